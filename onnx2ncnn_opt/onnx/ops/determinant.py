"""Determinants of small matrices."""

from __future__ import annotations

from functools import reduce

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.crop import pick
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Tensor, Value

_LARGEST = 4


@onnx_op("Det", since=11, errors="input")
def det(im: ImportContext, x: Tensor) -> Value:
    """Products of elements, by the first row."""
    n = x.shape[-1] if x.rank > 1 else None
    if not isinstance(n, int) or x.shape[-2] != n or not 1 <= n <= _LARGEST:
        raise im.refuse(
            f"a matrix of shape {list(x.shape[-2:])}: only square ones up to {_LARGEST} x {_LARGEST}",
            "compute it outside the net",
        )
    rows = [pick(im, x, x.rank - 2, np.array(i)) for i in range(n)]
    return _det(im, [[pick(im, row, row.rank - 1, np.array(i)) for i in range(n)] for row in rows])


def _det(im: ImportContext, rows: list[list[Tensor]]) -> Value:
    first, *rest = rows
    if not rest:
        return first[0]
    minors = [_det(im, [row[:i] + row[i + 1 :] for row in rest]) for i in range(len(first))]
    terms = [binary(im, BinaryOp.MUL, x, minor) for x, minor in zip(first, minors, strict=True)]
    return reduce(
        lambda a, b: binary(im, BinaryOp.SUB if b[0] % 2 else BinaryOp.ADD, a, b[1]), enumerate(terms[1:], 1), terms[0]
    )
