from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_BINARY = op("BinaryOp", "binary", with_scalar=0)


# Not exact: ncnn broadcasts row by row, and computes quotients and powers in another way at the end of a row.
@rewrite(_BINARY(op("Tile", "tile")("small"), "other"), _BINARY("other", op("Tile", "tile")("small")), exact=False)
def eliminate_tile_before_binaryop(small: Blob, other: Blob, tile: Layer, binary: Layer) -> Layer:
    """a, b ── Tile ── BinaryOp ──   ⇒   a, b ── BinaryOp ──

    If the BinaryOp broadcasts b to the same shape.
    """
    shape, rank = known_shape(small), len(known_shape(other))
    require(other is not tile.output and tile.output.uses == 1, f"'{tile.output.name}' is used twice")
    require(len(shape) == rank, f"'{small.name}' and '{other.name}' differ in rank")
    full = known_shape(tile.output)
    require(other.shape == full, f"'{other.name}' does not have the shape of the tiled blob")
    fits = all(a == 1 or a == b for a, b in zip(shape, full, strict=True))
    require(fits, f"'{small.name}' repeats more than one element")
    return binary.having(inputs=[small if blob is tile.output else blob for blob in binary.inputs])
