"""Layers that move data around: reshape, permute, concatenate, cut, pad, repeat; and reductions."""

from collections.abc import Sequence
from itertools import pairwise

from onnx2ncnn_opt.errors import GraphError
from onnx2ncnn_opt.ir.codes import Padding
from onnx2ncnn_opt.ir.dim import AXES, Dim, Shape, Sym, by_axis, exact_div, product, smaller, sum_of
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.permute import permutation
from onnx2ncnn_opt.ir.shapes.registry import (
    MAX_RANK,
    Batched,
    Output,
    data_axis,
    differ,
    equal,
    evaluated,
    fail,
    named_sizes,
    need_rank,
    parts,
    position,
    positions,
    shape_of,
    text,
)
from onnx2ncnn_opt.ir.windows import SIDES

_ABSENT = -233  # no size; in Crop and Slice, the rest of the axis
_NO_BATCH_AXIS = 233
# Ends of a slice from here on mean "to the end", for any size.
_OPEN_END = 1 << 30


@shape_of("Input")
def input_(layer: Layer) -> list[Output]:
    """Return the shapes that the blobs already have, else the layer's hint: the caller who feeds them decides."""
    return [Batched(blob.shape or _stated(layer), blob.batch) for blob in layer.outputs]


@shape_of("MemoryData")
def memory_data(layer: Layer) -> list[Output]:
    """Return the stated shape."""
    if layer["w"] < 1:
        fail(layer, "it has no size")
    return [_stated(layer)] * len(layer.outputs)


def _stated(layer: Layer) -> Shape | None:
    w, h, d, c = (layer[axis] for axis in "whdc")
    shape = (c, d, h, w) if d else (c, h, w) if c else (h, w) if h else (w,)
    return shape if all(shape) else None


@shape_of("Flatten")
def flatten(layer: Layer, x: Shape) -> Shape:
    """Return all elements in one axis."""
    return (product(x),)


@shape_of("Reshape", unknown_inputs=True)
def reshape(layer: Layer, x: Shape | None, *others: Shape | None) -> Batched:
    """Return the sizes of the parameters or the expression: 0 copies a size of the input, -1 is the rest.

    0 copies the axis of the same NAME (w from w); with batch axes, the axis of the same position, the batch included.
    Unlike other layers, Reshape gets its whole batch at once. Its other inputs, read for sizes, may have another batch.
    """
    before, after = layer["input_batch_axis"], layer["output_batch_axis"]
    sizes = _sizes(layer)
    if (before, after) == (_NO_BATCH_AXIS, _NO_BATCH_AXIS):
        return Batched(None if sizes is None else _plain_reshape(layer, x, sizes), layer.inputs[0].batch)
    full = None if x is None else _with_batch(layer, x, before)
    shape = None if sizes is None else _resolve(layer, full, full, sizes)
    if after == _NO_BATCH_AXIS:
        batch: Dim = 1
    elif shape is None:
        return Batched(None, layer.inputs[0].batch)
    else:
        axis = position(layer, after, len(shape), "output_batch_axis")
        shape, batch = shape[:axis] + shape[axis + 1 :], shape[axis]
    if shape is not None and not 1 <= len(shape) <= MAX_RANK:
        fail(layer, f"{len(shape)} axes remain without the batch")
    return Batched(shape, batch)


def _plain_reshape(layer: Layer, x: Shape | None, sizes: Shape) -> Shape | None:
    if len(sizes) > MAX_RANK:
        fail(layer, f"{len(sizes)} sizes make more than {MAX_RANK} axes")
    copies = None if x is None else tuple(named_sizes(x)[axis] for axis in AXES[len(sizes)])
    return _resolve(layer, x, copies, sizes)


def _sizes(layer: Layer) -> Shape | None:
    """Return the sizes in the parameters or the expression, outermost first."""
    if layer["shape_expr"]:
        sizes = evaluated(layer, "shape_expr", whole_batch=True)
        return None if sizes is None else tuple(reversed(sizes))
    rank = next((rank for rank, axis in enumerate("whcd") if layer[axis] == _ABSENT), MAX_RANK)
    if rank == 0:
        fail(layer, "it states no shape")
    return tuple(layer[axis] for axis in AXES[rank])


