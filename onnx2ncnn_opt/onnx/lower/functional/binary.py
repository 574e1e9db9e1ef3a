"""Arithmetic of two values with ONNX's (numpy's) broadcasting; integers are float32, which is exact up to 2**24.

ncnn broadcasts like numpy between Mats of equal rank, but aligns a Mat of lower rank to the outer axes. So both
operands get one layout, in which missing dims have size 1; trailing dims of size 1 may be omitted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import combinations, permutations, zip_longest

import numpy as np

from onnx2ncnn_opt.ir import dim
from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import Shape, Sym, fitting, known, larger, shape_text
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.view import Regroup, View, sizes
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.cells import as_constant
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.cast import as_numbers, number_value, wrapped_around
from onnx2ncnn_opt.onnx.lower.functional.views import repeated, unsqueeze, with_rank
from onnx2ncnn_opt.onnx.lower.layout import Layout, align, broadcast_axis, combined, common_layout
from onnx2ncnn_opt.onnx.value import Constant, Operand, SymbolicTensor, Tensor, Value

_NUMPY: Mapping[BinaryOp, Callable[[Array, Array], Array]] = {
    BinaryOp.ADD: np.add,
    BinaryOp.SUB: np.subtract,
    BinaryOp.MUL: np.multiply,
    BinaryOp.DIV: np.divide,
    BinaryOp.FLOOR_DIVIDE: np.floor_divide,
    BinaryOp.MAX: np.maximum,
}


def binary(im: ImportContext, op_type: BinaryOp, a: Operand, b: Operand) -> Tensor:
    """BinaryOp on two values that ONNX broadcasts; a finite constant of one element becomes its scalar."""
    shape = broadcast_shape(im, a.shape, b.shape)
    a, b = _computed(im, a, b.shape), _computed(im, b, a.shape)
    a, b = _without_batch(a, b), _without_batch(b, a)
    a, b = number_value(im, a), number_value(im, b)
    if isinstance(a, Constant) and isinstance(b, Constant):
        a = im.tensor(a)
    if isinstance(a, Constant):
        a, b, op_type = b, a, op_type.exchanged
    assert isinstance(a, Tensor)
    if isinstance(b, Constant) and b.scalar is not None and math.isfinite(b.scalar) and len(shape) == a.rank:
        return im.apply(a, op_type, float(im.f32(b.array).reshape(-1)[0]))
    rank = len(shape)
    own = [x.view if isinstance(x, Tensor) else View.of(x.shape, [range(x.rank)]) for x in (a, b)]
    aligned = align([view.with_axes(((),) * (rank - len(view.axes)) + view.axes) for view in own])
    if aligned is None:
        return binary(im, op_type, im.with_plain_axes(a), im.with_plain_axes(b) if isinstance(b, Tensor) else b)
    fine, origin = aligned
    pairs = zip((a, b), fine, strict=True)
    costs = [partial(im.cost, x.viewed(view)) if isinstance(x, Tensor) else None for x, view in pairs]
    layout = common_layout(fine, origin, costs)
    if layout is None:  # broadcasting needs more than four dims; operands of equal shape can merge theirs
        return binary(im, op_type, spread(im, a, shape), spread(im, b, shape))
    left, laid_out_a = _operand(im, a, fine[0], layout)
    right, laid_out_b = _operand(im, b, fine[1], layout, left)
    right = _fit(im, right, left, layout)
    left = _fit(im, left, right, layout)
    blob = im.layer("BinaryOp", left, right, op_type=op_type)
    axes = [broadcast_axis(pair) for pair in zip(laid_out_a.axes, laid_out_b.axes, strict=True)]
    result = Tensor(blob, combined(axes, origin, rank, layout), a.dtype)
    im.note_operands(result, a, b)
    return result


def number(value: float) -> Constant:
    """Return a scalar operand."""
    return Constant(np.array(value, np.float32))


def arithmetic(im: ImportContext, op_type: BinaryOp, a: Value, b: Value) -> Value:
    """Compute a BinaryOp; return a constant for two constants."""
    if isinstance(a, Constant) and isinstance(b, Constant):
        return Constant(np.asarray(_NUMPY[op_type](a.array, b.array)))
    return binary(im, op_type, a, b)


def added(im: ImportContext, a: Value | None, b: Value | None) -> Value | None:
    """Return a + b, or the operand that is not None; a constant for two constants."""
    return arithmetic(im, BinaryOp.ADD, a, b) if a is not None and b is not None else b if a is None else a


def _computed(im: ImportContext, x: Operand, other: Shape) -> Value:
    """Compute a symbolic tensor at run time, without repeating it along axes that broadcasting with `other` expands."""
    if not isinstance(x, SymbolicTensor):
        return x
    shape = list(x.shape)
    for axis in range(-min(x.rank, len(other)), 0):
        if other[axis] == x.shape[axis] and not x.varies(axis):
            shape[axis] = 1
    constant = as_constant(SymbolicTensor(x.cells, tuple(shape), x.dtype))
    return constant if isinstance(constant, Constant) else im.tensor(constant)


def _without_batch(x: Value, other: Value) -> Value:
    """Return one item of a constant that is the same for each item of the other operand's batch."""
    if isinstance(x, Constant) and isinstance(other, Tensor) and other.batch_axis is not None:
        axis = other.batch_axis - other.rank
        if -axis <= x.rank and x.shape[axis] == other.shape[axis]:
            first = x.array.take([0], axis)
            return Constant(first) if (x.array == first).all() else x
    return x


