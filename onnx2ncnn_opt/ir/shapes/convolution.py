"""Windows that slide over the inner axes: convolutions, poolings, Unfold and Fold."""

from collections.abc import Sequence

from onnx2ncnn_opt.ir.codes import SAME_LOWER, SAME_UPPER, PadMode
from onnx2ncnn_opt.ir.dim import Dim, Shape, product
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.shapes.registry import equal, fail, need_rank, parts, shape_of
from onnx2ncnn_opt.ir.windows import SIDES, axes_of, groups_of, pads_of

_OUTPUT_PADS = {"w": "output_pad_right", "h": "output_pad_bottom", "d": "output_pad_behind"}


def _positive(layer: Layer, name: str) -> list[int]:
    """Return a parameter for each axis; ncnn divides by strides, and reads beyond the blob with a kernel of 0."""
    values = [layer[f"{name}_{axis}"] for axis in axes_of(layer)]
    if min(values) < 1:
        fail(layer, f"a {name} of {values}")
    return values


def _padding(layer: Layer) -> list[int]:
    """Return the total padding of each axis; ncnn ignores pads that are all negative, except SAME."""
    pads = pads_of(layer)
    if max(pads) <= 0:
        return [0] * (len(pads) // 2)
    if min(pads) < 0:
        fail(layer, f"pads {pads} mix positive and negative")
    return [before + after for before, after in zip(pads[::2], pads[1::2], strict=True)]


def _steps(layer: Layer, axis: str, size: Dim, extent: Dim) -> Dim:
    """Return the number of elements by which a window of this extent can move along an axis."""
    room = size - extent
    if isinstance(room, int) and room < 0:
        fail(layer, f"the kernel spans {extent} along {axis}, the padded input has {size}")
    return room


def _slide(layer: Layer, sizes: Shape, kernel: Sequence[Dim]) -> Shape:
    """Return the output sizes of a convolution; SAME applies only if every pad is SAME."""
    axes, padding, pads = axes_of(layer), _padding(layer), pads_of(layer)
    strides, dilations = _positive(layer, "stride"), _positive(layer, "dilation")
    if pads[0] in (SAME_UPPER, SAME_LOWER) and len(set(pads)) == 1:
        return tuple((size - 1) // stride + 1 for size, stride in zip(sizes, strides, strict=True))
    return tuple(
        _steps(layer, axis, size + pad, (length - 1) * dilation + 1) // stride + 1
        for axis, size, length, stride, dilation, pad in zip(
            axes, sizes, kernel, strides, dilations, padding, strict=True
        )
    )


def _check_channels(layer: Layer, channels: Dim, outputs: int, kernel: list[int]) -> None:
    """Check the input's channels: if the weights have others, ncnn computes garbage or reads beyond the weights."""
    group = groups_of(layer)
    if outputs < 1 or group < 1 or outputs % group:
        fail(layer, f"num_output {outputs} in {group} groups")
    if isinstance(channels, int) and channels % group:
        fail(layer, f"{channels} input channels in {group} groups")
    taps = outputs // group * product(kernel)
    assert isinstance(taps, int)
    inputs, rest = divmod(layer["weight_data_size"], taps)
    if rest:
        fail(layer, f"weight_data_size {layer['weight_data_size']} is not a multiple of {taps}")
    equal(layer, inputs, channels, "the input channels of the weights and of the blob")


def _outputs_and_kernel(layer: Layer, x: Shape, dynamic: tuple[Shape, ...]) -> tuple[Dim, Sequence[Dim]]:
    """Return the output channels and the kernel.

    A weight that is an input has its ONNX shape: [O, I/group, kernel...], for a deconvolution [I, O/group, kernel...].
    """
    rank = len(axes_of(layer)) + 1
    need_rank(layer, x, rank)
    if not layer.params.get("dynamic_weight"):
        kernel = _positive(layer, "kernel")
        _check_channels(layer, x[0], layer["num_output"], kernel)
        return layer["num_output"], kernel
    if len(dynamic) < 1 + bool(layer["bias_term"]):
        fail(layer, "with dynamic_weight the weights (and the bias) are further inputs")
    weight = dynamic[0]
    if len(weight) != rank + 1:
        fail(layer, f"weights given as an input must be {rank + 1}-D")
    second = weight[1] * groups_of(layer)
    inputs, outputs = (weight[0], second) if layer.type.startswith("Deconvolution") else (second, weight[0])
    equal(layer, inputs, x[0], "the input channels of the weights and of the blob")
    return outputs, weight[2:]


@shape_of(
    *("Convolution", "ConvolutionDepthWise", "Convolution1D", "ConvolutionDepthWise1D"),
    *("Convolution3D", "ConvolutionDepthWise3D"),
)
def convolution(layer: Layer, x: Shape, *dynamic: Shape) -> Shape:
    """Return (num_output, output sizes)."""
    is_flat = layer.type == "Convolution" and len(x) == 1 and not layer.params.get("dynamic_weight")
    if is_flat and _positive(layer, "kernel") == [1, 1]:
        # Deprecated in ncnn, which still computes an InnerProduct.
        _check_channels(layer, x[0], layer["num_output"], [1, 1])
        return (layer["num_output"],)
    outputs, kernel = _outputs_and_kernel(layer, x, dynamic)
    return outputs, *_slide(layer, x[1:], kernel)


@shape_of(
    *("Deconvolution", "DeconvolutionDepthWise", "Deconvolution1D", "DeconvolutionDepthWise1D"),
    *("Deconvolution3D", "DeconvolutionDepthWise3D"),
)
def deconvolution(layer: Layer, x: Shape, *dynamic: Shape) -> Shape:
    """Return (num_output, output sizes).

    Pads cut the full output. ncnn reads `output_w` and so on only with SAME pads, and only if every axis has one.
    """
    axes = axes_of(layer)
    channels, kernel = _outputs_and_kernel(layer, x, dynamic)
    full = [
        (size - 1) * layer[f"stride_{axis}"] + (length - 1) * layer[f"dilation_{axis}"] + 1 + layer[_OUTPUT_PADS[axis]]
        for axis, size, length in zip(axes, x[1:], kernel, strict=True)
    ]
    padding = _padding(layer)
    wanted = [layer[f"output_{axis}"] for axis in axes]
    if any(padding) or min(wanted) <= 0:
        return channels, *(size - pad for size, pad in zip(full, padding, strict=True))
    if not any(pad in (SAME_UPPER, SAME_LOWER) for pad in pads_of(layer)):
        fail(layer, "output sizes need pads of -233 or -234")
    for size, want in zip(full, wanted, strict=True):
        if isinstance(size, int) and size < want:
            fail(layer, f"output sizes {wanted} are larger than the full output {full}")
    return channels, *wanted


@shape_of("DeformableConv2D")
def deformable_convolution(layer: Layer, x: Shape, offset: Shape, mask: Shape | None = None) -> Shape:
    """Return (num_output, output sizes).

    The offsets are (2 * kernel_h * kernel_w, output sizes), the mask half of that.
    """
    need_rank(layer, x, 3)
    kernel = _positive(layer, "kernel")
    _check_channels(layer, x[0], layer["num_output"], kernel)
    if min(pads_of(layer)) < 0:
        fail(layer, "negative pads, SAME included, are not for it")
    sizes = _slide(layer, x[1:], kernel)
    taps = kernel[0] * kernel[1]
    for blob, channels, name in ((offset, 2 * taps, "offset"), (mask, taps, "mask")):
        if blob is not None:
            need_rank(layer, blob, 3)
            for have, want in zip(blob, (channels, *sizes), strict=True):
                equal(layer, have, want, f"sizes of the {name} and of the kernel and output")
    return layer["num_output"], *sizes


@shape_of("Pooling", "Pooling1D", "Pooling3D")
def pooling(layer: Layer, x: Shape) -> Shape:
    """Return (channels, output sizes); (channels) for global pooling."""
    axes = axes_of(layer)
    need_rank(layer, x, len(axes) + 1)
    if layer["global_pooling"]:
        return x[:1]
    sizes = x[1:]
    if layer["adaptive_pooling"]:
        wanted = tuple(layer[f"out_{axis}"] for axis in axes)
        if layer.type == "Pooling1D" and wanted == (-233,):
            fail(layer, "out_w -233 is not for it")
        return x[0], *(size if want == -233 else want for want, size in zip(wanted, sizes, strict=True))
    mode = layer["pad_mode"]
    if mode not in list(PadMode):
        fail(layer, f"pad_mode {mode} is unknown")
    kernel, strides = _positive(layer, "kernel"), _positive(layer, "stride")
    if mode in (PadMode.SAME_UPPER, PadMode.SAME_LOWER):
        return x[0], *((size - 1) // stride + 1 for size, stride in zip(sizes, strides, strict=True))
    outputs = []
    for axis, size, length, stride in zip(axes, sizes, kernel, strides, strict=True):
        steps = _steps(layer, axis, size + sum(layer[f"pad_{side}"] for side in SIDES[axis]), length)
        # FULL pads the tail: the windows cover every element of the input.
        outputs.append((steps + (stride - 1 if mode == PadMode.FULL else 0)) // stride + 1)
    return x[0], *outputs


@shape_of("Unfold")
def unfold(layer: Layer, x: Shape) -> Shape:
    """Return (channels * kernel_h * kernel_w, number of windows)."""
    need_rank(layer, x, 3)
    kernel = _positive(layer, "kernel")
    return x[0] * product(kernel), product(_slide(layer, x[1:], kernel))


@shape_of("Fold")
def fold(layer: Layer, x: Shape) -> Shape:
    """Return (channels, output_h, output_w) for (channels * kernel_h * kernel_w, number of windows)."""
    need_rank(layer, x, 2)
    kernel = _positive(layer, "kernel")
    sizes = (layer["output_h"], layer["output_w"])
    equal(layer, x[1], product(_slide(layer, sizes, kernel)), "the number of columns and of windows")
    return parts(layer, x[0], kernel[0] * kernel[1], "rows"), *sizes
