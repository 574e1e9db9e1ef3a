from onnx2ncnn_opt.ir.codes import BinaryOp, Interp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._constants import is_uniform
from onnx2ncnn_opt.passes._views import before_views
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_BINARY = op("BinaryOp", "binary", with_scalar=0)


def _are_ones(blob: Blob) -> bool:
    """Return True for a constant of ones, also if Interp (nearest) repeats it to a dynamic length."""
    layer = before_views(blob).producer
    if layer is not None and layer.type == "Interp" and layer["resize_type"] == Interp.NEAREST:
        layer = layer.inputs[0].producer
    return layer is not None and layer.type == "MemoryData" and is_uniform(layer) and layer.weights["data"][0] == 1


_TILES = (
    op("Tile", "tile")("small"),
    op("BinaryOp", "tile", lambda layer: any(map(_are_ones, layer.inputs)), op_type=BinaryOp.MUL, with_scalar=0)(
        "small", "ones"
    ),
)


# Not exact: ncnn broadcasts row by row, and computes quotients and powers in another way at the end of a row.
@rewrite(
    *(_BINARY(*operands) for tile in _TILES for operands in ((tile, "other"), ("other", tile))),
    exact=False,
)
def eliminate_tile_before_binaryop(
    small: Blob, other: Blob, tile: Layer, binary: Layer, ones: Blob | None = None
) -> Layer:
    """a, b ── Tile ── BinaryOp ──   ⇒   a, b ── BinaryOp ──

    If the BinaryOp broadcasts b to the same shape. A product with ones is also a Tile, to a dynamic size.
    """
    require(ones is None or _are_ones(ones), f"'{tile.name}' does not multiply by ones")
    shape, rank = known_shape(small), len(known_shape(other))
    require(other is not tile.output and tile.output.uses == 1, f"'{tile.output.name}' is used twice")
    require(len(shape) == rank, f"'{small.name}' and '{other.name}' differ in rank")
    full = known_shape(tile.output)
    require(other.shape == full, f"'{other.name}' does not have the shape of the tiled blob")
    fits = all(a == 1 or a == b for a, b in zip(shape, full, strict=True))
    require(fits, f"'{small.name}' repeats more than one element")
    return binary.having(inputs=[small if blob is tile.output else blob for blob in binary.inputs])
