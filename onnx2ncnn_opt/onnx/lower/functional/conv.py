"""Convolutions with constant weights and with weights that are computed at run time."""

from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import Dim
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.pad import pad
from onnx2ncnn_opt.onnx.lower.functional.window import SUFFIX, ConvAttributes, halves, same_pads, window_params
from onnx2ncnn_opt.onnx.value import Ints, Tensor, Value

_PLAIN = ConvAttributes()


def conv(im: ImportContext, x: Tensor, w: Value, b: Value | None = None, *, attrs: ConvAttributes = _PLAIN) -> Value:
    """Convolution[DepthWise][1D|3D], also with computed weights; InnerProduct for images of one pixel."""
    kernel, group = _check(im, x, w, attrs), attrs.group
    n = len(kernel)
    stride = attrs.strides or (1,) * n
    # A kernel of one tap needs no dilation; without packing, ncnn crashes on a dilation larger than the image.
    dilation = tuple(1 if k == 1 else d for k, d in zip(kernel, attrs.dilations or (1,) * n, strict=True))
    begins_ends = same_pads(im, x, attrs, kernel, dilation, stride)
    params = window_params(kernel, stride, begins_ends, dilation) | ({} if group == 1 else {"group": group})
    kind = ("Convolution" if group == 1 else "ConvolutionDepthWise") + SUFFIX[n]
    if isinstance(w, Tensor):
        return _of_computed_weights(im, kind, x, w, b, w.shape[0], params)
    if isinstance(b, Tensor):
        return _biased(im, conv(im, x, w, attrs=attrs), b)
    weights = {"weight_data": w.array} | ({} if b is None else {"bias_data": b.array})
    params |= {"num_output": w.array.shape[0], "bias_term": int(b is not None), "weight_data_size": w.array.size}
    if group == 1 and set(kernel) == {1} and set(x.shape[2:]) == {1} and not any(begins_ends):
        plain = {name: params[name] for name in ("num_output", "bias_term", "weight_data_size")}
        blob = im.layer("InnerProduct", im.mat(x, [[1]], [0]), weights=weights, **plain)
        return im.wrap(blob, (x.shape[0], w.shape[0], *x.shape[2:]), [[1]], [0])
    count, rest = x.shape[0], [[axis] for axis in range(3, x.rank)]
    # If the items are not a Mat's batch yet, Reshape to a batch would move them element by element.
    if isinstance(count, int) and count > 1 and not x.view.batch:
        if group == x.shape[1]:
            weights = {name: np.concatenate([array] * count) for name, array in weights.items()}
            params |= {name: params[name] * count for name in ("num_output", "weight_data_size")}
            params["group"] = group * count
            dims = [[0, 1], [2], *rest]
            blob = im.layer(f"ConvolutionDepthWise{SUFFIX[n]}", im.mat(x, dims), weights=weights, **params)
            return im.wrap(blob, (count, w.shape[0], *blob.known_shape[1:]), dims)
        if set(kernel) == set(stride) == {1} and not any(begins_ends):
            dims = [[1], [0, 2], *rest]
            blob = im.layer(kind, im.mat(x, dims), weights=weights, **params)
            return im.wrap(blob, (count, w.shape[0], *x.shape[2:]), dims)
    return im.from_channels(x, im.layer(kind, im.channels(x), weights=weights, **params))


