from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_BINARY = op("BinaryOp", "binary", with_scalar=0)


@rewrite(_BINARY(op("Tile", "tile")("small"), "other"), _BINARY("other", op("Tile", "tile")("small")), exact=True)
def eliminate_tile_before_binaryop(small: Blob, other: Blob, tile: Layer, binary: Layer) -> Layer:
    """a, b ── Tile ── BinaryOp ──   ⇒   a, b ── BinaryOp ──

    Where the BinaryOp broadcasts b to the same shape.
    """
    for blob in (small, other):
        require(blob.shape is not None, f"the shape of '{blob.name}' is unknown")
    assert small.shape is not None
    assert other.shape is not None
    require(other is not tile.output and tile.output.uses == 1, f"'{tile.output.name}' is used twice")
    require(len(small.shape) == len(other.shape), f"'{small.name}' and '{other.name}' differ in rank")
    full = tile.output.shape
    require(full is not None and other.shape == full, f"'{other.name}' has not the shape of the tiled blob")
    assert full is not None
    fits = all(a == 1 or a == b for a, b in zip(small.shape, full, strict=True))
    require(fits, f"'{small.name}' repeats more than one element")
    return binary.having(inputs=[small if blob is tile.output else blob for blob in binary.inputs])