def spread(im: ImportContext, x: Value, shape: Shape) -> Value:
    """Return the value broadcast to a shape; along dynamic axes, multiply by ones."""
    if isinstance(x, Constant):
        x = Constant(np.broadcast_to(x.array, [1 if isinstance(size, Sym) else size for size in shape]))
        return x if x.shape == shape else spread(im, im.tensor(x), shape)
    if 0 in shape:
        return im.empty(shape, x.dtype)
    x = with_rank(x, len(shape))
    pairs, one, grown = list(zip(x.shape, shape, strict=True)), x, list[int]()
    x = repeated(im, x, [target if size == 1 and isinstance(target, int) else 1 for size, target in pairs])
    for axis, (size, target) in enumerate(pairs):
        is_dynamic = isinstance(size, Sym) or isinstance(target, Sym)
        if is_dynamic and fitting(size, target) is None:  # one is 1, or may be at run time
            row = im.tensor(Constant(np.ones(target, np.float32))) if isinstance(target, int) else im.ones(target)
            along = unsqueeze(im, row, tuple(range(1, len(shape) - axis)))
            x = binary(im, BinaryOp.MUL, as_numbers(im, x), along)
            grown.append(axis)
    for axis in grown:
        im.note_longer(x, axis, partial(spread, im, one, (*shape[:axis], larger(shape[axis], 1), *shape[axis + 1 :])))
    return x


def _operand(im: ImportContext, x: Value, view: View, layout: Layout, other: Blob | None = None) -> tuple[Blob, View]:
    """Return an operand in the common layout, without inner dims of size 1 if ncnn broadcasts it to `other` anyway."""
    dims, batch = layout.atoms(view)
    if isinstance(x, Tensor):
        trimmed = dims
        while len(trimmed) > 1 and not trimmed[-1]:
            trimmed = trimmed[:-1]
        # ncnn aligns a Mat of fewer dims to the outer axes, so it needs no inner dims of size 1.
        if view.batch == batch and view.dims != dims and view.dims == trimmed:
            return x.blob, view
        laid_out = im.in_layout(Tensor(x.blob, view, x.dtype), layout)
        return laid_out.blob, laid_out.view
    array = x.array.reshape(known(view.shape))
    order = [axis for group in layout.dims for axis in group]
    rest = [axis for axis in range(array.ndim) if axis not in order]
    data = array.transpose(order + rest).reshape(known(sizes(dims)))
    while data.ndim > 1 and data.shape[-1] == 1:
        data = data[..., 0]
    if other is not None and _needs_rank(data.shape, other.shape or ()):
        data = data.reshape(data.shape + (1,) * (len(other.shape or ()) - data.ndim))
    return im.memory(data), view


