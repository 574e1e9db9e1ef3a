"""Reductions over axes, and Softmax along an axis."""

from collections.abc import Callable
from functools import partial

from onnx2ncnn_opt.ir.codes import Reduction
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.activation import flattened, log_softmax, softmax
from onnx2ncnn_opt.onnx.lower.functional.cast import as_numbers
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
    register(later=("axes", "noop_with_empty_axes"))(reduction)
    register(since=axes_input)(reduction)


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