def _with_batch(layer: Layer, x: Shape, axis: int) -> Shape:
    batch = layer.inputs[0].batch
    if axis == _NO_BATCH_AXIS:
        if batch != 1:
            fail(layer, f"input_batch_axis is not given, but the input has a batch of {batch}")
        return x
    axis = position(layer, axis, len(x) + 1, "input_batch_axis")
    return *x[:axis], batch, *x[axis:]


def _resolve(layer: Layer, x: Shape | None, copies: Shape | None, sizes: Shape) -> Shape | None:
    """Return the sizes with 0 and -1 replaced; None if that needs an unknown input."""
    if x is None or copies is None:
        return None if 0 in sizes or -1 in sizes else sizes
    if sizes.count(-1) > 1:
        fail(layer, f"{text(sizes)} leaves two sizes open")
    if any(size == 0 and i >= len(copies) for i, size in enumerate(sizes)):
        fail(layer, f"{text(sizes)} copies an axis that the input does not have")
    result = [copies[i] if size == 0 else size for i, size in enumerate(sizes)]
    total = product(x)
    if -1 in result:
        others = product(size for size in result if size != -1)
        rest = exact_div(total, others)
        if rest is None:
            if isinstance(total, int):
                if isinstance(others, Sym):
                    return None
                fail(layer, f"{total} elements do not fit {text(sizes)}")
            rest = total // others
        result[result.index(-1)] = rest
    elif differ(product(result), total):
        fail(layer, f"{total} elements do not fit {text(sizes)}")
    return tuple(result)


@shape_of("Permute")
def permute(layer: Layer, x: Shape) -> Shape:
    """Return the sizes in the order of order_type."""
    try:
        return tuple(x[axis] for axis in permutation(layer["order_type"], len(x)))
    except GraphError as error:
        fail(layer, str(error))


@shape_of("Squeeze")
def squeeze(layer: Layer, x: Shape) -> Shape:
    """Return the shape without the named axes of size 1; ncnn silently keeps named axes of another size."""
    if layer["axes"]:
        named = positions(layer, layer["axes"], len(x))
    else:
        named = [i for i, axis in enumerate(AXES[len(x)]) if layer[f"squeeze_{axis}"]]
    return tuple(size for i, size in enumerate(x) if i not in named or size != 1) or (1,)


@shape_of("ExpandDims")
def expand_dims(layer: Layer, x: Shape) -> Shape:
    """Return the shape with axes of size 1 at the given positions of the output."""
    rank = len(x) + len(layer["axes"])
    if rank > MAX_RANK:
        fail(layer, f"the result would be {rank}-D")
    new = positions(layer, layer["axes"], rank)
    if len(set(new)) != len(new):
        fail(layer, f"axes {list(layer['axes'])} repeat one")
    old = iter(x)
    return tuple(1 if i in new else next(old) for i in range(rank))


@shape_of("Concat")
def concat(layer: Layer, first: Shape, *others: Shape) -> Shape:
    """Return the shape with the sizes along the axis added up; all other sizes must be equal."""
    axis = data_axis(layer, len(first))
    result = list(first)
    for other in others:
        need_rank(layer, other, len(first))
        for i, size in enumerate(other):
            if i != axis:
                result[i] = equal(layer, result[i], size, f"sizes along axis {i}")
    result[axis] = sum_of(shape[axis] for shape in (first, *others))
    return tuple(result)


