"""Resize and Upsample.

ncnn's Interp has three samplings: nearest by ``floor(x * in / out)``, bilinear and bicubic with half-pixel or aligned
corners. A mode of ONNX becomes Interp if each output element reads the same index. GridSample does other nearest modes.
All other modes are linear in the operand, so they become products with a constant matrix, one axis at a time.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Interp, SamplePadding
from onnx2ncnn_opt.ir.dim import Dim, Sym, at_least, exact_div, is_fixed, known, named, names_in, product
from onnx2ncnn_opt.ir.permute import inverted
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.fold.cells import as_constant, as_symbolic
from onnx2ncnn_opt.onnx.items import NodeView
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.cast import as_float
from onnx2ncnn_opt.onnx.lower.functional.crop import crop
from onnx2ncnn_opt.onnx.lower.functional.gather import pixels
from onnx2ncnn_opt.onnx.lower.functional.matmul import linear
from onnx2ncnn_opt.onnx.lower.functional.resampling import SIMPLE, Axis, Sampling
from onnx2ncnn_opt.onnx.lower.functional.views import multiples_of
from onnx2ncnn_opt.onnx.lower.memory_budget import require_room
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Operand, Sizes, Tensor, held_as_float, is_float, is_held_as_float

_LONGEST = 1 << 20  # elements of an axis: beyond any image
_LARGEST_DENOMINATOR = 64  # of a scale of dynamic sizes
_PARTS = (1, 2, 4, 8, 16, 32, 64)  # fractions that float32 has


def _resized(node: NodeView) -> int:
    """Apply the rule of Resize, which works axis by axis: items are on an axis that keeps its size."""
    axis = items.kept(node, (), sizes=(1, 2, 3))
    items.require(node.text("coordinate_transformation_mode") != "tf_crop_and_resize")
    items.require(node.result[axis] == node.shape(0)[axis])
    node.is_batch = axis == 0
    return axis


@onnx_op("Upsample", since=7, later=("scales",), batch=0, integers=True, items=_resized)
@onnx_op("Upsample", since=9, batch=0, integers=True, items=_resized)
@onnx_op("Resize", since=10, batch=0, integers=True, items=_resized)
def resize10(im: ImportContext, x: Operand, scales: Array, *, mode: str = "nearest") -> Operand:
    """Interp; coordinates are asymmetric, nearest rounds down, or up if an axis shrinks."""
    sampling = Sampling(mode, "asymmetric", SIMPLE)
    return _resize(im, *_scaled(im, x, np.asarray(scales), sampling), sampling)


@onnx_op("Resize", since=11, batch=0, integers=True, items=_resized)
def resize11(
    im: ImportContext,
    x: Operand,
    roi: Array | None = None,
    scales: Array | None = None,
    sizes: Sizes | None = None,
    *,
    axes: Ints | None = None,
    keep_aspect_ratio_policy: str = "stretch",
    sampling: Sampling,
) -> Operand:
    """Interp, or products with constant matrices."""
    targets = im.axes(range(x.rank) if axes is None else axes, x.rank)
    regions: dict[int, tuple[float, float]] = {}
    if sampling.crops:
        if keep_aspect_ratio_policy != "stretch" or (scales is not None and (scales != 1).any()):
            # ONNX scales the region, ONNX Runtime the whole axis.
            raise im.refuse("scales with coordinate_transformation_mode tf_crop_and_resize", "export it with sizes")
        if roi is None or roi.size != 2 * len(targets):
            raise im.invalid(f"a region of {0 if roi is None else roi.size} numbers for {len(targets)} axes")
        ends = roi.astype(np.float64).reshape(2, -1).tolist()
        regions = {axis: (begin, end) for axis, begin, end in zip(targets, *ends, strict=True)}
    if scales is not None and scales.ndim != 1:
        raise im.invalid("its scales are not a list")
    numbers = sizes or scales
    if numbers is not None and len(numbers) not in (0, len(targets)):
        raise im.invalid(f"{len(numbers)} sizes or scales for {len(targets)} axes")
    if sizes and keep_aspect_ratio_policy != "stretch":
        changes = _in_proportion(im, x, targets, sizes, keep_aspect_ratio_policy)
    elif sizes:
        outs = dict(zip(targets, sizes, strict=True))
        changes = [_sized(axis, n, outs.get(axis, n), sampling) for axis, n in enumerate(x.shape)]
    elif scales is None or not scales.size:
        raise im.invalid("it has neither sizes nor scales")
    else:
        factors = np.ones(x.rank, np.float32)
        factors[targets] = scales
        x, changes = _scaled(im, x, factors, sampling)
    return _resize(im, x, [a._replace(region=regions.get(a.axis, a.region)) for a in changes], sampling)


def _in_proportion(im: ImportContext, x: Operand, targets: Sequence[int], sizes: Sizes, policy: str) -> list[Axis]:
    """Return all axes with one common scale, so that none gets larger (or smaller) than its requested size."""
    limit = {"not_larger": min, "not_smaller": max}.get(policy)
    if limit is None:
        raise im.invalid(f"keep_aspect_ratio_policy {policy} is not known")
    if any(isinstance(size, Sym) for size in (*sizes, *x.shape)):
        raise im.refuse("keep_aspect_ratio_policy with dynamic dimensions", "bind them with --shape")
    shape = known(x.shape)
    scale = limit(out / shape[axis] for axis, out in zip(targets, known(sizes), strict=True))
    return [
        Axis(axis, size, int(np.floor(size * scale + 0.5)), scale) if axis in targets else Axis(axis, size, size, 1.0)
        for axis, size in enumerate(shape)
    ]


def _sized(axis: int, size: Dim, out: Dim, sampling: Sampling) -> Axis:
    if isinstance(size, int) and isinstance(out, int):
        return Axis(axis, size, out, out / size)
    if isinstance(size, Sym) and out == size // 2 and sampling.mode == "nearest":
        return Axis(axis, size, out, 0.5)  # of 2m + 1 pixels, too, floor(i * size / m) is 2i for all i < m
    wholes = ((exact_div(out * parts, size), parts) for parts in _PARTS)
    return Axis(axis, size, out, next((n / parts for n, parts in wholes if isinstance(n, int)), None))


def _scaled(im: ImportContext, x: Operand, scales: Array, sampling: Sampling) -> tuple[Operand, list[Axis]]:
    """Return all axes with their scales, and the operand, perhaps cropped along dynamic axes."""
    if scales.ndim != 1:
        raise im.invalid("its scales are not a list")
    if len(scales) != x.rank:
        raise im.invalid(f"{len(scales)} scales for rank {x.rank}")
    if not all(0 < factor < np.inf for factor in scales):
        raise im.invalid(f"scales {[float(factor) for factor in scales]} are not all positive")
    axes = []
    for axis, (size, factor) in enumerate(zip(x.shape, np.asarray(scales, np.float32), strict=True)):
        if isinstance(size, int):
            # ONNX: floor(size * scale), computed in float32.
            axes.append(Axis(axis, size, int(np.floor(np.float32(size) * factor)), float(factor)))
            continue
        ratio = Fraction(float(factor))
        if ratio.denominator > _LARGEST_DENOMINATOR:
            raise im.refuse(f"scale {factor} of a dynamic dimension", "bind it with --shape")
        if ratio.numerator == 1 and sampling.mode == "linear" and sampling.coordinates == "half_pixel":
            # Each pixel reads a whole group of pixels; the remaining pixels at the end are not read.
            size = size // ratio.denominator * ratio.denominator
            x = x if size == x.shape[axis] else crop(im, im.tensor(x), axis, 0, size)
        axes.append(Axis(axis, size, size * ratio.numerator // ratio.denominator, float(factor)))
    return x, axes


def _resize(im: ImportContext, x: Operand, axes: list[Axis], sampling: Sampling) -> Operand:
    if any(a.out == a.size and a.region != (0.0, 1.0) for a in axes):
        reason = "a region that becomes as large as all: ONNX Runtime does not cut it out"
        raise im.refuse(reason, "resize without a region")
    if all(a.out == a.size for a in axes):
        return x
    if not isinstance(x, Tensor) and not sampling.crops:
        one, cells = as_symbolic(x), as_symbolic(x).cells
        if cells.size and (cells == cells.flat[0]).all() and not isinstance(cells.flat[0], Sym):  # as masks of ones
            cells = cells.flat[:1].reshape((1,) * x.rank)
            return as_constant(replace(one, cells=cells, shape=tuple(a.out for a in axes)))
    x = x if isinstance(x, Constant) else im.tensor(x)
    is_known = is_fixed([a.out for a in axes]) and (sampling.mode == "nearest" or is_float(x.dtype))
    if isinstance(x, Constant) and is_known and not sampling.crops:  # as embeddings of positions
        return _of_constant(im, x, axes, sampling)
    x = im.tensor(x)
    if is_float(x.dtype):
        return _resize_floats(im, x, axes, sampling)
    if sampling.mode != "nearest" or sampling.crops:
        raise im.refuse(f"mode {sampling.mode} of {x.dtype}: ncnn's is between integers", "cast to float before")
    if x.dtype.itemsize > 2 and not is_held_as_float(x.dtype):
        raise im.refuse(f"numbers of {x.dtype}, not all of which float32 holds exactly", "cast to float before")
    return _resize_floats(im, as_float(im, x), axes, sampling).of_type(held_as_float(x.dtype))


def _changed(im: ImportContext, axes: list[Axis], sampling: Sampling) -> list[Axis]:
    """Return the axes that change; refuse unknown modes, and sizes out of bounds."""
    if sampling.mode not in ("nearest", "linear", "cubic"):
        raise im.invalid(f"mode {sampling.mode}")
    if not sampling.is_known:
        raise im.invalid(f"modes {sampling.coordinates} and {sampling.nearest_mode} are not known")
    # ONNX Runtime ignores a scale that does not change the size if no other size changes, or with antialias.
    changed = [a for a in axes if a.out != a.size or (a.scale != 1 and not sampling.antialias)]
    sizes = [a.out for a in changed if isinstance(a.out, int)]
    if max(sizes, default=1) > _LONGEST:
        raise im.refuse(f"an axis of more than {_LONGEST} elements", "resize to fewer elements")
    if min(sizes, default=1) < 1:
        raise im.refuse("an axis shrinks to nothing, and ncnn has no empty tensors", "use a larger scale or size")
    return changed


def _of_constant(im: ImportContext, x: Constant, axes: list[Axis], sampling: Sampling) -> Constant:
    array = x.array
    for one in _changed(im, axes, sampling):
        if sampling.mode == "nearest":
            array = array.take(sampling.nearest(one), one.axis)
        else:
            array = np.moveaxis(np.tensordot(sampling.matrix(one), array, (1, one.axis)), 0, one.axis)
    return Constant(array.astype(x.dtype))


def _resize_floats(im: ImportContext, x: Tensor, axes: list[Axis], sampling: Sampling) -> Tensor:
    changed = _changed(im, axes, sampling)
    params = _interp(im, changed, sampling)
    if params is not None:
        image = [a for a in changed if a.axis >= x.rank - 2]
        for group in (*([a] for a in changed if a not in image), image):
            x = _interp_layer(im, x, group, params) if group else x
        return x
    multiples = [pair for one in changed for pair in _whole(im, one, sampling)] if sampling.mode == "nearest" else []
    if multiples:
        raise im.invalid("its scales are not exact", multiples)
    for one in changed:
        reason = f"{sampling.mode} with {sampling.coordinates} from {one.size} to {one.out}"
        im.fixed((one.size, one.out), f"{reason}, which ncnn does not sample the same way at every size")
    if sampling.mode == "nearest":
        for last in range(len(changed), 0, -2):
            x = _copied(im, x, changed[max(last - 2, 0) : last], sampling)
    else:
        for one in changed:
            x = _product(im, x, one, sampling)
    if not sampling.crops or not sampling.extrapolation_value:
        return x
    inside = np.ones((), bool)
    for axis in axes:
        inside = inside[..., None] & (sampling.inside(axis) if axis in changed else np.ones(1, bool))
    return binary(im, BinaryOp.ADD, x, Constant(np.where(inside, 0, sampling.extrapolation_value)))


def _whole(im: ImportContext, axis: Axis, sampling: Sampling) -> Sequence[tuple[Dim, Dim]]:
    """Return multiples for dimensions that make a size the exact part of another one, as h // 4 is for (h, 4 * h_4)."""
    large = dict.fromkeys(names_in([axis.size, axis.out]), _LONGEST)
    ratio = Fraction(*known(named([axis.out, axis.size], large)))
    multiples = multiples_of(im, axis.size * ratio.numerator, axis.out * ratio.denominator)
    return multiples if multiples and _is_floor(axis._replace(scale=float(ratio)), sampling) else ()


