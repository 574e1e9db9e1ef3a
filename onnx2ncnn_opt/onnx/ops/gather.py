"""Gather and its kin."""

from __future__ import annotations

from onnx2ncnn_opt.onnx.fold import bounds
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.gather import gather, gather_elements, gather_nd
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Operand, Value

onnx_op("Gather", integers=True, moves=(0,), indexes=1, folds=bounds.gather)(gather)
onnx_op("GatherElements", since=11, integers=True, moves=(0,), indexes=1, folds=bounds.second)(gather_elements)


@onnx_op("GatherND", since=11, integers=True, folds=bounds.gather_nd)
def gather_nd11(im: ImportContext, data: Value, indices: Operand) -> Value:
    """Crop and Concat of constant indices; else Gather by what they are in all."""
    return gather_nd(im, data, indices)


onnx_op("GatherND", since=12, integers=True, folds=bounds.gather_nd)(gather_nd)
