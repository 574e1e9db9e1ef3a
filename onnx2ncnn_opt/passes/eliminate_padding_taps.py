from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.windows import axes_of
from onnx2ncnn_opt.passes._families import CONVOLUTIONS
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.passes._windows import Window, has_known_sizes, reordered, weight_of, window_params, windows
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Refused, require, rewrite


def _kept(window: Window) -> range:
    """Return the taps that stay: from the first to the last one that reads an element, more if pads became negative."""
    live = window.live_taps
    if not live:
        return range(window.kernel)
    head = min(live[0], window.before // window.dilation)
    tail = min(window.kernel - 1 - live[-1], window.after // window.dilation)
    return range(head, window.kernel - tail)


def _may_lose_taps(layer: Layer) -> bool:
    """Return True if a kernel has taps that read only padding, or if it is dilated and sizes are unknown."""
    if not has_known_sizes(layer):
        return any(layer[f"dilation_{axis}"] > 1 and layer[f"kernel_{axis}"] > 1 for axis in axes_of(layer))
    try:
        return any(len(_kept(window)) < window.kernel for window in windows(layer))
    except Refused:
        return False


def _crashes_unpacked(windows: Sequence[Window]) -> bool:
    """Return True if ncnn without packing cuts the image into `dilation` parts, and a part has no output."""
    is_cut = len({(window.kernel, window.stride, window.dilation) for window in windows}) == 1
    return is_cut and windows[0].stride == 1 and any(window.outputs < window.dilation for window in windows)


@rewrite(
    op(CONVOLUTIONS, "layer", _may_lose_taps), exact=False, purpose="dilated convolutions of small maps, as in DeepLab"
)
def eliminate_padding_taps(layer: Layer) -> Layer:
    """x ── Convolution (taps that read padding alone) ──   ⇒   x ── Convolution (smaller kernel) ──"""
    require_own_weights(layer)
    old = windows(layer)
    require(layer["pad_value"] == 0, f"'{layer.name}' does not pad with zeros")
    require(np.isfinite(layer.weights["weight_data"]).all(), f"'{layer.name}' multiplies its padding with infinities")
    weight = weight_of(layer)
    smaller = []
    for axis, window in enumerate(old, weight.ndim - len(old)):
        taps = _kept(window)
        weight = weight.take(taps, axis)
        head, tail = taps.start, window.kernel - taps.stop
        dilation = window.dilation if len(taps) > 1 else 1
        before, after = window.before - head * window.dilation, window.after - tail * window.dilation
        smaller.append(replace(window, kernel=len(taps), dilation=dilation, before=before, after=after))
    crashes = _crashes_unpacked(smaller) and not _crashes_unpacked(old)
    require(not crashes, f"ncnn without packing would crash: '{layer.name}' has fewer outputs than its dilation")
    stored = reordered(layer.weights.stored("weight_data"), weight)
    new = layer.having(weights={"weight_data": stored}, weight_data_size=weight.size, **window_params(smaller))
    return new.without_defaults()
