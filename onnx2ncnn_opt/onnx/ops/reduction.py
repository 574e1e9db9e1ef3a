"""Reductions over axes, and Softmax along one."""

from __future__ import annotations

from collections.abc import Callable

from onnx2ncnn_opt.ir.dim import product
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.view import View
from onnx2ncnn_opt.onnx.importer import ImportContext
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Ints, Tensor

# ONNX operator -> Reduction operation, and the opset from which its axes are an input.
_OPERATIONS = {
    "ReduceSum": (0, 13),
    "ReduceSumSquare": (2, 18),
    "ReduceMean": (3, 18),
    "ReduceMax": (4, 18),
    "ReduceMin": (5, 18),
    "ReduceProd": (6, 18),
    "ReduceL1": (7, 18),
    "ReduceL2": (8, 18),
    "ReduceLogSum": (9, 18),
    "ReduceLogSumExp": (10, 18),
}
# What a reduction over axes of size 1 (or none) leaves to do, as UnaryOp codes.
_ALONE: dict[str, tuple[int, ...]] = {"ReduceSumSquare": (4,), "ReduceL1": (0,), "ReduceL2": (0,), "ReduceLogSum": (8,)}


def _register(name: str, operation: int, axes_input: int) -> None:
    def by_attribute(im: ImportContext, x: Tensor, *, axes: Ints | None = None, keepdims: int = 1) -> Tensor:
        return reduce(im, x, name, axes, keepdims)

    def by_input(
        im: ImportContext, x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        if not axes and noop_with_empty_axes:
            return _alone(im, x, name)
        return reduce(im, x, name, axes or None, keepdims)

    functions: tuple[tuple[Callable[..., Tensor], int], ...] = ((by_attribute, 1), (by_input, axes_input))
    for function, since in functions:
        function.__doc__ = f"Reduction {LAYERS['Reduction'].enums['operation'][operation]}; constant axes."
        onnx_op(name, since=since)(function)


for _name, (_operation, _axes_input) in _OPERATIONS.items():
    _register(_name, _operation, _axes_input)


def reduce(im: ImportContext, x: Tensor, name: str, axes: Ints | None, keepdims: int) -> Tensor:
    """Reduction over the axes (all, for None), each of them a dim or a run of dims of the Mat."""
    reduced = sorted(im.axes(axes, x.rank)) if axes is not None else list(range(x.rank))
    atoms = [axis for axis in reduced if x.view.axes[axis]]
    if not atoms:
        result = _alone(im, x, name)
    else:
        lying = im.separated(x, atoms)
        if lying is None:
            return _reduced_as_one(im, x, name, reduced, keepdims)
        dims = sorted(d for d in (lying.view.dim_of(axis) for axis in atoms) if d is not None)
        kept = [i for i in range(len(lying.view.dims)) if i not in dims]
        trailing = dims == list(range(len(kept), len(kept) + len(dims)))
        blob = im.layer(
            "Reduction",
            lying.blob,
            operation=_OPERATIONS[name][0],
            reduce_all=0,
            axes=tuple(dims),
            # Behind the kept dims a size of 1 says nothing; before them it keeps later broadcasts aligned.
            keepdims=int(bool(keepdims) and (not trailing or not kept)),
            fixbug0=1,
        )
        assert blob.shape is not None
        left = [lying.view.dims[i] for i in kept]
        if len(blob.shape) == len(lying.view.dims):
            left = [() if i in dims else group for i, group in enumerate(lying.view.dims)]
        axes_left = tuple(() if axis in reduced else group for axis, group in enumerate(lying.view.axes))
        result = Tensor(blob, View(lying.view.batch, tuple(left) or ((),), axes_left), x.dtype)
    axes_out = [group for axis, group in enumerate(result.view.axes) if keepdims or axis not in reduced]
    return result.viewed(result.view.with_axes(axes_out))


def _reduced_as_one(im: ImportContext, x: Tensor, name: str, reduced: list[int], keepdims: int) -> Tensor:
    """Reduction over one dim that holds all the axes: where they lie apart from each other in too many dims."""
    kept = [axis for axis in range(x.rank) if axis not in reduced]
    blob = im.layer(
        "Reduction", im.mat(x, [kept, reduced]), reduce_all=0, axes=(1,), fixbug0=1, operation=_OPERATIONS[name][0]
    )
    shape = tuple(1 if axis in reduced else size for axis, size in enumerate(x.shape) if keepdims or axis in kept)
    return im.wrap(blob, shape, [[a for a in range(len(shape)) if not keepdims or a in kept]], dtype=x.dtype)


def _alone(im: ImportContext, x: Tensor, name: str) -> Tensor:
    for code in _ALONE.get(name, ()):
        x = im.unary(x, "UnaryOp", op_type=code)
    return x


def _softmax(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    axis = im.axis(axis, x.rank)
    if not x.view.axes[axis]:
        # The softmax of one element is 1; written so that NaN and infinity stay NaN as in ONNX.
        zero = im.like(x, im.layer("BinaryOp", x.blob, x.blob, op_type=1))
        return im.unary(zero, "UnaryOp", op_type=7)
    lying = im.along(x, [axis])
    dim = lying.view.dim_of(axis)
    return im.like(lying, im.layer("Softmax", lying.blob, axis=dim, fixbug0=1))


def _coerced(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """Before opset 13 Softmax ran over all axes from `axis` on, flattened."""
    axis = im.axis(axis, x.rank)
    shape = (product(x.shape[:axis]), product(x.shape[axis:]))
    flat = im.reshape(x, shape)
    assert isinstance(flat, Tensor)
    return flat


@onnx_op("Softmax")
def softmax1(im: ImportContext, x: Tensor, *, axis: int = 1) -> Tensor:
    """Softmax over the flattened axes from `axis` on."""
    return _back(im, _softmax(im, _coerced(im, x, axis), 1), x)


@onnx_op("Softmax", since=13)
def softmax13(im: ImportContext, x: Tensor, *, axis: int = -1) -> Tensor:
    """Softmax along one axis."""
    return _softmax(im, x, axis)


@onnx_op("LogSoftmax")
def log_softmax1(im: ImportContext, x: Tensor, *, axis: int = 1) -> Tensor:
    """Softmax over the flattened axes from `axis` on, and UnaryOp log."""
    return _back(im, im.unary(_softmax(im, _coerced(im, x, axis), 1), "UnaryOp", op_type=8), x)


@onnx_op("LogSoftmax", since=13)
def log_softmax13(im: ImportContext, x: Tensor, *, axis: int = -1) -> Tensor:
    """Softmax and UnaryOp log."""
    return im.unary(_softmax(im, x, axis), "UnaryOp", op_type=8)


def _back(im: ImportContext, result: Tensor, x: Tensor) -> Tensor:
    shaped = im.reshape(result, x.shape)
    assert isinstance(shaped, Tensor)
    return shaped
