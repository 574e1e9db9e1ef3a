import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._fold import require_offsets_fold
from onnx2ncnn_opt.passes._linear import close, factor, offset, plus, times
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_CLIP = op("Clip", "clip", min=0.0)
_ADD = plus(times("x", "mul"), "add")
_ADD_ALONE = plus("x", "add")


@rewrite(
    times(_CLIP(_ADD), "scale"),
    times(_CLIP(_ADD_ALONE), "scale"),
    _CLIP(_ADD),
    _CLIP(_ADD_ALONE),
    _CLIP(times(_ADD_ALONE, "divided")),
    exact=False,
    purpose="models with the expanded form, such as exports before opset 14",
)
def fuse_hardsigmoid(
    x: Blob, clip: Layer, add: Layer, mul: Layer | None = None, scale: Layer | None = None, divided: Layer | None = None
) -> Layer:
    """Clip(x * a + b, 0, c) / c, Clip((x + b) / c, 0, 1)   ⇒   HardSigmoid(x)

    The multiplication may be missing if a is 1, and the division if c is 1.
    """
    top = factor(scale) if scale else 1.0
    require(close(clip["max"] * top, 1.0), f"the values of '{clip.name}' do not end at 1")
    slope = factor(divided) if divided else 1.0
    alpha = (factor(mul) if mul else slope) * top
    require(alpha > 0, f"'{clip.name}' falls where HardSigmoid rises")
    beta = np.array(offset(add) * slope * top)
    require_offsets_fold(beta, np.zeros(()), lambda: np.array(alpha))
    return Layer("HardSigmoid", clip.name, [x], (), {"alpha": alpha, "beta": float(beta)})
