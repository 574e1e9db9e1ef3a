"""Matrix products: MatMul of two tensors, InnerProduct or Gemm with a constant matrix."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.view import MAX_DIMS, Atoms, Dims, View, flat, runs
from onnx2ncnn_opt.ir.weight import Array, Encoding, Weight
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, broadcast_shape, number, spread
from onnx2ncnn_opt.onnx.lower.functional.views import rows, squeeze, transposed, unsqueeze, with_rank
from onnx2ncnn_opt.onnx.lower.layout import Layout, align, broadcast_axis, combined, presence
from onnx2ncnn_opt.onnx.read.given import solved
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value


def matmul(im: ImportContext, a: Value, b: Value) -> Tensor:
    """MatMul; InnerProduct or Gemm if the right matrix is constant."""
    if a.rank == 0 or b.rank == 0:
        raise im.invalid("an operand is a scalar")
    inner = a.shape[-1], b.shape[-2 if b.rank > 1 else 0]
    if all(isinstance(n, int) for n in inner) and inner[0] != inner[1]:
        raise im.mismatch(f"the inner sizes {inner[0]} and {inner[1]} differ", [inner])
    if isinstance(a, Tensor) and isinstance(b, Constant) and b.rank <= 2:
        result = linear(im, a, im.f32(b.array).T if b.rank == 2 else im.f32(b.array)[None])
        return result if b.rank == 2 else squeeze(im, result, (-1,))
    x, y = im.tensor(a), im.tensor(b)
    if x.rank == 1:
        return squeeze(im, matmul(im, unsqueeze(im, x, (0,)), y), (-2 if y.rank > 1 else -1,))
    if y.rank == 1:
        return squeeze(im, matmul(im, x, unsqueeze(im, y, (1,))), (-1,))
    return _matmul(im, x, y)


def _matmul(im: ImportContext, x: Tensor, y: Tensor) -> Tensor:
    """MatMul of Mats whose two innermost dims are the matrices; B may be transposed."""
    rank = max(x.rank, y.rank)
    aligned = align([with_rank(v, rank).view for v in (x, y)], (rank - 2, rank - 1))
    if aligned is None:
        return _matmul(im, im.with_plain_axes(x), im.with_plain_axes(y))
    (left, right), origin = aligned
    row, column = len(origin) - 2, len(origin) - 1
    shared = bool(row and left.batch) and [left.batch, right.batch] == [v.axes[0] for v in (left, right)]
    batch = (0,) if shared else ()
    # Merge neighbouring outer axes of equal presence into one dim.
    outer = [axis for axis in range(row) if axis not in batch and (left.axes[axis] or right.axes[axis])]
    groups = [tuple(group) for _, group in groupby(outer, lambda axis: presence((left, right), axis))]
    if len(groups) + 2 > MAX_DIMS:  # operands of equal shape can merge theirs
        outer_shape = broadcast_shape(im, x.shape[:-2], y.shape[:-2])
        spread_x, spread_y = (im.tensor(spread(im, v, (*outer_shape, *v.shape[-2:]))) for v in (x, y))
        return _matmul(im, spread_x, spread_y)
    pair, matrix = (x.viewed(left), y.viewed(right)), ((row,), (column,))
    layouts = [
        (Layout((*order, *matrix), batch), Layout((*order, *second), batch))
        for order in _orders(groups)
        for second in (matrix, matrix[::-1])
    ]
    layout, other = min(layouts, key=lambda layouts: _price(im, pair, layouts))
    a, b = im.in_layout(pair[0], layout), im.in_layout(pair[1], other)
    blob = im.layer("MatMul", a.blob, b.blob, transB=int(layout != other))
    axes = [broadcast_axis(pair) for pair in zip(a.view.axes[:row], b.view.axes[:row], strict=True)]
    axes += [a.view.axes[row], b.view.axes[column]]
    return Tensor(blob, combined(axes, origin, rank, layout), x.dtype)


def _price(im: ImportContext, operands: Sequence[Tensor], layouts: Sequence[Layout]) -> tuple[int, int]:
    """Return the number of layout layers, then of moved pieces: passes merge moves of few pieces with others."""
    layers = pieces = 0
    for x, layout in zip(operands, layouts, strict=True):
        dims, batch = layout.atoms(x.view)
        layers += im.cost(x, layout)
        pieces += len(runs(x.view.batch + flat(x.view.dims), batch + flat(dims)))
    return layers, pieces


def _orders(groups: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Yield orders of the outer dims: first as the axes, then (for heads of windows) with a group's last axes first."""
    yield groups
    for i, group in enumerate(groups):
        for cut in range(len(group) - 1, 0, -1):
            yield [*groups[:i], group[cut:] + group[:cut], *groups[i + 1 :]]


