"""Gather and its kin."""

from __future__ import annotations

from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.gather import gather, gather_elements, gather_nd
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Operand, Value


@onnx_op("Gather", integers=True, moves=(0,), indexes=1)
def gather_op(im: ImportContext, data: Value, indices: Operand, *, axis: int = 0) -> Value:
    """Crop for constant indices; Embed in a constant table for indices that are fed, else GridSample."""
    return gather(im, data, indices, axis=axis)


@onnx_op("GatherElements", since=11, integers=True, moves=(0,), indexes=1)
def gather_elements_op(im: ImportContext, data: Value, indices: Value, *, axis: int = 0) -> Value:
    """Crop and Concat of constant indices, each of which may stand for a whole row; else GridSample."""
    return gather_elements(im, data, indices, axis=axis)


@onnx_op("GatherND", since=11, integers=True)
def gather_nd11(im: ImportContext, data: Value, indices: Operand) -> Value:
    """Crop and Concat of constant indices; else Gather by what they are in all."""
    return gather_nd(im, data, indices)


@onnx_op("GatherND", since=12, integers=True)
def gather_nd12(im: ImportContext, data: Value, indices: Operand, *, batch_dims: int = 0) -> Value:
    """Crop and Concat of constant indices; else Gather by what they are in all."""
    return gather_nd(im, data, indices, batch_dims=batch_dims)