def _fit(im: ImportContext, x: Blob, other: Blob, layout: Layout) -> Blob:
    """Reshape a blob if ncnn would broadcast it wrongly: a 1-D Mat is along w unless it is as long as the outer dim."""
    shape, others = x.known_shape, other.known_shape
    is_ambiguous = len(shape) == 1 < len(others) and shape != others[:1] and shape != (1,)
    is_misread = is_ambiguous or _needs_rank(shape, others)
    return im.apply_step(x, Regroup(shape + (1,) * (len(layout.dims) - len(shape)))) if is_misread else x


def _needs_rank(shape: Shape, other: Shape) -> bool:
    """Return True if a Mat of two or more dims needs the other's rank: its sizes differ from the outer dims."""
    # Sizes of 1 broadcast on Vulkan only between Mats of equal rank (binaryop_broadcast.comp, "implicit broadcast").
    return 1 < len(shape) < len(other) and shape != other[: len(shape)]


def broadcast_shape(im: ImportContext, *shapes: Shape) -> Shape:
    """Return the shape that shapes broadcast to; raise Refusal if they do not broadcast."""
    result, columns = dim.broadcast_shape(shapes), list(zip_longest(*map(reversed, shapes), fillvalue=1))
    if result is None:
        pairs = [pair for sizes in columns for pair in combinations(sizes, 2) if 1 not in pair]
        raise im.mismatch(f"shapes {' and '.join(map(shape_text, shapes))} do not broadcast", pairs)
    for column in columns:
        for a, b in permutations(column, 2):
            for size in dim.limits(a, b):  # ONNX Runtime refuses smaller ones
                im.demand(size, 0)
    return result


def expand(im: ImportContext, x: Tensor, shape: Shape) -> Value:
    """Tile along the axes that grow."""
    target = dim.broadcast_shape((x.shape, shape))
    if target is None:
        raise im.refuse(f"{shape_text(x.shape)} cannot be expanded to {shape_text(shape)}", "bind sizes with --shape")
    return spread(im, x, target)


def add(im: ImportContext, a: Operand, b: Operand) -> Tensor:
    """BinaryOp add."""
    return wrapped_around(im, binary(im, BinaryOp.ADD, a, b))


def mul(im: ImportContext, a: Operand, b: Operand) -> Tensor:
    """BinaryOp mul."""
    if a.dtype.kind in "iu" and a.dtype.itemsize == 2:
        raise im.refuse(f"a product of {a.dtype}, which overflows where float32 is not exact", "cast to int64 before")
    return wrapped_around(im, binary(im, BinaryOp.MUL, a, b))


def maximum(im: ImportContext, *xs: Value) -> Value:
    """Chain BinaryOp max, without -inf, which jax's softmax contains."""
    return reduce(lambda a, b: binary(im, BinaryOp.MAX, a, b), _without(-np.inf, xs))


def minimum(im: ImportContext, *xs: Value) -> Value:
    """Chain BinaryOp min."""
    return reduce(lambda a, b: binary(im, BinaryOp.MIN, a, b), _without(np.inf, xs))


def _without(neutral: float, xs: Sequence[Value]) -> Sequence[Value]:
    """Return the operands except constants `neutral`; all operands if the rank of the result would change."""
    others = [x for x in xs if not (isinstance(x, Constant) and x.scalar == neutral)]
    return others if max((x.rank for x in others), default=-1) == max(x.rank for x in xs) else xs