BLOCK_SIZES = (32, 64, 128)  # of ncnn's Gemm


def linear(im: ImportContext, x: Tensor, weight: Array, bias: Array | None = None) -> Tensor:
    """``x @ weight.T + bias`` for weight [outputs, inputs] and bias [outputs]: InnerProduct for one row, else Gemm."""
    outputs, inputs = weight.shape
    if x.shape[-1] != inputs and (isinstance(x.shape[-1], int) or solved([(x.shape[-1], inputs)])):
        reason = f"the operand's last axis has size {x.shape[-1]}, the matrix takes {inputs}"
        raise im.invalid(reason, [(x.shape[-1], inputs)])
    last, batch = x.view.axes[-1], x.view.batch
    outer = set(flat(x.view.axes[:-1]))
    if outer in (set(), set(batch)):
        if outer != set(batch):
            x = im.in_mat(x, (last,), ())  # one row, whose elements are the batch of a Mat
        # InnerProduct flattens its input, so only the order of elements matters, and the weight can follow it.
        columns = _columns(weight, last, flat(x.view.dims))
        weights = {"weight_data": columns} | ({} if bias is None else {"bias_data": bias})
        params = {"num_output": outputs, "bias_term": int(bias is not None), "weight_data_size": weight.size}
        blob = im.layer("InnerProduct", x.blob, weights=weights, **params)
        return _with_last(x, blob, ((),) * (len(blob.known_shape) - 1), outputs)
    laid_out = _in_order(im, x, inputs, outputs)
    laid_out = laid_out if set(laid_out.view.dims[-1]) == set(last) else rows(im, laid_out, laid_out.rank - 1)
    if len(laid_out.view.dims) > 2:
        laid_out = im.in_mat(laid_out, (flat(laid_out.view.dims[:-1]), laid_out.view.dims[-1]), laid_out.view.batch)
    weights = {"B_data": _columns(weight, last, laid_out.view.dims[-1])} | ({} if bias is None else {"C_data": bias})
    params = {"constantN": outputs, "constantK": inputs}
    params |= {} if bias is None else {"constantC": 1, "constant_broadcast_type_C": 4}
    blob = im.layer("Gemm", laid_out.blob, weights=weights, transB=1, constantB=1, **params)
    return _with_last(laid_out, blob, laid_out.view.dims[:-1], outputs)


def linear_of_blocks(im: ImportContext, x: Tensor, integers: Array, scales: Array, size: int) -> Tensor:
    """Compute ``x @ weight.T`` for 8-bit `integers` [outputs, inputs] with a scale for each block of `size`."""
    outputs, inputs = integers.shape
    outer, last = flat(x.view.axes[:-1]), x.view.axes[-1]
    batch = () if set(last) & set(x.view.batch) else x.view.batch
    laid_out = im.in_mat(x, (tuple(atom for atom in outer if atom not in batch), last), batch)
    packed = Weight(integers.reshape(-1).view(np.uint8), Encoding.BYTES)
    weights: dict[str, Array | Weight] = {"B_data_packed_bytes": packed, "B_data_quantize_scales": 1 / scales}
    params = {"constantN": outputs, "constantK": inputs, "quantize_term": 800 + BLOCK_SIZES.index(size)}
    blob = im.layer("Gemm", laid_out.blob, weights=weights, transB=1, constantB=1, **params)
    return _with_last(laid_out, blob, laid_out.view.dims[:-1], outputs)