def conv_transpose(
    im: ImportContext,
    x: Tensor,
    w: Value,
    b: Value | None = None,
    *,
    attrs: ConvAttributes = _PLAIN,
    output_padding: Ints = (),
    output_shape: Ints = (),
) -> Value:
    """Deconvolution[DepthWise][1D|3D]; Padding after it for negative pads."""
    kernel, group, pads = _check(im, x, w, attrs, is_transposed=True), attrs.group, attrs.pads
    n = len(kernel)
    dilation, stride = attrs.dilations or (1,) * n, attrs.strides or (1,) * n
    extra = output_padding or (0,) * n
    if any(p < 0 for p in pads):
        raise im.refuse(f"pads {pads} are negative", "crop the operand before")
    if output_shape or attrs.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        pads = _transposed_pads(im, x, kernel, dilation, stride, extra, attrs.auto_pad, output_shape[-n:])
    pads = pads or (0,) * 2 * n
    attrs = attrs._replace(auto_pad="NOTSET", pads=tuple(max(p, 0) for p in pads))
    if any(p < 0 for p in pads):
        narrow = im.tensor(conv_transpose(im, x, w, attrs=attrs, output_padding=output_padding))
        wide = pad(im, narrow, tuple(max(-p, 0) for p in pads), axes=tuple(range(2, x.rank)))
        return wide if b is None else _biased(im, wide, b)
    params = window_params(kernel, stride, pads, dilation) | ({} if group == 1 else {"group": group})
    for name, size in zip(("right", "bottom", "behind"), reversed(extra), strict=False):
        params[f"output_pad_{name}"] = size
    kind = ("Deconvolution" if group == 1 else "DeconvolutionDepthWise") + SUFFIX[n]
    if isinstance(w, Tensor):
        return _of_computed_weights(im, kind, x, w, b, w.shape[1] * group, params)
    if isinstance(b, Tensor):
        return _biased(im, conv_transpose(im, x, w, attrs=attrs, output_padding=output_padding), b)
    # ONNX has [I, O/g, ...], ncnn [g, O/g, I/g, ...].
    weight = w.array.reshape(group, w.array.shape[0] // group, w.array.shape[1], *kernel).swapaxes(1, 2)
    weights = {"weight_data": weight} | ({} if b is None else {"bias_data": b.array})
    params |= {"num_output": w.array.shape[1] * group, "bias_term": int(b is not None), "weight_data_size": weight.size}
    return im.from_channels(x, im.layer(kind, im.channels(x), weights=weights, **params))


def _of_computed_weights(
    im: ImportContext, kind: str, x: Tensor, w: Tensor, b: Value | None, outputs: Dim, params: dict[str, Any]
) -> Value:
    """Return the layer with its weight, in ONNX's order, and bias as further inputs."""
    if kind.endswith("3D"):
        reason = "a 3-D kernel that is computed at run time: ncnn takes constant ones only"
        raise im.refuse(reason, "make the kernel a constant")
    [count] = im.fixed([outputs], "a dynamic number of kernels")
    inputs = [im.channels(x), im.mat(w, [[axis] for axis in range(w.rank)])]
    if b is not None:
        inputs.append(im.mat(b, [[0]]))
    params = {**params, "num_output": count, "bias_term": int(b is not None), "dynamic_weight": 1}
    return im.from_channels(x, im.layer(kind, *inputs, **params))


def _biased(im: ImportContext, y: Value, b: Value) -> Value:
    """Add one number per channel."""
    return binary(im, BinaryOp.ADD, y, im.reshape(b, (*b.shape, *(1,) * (y.rank - 2))))


def _check(
    im: ImportContext, x: Tensor, w: Value, attrs: ConvAttributes, *, is_transposed: bool = False
) -> tuple[int, ...]:
    """Return the kernel's sizes; raise Refusal if operands and attributes do not match."""
    n = w.rank - 2
    if n not in SUFFIX:
        hint = "write it as several convolutions of at most three dimensions"
        raise im.refuse(f"a kernel of {n} dimensions, ncnn has 1 to 3", hint)
    if x.rank != w.rank:
        raise im.invalid(f"the operand has rank {x.rank}, the weight rank {w.rank}")
    kernel = im.fixed(w.shape[2:], "a kernel of dynamic size")
    if attrs.kernel_shape and tuple(attrs.kernel_shape) != kernel:
        raise im.invalid(f"kernel_shape {attrs.kernel_shape} is not the weight's {kernel}")
    per_axis, group = (attrs.strides, attrs.dilations), attrs.group
    if any(sizes and (len(sizes) != n or min(sizes) < 1) for sizes in per_axis) or len(attrs.pads) not in (0, 2 * n):
        raise im.invalid(f"its attributes do not give one positive number for each of {n} dimensions")
    if group < 1 or (isinstance(w.shape[0], int) and w.shape[0] % group):
        raise im.invalid(f"{w.shape[0]} kernels do not divide into {group} groups")
    channels = w.shape[0] if is_transposed else w.shape[1] * group
    if isinstance(x.shape[1], int) and isinstance(channels, int) and x.shape[1] != channels:
        raise im.invalid(f"the operand has {x.shape[1]} channels, the weight is for {channels}")
    im.demand(x.shape[1] - channels, 0)
    return kernel


def _transposed_pads(
    im: ImportContext, x: Tensor, kernel: Ints, dilation: Ints, stride: Ints, extra: Ints, auto_pad: str, sizes: Ints
) -> Ints:
    """Compute the pads from the result's size as ONNX ConvTranspose does; with SAME_* that is input times stride."""
    totals = []  # if negative, the end pad is negative, as in ONNX Runtime
    for i, size in enumerate(im.fixed(x.shape[2:], "the pads depend on a dynamic dimension")):
        result = sizes[i] if sizes else size * stride[i]
        total = stride[i] * (size - 1) + extra[i] + (kernel[i] - 1) * dilation[i] + 1 - result
        if total < 0 and (not sizes or total <= -stride[i]):
            reason = f"an axis of {result} elements, {-total} more than its windows reach"
            raise im.refuse(reason, "pad the result in the model")
        totals.append(total)
    return halves(totals, auto_pad)
