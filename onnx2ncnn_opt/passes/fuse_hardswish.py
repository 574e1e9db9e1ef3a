from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import close, factor, mul, multiplied, offset, plus, times
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_MOST = 1e4  # a Clip with one bound has the largest number as the other
_CLIP = op("Clip", "clip", min=0.0)(plus("x", "add"))


@rewrite(
    mul("x", op("HardSigmoid", "gate")("x")),
    times(mul("x", _CLIP), "scale"),
    mul(times("x", "scale"), _CLIP),
    mul("x", times(_CLIP, "scale")),
    exact=False,
    purpose="models with the expanded form, such as exports before opset 14",
)
def fuse_hardswish(
    x: Blob, gate: Layer | None = None, clip: Layer | None = None, add: Layer | None = None, scale: Layer | None = None
) -> list[Layer]:
    """x * HardSigmoid(x), or x * Clip(x + 3, 0, 6) / 6   ⇒   HardSwish(x)

    The division by 6 may be anywhere. Another factor stays: PP-OCR has x * Clip(x + 3, 0, 6) * 0.03.
    """
    if gate:
        require(gate["alpha"] > 0, f"'{gate.name}' falls where HardSwish rises")
        return [Layer("HardSwish", gate.name, [x], (), {"alpha": gate["alpha"], "beta": gate["beta"]})]
    assert clip
    assert add
    assert scale
    top = clip["max"]
    require(0 < top < _MOST, f"the values of '{clip.name}' do not end between 0 and {_MOST:g}")
    rest = top * factor(scale)
    by = factor(scale) if close(rest, 1.0) else 1 / top
    swish = Layer("HardSwish", clip.name, [x], (), {"alpha": by, "beta": offset(add) * by})
    if close(rest, 1.0):
        return [swish]
    swish = swish.having(outputs=[Blob(f"{clip.output.name}_hardswish")])
    return [swish, multiplied(swish.output, rest, scale.name)]