@shape_of("Slice")
def slice_(layer: Layer, x: Shape) -> list[Output]:
    """Return one piece per output, from sizes (-233 shares the rest evenly) or from the indices between pieces."""
    axis = data_axis(layer, len(x))
    size, count = x[axis], len(layer.outputs)
    sizes: list[Dim] = []
    done: Dim = 0
    if layer["indices"]:
        if len(layer["indices"]) != count - 1:
            fail(layer, f"{len(layer['indices'])} indices make {len(layer['indices']) + 1} pieces for {count} outputs")
        ends = [size + index if index < 0 else index for index in layer["indices"]]
        sizes = [end - start for start, end in pairwise([0, *ends, size])]
    else:
        if len(layer["slices"]) != count:
            fail(layer, f"{len(layer['slices'])} sizes for {count} outputs")
        for i, piece in enumerate(layer["slices"]):
            sizes.append((size - done) // (count - i) if piece == _ABSENT else piece)
            done = done + sizes[-1]
        if differ(done, size):
            fail(layer, f"the pieces {text(sizes)} make {done}, not {size}")
    if any(isinstance(piece, int) and piece <= 0 for piece in sizes):
        fail(layer, f"the pieces {text(sizes)} are not all there")
    return [(*x[:axis], piece, *x[axis + 1 :]) for piece in sizes]


@shape_of("Crop")
def crop(layer: Layer, x: Shape, reference: Shape | None = None, *others: Shape) -> Output:
    """Return the part given by starts and ends, by expressions of them, by offsets and sizes, or by a second blob."""
    if layer["starts_expr"] and layer["ends_expr"]:
        starts, ends = evaluated(layer, "starts_expr"), evaluated(layer, "ends_expr")
        axes = evaluated(layer, "axes_expr") if layer["axes_expr"] else []
        if starts is None or ends is None or axes is None:
            return None
        return _numpy_crop(layer, x, starts, ends, [_number(layer, axis) for axis in axes])
    if layer["starts"] and layer["ends"]:
        return _numpy_crop(layer, x, layer["starts"], layer["ends"], layer["axes"])
    if reference is None:
        return tuple(_cut(layer, axis, size) for axis, size in by_axis(x).items())
    if layer["woffset"] == _ABSENT:
        return None  # the second blob holds the numbers, not the shape
    sizes = named_sizes(reference)
    wanted = [sizes[axis] for axis in AXES[len(x)]]
    if len(x) >= 3 and len(reference) != len(x):
        wanted[0] = x[0]
    _check_inside(layer, x, _offsets(layer, x), wanted)
    return tuple(wanted)


def _numpy_crop(layer: Layer, x: Shape, starts: list[Dim], ends: list[Dim], axes: list[int]) -> Shape:
    cropped = _axes(layer, axes, x)
    if len(starts) < len(cropped) or len(ends) < len(cropped):
        fail(layer, f"{len(starts)} starts and {len(ends)} ends for {len(cropped)} axes")
    result = list(x)
    for axis, start, end in zip(cropped, starts, ends, strict=False):
        first = 0 if start == _ABSENT else _from_start(start, x[axis])
        if isinstance(first, int) and first < 0:
            fail(layer, f"start {start} is before axis {axis}, which ncnn does not clamp")
        left = _end(x[axis], end) - first
        result[axis] = left
        if isinstance(left, int) and left <= 0:
            fail(layer, f"nothing is left of axis {axis} between {start} and {end}")
    return tuple(result)


def _axes(layer: Layer, axes: Sequence[int], x: Shape) -> Sequence[int]:
    """Return the axes counted from 0; all of them if there are none."""
    return positions(layer, axes, len(x)) if axes else range(len(x))


def _from_start(start: Dim, size: Dim) -> Dim:
    return size + start if isinstance(start, int) and start < 0 else start


def _end(size: Dim, end: Dim) -> Dim:
    if end == _ABSENT or (isinstance(end, int) and end >= _OPEN_END):
        return size
    if isinstance(end, int) and end <= 0:
        return size + end  # 0 is the end of the axis, not its start
    return smaller(end, size)


def _cut(layer: Layer, axis: str, size: Dim) -> Dim:
    before: int = layer[f"{axis}offset"]
    after: int = layer[f"{axis}offset2"]
    want: int = layer[f"out{axis}"]
    if before < 0 or after < 0:
        fail(layer, f"negative offsets along {axis}")
    left = size - (before + after)
    result = left if want == _ABSENT or (isinstance(left, int) and left < want) else want
    if isinstance(result, int) and result <= 0:
        fail(layer, f"nothing is left of {axis}: offsets {before} and {after}, size {want} (-233: all) of {size}")
    return result


def _number(layer: Layer, value: Dim) -> int:
    if isinstance(value, Sym):
        fail(layer, f"axis {value} is not a number")
    return value


@shape_of("Padding")
def padding(layer: Layer, x: Shape) -> Shape:
    """Return the shape with the borders added: front and behind pad c of a 3-D blob, and d of a 4-D one."""
    result = []
    for axis, size in by_axis(x).items():
        before, after = (layer[side] for side in SIDES[axis]) if (axis, len(x)) != ("c", 4) else (0, 0)
        if layer["type"] == Padding.REFLECT and isinstance(size, int) and max(before, after) >= size:
            fail(layer, f"a reflection of {max(before, after)} needs more than {size} elements along {axis}")
        result.append(size + (before + after))
    if layer["per_channel_pad_data_size"] and len(x) >= 3:
        equal(layer, layer["per_channel_pad_data_size"], result[0], "per_channel_pad_data_size and the channels")
    return tuple(result)


@shape_of("Tile")
def tile(layer: Layer, x: Shape) -> Shape:
    """Return numpy.tile's shape for repeats; else the shape with one axis repeated, which counts from 0 only."""
    repeats = list(layer["repeats"])
    if not repeats:
        if not 0 <= layer["axis"] < len(x):
            fail(layer, f"axis {layer['axis']} is out of range")
        repeats = [layer["tiles"] if i == layer["axis"] else 1 for i in range(len(x))]
    if len(repeats) > MAX_RANK:
        fail(layer, f"{len(repeats)} repeats make more than {MAX_RANK} axes")
    rank = max(len(x), len(repeats))
    sizes = (1,) * (rank - len(x)) + x
    repeats = [1] * (rank - len(repeats)) + repeats
    return tuple(size * repeat for size, repeat in zip(sizes, repeats, strict=True))


@shape_of("Reduction")
def reduction(layer: Layer, x: Shape) -> Shape:
    """Return the shape without the reduced axes, or with size 1 there; (1) if nothing is left."""
    reduces_all = layer["reduce_all"] or len(x) == 1  # 1-D: for any axes
    reduced = range(len(x)) if reduces_all else positions(layer, layer["axes"], len(x))
    if layer["keepdims"]:
        return tuple(1 if i in reduced else size for i, size in enumerate(x))
    return tuple(size for i, size in enumerate(x) if i not in reduced) or (1,)


@shape_of("MVN")
def mean_variance_norm(layer: Layer, x: Shape) -> Shape:
    """Return the input's shape; ncnn makes 1-D and 2-D blobs 3-D."""
    return (1,) * (3 - len(x)) + x


@shape_of("GLU")
def glu(layer: Layer, x: Shape) -> Shape:
    """Return the shape with the axis halved."""
    axis = data_axis(layer, len(x))
    return *x[:axis], parts(layer, x[axis], 2, "size"), *x[axis + 1 :]


@shape_of("Diag")
def diag(layer: Layer, x: Shape) -> Output:
    """Return the matrix with a vector on its diagonal, or a matrix's diagonal."""
    need_rank(layer, x, 1, 2)
    offset = layer["diagonal"]
    if len(x) == 1:
        size = x[0] + abs(offset)
        return size, size
    h, w = (x[0] - max(-offset, 0), x[1] - max(offset, 0))
    if isinstance(h - w, Sym):
        return None
    return (w if differ(h, w) and h - w > 0 else h,)


@shape_of("CopyTo")
def copy_to(layer: Layer, x: Shape, source: Shape) -> Shape:
    """Return the first input's shape; the second must be inside it."""
    need_rank(layer, source, len(x))
    offsets = _offsets(layer, x)
    if layer["starts"]:
        axes = _axes(layer, layer["axes"], x)
        if len(layer["starts"]) < len(axes):
            fail(layer, f"{len(layer['starts'])} starts for {len(axes)} axes")
        offsets = [0] * len(x)
        for axis, start in zip(axes, layer["starts"], strict=False):
            offsets[axis] = _from_start(start, x[axis])
    _check_inside(layer, x, offsets, source)
    return x


def _offsets(layer: Layer, x: Shape) -> list[Dim]:
    return [layer[f"{axis}offset"] for axis in AXES[len(x)]]


def _check_inside(layer: Layer, x: Shape, offsets: Sequence[Dim], parts: Sequence[Dim]) -> None:
    """Fail if a part surely exceeds its blob."""
    for size, offset, part in zip(x, offsets, parts, strict=True):
        left = size - (part + offset)
        if any(isinstance(n, int) and n < 0 for n in (offset, left)):
            fail(layer, f"{part} from {offset} on is not inside {size}")
