from __future__ import annotations

import numpy as np

from onnx2ncnn_opt.ir.dim import exact_div
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._views import VIEWS, step_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


@rewrite(op(VIEWS, "back")(op("InstanceNorm", "norm")(op(VIEWS, "groups")("x"))), exact=False)
def fuse_groupnorm(x: Blob, groups: Layer, norm: Layer, back: Layer) -> Layer:
    """x ── Reshape (channels to groups) ── InstanceNorm ── Reshape (back) ──   ⇒   x ── GroupNorm ──"""
    for view in (groups, back):
        require(isinstance(step_of(view), Regroup), f"{view.type} '{view.name}' is not a mere reshape")
    require(x.shape == back.output.shape, f"'{back.output.name}' has not the shape of '{x.name}'")
    assert x.shape is not None
    count, channels = norm["channels"], x.shape[0]
    require(isinstance(channels, int), f"the channels of '{x.name}' are unknown")
    assert isinstance(channels, int)
    each = exact_div(channels, count)
    require(each is not None, f"{channels} channels do not make {count} groups")
    assert isinstance(each, int)
    params = {"group": count, "channels": channels, "eps": norm["eps"]}
    if not norm["affine"]:
        return Layer("GroupNorm", norm.name, [x], (), {**params, "affine": 0})
    weights = {name: np.repeat(norm.weights[name], each) for name in ("gamma_data", "beta_data")}
    return Layer("GroupNorm", norm.name, [x], (), params, weights)
