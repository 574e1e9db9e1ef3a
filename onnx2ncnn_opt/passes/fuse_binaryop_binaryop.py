from collections.abc import Iterator
from functools import partial

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._constants import constant_array, finite_float32, stored, with_data
from onnx2ncnn_opt.passes._fold import one_factor, require_offsets_fold
from onnx2ncnn_opt.passes._linear import factor, offset
from onnx2ncnn_opt.rewrite.pattern import Op, const, op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_FACTORS, _OFFSETS = frozenset({BinaryOp.MUL, BinaryOp.DIV}), frozenset({BinaryOp.ADD, BinaryOp.SUB})
_ONE = partial(np.ones, ())  # the reach of the blob


def _variants() -> Iterator[Op]:
    for kinds in (_FACTORS, _OFFSETS):
        scalar = op("BinaryOp", "inner", op_type=kinds, with_scalar=1)("x")
        yield op("BinaryOp", "outer", op_type=kinds, with_scalar=1)(scalar)
    for kind in (BinaryOp.MUL, BinaryOp.ADD):
        inner = op("BinaryOp", "inner", op_type=kind, with_scalar=0)("x", const("first"))
        yield op("BinaryOp", "outer", op_type=kind, with_scalar=0)(inner, const("second"))


@rewrite(*_variants(), exact=False, purpose="scaled attention and masks of transformers")
def fuse_binaryop_binaryop(
    x: Blob, inner: Layer, outer: Layer, first: Layer | None = None, second: Layer | None = None
) -> Layer | list[Layer]:
    """x ── BinaryOp (constant) ── BinaryOp (constant) ──   ⇒   x ── BinaryOp (constant) ──

    For two factors or two offsets, unless they may be a rounding trick.
    """
    is_factor = outer["op_type"] in _FACTORS
    if first is None or second is None:
        require(not is_factor or (inner["b"] and outer["b"]), "a factor or divisor is 0")
        value = one_factor(factor(inner), factor(outer)) if is_factor else offset(inner) + offset(outer)
        if not is_factor:
            require_offsets_fold(np.array(offset(inner)), np.array(offset(outer)), _ONE)
        require(finite_float32(value), "the constants together are too large")
        return outer.having(inputs=[x], op_type=BinaryOp.MUL if is_factor else BinaryOp.ADD, b=value)
    a, b = constant_array(first), constant_array(second)
    require(a.ndim == b.ndim, f"'{first.name}' and '{second.name}' differ in rank")
    require(x.shape is not None and x.shape == outer.output.shape, f"the constants give '{x.name}' another shape")
    fits = all(m == n or 1 in (m, n) for m, n in zip(a.shape, b.shape, strict=True))
    require(fits and (a.ndim == len(x.shape or ()) or a.shape == b.shape), "the constants broadcast along other axes")
    both = np.asarray(a * b if is_factor else a + b)
    require(both.size <= max(a.size, b.size), "the constants together would be larger")
    if not is_factor:
        require_offsets_fold(a, b, _ONE)
    data = stored(second, "data", both)
    constant = with_data(second.having(load_type=None, weights={"data": data}), data)
    constant.outputs = (Blob(f"{second.output.name}_both", both.shape),)
    return [constant, outer.having(inputs=[x, constant.output])]
