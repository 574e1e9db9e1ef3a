"""Operators that read an image at computed positions, and Col2Im."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Sample, SamplePadding, UnaryOp
from onnx2ncnn_opt.ir.dim import Dim, Shape, shape_text
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import arithmetic, binary, number
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.crop import crop
from onnx2ncnn_opt.onnx.lower.functional.division import applied
from onnx2ncnn_opt.onnx.lower.functional.gather import fixed, gather_nd, numbers_of
from onnx2ncnn_opt.onnx.lower.functional.matmul import matmul
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.window import pad_params, spatial
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Sizes, Tensor, Value

_SAMPLE_TYPES = {mode.name.lower(): mode for mode in Sample} | {"linear": Sample.BILINEAR, "cubic": Sample.BICUBIC}
_PADDINGS = {mode.name.lower(): mode for mode in SamplePadding}
_MOST_REGIONS = 256
_MOST_PIXELS = 2**20  # lookups for the maxima in regions


class _GridAttributes(NamedTuple):
    align_corners: int = 0
    padding_mode: str = "zeros"


class _RoiAttributes(NamedTuple):
    mode: str = "avg"
    output_height: int = 1
    output_width: int = 1
    sampling_ratio: int = 0
    spatial_scale: float = 1.0


@onnx_op("GridSample", since=16, batch=0, items=items.batch(0, 1))
def grid_sample16(
    im: ImportContext, x: Tensor, grid: Value, *, mode: str = "bilinear", attrs: _GridAttributes
) -> Tensor:
    """GridSample."""
    return grid_sample20(im, x, grid, mode=mode, attrs=attrs)


@onnx_op("GridSample", since=20, batch=0, items=items.batch(0, 1))
def grid_sample20(im: ImportContext, x: Tensor, grid: Value, *, mode: str = "linear", attrs: _GridAttributes) -> Tensor:
    """GridSample of images and volumes."""
    align_corners, padding_mode = attrs
    n = x.rank - 2
    if n not in (2, 3) or grid.rank != x.rank or grid.shape[-1] != n:
        raise im.invalid(f"a grid of shape {list(grid.shape)} for an operand of rank {x.rank}")
    if mode not in _SAMPLE_TYPES or padding_mode not in _PADDINGS or (n == 3 and _SAMPLE_TYPES[mode] == Sample.BICUBIC):
        reason = f"mode {mode} with padding_mode {padding_mode} in {n} dimensions"
        raise im.refuse(reason, "use bilinear or nearest in volumes")
    if mode == "nearest":
        grid = _rounded(im, grid, x.shape[:1:-1], align_corners)
    if padding_mode == "reflection":
        grid = _folded(im, grid)
    blob = im.layer(
        "GridSample",
        im.channels(x),
        im.mat(grid, [[axis] for axis in range(1, n + 2)], [0]),
        sample_type=_SAMPLE_TYPES[mode],
        padding_mode=_PADDINGS[padding_mode],
        align_corner=int(bool(align_corners)),
    )
    return im.wrap(blob, (*x.shape[:2], *grid.shape[1:-1]), [[axis] for axis in range(1, x.rank)], [0], x.dtype)


def _rounded(im: ImportContext, grid: Value, sizes: Shape, align_corners: int) -> Value:
    """Round the grid to whole pixels, halves to even pixels as in ONNX: ncnn rounds them up.

    `sizes` are the sizes of the axes of the coordinates x, y(, z).
    """
    if align_corners and 1 in sizes:
        reason = f"mode nearest in an image whose sizes are {', '.join(map(str, reversed(sizes)))}"
        raise im.refuse(reason, "with align_corners each has to be 2 or more")
    size = numbers_of(im, *sizes)
    if isinstance(grid, Constant):
        grid = Constant(im.f32(grid.array))
    # With ONNX Runtime's order of operations, so the same positions are halves.
    position = arithmetic(im, BinaryOp.ADD, grid, number(1))
    if align_corners:
        for each in sizes:
            im.demand(each, 2)
        last = arithmetic(im, BinaryOp.SUB, size, number(1))
        pixel = arithmetic(im, BinaryOp.MUL, arithmetic(im, BinaryOp.MUL, position, number(0.5)), last)
        pixel = applied(im, pixel, UnaryOp.ROUND, np.rint)
        step = arithmetic(im, BinaryOp.DIV, number(2), last)
        return arithmetic(im, BinaryOp.SUB, arithmetic(im, BinaryOp.MUL, pixel, step), number(1))
    pixel = arithmetic(im, BinaryOp.SUB, arithmetic(im, BinaryOp.MUL, position, size), number(1))
    pixel = applied(im, arithmetic(im, BinaryOp.MUL, pixel, number(0.5)), UnaryOp.ROUND, np.rint)
    pixel = arithmetic(im, BinaryOp.MUL, pixel, arithmetic(im, BinaryOp.DIV, number(2), size))
    first = arithmetic(im, BinaryOp.SUB, arithmetic(im, BinaryOp.DIV, number(1), size), number(1))
    return arithmetic(im, BinaryOp.ADD, pixel, first)


def _folded(im: ImportContext, grid: Value) -> Value:
    """Reflect the grid into -1 to 1 repeatedly: ncnn reflects only once."""
    position = arithmetic(im, BinaryOp.ADD, grid, number(1))
    periods = arithmetic(im, BinaryOp.MUL, arithmetic(im, BinaryOp.FLOOR_DIVIDE, position, number(4)), number(4))
    distance = arithmetic(im, BinaryOp.SUB, arithmetic(im, BinaryOp.SUB, position, periods), number(2))
    return arithmetic(im, BinaryOp.SUB, number(1), applied(im, distance, UnaryOp.ABS, np.abs))


@onnx_op("AffineGrid", since=20, items=lambda node: items.kept(node, (1, 2), sizes=(1,)))
def affine_grid(im: ImportContext, theta: Tensor, size: Sizes, *, align_corners: int = 0) -> Value:
    """Multiply a constant grid of corners by theta."""
    n = len(size) - 2
    if n not in (2, 3) or theta.rank != 3 or theta.shape[1:] != (n, n + 1) or theta.shape[0] != size[0]:
        raise im.invalid(f"theta of shape {shape_text(theta.shape)} for the size {shape_text(size)}")
    image = im.fixed(size[2:], "a grid of dynamic size")
    if align_corners and 1 in image:
        reason = "align_corners of an axis with one pixel, which has no two corners"
        raise im.refuse(reason, "export it with align_corners = 0")
    axes = [np.linspace(-1, 1, k) if align_corners else (2 * np.arange(k) + 1) / k - 1 for k in image]
    # Coordinates are x, y(, z), then 1.
    positions = [*reversed(np.meshgrid(*axes, indexing="ij")), np.ones(image)]
    base = Constant(np.stack(positions, axis=-1).reshape(-1, n + 1).astype(np.float32))
    return im.reshape(matmul(im, base, theta.transpose((0, 2, 1))), (size[0], *image, n))


@onnx_op("DeformConv", since=19, batch=0, items=items.batch(0, 2, 4))
def deform_conv(
    im: ImportContext,
    x: Tensor,
    w: Array,
    offset: Tensor,
    b: Array | None = None,
    mask: Tensor | None = None,
    *,
    dilations: Ints = (),
    group: int = 1,
    kernel_shape: Ints = (),
    offset_group: int = 1,
    pads: Ints = (),
    strides: Ints = (),
) -> Value:
    """DeformableConv2D, one for each group of channels and of offsets."""
    channels = x.shape[1]
    if w.ndim != 4 or x.rank != 4:
        reason = f"a kernel of rank {w.ndim} for an operand of rank {x.rank}: ncnn has images only"
        raise im.refuse(reason, "write it as a convolution of images")
    if not isinstance(channels, int) or channels != w.shape[1] * group or w.shape[0] % group or channels % offset_group:
        raise im.invalid(
            f"a kernel of shape {list(w.shape)}, {group} groups and {offset_group} of offsets for {channels} channels"
        )
    params: dict[str, Any] = spatial("kernel", w.shape[2:]) | spatial("dilation", dilations or (1, 1))
    params |= spatial("stride", strides or (1, 1)) | pad_params(pads or (0, 0, 0, 0))
    inputs, outputs, per_offset = w.shape[1], w.shape[0] // group, channels // offset_group
    edges = sorted({*range(0, channels + 1, inputs), *range(0, channels + 1, per_offset)})
    parts: list[Value] = []
    for g in range(group):
        weight = w[g * outputs : (g + 1) * outputs]
        total: Value | None = None
        for begin, end in pairwise(e for e in edges if g * inputs <= e <= (g + 1) * inputs):
            piece = weight[:, begin - g * inputs : end - g * inputs]
            weights = {"weight_data": piece}
            if b is not None and total is None:
                weights["bias_data"] = b[g * outputs : (g + 1) * outputs]
            positions = [_part(im, y, begin // per_offset, offset_group) for y in (offset, mask) if y is not None]
            blob = im.layer(
                "DeformableConv2D",
                im.channels(crop(im, x, 1, begin, end) if end - begin < channels else x),
                *(im.channels(position) for position in positions),
                weights=weights,
                num_output=outputs,
                bias_term=int("bias_data" in weights),
                weight_data_size=piece.size,
                **params,
            )
            y = im.wrap(blob, (x.shape[0], outputs, *offset.shape[2:]), [[1], [2], [3]], [0], x.dtype)
            total = y if total is None else binary(im, BinaryOp.ADD, total, y)
        assert total is not None
        parts.append(total)
    return concat(im, *parts, axis=1)


def _part(im: ImportContext, x: Tensor, index: int, count: int) -> Tensor:
    """Return one of `count` equal groups of channels."""
    if count == 1:
        return x
    (channels,) = fixed(im, x.shape[1:2])
    size = channels // count
    return crop(im, x, 1, index * size, (index + 1) * size)


@onnx_op("RoiAlign", since=10, integers=True)
def roi_align10(im: ImportContext, x: Tensor, rois: Value, batch_indices: Value, *, attrs: _RoiAttributes) -> Tensor:
    """One ROIAlign for each region, and Concat."""
    return roi_align16(im, x, rois, batch_indices, attrs=attrs, coordinate_transformation_mode="output_half_pixel")


@onnx_op("RoiAlign", since=16, integers=True)
def roi_align16(
    im: ImportContext,
    x: Tensor,
    rois: Value,
    batch_indices: Value,
    *,
    attrs: _RoiAttributes,
    coordinate_transformation_mode: str = "half_pixel",
) -> Tensor:
    """One ROIAlign for each region, and Concat; in mode max, lookups of constant pixels and a Reduction."""
    mode = attrs.mode
    if mode not in ("avg", "max"):
        raise im.invalid(f"mode {mode} is not known")
    if mode == "max" and not isinstance(rois, Constant):
        reason = "mode max in regions that are computed at run time: ncnn averages only"
        raise im.refuse(reason, "use mode avg, or make the regions constant")
    images = _image_of_each(im, x, rois.shape[0], batch_indices)
    is_centred = coordinate_transformation_mode == "half_pixel"
    if mode == "max" and isinstance(rois, Constant):
        ends = rois.array.astype(np.float32) * np.float32(attrs.spatial_scale) - np.float32(0.5 if is_centred else 0)
        return _largest(im, x, images, ends, attrs, is_centred=is_centred)
    return _averages(im, x, images, rois, attrs, is_centred=is_centred)


def _image_of_each(im: ImportContext, x: Tensor, count: Dim, batch_indices: Value) -> Array:
    """Return the index of the image of each of `count` regions."""
    if x.rank != 4 or (x.shape[0] != 1 and not isinstance(batch_indices, Constant)):
        raise im.refuse("the image of each region is known only at run time", "convert it for one image")
    if not isinstance(count, int) or not 1 <= count <= _MOST_REGIONS:
        reason = f"{count} regions: their number must be known, and at most {_MOST_REGIONS}"
        raise im.refuse(reason, "convert it for fewer regions")
    images = batch_indices.array.reshape(-1) if isinstance(batch_indices, Constant) else np.zeros(count, int)
    if images.shape != (count,) or images.min() < 0 or (isinstance(x.shape[0], int) and images.max() >= x.shape[0]):
        raise im.invalid(f"regions in images {images.tolist()} for {count} regions of {x.shape[0]} images")
    return images


def _averages(
    im: ImportContext, x: Tensor, images: Array, rois: Value, attrs: _RoiAttributes, *, is_centred: bool
) -> Tensor:
    """Return the average in each cell of each region."""
    count = len(images)
    image = {i: im.channels(x if x.shape[0] == 1 else crop(im, x, 0, i, i + 1)) for i in sorted(set(images.tolist()))}
    regions = im.mat(rois, [[0], [1]])
    rows = [regions] if count == 1 else im.layers("Slice", regions, outputs=count, slices=(1,) * count, axis=0)
    parts = [
        im.layer(
            "ROIAlign",
            image[i],
            row,
            pooled_width=attrs.output_width,
            pooled_height=attrs.output_height,
            spatial_scale=attrs.spatial_scale,
            sampling_ratio=attrs.sampling_ratio,
            aligned=int(is_centred),
            version=1,
        )
        for i, row in zip(images.tolist(), rows, strict=True)
    ]
    shape = (count, x.shape[1], attrs.output_height, attrs.output_width)
    if count == 1:
        return im.wrap(parts[0], shape, [[1], [2], [3]], dtype=x.dtype)
    return im.wrap(im.layer("Concat", *parts, axis=0), shape, [[0, 1], [2], [3]], dtype=x.dtype)


def _largest(
    im: ImportContext, x: Tensor, images: Array, ends: Array, attrs: _RoiAttributes, *, is_centred: bool
) -> Tensor:
    """Return the maximum in each cell of each region, as in ONNX Runtime: of weighted pixels, not of samples."""
    reason = "mode max in an image of dynamic size"
    batch, channels, height, width = im.fixed(x.shape, reason, "bind them with --shape")
    size, ratio = (attrs.output_height, attrs.output_width), attrs.sampling_ratio
    positions, weights = [], []
    for image, (left, top, right, bottom) in zip(images.tolist(), ends, strict=True):
        rows, of_rows = _around(top, bottom, height, size[0], ratio, is_centred=is_centred)
        columns, of_columns = _around(left, right, width, size[1], ratio, is_centred=is_centred)
        position = (image * height + rows[:, None, :, None]) * width + columns[None, :, None, :]
        positions.append(position.reshape(size[0] * size[1], -1))
        weights.append((of_rows[:, None, :, None] * of_columns[None, :, None, :]).reshape(positions[-1].shape))
    most = max(1, *(position.shape[1] for position in positions))
    if len(positions) * size[0] * size[1] * most > _MOST_PIXELS:
        reason = f"mode max of {most} pixels in each of {size[0] * size[1]} cells of {len(positions)} regions"
        raise im.refuse(reason, "use fewer or smaller regions, or sampling_ratio 1")
    # Cells with fewer pixels repeat the last one; cells without pixels read pixel 0 with weight 0.
    position = np.concatenate([_widened(position, most) for position in positions])
    weight = np.concatenate([_widened(weight, most) for weight in weights])
    flat = im.reshape(x.transpose((0, 2, 3, 1)), (batch * height * width, channels))
    pixels = gather_nd(im, flat, Constant(position[..., None]))
    weighted = binary(im, BinaryOp.MUL, pixels, Constant(weight[..., None].astype(np.float32)))
    largest = im.tensor(im.reshape(reduce(im, weighted, "ReduceMax", (1,), 0), (len(positions), *size, channels)))
    return largest.transpose((0, 3, 1, 2))


def _widened(x: Array, width: int) -> Array:
    missing = [(0, 0), (0, width - x.shape[1])]
    return np.pad(x, missing, mode="edge") if x.shape[1] else np.pad(x, missing)


def _around(
    begin: np.float32, end: np.float32, length: int, cells: int, ratio: int, *, is_centred: bool
) -> tuple[Array, Array]:
    """Return the neighbours of the samples of each cell along an axis, and their weights: [cells, 2 * samples]."""
    # In float32 and with ONNX Runtime's order of operations, so the same samples are outside.
    extent = end - begin if is_centred else max(end - begin, np.float32(1))
    cell = extent / np.float32(cells)
    samples = ratio if ratio > 0 else max(int(np.ceil(cell)), 0)
    inside = (np.arange(samples, dtype=np.float32) + np.float32(0.5)) * cell / np.float32(max(samples, 1))
    position = begin + np.arange(cells, dtype=np.float32)[:, None] * cell + inside
    low = np.clip(np.floor(position), 0, length - 1)
    share = np.where(low == length - 1, 0, np.maximum(position, 0) - low)
    outside = (position < -1) | (position > length)
    pixels = np.stack([low, np.minimum(low + 1, length - 1)], axis=-1).astype(np.int64)
    weights = np.where(outside[..., None], 0, np.stack([1 - share, share], axis=-1))
    return pixels.reshape(cells, -1), weights.astype(np.float32).reshape(cells, -1)


@onnx_op("Col2Im", since=18, batch=0)
def col2im(
    im: ImportContext,
    x: Tensor,
    image_shape: Ints,
    block_shape: Ints,
    *,
    dilations: Ints = (),
    pads: Ints = (),
    strides: Ints = (),
) -> Tensor:
    """Fold, also of rows."""
    n = len(image_shape)
    if n > 2:
        raise im.refuse(f"an image of {n} dimensions: ncnn folds two", "fold it in two dimensions")
    dilation, stride, pad = dilations or (1,) * n, strides or (1,) * n, pads or (0, 0) * n
    if n == 1:
        sizes, pad = ((1, *image_shape), (1, *block_shape)), (0, pad[0], 0, pad[1])
        row = col2im(im, x, *sizes, dilations=(1, *dilation), pads=pad, strides=(1, *stride))
        return row.viewed(row.view.with_axes([row.view.axes[0], row.view.axes[1], row.view.axes[3]]))
    blocks = [
        (size + begin + end - d * (k - 1) - 1) // s + 1
        for size, begin, end, d, k, s in zip(image_shape, pad[:2], pad[2:], dilation, block_shape, stride, strict=True)
    ]
    channels, size = x.shape[1], block_shape[0] * block_shape[1]
    if x.rank != 3 or x.shape[2] != blocks[0] * blocks[1] or not isinstance(channels, int):
        raise im.invalid(f"columns of shape {list(x.shape)} for {blocks[0]} x {blocks[1]} blocks")
    if channels % size:
        raise im.invalid(f"{channels} rows do not divide into blocks of {block_shape[0]} x {block_shape[1]}")
    params: dict[str, Any] = spatial("kernel", block_shape) | spatial("dilation", dilation)
    params |= spatial("stride", stride) | pad_params(pad) | spatial("output", image_shape)
    blob = im.layer("Fold", im.mat(x, [[1], [2]], [0]), **params)
    return im.wrap(blob, (x.shape[0], channels // size, *image_shape), [[1], [2], [3]], [0], x.dtype)
