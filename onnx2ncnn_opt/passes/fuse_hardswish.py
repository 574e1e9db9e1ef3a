from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import close, factor, mul, offset, plus, times
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

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
) -> Layer:
    """x * HardSigmoid(x), or x * Clip(x + 3, 0, 6) / 6   ⇒   HardSwish(x)

    The division by 6 may be anywhere.
    """
    if gate:
        alpha, beta, name = gate["alpha"], gate["beta"], gate.name
    else:
        assert clip
        assert add
        assert scale
        alpha, beta, name = factor(scale), offset(add) * factor(scale), clip.name
        require(close(clip["max"] * alpha, 1.0), f"the values of '{clip.name}' do not end at 1")
    require(alpha > 0, f"'{name}' falls where HardSwish rises")
    return Layer("HardSwish", name, [x], (), {"alpha": alpha, "beta": beta})
