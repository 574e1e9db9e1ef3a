"""Losses of classes: what the network gives for the right class of each element, looked up."""

from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.cast import number_value
from onnx2ncnn_opt.onnx.lower.functional.gather import gather, gather_elements
from onnx2ncnn_opt.onnx.lower.functional.logic import equal
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.softmax import log_softmax
from onnx2ncnn_opt.onnx.lower.functional.where import where
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value, held_as_float

_REDUCTIONS = ("none", "mean", "sum")
_PLACE = held_as_float(np.dtype(np.uint32))


@onnx_op("NegativeLogLikelihoodLoss", since=12, integers=True)
def nll_loss(
    im: ImportContext,
    x: Tensor,
    target: Value,
    weight: Value | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Value:
    """GridSample of the targets' classes; elements to ignore count as 0."""
    if reduction not in _REDUCTIONS:
        raise im.invalid(f"reduction {reduction} is not known")
    if x.rank < 2 or target.rank != x.rank - 1:
        raise im.invalid(f"targets of shape {list(target.shape)} for classes of shape {list(x.shape)}")
    ignored: Value | None = None
    if isinstance(target, Constant):
        target = Constant(target.array.astype(np.int64))
        if ignore_index is not None and (target.array == ignore_index).any():
            ignored = Constant(target.array == ignore_index)
            target = Constant(np.where(ignored.array, 0, target.array))
    elif ignore_index is not None:
        ignored = equal(im, target, Constant(np.array(ignore_index)))
        target = im.tensor(where(im, ignored, Constant(np.array(0)), target))
    share = _weights(im, target, weight, ignored)
    loss = im.apply(_of_class(im, x, target), UnaryOp.NEG)
    result: Value = loss if weight is None or share is None else binary(im, BinaryOp.MUL, loss, share)
    if ignored is not None:
        result = where(im, ignored, number(0), result)
    if reduction == "none":
        return result
    if reduction == "mean" and share is None:
        return reduce(im, im.tensor(result), "ReduceMean", None, 0)
    total = reduce(im, im.tensor(result), "ReduceSum", None, 0)
    if reduction == "sum" or share is None:
        return total
    return binary(im, BinaryOp.DIV, total, reduce(im, share, "ReduceSum", None, 0))


@onnx_op("SoftmaxCrossEntropyLoss", since=12, integers=True)
def cross_entropy(
    im: ImportContext,
    scores: Tensor,
    labels: Value,
    weights: Value | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> tuple[Value, ...]:
    """LogSoftmax, and GridSample of the labels' classes."""
    logs = log_softmax(im, scores, 1)
    return nll_loss(im, logs, labels, weights, ignore_index=ignore_index, reduction=reduction), logs


def _of_class(im: ImportContext, x: Tensor, target: Value) -> Tensor:
    """What stands at each element's own class."""
    if isinstance(target, Constant):
        found = im.tensor(gather_elements(im, x, Constant(np.expand_dims(target.array, 1)), axis=1))
    else:
        axes = target.view.axes
        column = _place(im, target.viewed(target.view.with_axes((axes[0], (), *axes[1:]))))
        found = im.tensor(gather_elements(im, x, column, axis=1))
    return found.viewed(found.view.with_axes((found.view.axes[0], *found.view.axes[2:])))


def _weights(im: ImportContext, target: Value, weight: Value | None, ignored: Value | None) -> Tensor | None:
    """How much each element counts; None where all count the same."""
    if weight is None and ignored is None:
        return None
    if weight is None:
        share: Value = Constant(np.ones_like(target.array, np.float32)) if isinstance(target, Constant) else number(1)
    elif isinstance(target, Constant) and isinstance(weight, Constant):
        share = Constant(weight.array[target.array])
    else:
        share = gather(im, weight, target if isinstance(target, Constant) else _place(im, target))
    if isinstance(ignored, Constant) and isinstance(share, Constant):
        return im.tensor(Constant(np.where(ignored.array, 0, share.array)))
    return im.tensor(share if ignored is None else where(im, ignored, number(0), share))


def _place(im: ImportContext, target: Tensor) -> Tensor:
    """Classes as indices, none of which is negative."""
    numbers = im.tensor(number_value(im, target))
    return Tensor(numbers.blob, numbers.view, _PLACE)
