from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite


@rewrite(
    op("RotaryEmbed", "rotary", where=lambda rotary: len(rotary.inputs[0].shape or ()) == 2),
    exact=True,
    purpose="GPUs: Vulkan rotates packed rows of two dims by the angles of other rows",
)
def replace_rotaryembed2d(rotary: Layer) -> list[Layer]:
    """x ── RotaryEmbed ──   ⇒   x ── ExpandDims ── RotaryEmbed ── Squeeze ──"""
    x, *tables = rotary.inputs
    names = (f"{rotary.output.name}_{suffix}" for suffix in ("head", "rotated"))
    head, rotated = (Blob(name, (1, *x.known_shape), x.batch) for name in names)
    before = Layer("ExpandDims", f"{rotary.name}_head", [x], [head], {"axes": (0,)})
    new = rotary.having(inputs=[head, *tables], outputs=[rotated])
    return [before, new, Layer("Squeeze", f"{rotary.name}_rows", [rotated], (), {"axes": (0,)})]
