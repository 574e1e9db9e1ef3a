"""What fp16 does to ResNet-18, and what masks do: the estimate of two real conversions."""

from onnx2ncnn_opt import convert
from scripts.pictures.svg import Box, arrow, picture, text
from testing.exports import ROOT, refilled

_LIMIT, _WIDTH = 2e-2, 4e-2


def draw() -> dict[str, str]:
    """Return the picture by its file's name."""
    model = refilled(ROOT / "fixtures" / "models" / "resnet18.ts.onnx").SerializeToString()
    plain, masked = convert(model, masks=False), convert(model)
    assert plain.precision is not None
    assert masked.precision is not None
    errors, masks, price = (plain.precision.error, masked.precision.error), len(masked.masks), masked.precision.price
    scale = 376 / _WIDTH
    line = 12 + _LIMIT * scale
    shapes: list[object] = [
        text(12, 24, "ResNet-18 in fp16: error of its output (estimated)", weight=600),
        _bar(36, errors[0], scale, "bad"),
        text(12, 76, f"without masks: {errors[0]:.1e}", "small"),
        _bar(92, errors[1], scale, "good"),
        text(12, 132, f"with masks for {masks} layers: {errors[1]:.1e}", "small"),
        f'<line x1="{line:g}" x2="{line:g}" y1="32" y2="138" stroke="var(--text)" stroke-dasharray="4 3"/>',
        text(line + 6, 130, "2e-2 of the largest value is allowed", "small"),
        Box(12, 154, 172, 42, ("11 bits are too few", "for sums of many terms")),
        arrow((184, 175), (214, 175)),
        Box(216, 154, 172, 42, (f"{masks} layers in fp32", f"{price:.0%} of the multiplications"), "fill-good"),
    ]
    title = f"ResNet-18 in fp16 is off by {errors[0]:.1e} without masks, and by {errors[1]:.1e} with {masks} masks."
    return {"fp16.svg": picture(title, 400, 208, *shapes)}


def _bar(y: float, error: float, scale: float, style: str) -> str:
    return f'<rect x="12" y="{y:g}" width="{error * scale:.1f}" height="24" rx="4" class="{style}" opacity="0.85"/>'
