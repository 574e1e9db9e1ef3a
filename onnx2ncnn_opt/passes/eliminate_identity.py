from collections.abc import Callable

from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

# The neutral scalar of each operator; ncnn's power of 1 changes numbers that are not positive.
_NEUTRAL = {BinaryOp.ADD: 0.0, BinaryOp.SUB: 0.0, BinaryOp.MUL: 1.0, BinaryOp.DIV: 1.0}
_PLAIN = frozenset({Reduction.SUM, Reduction.MEAN, Reduction.MAX, Reduction.MIN, Reduction.PROD})
_SIDES = ("top", "bottom", "left", "right", "front", "behind")


def _keeps_shape(layer: Layer) -> bool:
    """Return True if the shape stays: then a layer that only crops, joins or resizes has no effect."""
    before, after = layer.inputs[0].shape, layer.output.shape
    return before is not None and before == after


def _reduces_nothing(reduction: Layer) -> bool:
    """Return True for a plain reduction that keeps its axes, all of one element."""
    shape, is_plain = reduction.input.shape, reduction["operation"] in _PLAIN and reduction["coeff"] == 1
    if shape is None or not is_plain or not _keeps_shape(reduction):
        return False
    axes = range(len(shape)) if reduction["reduce_all"] else reduction["axes"]
    return all(shape[axis] == 1 for axis in axes)


_IDENTITIES: dict[str, Callable[[Layer], bool]] = {
    "BinaryOp": lambda layer: bool(layer["with_scalar"]) and _NEUTRAL.get(layer["op_type"]) == layer["b"],
    "Concat": lambda layer: len(layer.inputs) == 1,
    "Crop": lambda layer: len(layer.inputs) == 1 and _keeps_shape(layer),
    "Interp": lambda layer: len(layer.inputs) == 1 and _keeps_shape(layer) and len(layer.output.shape or ()) == 3,
    "Padding": lambda layer: not any(layer[side] for side in _SIDES),
    "PixelShuffle": lambda layer: bool(layer["upscale_factor"] == 1),
    "Reduction": _reduces_nothing,
    "Reorg": lambda layer: bool(layer["stride"] == 1),
    "ShuffleChannel": lambda layer: bool(layer["group"] == 1),
    "Slice": lambda layer: len(layer.outputs) == 1 and _keeps_shape(layer),
    "Tile": lambda layer: all(times == 1 for times in (*layer["repeats"], layer["tiles"])),
}


# Not exact: ncnn computes x / 1 as x times an estimate of 1 / 1.
@rewrite(
    op(_IDENTITIES, "layer", lambda layer: len(layer.outputs) == 1 and _IDENTITIES[layer.type](layer)),
    exact=False,
    purpose="layers that an export leaves though they do nothing",
)
def eliminate_identity(layer: Layer) -> Blob:
    """x ── a layer that changes nothing ──   ⇒   x ──

    Concat and Slice of one blob, Crop and Interp to the same size, Padding by nothing, Tile by 1, PixelShuffle, Reorg
    and ShuffleChannel by 1, a Reduction over axes of one element, and BinaryOp + 0, - 0, * 1, / 1.
    """
    same = layer.inputs[0].shape is None or layer.inputs[0].shape == layer.output.shape
    require(same, f"{layer.type} '{layer.name}' gives another shape")
    return layer.inputs[0]
