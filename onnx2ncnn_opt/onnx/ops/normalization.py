"""Normalisations."""

from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.dim import product
from onnx2ncnn_opt.ir.view import flat
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.items import NodeView
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number, spread
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MIN
from onnx2ncnn_opt.onnx.lower.functional.norm import deviation, instance_normal, layer_norm, rms_norm
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Tensor, Value

_RANKS = "reshape it in the model: ncnn takes images and, for some layers, rows and volumes"


def _affine(im: ImportContext, x: Value, scale: Value, bias: Value) -> Value:
    """x * scale + bias, with scale and bias along axis 1."""
    factor, offset = (im.reshape(param, (*param.shape, *(1,) * (x.rank - 2))) for param in (scale, bias))
    return binary(im, BinaryOp.ADD, binary(im, BinaryOp.MUL, x, factor), offset)


def _by_running_statistics(node: NodeView) -> int:
    items.require(not node.number("training_mode", 0))
    items.batch(0)(node)
    return 0


# onnx.reference folds the earlier versions as if they trained.
@onnx_op("BatchNormalization", since=7, later=("training_mode",), batch=0, items=_by_running_statistics)
@onnx_op("BatchNormalization", since=14, later=("spatial",), batch=0, items=_by_running_statistics, folds=True)
def batch_norm(
    im: ImportContext,
    x: Tensor,
    scale: Value,
    bias: Value,
    mean: Value,
    var: Value,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    training_mode: int = 0,
) -> Value | tuple[Value, ...]:
    """BatchNorm with the running statistics; BinaryOp mul and add for rows of features or computed statistics.

    In training mode, InstanceNorm for a batch of one item, Reductions for larger batches.
    """
    if not spatial:
        raise im.refuse("spatial is 0: ncnn has statistics per channel only", "export it with spatial = 1")
    if training_mode:
        return _in_training(im, x, scale, bias, mean, var, epsilon, momentum)
    arrays = [param.array for param in (scale, bias, mean, var) if isinstance(param, Constant)]
    if len(arrays) < 4:
        slope = binary(im, BinaryOp.DIV, scale, deviation(im, var, epsilon))
        return _affine(im, x, slope, binary(im, BinaryOp.SUB, bias, binary(im, BinaryOp.MUL, mean, slope)))
    if x.rank == 2 and x.view.axes[0] and not x.view.batch:
        # Rows of features: making them a batch and back would take two layers.
        factor = arrays[0].astype(np.float64) / np.sqrt(arrays[3].astype(np.float64) + epsilon)
        shift = arrays[1] - arrays[2] * factor
        return binary(im, BinaryOp.ADD, binary(im, BinaryOp.MUL, x, Constant(factor)), Constant(shift))
    weights = dict(zip(("slope_data", "bias_data", "mean_data", "var_data"), arrays, strict=True))
    dims = im.channel_dims(x)
    blob = im.layer("BatchNorm", im.mat(x, dims, [0]), weights=weights, channels=arrays[0].size, eps=epsilon)
    return im.wrap(blob, x.shape, dims, [0])


def _in_training(
    im: ImportContext, x: Tensor, scale: Value, bias: Value, mean: Value, var: Value, epsilon: float, momentum: float
) -> tuple[Value, ...]:
    """Normalise by the operand's own statistics, and update the running statistics."""
    y = instance_norm(im, x, scale, bias, epsilon=epsilon) if x.shape[0] == 1 and 3 <= x.rank <= 5 else None
    axes = tuple(axis for axis in range(x.rank) if axis != 1)
    own_mean = reduce(im, x, "ReduceMean", axes, 1)
    centred = binary(im, BinaryOp.SUB, x, own_mean)
    variance = reduce(im, im.apply(centred, UnaryOp.SQUARE), "ReduceMean", axes, 1)
    if y is None:
        y = _affine(im, binary(im, BinaryOp.DIV, centred, deviation(im, variance, epsilon)), scale, bias)

    def running(old: Value, new: Value) -> Value:
        kept = binary(im, BinaryOp.MUL, old, number(momentum))
        added = binary(im, BinaryOp.MUL, new, number(1 - momentum))
        return binary(im, BinaryOp.ADD, kept, im.reshape(added, old.shape))

    return y, running(mean, own_mean), running(var, variance)