def _in_order(im: ImportContext, x: Tensor, inputs: int, outputs: int) -> Tensor:
    """Return x with its rows in the order of its axes, if the product is wider, because moving that costs more."""
    last, batch = x.view.axes[-1], x.view.batch
    axes = [tuple(atom for atom in axis if atom not in batch) for axis in x.view.axes[:-1]]
    atoms = tuple(atom for atom in flat(x.view.dims) if atom not in last)
    # In windows of an image, an axis consists of separate pieces; other orders may be transposed back later.
    is_scattered = any(len(runs(atoms, axis)) > 1 for axis in axes)
    is_fixed = all(isinstance(atom.size, int) for atom in atoms)
    return im.in_mat(x, (flat(axes), last), batch) if outputs > inputs and is_scattered and is_fixed else x


def _columns(weight: Array, logical: Atoms, memory: Atoms) -> Array:
    """Return the weight with its columns in the order of the operand's elements."""
    if logical == memory:
        return weight
    parts = weight.reshape(-1, *known(atom.size for atom in logical))
    return parts.transpose(0, *(logical.index(atom) + 1 for atom in memory)).reshape(weight.shape)


def _with_last(x: Tensor, blob: Blob, outer: Dims, size: int) -> Tensor:
    """Return the layer's result: the operand's view with a last axis, and last dim, of another size."""
    new = View.of((size,), [[0]]).axes[0]
    return Tensor(blob, View(x.view.batch, (*outer, new), (*x.view.axes[:-1], new)), x.dtype)


class ProductAttributes(NamedTuple):
    """The attributes that Gemm and the matrix products of com.microsoft share."""

    alpha: float = 1.0
    transA: int = 0
    transB: int = 0

    def matrices(self, a: Value, b: Value) -> tuple[Value, Value]:
        """Return the operands, transposed if the attributes say so."""
        return transposed(a) if self.transA else a, transposed(b) if self.transB else b


def gemm(
    im: ImportContext, a: Value, b: Value, c: Value | None = None, *, attrs: ProductAttributes, beta: float = 1.0
) -> Value:
    """InnerProduct or Gemm for a constant B, else MatMul and BinaryOps for alpha, beta and C."""
    if a.rank != 2 or b.rank != 2:
        raise im.invalid(f"its operands have ranks {a.rank} and {b.rank}, not 2")
    a, b = attrs.matrices(a, b)
    if isinstance(a, Tensor) and isinstance(b, Constant):
        weight = im.f32(b.array).T
        if attrs.alpha != 1:  # avoid a copy of a large weight
            weight = weight * np.float32(attrs.alpha)
        bias = _row_bias(im, c, weight.shape[0], beta)
        product: Value = linear(im, a, weight, bias)
        if bias is not None or c is None:
            return product
    else:
        product = matmul(im, a, b)
        if attrs.alpha != 1:
            product = binary(im, BinaryOp.MUL, product, number(attrs.alpha))
    if c is None:
        return product
    scaled = c if beta == 1 else binary(im, BinaryOp.MUL, c, number(beta))
    return binary(im, BinaryOp.ADD, product, scaled)


def _row_bias(im: ImportContext, c: Value | None, size: int, beta: float) -> Array | None:
    """Return C as one number per column; None if it is not constant, or has several rows."""
    if not isinstance(c, Constant) or (c.rank > 1 and c.array.shape[-2] != 1):
        return None
    return im.spread(im.f32(c.array).reshape(-1) * np.float32(beta), (size,))
