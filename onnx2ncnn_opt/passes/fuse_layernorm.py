"""`fuse_layernorm`, `fuse_instancenorm`: normalisations written as means, squares and roots."""

from __future__ import annotations

from collections.abc import Iterator

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._fold import SUB
from onnx2ncnn_opt.passes._linear import offset
from onnx2ncnn_opt.passes._statistics import axes_of, known_shape, mean, over_root, square
from onnx2ncnn_opt.rewrite.pattern import Op, op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


def _centred() -> Op:
    return op("BinaryOp", "centred", op_type=SUB, with_scalar=0)("x", mean("x", "mean"))


def _forms() -> Iterator[Op]:
    for squares in square(_centred(), _centred()):
        yield from over_root(_centred(), mean(squares, "variance"))


@rewrite(*_forms(), exact=False)
def fuse_layernorm(x: Blob, mean: Layer, variance: Layer, eps: Layer, root: Layer) -> Layer:
    """(x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps)   ⇒   LayerNorm(x)

    For means over the innermost axis of matrices and stacks of them.
    """
    shape = known_shape(x)
    require(len(shape) in (2, 3), f"'{x.name}' is not one or several matrices")
    inner = (len(shape) - 1,)
    for reduction in (mean, variance):
        require(axes_of(reduction, len(shape)) == inner, f"'{reduction.name}' is not over the innermost axis")
    width = shape[-1]
    require(isinstance(width, int), f"the width of '{x.name}' is unknown")
    return Layer("LayerNorm", root.name, [x], (), {"affine_size": width, "eps": offset(eps), "affine": 0})


@rewrite(*_forms(), exact=False)
def fuse_instancenorm(x: Blob, mean: Layer, variance: Layer, eps: Layer, root: Layer) -> Layer:
    """(x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps)   ⇒   InstanceNorm(x)

    For means over everything but the channels.
    """
    shape = known_shape(x)
    require(len(shape) in (3, 4), f"'{x.name}' has not channels and an image")
    inner = tuple(range(1, len(shape)))
    for reduction in (mean, variance):
        require(axes_of(reduction, len(shape)) == inner, f"'{reduction.name}' is not over all of a channel")
    channels = shape[0]
    require(isinstance(channels, int), f"the channels of '{x.name}' are unknown")
    return Layer("InstanceNorm", root.name, [x], (), {"channels": channels, "eps": offset(eps), "affine": 0})


PASSES = (fuse_layernorm, fuse_instancenorm)
