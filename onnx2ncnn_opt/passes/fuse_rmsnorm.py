from math import sqrt

import numpy as np

from onnx2ncnn_opt.ir.codes import EpsMode
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import offset
from onnx2ncnn_opt.passes._statistics import axes_of, mean, over_root, square
from onnx2ncnn_opt.rewrite.rule import fixed_size, known_shape, require, rewrite

_VARIANTS = [variant for squares in square("x", "x") for variant in over_root("x", mean(squares, "mean"))]


@rewrite(*_VARIANTS, exact=False, purpose="language models")
def fuse_rmsnorm(x: Blob, mean: Layer, eps: Layer, root: Layer) -> Layer:
    """x / sqrt(mean(x * x) + eps)   ⇒   RMSNorm(x)

    For means over the innermost axis of 2-D and 3-D blobs. A mean over the channels of an image becomes a Normalize.
    """
    shape = known_shape(x)
    axes = axes_of(mean, len(shape))
    require(len(axes) == 1, f"'{mean.name}' is over several axes")
    return normalized(x, root, axes[0], mean, offset(eps), 1 / fixed_size(x, axes[0]))


def normalized(x: Blob, root: Layer, axis: int, reduction: Layer, eps: float, factor: float) -> Layer:
    """Return the layer for x / sqrt(factor * sum(x * x) + eps), with the sum along an axis."""
    shape = known_shape(x)
    require(eps >= 0, "the number that is added under the root is negative")
    if len(shape) in (2, 3) and axis == len(shape) - 1:
        width = fixed_size(x, axis)
        scale = 1 / sqrt(factor * width)
        params = {"affine_size": width, "eps": eps / (factor * width)}
        if np.isclose(scale, 1, rtol=1e-9):
            return Layer("RMSNorm", root.name, [x], (), {**params, "affine": 0})
        gamma = np.full(width, scale, np.float32)
        return Layer("RMSNorm", root.name, [x], (), params, {"gamma_data": gamma})
    whole, across_channels = len(shape) == 1, len(shape) in (3, 4) and axis == 0
    require(whole or across_channels, f"'{reduction.name}' is not over a vector, rows, or the channels of an image")
    return over_norm(x, root, eps / factor, EpsMode.SUM_PLUS, 1 / sqrt(factor))


def over_norm(x: Blob, root: Layer, eps: float, mode: EpsMode, scale: float = 1.0) -> Layer:
    """Return the Normalize for scale * x / norm, with the norm of a vector, or over the channels of each pixel."""
    params = {"across_spatial": int(len(x.known_shape) == 1), "channel_shared": 1, "eps": eps, "scale_data_size": 1}
    weights = {"scale_data": np.full(1, scale, np.float32)}
    return Layer("Normalize", root.name, [x], (), params | {"eps_mode": mode}, weights)
