"""Normalisations over channels, groups and the innermost axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.form import Form
from onnx2ncnn_opt.onnx.importer import ImportContext
from onnx2ncnn_opt.onnx.ops.elementwise import ADD, MUL, binary
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value


def _channelwise(im: ImportContext, x: Tensor, kind: str, weights: dict[str, Array], **params: Any) -> Tensor:
    blob = im.layer(kind, im.channels(x), weights=weights, **params)
    return im.wrap(blob, x.shape, [[axis] for axis in range(1, x.rank)], [0])


@onnx_op("BatchNormalization", since=7, batch=0)
def batch_norm(
    im: ImportContext,
    x: Tensor,
    scale: Array,
    bias: Array,
    mean: Array,
    var: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    training_mode: int = 0,
) -> Value:
    """BatchNorm with the running statistics; BinaryOp mul and add for rows of features."""
    if training_mode:
        raise im.refuse("training_mode is 1: it would use the statistics of its input", "export the model in eval mode")
    if not spatial:
        raise im.refuse("spatial is 0: statistics per element")
    if x.rank == 2 and x.view.axes[0] and not x.view.batch:
        # Rows of features: as a batch they would have to be taken apart and put together again.
        factor = scale.astype(np.float64) / np.sqrt(var.astype(np.float64) + epsilon)
        shift = bias - mean * factor
        return binary(im, ADD, binary(im, MUL, x, Constant(factor)), Constant(shift))
    weights = {"slope_data": scale, "mean_data": mean, "var_data": var, "bias_data": bias}
    return _channelwise(im, x, "BatchNorm", weights, channels=scale.size, eps=epsilon)


@onnx_op("InstanceNormalization", since=6, batch=0)
def instance_norm(im: ImportContext, x: Tensor, scale: Array, bias: Array, *, epsilon: float = 1e-5) -> Tensor:
    """InstanceNorm per channel over all further axes, on a Mat of three dims."""
    weights = {"gamma_data": scale, "beta_data": bias}
    if x.rank in (4, 5):
        return _channelwise(im, x, "InstanceNorm", weights, channels=scale.size, eps=epsilon)
    if x.rank != 3:
        raise im.refuse(f"the operand has rank {x.rank}")
    # A 2-D Mat would be one single channel.
    blob = im.layer("InstanceNorm", im.mat(x, [[1], [], [2]], [0]), weights=weights, channels=scale.size, eps=epsilon)
    return im.wrap(blob, x.shape, [[1], [], [2]], [0])


@onnx_op("LayerNormalization", since=17)
def layer_norm(
    im: ImportContext,
    x: Tensor,
    scale: Value,
    bias: Value | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Value:
    """LayerNorm over the axes from `axis` on, as the innermost dim; BinaryOps for a scale that is no constant."""
    axis = im.axis(axis, x.rank)
    shape = x.shape[axis:]
    if not all(isinstance(size, int) for size in shape):
        raise im.refuse("the normalised axes have sizes that are not fixed", "bind them with --shape")
    size = int(np.prod([int(n) for n in shape if isinstance(n, int)]))
    weights: dict[str, Array] = {}
    constant = isinstance(scale, Constant) and (bias is None or isinstance(bias, Constant))
    if isinstance(scale, Constant) and constant:
        gamma = im.spread(scale.array, known(shape)).reshape(-1)
        beta = im.spread(bias.array, known(shape)).reshape(-1) if isinstance(bias, Constant) else np.zeros_like(gamma)
        if (gamma != 1).any() or (beta != 0).any():
            weights = {"gamma_data": gamma, "beta_data": beta}
    last = rows(im, x, axis)
    blob = im.layer("LayerNorm", last.blob, weights=weights, affine_size=size, eps=epsilon, affine=int(bool(weights)))
    normal: Value = im.like(last, blob)
    if constant:
        return normal
    normal = binary(im, MUL, normal, scale)
    return normal if bias is None else binary(im, ADD, normal, bias)


@onnx_op("LRN", batch=0)
def lrn(
    im: ImportContext, x: Tensor, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int
) -> Tensor:
    """LRN across the channels."""
    if size < 1 or size % 2 == 0:
        raise im.refuse(f"size {size}: ncnn's window lies evenly around its channel")
    if x.rank != 4:
        raise im.refuse(f"the operand has rank {x.rank}")
    return _channelwise(im, x, "LRN", {}, local_size=size, alpha=alpha, beta=beta, bias=bias)


def rows(im: ImportContext, x: Tensor, axis: int) -> Tensor:
    """The tensor with the axes from `axis` on as the innermost dim of the Mat, in as few layers as possible."""
    inner = tuple(range(axis, x.rank))
    atoms = tuple(atom for a in inner for atom in x.view.axes[a])
    if x.view.dims[-1] == atoms:
        return x
    outer = [a for a in range(axis) if x.view.axes[a]]
    batch: list[int] = []
    if x.view.batch and outer and x.view.axes[outer[0]] == x.view.batch:
        batch, outer = outer[:1], outer[1:]
    dims = [[a] for a in outer] if len(outer) <= 2 else [outer]
    return im.formed(x, Form((*map(tuple, dims), inner), tuple(batch)))