def _interp(im: ImportContext, changed: list[Axis], sampling: Sampling) -> dict[str, int] | None:
    """Return Interp's parameters if it samples the axes as ONNX does, else None; for one pixel it does not."""
    if sampling.crops:
        return None
    if sampling.mode == "nearest":
        return {"resize_type": Interp.NEAREST} if all(_is_floor(a, sampling) for a in changed) else None
    if sampling.antialias or sampling.exclude_outside or (sampling.mode == "cubic" and sampling.cubic_coeff_a != -0.75):
        return None
    # Interp samples both image axes in one mode; an axis that keeps its size does not change in any mode.
    aligned, half = sampling.coordinates == "align_corners", sampling.coordinates == "pytorch_half_pixel"
    if not (aligned or half or sampling.coordinates == "half_pixel"):
        return None
    if not (aligned or all(_leads_to_size(a) for a in changed)):
        return None  # ONNX's scale is not exactly the ratio of the sizes, which aligned corners do not use
    shrinking = [a for a in changed if aligned or (half and not at_least(a.out - a.size, 0))]
    if not all(im.try_demand(a.out, 2) for a in shrinking):
        return None
    kind = Interp.BILINEAR if sampling.mode == "linear" else Interp.BICUBIC
    return {"resize_type": kind, "align_corner": int(aligned)}


