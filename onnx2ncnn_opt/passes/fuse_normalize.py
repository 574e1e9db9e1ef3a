import math
from collections.abc import Iterator

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, EpsMode, Reduction, UnaryOp
from onnx2ncnn_opt.ir.dim import Sym, is_fixed, known
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._statistics import axes_of, over, sqrt, sum_of_squares
from onnx2ncnn_opt.passes._trace import Sizes, moved
from onnx2ncnn_opt.passes._views import VIEWS, chain_above, view_layers
from onnx2ncnn_opt.passes.fuse_rmsnorm import normalized, over_norm
from onnx2ncnn_opt.rewrite.pattern import Op, op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

# A squared norm below that of every row except zeros, and the lower limit of an RMSNorm's eps.
_TINY, _LEAST = 1e-20, 1e-36


def _limited(length: Op) -> Iterator[Op]:
    yield op("Clip", "least", lambda clip: bool(clip["max"] > 1e38))(length)
    yield op("BinaryOp", "least", op_type=BinaryOp.MAX, with_scalar=1)(length)


def _variants() -> Iterator[Op]:
    squares = tuple(sum_of_squares())
    for length in (op("Reduction", "norm", operation=Reduction.L2)("x"), *map(sqrt, squares)):
        for least in _limited(length):
            yield from over("x", least)
            yield from over("rows", op(VIEWS, "view")(least))
    for square in squares:
        for least in _limited(square):
            yield from over("x", op("UnaryOp", "square", op_type=UnaryOp.SQRT)(least))


@rewrite(*_variants(), exact=False, purpose="embeddings and cosine similarity")
def fuse_normalize(
    x: Blob,
    norm: Layer,
    least: Layer,
    root: Layer,
    square: Layer | None = None,
    rows: Blob | None = None,
    view: Layer | None = None,
) -> Layer | list[Layer]:
    """x / max(L2 norm of x, eps)   ⇒   Normalize(x)

    For the norm of a vector, or over the channels of each pixel. The norm of rows becomes an RMSNorm if eps is so small
    that it only affects rows of zeros; rows of dynamic length become channels. The maximum may also be taken of the
    squared norm. The norms may be computed before views that make rows of the elements, as in XCiT.
    """
    shape = known_shape(x)
    if rows is not None and view is not None:
        _require_rows(x, norm, view, rows)
        x, shape = rows, rows.known_shape
    axes = axes_of(norm, len(shape)) if rows is None else (len(shape) - 1,)
    eps = least["min"] if least.type == "Clip" else least["b"]
    require(eps > 0, f"'{least.name}' lets norms be 0")
    require(norm["coeff"] == 1, f"'{norm.name}' has a factor")
    mode = EpsMode.MAX_SUM if square else EpsMode.MAX_ROOT
    if len(shape) in (2, 3) and axes == (len(shape) - 1,):
        if isinstance(shape[-1], Sym):
            return _as_channels(x, root, eps, mode)
        limit, width = eps if square else eps * eps, shape[-1]
        require(limit <= _TINY, f"rows may be shorter than '{least.name}' says")
        is_left = isinstance(width, int) and limit / width > _LEAST
        require(is_left, f"the eps would be too small for '{least.name}'")
        return normalized(x, root, axes[0], norm, limit, 1.0)
    whole, across_channels = len(shape) == 1, len(shape) in (3, 4) and axes == (0,)
    require(whole or across_channels, f"'{norm.name}' is not over a vector or over channels")
    return over_norm(x, root, eps, mode)


def _as_channels(x: Blob, root: Layer, eps: float, mode: EpsMode) -> list[Layer]:
    """Return the layers that make a channel of each row, divide it by its norm, and make rows of the channels."""
    *rows, width = x.known_shape
    require(is_fixed(rows), f"the number of rows of '{x.name}' is not fixed")
    to_channels = view_layers(x, (Regroup((math.prod(known(rows)), 1, width)),), like=[root])
    norm = over_norm(to_channels[0].output, root, eps, mode).having(across_spatial=1, across_channel=0)
    norm.outputs = (Blob(f"{root.output.name}_norm", to_channels[0].output.shape, x.batch),)
    return [*to_channels, norm, *view_layers(norm.output, (Regroup(x.known_shape),), like=[root])]


def _require_rows(x: Blob, norm: Layer, view: Layer, rows: Blob) -> None:
    """Refuse unless `rows` is a view of x, and each of its rows has the elements of one norm, which divides it."""
    above = chain_above(rows)
    chain = next((above[i:] for i, layer in enumerate(above) if layer.input is x), ())
    require(chain, f"'{rows.name}' is no view of '{x.name}'")
    sizes = Sizes(blob for layer in (*chain, view) for blob in (layer.input, layer.output))
    kept = list(sizes.shape(x))
    for axis in range(len(kept)) if norm["reduce_all"] else norm["axes"]:
        kept[axis] = 1
    index = np.arange(math.prod(kept), dtype=np.int32)
    of_elements = np.broadcast_to(index.reshape(kept), sizes.shape(x))
    for layer in chain:
        of_elements = moved(layer, layer.output, of_elements, sizes)
    divisors = moved(view, view.output, index.reshape(sizes.shape(view.input)), sizes)
    fits = divisors.ndim == of_elements.ndim and of_elements.shape[-1] * index.size == of_elements.size
    require(fits and (of_elements == divisors).all(), f"the rows of '{rows.name}' are not what '{norm.name}' is over")