@onnx_op("InstanceNormalization", since=6, batch=0, errors="input", folds=True)
def instance_norm(im: ImportContext, x: Tensor, scale: Value, bias: Value, *, epsilon: float = 1e-5) -> Value:
    """InstanceNorm per channel over all further axes, on a Mat of three dims; BinaryOps for computed scale and bias.

    GroupNorm if each of its channels is a group of the Mat's: torch exports GroupNorm in this way before opset 18.
    """
    if not 3 <= x.rank <= 5:
        raise im.refuse(f"the operand has rank {x.rank}", _RANKS)
    params: dict[str, Any] = {"affine": 0}
    if isinstance(scale, Constant) and isinstance(bias, Constant):
        group, channels = scale.array.size, _grouped_channels(x)
        if channels is not None and scale.shape == bias.shape == (x.shape[1],):
            gamma, beta = (np.repeat(param.array, channels // group) for param in (scale, bias))
            params = {"weights": {"gamma_data": gamma, "beta_data": beta}, "eps": epsilon, "channels": channels}
            kind, params = ("InstanceNorm", params) if group == channels else ("GroupNorm", {"group": group} | params)
            return im.like(x, im.layer(kind, x.blob, **params))
        params = {"channels": scale.array.size, "weights": {"gamma_data": scale.array, "beta_data": bias.array}}
    # ncnn treats a 2-D Mat as one channel.
    dims = [[1], [], [2]] if x.rank == 3 else [[axis] for axis in range(1, x.rank)]
    normal = instance_normal(im, x, dims, epsilon, [0], **params)
    return normal if "weights" in params else _affine(im, normal, scale, bias)


def _grouped_channels(x: Tensor) -> int | None:
    """Return the channels of the Mat where axis 1 counts groups of them, and the other axes all that is in a group.

    Groups of one channel need a Mat of three dims or more, because ncnn treats a 2-D Mat as one channel.
    """
    view, groups = x.view, x.view.axes[1]
    first = view.dims[0] if view.dims else ()
    channels = product(atom.size for atom in first)
    is_inner = view.batch == view.axes[0] and flat(view.dims) == flat(view.axes[1:])
    is_grouped = first[: len(groups)] == groups and (groups != first or len(view.dims) > 2)
    return channels if is_inner and is_grouped and isinstance(channels, int) else None


@onnx_op("GroupNormalization", since=18, batch=0, errors="input")
def group_norm(
    im: ImportContext,
    x: Tensor,
    scale: Value,
    bias: Value,
    *,
    epsilon: float = 1e-5,
    num_groups: int,
    stash_type: int = 1,
) -> Value:
    """GroupNorm, and BinaryOps for computed scale and bias; before opset 21 these are per group, else per channel."""
    channels = x.shape[1] if x.rank > 1 else None
    if not isinstance(channels, int) or num_groups < 1 or channels % num_groups:
        raise im.invalid(f"{channels} channels do not divide into {num_groups} groups")
    size = channels if im.opset >= 21 else num_groups
    if scale.shape != (size,) or bias.shape != (size,):
        raise im.invalid(f"scale and bias of shapes {list(scale.shape)} and {list(bias.shape)}, not [{size}]")
    gamma, beta = (_of_each(im, param, channels // size) for param in (scale, bias))
    params: dict[str, Any] = {"affine": 0}
    if isinstance(gamma, Constant) and isinstance(beta, Constant):
        params = {"weights": {"gamma_data": gamma.array, "beta_data": beta.array}}
    blob = im.layer("GroupNorm", im.channels(x), group=num_groups, channels=channels, eps=epsilon, **params)
    normal = im.from_channels(x, blob, x.dtype)
    return normal if "weights" in params else _affine(im, normal, gamma, beta)


def _of_each(im: ImportContext, param: Value, count: int) -> Value:
    """Return a vector with each element repeated `count` times."""
    (size,) = param.shape
    return im.reshape(spread(im, im.reshape(param, (size, 1)), (size, count)), (size * count,))


onnx_op("LayerNormalization", since=17, axes="same", items=items.from_axis(-1), errors="input", folds=True)(layer_norm)
onnx_op("RMSNormalization", since=23, axes="same", items=items.from_axis(-1), folds=True)(rms_norm)


@onnx_op("LRN", batch=0)
def lrn(
    im: ImportContext, x: Tensor, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int
) -> Tensor:
    """LRN across the channels."""
    if size < 1 or size % 2 == 0:
        reason = f"size {size} is even: ncnn's window is symmetric around its channel"
        raise im.refuse(reason, "export it with an odd size")
    if x.rank != 4:
        raise im.refuse(f"the operand has rank {x.rank}", _RANKS)
    blob = im.layer("LRN", im.channels(x), local_size=size, alpha=alpha, beta=beta, bias=bias)
    return im.from_channels(x, blob)


_MVN_EPSILON = 1e-9


@onnx_op("MeanVarianceNormalization", since=9, axes="same", items=items.along((0, 2, 3), "axes"), errors="input")
def mean_variance_norm(im: ImportContext, x: Tensor, *, axes: Ints = (0, 2, 3)) -> Value:
    """Compute means, differences, and a square root, as ONNX defines it."""
    centred = binary(im, BinaryOp.SUB, x, reduce(im, x, "ReduceMean", axes, 1))
    variance = reduce(im, im.apply(centred, UnaryOp.SQUARE), "ReduceMean", axes, 1)
    deviation = binary(im, BinaryOp.ADD, im.apply(variance, UnaryOp.SQRT), number(_MVN_EPSILON))
    return binary(im, BinaryOp.DIV, centred, deviation)


@onnx_op("LpNormalization", axes="same", items=items.along(-1))
def lp_norm(im: ImportContext, x: Tensor, *, axis: int = -1, p: int = 2) -> Value:
    """Divide by a Reduction; zeros stay zeros."""
    if p not in (1, 2):
        raise im.refuse(f"p is {p}: only 1 and 2 are norms in ONNX", "export it with p = 1 or 2")
    norm = reduce(im, x, f"ReduceL{p}", (im.axis(axis, x.rank),), 1)
    return binary(im, BinaryOp.DIV, x, binary(im, BinaryOp.MAX, norm, number(FLT_MIN)))
