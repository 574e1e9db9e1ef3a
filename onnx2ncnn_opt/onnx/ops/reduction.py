"""Reductions over axes, and along an axis Softmax, sums and products up to each element."""

from collections.abc import Callable
from functools import partial

from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.activation import flattened, log_softmax, softmax
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, mul
from onnx2ncnn_opt.onnx.lower.functional.cast import as_numbers
from onnx2ncnn_opt.onnx.lower.functional.crop import crop, flip
from onnx2ncnn_opt.onnx.lower.functional.pad import pad
from onnx2ncnn_opt.onnx.lower.functional.reduce import OPERATIONS, reduce, reduced_element
from onnx2ncnn_opt.onnx.registry import Errors, onnx_op
from onnx2ncnn_opt.onnx.value import Ints, Tensor

_OF_INTEGERS = ("ReduceSum", "ReduceSumSquare", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1")

_DOMAINS = {"ReduceLogSum": (0.1, 4.0), "ReduceProd": (0.5, 1.5)}


def _register(name: str, operation: Reduction, axes_input: int) -> None:
    def reduction(
        im: ImportContext, x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        if not axes and noop_with_empty_axes:
            return reduced_element(im, as_numbers(im, x), name)
        return reduce(im, x, name, axes or None, keepdims)

    reduction.__doc__ = f"Reduction {operation.name.lower()}; constant axes."
    domains, rule = {0: _DOMAINS[name]} if name in _DOMAINS else None, items.reduced(None, "axes", 1)
    register = partial(onnx_op, name, integers=name in _OF_INTEGERS, domains=domains, items=rule, folds=True)
    errors: Errors = "input" if operation in (Reduction.SUM, Reduction.MEAN) else "result"
    register(later=("axes", "noop_with_empty_axes"), errors=errors)(reduction)
    register(since=axes_input, errors=errors)(reduction)


for _name, (_operation, _axes_input) in OPERATIONS.items():
    _register(_name, _operation, _axes_input)


def _register_softmax(name: str, function: Callable[[ImportContext, Tensor, int], Tensor], errors: Errors) -> None:
    def over_axes(im: ImportContext, x: Tensor, *, axis: int = 1) -> Tensor:
        return flattened(im, x, axis, function)

    def along_axis(im: ImportContext, x: Tensor, *, axis: int = -1) -> Tensor:
        return function(im, x, axis)

    over_axes.__doc__ = f"{name} over the flattened axes from `axis` on."
    along_axis.__doc__ = f"{name} along one axis."
    onnx_op(name, axes="same", items=items.from_axis(1), errors=errors)(over_axes)
    onnx_op(name, since=13, axes="same", items=items.along(-1), folds=True, errors=errors)(along_axis)


_register_softmax("Softmax", softmax, "result")
_register_softmax("LogSoftmax", log_softmax, "one")


@onnx_op("CumSum", since=11, integers=True, axes="same", items=items.along(None, index=1), folds=True)
def cumsum(im: ImportContext, x: Tensor, axis: Ints, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """CumulativeSum, between two Flips if reverse; exclusive sums use the shifted operand."""
    along, x = im.axis(axis[0], x.rank), as_numbers(im, x)
    if not x.view.axes[along]:
        return binary(im, BinaryOp.SUB, x, x) if exclusive else x
    if reverse:
        x = flip(im, x, along)
    if exclusive:
        x = _shifted(im, x, along, 1, fill=0.0)
    before = [a for a in range(along) if x.view.axes[a]]
    after = [a for a in range(along + 1, x.rank) if x.view.axes[a]]
    batch = [before.pop(0)] if before and x.view.batch and x.view.axes[before[0]] == x.view.batch else []
    dims = [group for group in (before, [along], after) if group]
    blob = im.layer("CumulativeSum", im.mat(x, dims, batch), axis=dims.index([along]))
    y = im.wrap(blob, x.shape, dims, batch, x.dtype)
    return flip(im, y, along) if reverse else y


@onnx_op("CumProd", since=26, integers=True, axes="same", items=items.along(None, index=1))
def cumprod(im: ImportContext, x: Tensor, axis: Ints, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """BinaryOp mul of the operand with itself shifted by 1, of the product with itself shifted by 2, 4, and so on."""
    along, x = im.axis(axis[0], x.rank), as_numbers(im, x)
    (size,) = im.fixed((x.shape[along],), "the axis is dynamic")
    if reverse:
        x = flip(im, x, along)
    if exclusive:
        x = _shifted(im, x, along, 1, fill=1.0)
    shift = 1
    while shift < size:
        x = mul(im, x, _shifted(im, x, along, shift, fill=1.0))
        shift *= 2
    return flip(im, x, along) if reverse else x


def _shifted(im: ImportContext, x: Tensor, axis: int, shift: int, *, fill: float) -> Tensor:
    """Shift the elements of an axis towards its end, and fill the start."""
    pads = [0] * 2 * x.rank
    pads[axis] = shift
    return crop(im, im.tensor(pad(im, x, pads=tuple(pads), value=fill)), axis, 0, -shift)
