"""Operators that make, move or cast elements and compute none."""

from typing import Literal

import numpy as np

from onnx2ncnn_opt.onnx.tail.operators.checks import axis_of, sized
from onnx2ncnn_opt.onnx.tail.registry import Ints, L, N, T, To, V, tail_op


@tail_op("Identity", cpp="")
def identity(x: T) -> T:
    """Return the input."""
    return x


@tail_op("Transpose", cpp="")
def transpose(x: T, *, perm: list[int] | None = None) -> T:
    """Permute the axes."""
    return np.transpose(x, perm)


@tail_op("Reshape", cpp="")
def reshape(x: T, shape: Ints, *, allowzero: int = 0) -> T:
    """Reshape; 0 keeps a size, and -1 takes the rest."""
    return x.reshape(shape if allowzero else [size or x.shape[axis] for axis, size in enumerate(shape)])


@tail_op("Flatten", cpp="")
def flatten(x: T, *, axis: int = 1) -> T:
    """Make a matrix of the axes before `axis` and the others."""
    axis = axis_of(axis, x.ndim) if axis != x.ndim else axis
    rows = int(np.prod(x.shape[:axis]))
    return x.reshape(rows, int(np.prod(x.shape[axis:])))


@tail_op("Squeeze", cpp="")
def squeeze(x: T, axes: Ints | None = None) -> T:
    """Drop axes of size 1."""
    return np.squeeze(x, None if axes is None else tuple(axes))


@tail_op("Unsqueeze", cpp="")
def unsqueeze(x: T, axes: Ints) -> T:
    """Add axes of size 1."""
    return np.expand_dims(x, tuple(axes))


@tail_op("Expand", cpp="")
def expand(x: T, shape: Ints) -> T:
    """Broadcast to a shape."""
    return np.broadcast_to(x, sized(*np.broadcast_shapes(x.shape, tuple(shape))))


@tail_op("Slice", cpp="")
def slice_(x: T, starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None) -> T:
    """Cut axes."""
    cuts = [slice(None)] * x.ndim
    chosen = range(len(starts)) if axes is None else axes
    for start, end, axis, step in zip(starts, ends, chosen, steps or [1] * len(starts), strict=True):
        cuts[axis_of(axis, x.ndim)] = slice(start, end, step)
    return x[tuple(cuts)]


@tail_op("Split", cpp="")
def split(x: T, split: Ints | None = None, *, axis: int = 0, num_outputs: int) -> list[T]:
    """Cut an axis into parts, of equal sizes unless `split` has them."""
    axis = axis_of(axis, x.ndim)
    size = x.shape[axis]
    part = -(-size // num_outputs)
    sizes = [min(part, max(size - i * part, 0)) for i in range(num_outputs)] if split is None else split
    if len(sizes) != num_outputs or min(sizes) < 0 or sum(sizes) != size:
        raise ValueError(f"parts of the sizes {sizes} from {size}")
    return np.split(x, np.cumsum(sizes)[:-1], axis)


@tail_op("Concat", cpp="")
def concat(*xs: T, axis: int) -> T:
    """Join tensors along an axis."""
    axis = axis_of(axis, xs[0].ndim)
    sized(*xs[0].shape[:axis], sum(x.shape[axis] for x in xs), *xs[0].shape[axis + 1 :])
    return np.concatenate(xs, axis)


@tail_op("Tile", cpp="")
def tile(x: T, repeats: Ints) -> T:
    """Repeat along each axis."""
    sized(*(size * count for size, count in zip(x.shape, repeats, strict=True)))
    return np.tile(x, repeats)


@tail_op("Pad", cpp="")
def pad(
    x: T, pads: Ints, value: T | None = None, axes: Ints | None = None, *, mode: Literal["constant"] = "constant"
) -> T:
    """Add a constant around a tensor; negative pads cut."""
    chosen = range(x.ndim) if axes is None else [axis_of(axis, x.ndim) for axis in axes]
    if len(pads) != 2 * len(chosen):
        raise ValueError(f"{len(pads)} pads of {len(chosen)} axes")
    before, after = [0] * x.ndim, [0] * x.ndim
    for axis, first, last in zip(chosen, pads[: len(chosen)], pads[len(chosen) :], strict=True):
        before[axis], after[axis] = first, last
    shape = sized(*(size + first + last for size, first, last in zip(x.shape, before, after, strict=True)))
    y = np.full(shape, 0 if value is None else value.reshape(()), x.dtype)
    cut = tuple(
        slice(max(-first, 0), size - max(-last, 0)) for size, first, last in zip(x.shape, before, after, strict=True)
    )
    y[
        tuple(slice(max(first, 0), size - max(last, 0)) for size, first, last in zip(shape, before, after, strict=True))
    ] = x[cut]
    return y


@tail_op("Shape", cpp="")
def shape(x: T, *, start: int = 0, end: int | None = None) -> L:
    """Return the shape."""
    return np.array(x.shape[start:end], np.int64)


@tail_op("Size", cpp="")
def size(x: T) -> L:
    """Return the number of elements."""
    return np.array(x.size, np.int64)


@tail_op("ConstantOfShape", cpp="")
def constant_of_shape(shape: Ints, value: V | None = None) -> V:
    """Fill a shape with a value."""
    return np.full(sized(*shape), np.float32(0) if value is None else value.reshape(()))


@tail_op("Range", cpp="")
def range_(start: N, limit: N, delta: N) -> N:
    """Count from start to limit; floats add up as ONNX Runtime's do."""
    first, step = start.reshape(()).item(), delta.reshape(()).item()
    if start.dtype.kind == "f":
        count = float(np.ceil(np.float64(limit.reshape(()) - start.reshape(())) / step))
    else:
        count = -((first - limit.reshape(()).item()) // step)
    if not count <= 2**28:
        raise ValueError(f"a result of {count} elements")
    y = np.full(max(int(count), 0), step, start.dtype)
    y[:1] = first
    return np.add.accumulate(y, dtype=start.dtype)


@tail_op("Cast", cpp="")
def cast(x: T, *, to: str, saturate: int = 1, round_mode: str = "up") -> To:
    """Cast; floats out of an integer's range become the lowest one, as on x86."""
    if x.dtype.kind != "f" or np.dtype(to).kind not in "iu":
        return x.astype(to)
    wide = np.int64 if to in ("int64", "uint64", "uint32") else np.int32
    low = float(np.iinfo(wide).min)
    y = x.astype(np.float64)
    return np.where((y > low) & (y < -low), y, low).astype(wide).astype(to)
