from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._fold import DIV
from onnx2ncnn_opt.passes._statistics import known_shape
from onnx2ncnn_opt.rewrite.pattern import Op, op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_L2, _MAX = 8, 4
_AT_LEAST = 1  # eps_mode: x / max(norm, eps)


def _forms() -> Iterator[Op]:
    norm = op("Reduction", "norm", operation=_L2, coeff=1.0)("x")
    for least in (
        op("Clip", "least", lambda clip: bool(clip["max"] > 1e38))(norm),
        op("BinaryOp", "least", op_type=_MAX, with_scalar=1)(norm),
    ):
        yield op("BinaryOp", "root", op_type=DIV, with_scalar=0)("x", least)


@rewrite(*_forms(), exact=False, kept="embeddings and cosine similarity")
def fuse_normalize(x: Blob, norm: Layer, least: Layer, root: Layer) -> Layer:
    """x / max(L2 norm of x, eps)   ⇒   Normalize(x)

    For the norm of a vector, and that over the channels at each place of an image.
    """
    shape = known_shape(x)
    axes = {axis % len(shape) for axis in norm["axes"]}
    whole = len(shape) == 1 and (norm["reduce_all"] or axes == {0})
    across_channels = len(shape) in (3, 4) and not norm["reduce_all"] and axes == {0} and norm["keepdims"]
    require(whole or across_channels, f"'{norm.name}' is not over a vector or over channels")
    eps = least["min"] if least.type == "Clip" else least["b"]
    require(eps > 0, f"'{least.name}' lets norms be 0")
    params = {
        "across_spatial": 1 if whole else 0,
        "channel_shared": 1,
        "eps": eps,
        "scale_data_size": 1,
        "eps_mode": _AT_LEAST,
    }
    return Layer("Normalize", root.name, [x], (), params, {"scale_data": np.ones(1, np.float32)})
