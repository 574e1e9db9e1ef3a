"""The operator Where."""

from __future__ import annotations

from onnx2ncnn_opt.onnx.fold import bounds
from onnx2ncnn_opt.onnx.lower.functional.where import where
from onnx2ncnn_opt.onnx.registry import onnx_op

onnx_op("Where", since=9, integers=True, moves=(1, 2), selects=True, axes="each", folds=bounds.broadcast)(where)