def _is_floor(axis: Axis, sampling: Sampling) -> bool:
    """Return True if ONNX's nearest reads element ``floor(i * in / out)``, computed in ncnn's float32."""
    if isinstance(axis.size, Sym) or isinstance(axis.out, Sym):
        if axis.size == 1:
            return True
        shrinks = not at_least(axis.out - axis.size, 0)
        rounds_down = sampling.nearest_mode == "floor" or (sampling.nearest_mode == SIMPLE and not shrinks)
        plain = sampling.coordinates == "asymmetric" and rounds_down
        halves = (sampling.coordinates == "half_pixel" and sampling.nearest_mode.startswith("round_prefer")) or (
            sampling.coordinates == "tf_half_pixel_for_nn" and rounds_down
        )
        if axis.scale is None:
            # From n to 2n - 1 or 2n + 1 only the first quotient is whole, so float32's rounding changes no floor.
            return plain and axis.size in (axis.out // 2, (axis.out + 1) // 2)
        return (plain or (halves and axis.scale == int(axis.scale))) and _is_stable(axis.scale)
    ratio = np.float32(axis.size) / np.float32(axis.out)
    ncnn = np.minimum((np.arange(axis.out, dtype=np.float32) * ratio).astype(np.int64), axis.size - 1)
    return bool(np.array_equal(ncnn, sampling.nearest(axis)))


def _is_stable(scale: float) -> bool:
    """Return True if ``floor(i * (1 / scale))`` in float32 equals ``floor(i / scale)`` for all indices i of an axis."""
    ratio, index = Fraction(scale), np.arange(_LONGEST)
    product = index.astype(np.float32) * (np.float32(1) / np.float32(scale))
    return bool(np.array_equal(np.floor(product), index * ratio.denominator // ratio.numerator))


def _leads_to_size(axis: Axis) -> bool:
    """Return True if the scale of the coordinates equals the ratio of the sizes."""
    if axis.scale is None:
        return True
    if isinstance(axis.size, int) and isinstance(axis.out, int):
        return axis.scale == axis.out / axis.size
    ratio = Fraction(axis.scale)
    return axis.size * ratio.numerator == axis.out * ratio.denominator


def _interp_layer(im: ImportContext, x: Tensor, group: Sequence[Axis], params: dict[str, Any]) -> Tensor:
    """Resize one axis, or the last two; the axes before are channels, and those after are columns."""
    first, last = group[0].axis, x.rank - 1
    batch, row = [0][:first], min(first, last - 1)
    dims = [[*range(len(batch), row)], [row], [*range(row + 1, x.rank)]]
    if first == last < 3:
        dims = [[*range(len(batch), last)], [], [last]]
    # A row has one number per channel, as after a global pooling: Interp expands it to the image.
    is_row = dims[0] == [1] and x.rank < 5 and len(im.channel_dims(x)) == 1
    blob = im.mat(x, [[1]] if is_row else dims, batch)
    named = {a.axis: a for a in group}
    shape = tuple(named[axis].out if axis in named else size for axis, size in enumerate(x.shape))
    height, width = (product(shape[axis] for axis in dim) for dim in dims[1:])
    scales = [next((named[axis].scale for axis in dim if axis in named), 1.0) for dim in dims[1:]]
    if isinstance(height, int) and isinstance(width, int):
        blob = im.layer("Interp", blob, output_height=height, output_width=width, **params)
    elif None not in scales:
        blob = im.layer("Interp", blob, height_scale=scales[0], width_scale=scales[1], **params)
    else:
        [size], others = im.size_expressions([(width, height)], blob)
        blob = im.layer("Interp", blob, *others, size_expr=size, **params)
    return im.wrap(blob, shape, dims, batch)


def _copied(im: ImportContext, x: Tensor, axes: Sequence[Axis], sampling: Sampling) -> Tensor:
    """Return the nearest elements along one or two axes by GridSample: a product would turn infinities into NaN."""
    changed, batch = [one.axis for one in axes], [] if axes[0].axis == 0 else [0]
    others = [axis for axis in range(x.rank) if axis not in (*batch, *changed)]
    dims = [others, *([] for _ in range(2 - len(axes))), *([axis] for axis in changed)]
    places = [np.zeros(1)] * (2 - len(axes)) + [_places(one, sampling) for one in axes]
    require_room(2 * places[0].size * places[1].size, "a grid")
    grid = np.stack(np.meshgrid(*places[::-1])).astype(np.float32)
    blob = pixels(im, im.mat(x, dims, batch), im.memory(grid), SamplePadding.ZEROS)
    sizes = {one.axis: one.out for one in axes}
    return im.wrap(blob, tuple(sizes.get(axis, size) for axis, size in enumerate(x.shape)), dims, batch)


def _places(axis: Axis, sampling: Sampling) -> Array:
    """Return the coordinates of the nearest elements, -1 and 1 at the outer borders, and -3 outside of the operand."""
    middles = (2 * sampling.nearest(axis) + 1) / axis.size - 1
    return np.where(sampling.inside(axis), middles, -3) if sampling.crops else middles


def _product(im: ImportContext, x: Tensor, axis: Axis, sampling: Sampling) -> Tensor:
    """Resize an axis by a product with a constant matrix [out, in]."""
    perm = [a for a in range(x.rank) if a != axis.axis] + [axis.axis]
    resized = linear(im, x.transpose(perm), sampling.matrix(axis))
    return resized.transpose(inverted(perm))
