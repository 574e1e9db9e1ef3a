from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.ir.windows import axes_of, groups_of
from onnx2ncnn_opt.passes._constants import stored
from onnx2ncnn_opt.passes._families import CONVOLUTIONS, DEPTHWISE
from onnx2ncnn_opt.passes._fold import (
    bias_of,
    require_no_activation,
    require_offsets_fold,
    require_own_weights,
    slice_affine,
)
from onnx2ncnn_opt.passes._linear import LINEAR, SIGNS
from onnx2ncnn_opt.passes._windows import Slide, slides, weight_of
from onnx2ncnn_opt.rewrite.pattern import Op, Pattern, op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


class _Branch(NamedTuple):
    """A convolution, or a blob as a kernel of one tap (then `layer` is None), with its sign in the sum.

    The weight is (outputs, inputs of a group, kernel sizes), the bias (outputs), both in float64.
    """

    layer: Layer | None
    slides: tuple[Slide, ...]
    weight: Array
    bias: Array


def _sums(types: tuple[str, ...], other: Pattern) -> list[Op]:
    """Return patterns of sums and differences of a convolution and another branch of x, in both orders."""
    conv, total = op(types, "conv")("x"), op("BinaryOp", "total", op_type=frozenset(SIGNS), with_scalar=0)
    return [total(conv, other), total(other, conv)]


@rewrite(
    _sums(CONVOLUTIONS, op(CONVOLUTIONS)("x"))[0],
    *_sums(CONVOLUTIONS, op(("BatchNorm", "Scale"))("x")),
    *_sums(DEPTHWISE, op("BinaryOp", op_type=LINEAR, with_scalar=1)("x")),
    *_sums(DEPTHWISE, "x"),
    exact=False,
    purpose="branches that were trained side by side, as in RepVGG, MobileOne and FastViT",
)
def fuse_parallel_convolutions(x: Blob, conv: Layer, total: Layer) -> Layer:
    """x ── Convolution 3x3, Convolution 1x1, BatchNorm ── BinaryOp (add) ──   ⇒   x ── Convolution 3x3 ──

    The pass adds each tap of the smaller kernel to the tap of the larger one that reads the same element. A BatchNorm,
    a Scale, a scalar and the blob itself are kernels of one tap. A scalar and the blob need a depthwise convolution,
    because winograd in fp16 would round the blob.
    """
    signs = SIGNS[total["op_type"]]
    branches = [_branch(blob, x, conv, sign) for blob, sign in zip(total.inputs, signs, strict=True)]
    branches.sort(key=lambda branch: (branch.layer is None, -branch.weight.size))
    large, small = branches
    assert large.layer is not None
    require(large.weight.shape[:2] == small.weight.shape[:2], f"the branches of '{total.name}' differ in channels")
    taps = [_taps(outer, inner) for outer, inner in zip(large.slides, small.slides, strict=True)]
    weight = large.weight.copy()
    weight[np.ix_(*map(range, weight.shape[:2]), *taps)] += small.weight
    bias = large.bias + small.bias
    require_offsets_fold(large.bias, small.bias, lambda: np.abs(weight).reshape(len(bias), -1).sum(axis=1))
    weights = {"weight_data": stored(large.layer, "weight_data", weight).reshape(-1)}
    if bias.any() or large.layer["bias_term"]:
        weights["bias_data"] = stored(large.layer, "bias_data", bias)
    return large.layer.having(weights=weights, bias_term=int("bias_data" in weights))


def _branch(blob: Blob, x: Blob, conv: Layer, sign: float) -> _Branch:
    """Return one operand of the sum; other layers than convolutions become kernels of one tap, grouped like `conv`."""
    layer = blob.producer
    if blob is x or layer is None or layer.type not in CONVOLUTIONS:
        return _one_tap(None if blob is x else layer, conv, sign)
    require(layer.type == conv.type and groups_of(layer) == groups_of(conv), f"'{layer.name}' has other groups")
    require_own_weights(layer)
    require_no_activation(layer)
    require(layer["pad_value"] == 0, f"'{layer.name}' does not pad with zeros")
    bias = bias_of(layer, layer["num_output"])
    weight = layer.weights["weight_data"].reshape(weight_of(layer).shape).astype(np.float64)
    return _Branch(layer, slides(layer), weight * sign, bias * sign)


def _one_tap(layer: Layer | None, conv: Layer, sign: float) -> _Branch:
    """Return a BatchNorm, a Scale, a scalar or (None) the blob itself as the kernel of a convolution."""
    count, size = int(conv["num_output"]), weight_of(conv).shape[1]
    require(count == size * groups_of(conv), f"'{conv.name}' has more or fewer outputs than inputs")
    scale, shift = slice_affine(layer, count) if layer is not None else (np.ones(count), np.zeros(count))
    weight = np.zeros((count, size))
    weight[np.arange(count), np.arange(count) % size] = scale * sign
    axes = axes_of(conv)
    return _Branch(
        None,
        tuple(Slide(axis, 1, 1, 1, 0, 0) for axis in axes),
        weight.reshape(count, size, *(1 for _ in axes)),
        shift * sign,
    )


def _taps(large: Slide, small: Slide) -> list[int]:
    """Return the taps of the larger kernel that read the same elements as the taps of the smaller one."""
    offsets = [large.before - small.before + tap * small.dilation for tap in range(small.kernel)]
    taps, rests = zip(*(divmod(offset, large.dilation) for offset in offsets), strict=True)
    covers = not any(rests) and all(0 <= tap < large.kernel for tap in taps)
    same_ends = large.before + large.after - large.extent == small.before + small.after - small.extent
    require(covers and same_ends and large.stride == small.stride, "neither kernel covers the elements of the other")
    return list(taps)
