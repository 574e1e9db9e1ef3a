"""`move_crop_up`: removes rows that no layer reads, before layers compute them.

A transformer's classifier reads one row of the last block, that of the class token. Layers that compute each row from
the same row of their operands then need only this row. Attention needs all keys and values, but only one query.
"""

from collections.abc import Callable, Iterator, Mapping

from onnx2ncnn_opt.ir.attention import operand_count
from onnx2ncnn_opt.ir.codes import GemmC
from onnx2ncnn_opt.ir.dim import product
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.int8 import BLOCKS
from onnx2ncnn_opt.ir.layers import types_with
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.passes._crops import cropped, last_row, part
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.passes._gemm import linear_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_Operands = Iterator[tuple[Blob, int | None]]
"""A layer's inputs, each with the axis to crop; None for an input that stays whole."""


def _elementwise(layer: Layer, axis: int) -> _Operands:
    """Yield the operands: crop operands with the output's size along the axis, and keep operands of size 1."""
    rank, size = len(layer.output.known_shape), layer.output.known_shape[axis]
    for blob in layer.inputs:
        shape = known_shape(blob, rank)
        require(shape[axis] in (1, size), f"'{blob.name}' has another size along axis {axis}")
        yield blob, axis if shape[axis] == size else None


def _norm(layer: Layer, axis: int) -> _Operands:
    shape = known_shape(layer.input)
    inside = [product(shape[k:]) for k in range(axis + 1, len(shape))]
    require(layer["affine_size"] in inside, f"'{layer.name}' normalises along axis {axis}")
    yield layer.input, axis


def _product(layer: Layer, axis: int) -> _Operands:
    require(len(layer.inputs) == 1, f"'{layer.name}' has several operands")
    known_shape(layer.input, 2)
    known_shape(layer.output, 2)  # an InnerProduct flattens a matrix if its rows have another size than the weights
    require(axis == 0, f"'{layer.name}' computes every column from all of them")
    if layer.type == "Gemm" and layer["quantize_term"] >= BLOCKS:
        require(
            layer["constant_broadcast_type_C"] in (GemmC.NONE, GemmC.SCALAR, GemmC.N),
            f"Gemm '{layer.name}' adds a matrix",
        )
    elif layer.type == "Gemm":
        linear_of(layer)
    else:
        require_own_weights(layer)
    yield layer.input, axis


def _attention(layer: Layer, axis: int) -> _Operands:
    require(axis == 0, f"'{layer.name}' computes every column from all of them")
    require(layer["quantize_term"] == 0, f"'{layer.name}' is quantised to int8")
    count = operand_count(layer)
    q, *others = layer.inputs[:count]
    yield q, axis
    for blob in others or [q]:
        yield blob, None
    for mask in layer.inputs[count:]:
        yield mask, len(known_shape(mask)) - 2


_OPERANDS: Mapping[str, Callable[[Layer, int], _Operands]] = {
    **dict.fromkeys((*types_with(Trait.ELEMENTWISE), "BinaryOp", "Eltwise"), _elementwise),
    **dict.fromkeys(("LayerNorm", "RMSNorm"), _norm),
    **dict.fromkeys(("Gemm", "InnerProduct"), _product),
    "MultiHeadAttention": _attention,
}


def _keeps_few(crop: Layer) -> bool:
    """Return True if a Crop keeps at most half of an axis, or the last element of a dynamic one."""
    kept = part(crop)
    if kept is None:
        return last_row(crop) is not None
    axis, start, end = kept
    size = crop.input.known_shape[axis]
    return isinstance(size, int) and 2 * (end - start) <= size


@rewrite(
    op("Crop", "crop", _keeps_few)(op(_OPERANDS, "layer")),
    exact=False,
    purpose="transformers with an output that needs only the class token or the last token",
)
def move_crop_up(layer: Layer, crop: Layer) -> list[Layer]:
    """x ── Gemm, LayerNorm, BinaryOp, ... ── Crop ──   ⇒   x ── Crop ── Gemm, LayerNorm, BinaryOp, ... ──

    In attention, only the queries and the rows of the mask are cropped.
    """
    kept = part(crop) or last_row(crop)
    assert kept is not None
    axis, start, end = kept
    crops: list[Layer] = []
    inputs = []
    for blob, cropped_axis in _OPERANDS[layer.type](layer, axis):
        if cropped_axis is not None:
            new = cropped(crop, blob, {cropped_axis: (start, end)}).having(outputs=[Blob(f"{blob.name}_crop")])
            new.name = f"{layer.name}_crop{len(crops)}"
            crops.append(new)
            blob = new.output
        inputs.append(blob)
    return [*crops, layer.having(inputs=inputs)]
