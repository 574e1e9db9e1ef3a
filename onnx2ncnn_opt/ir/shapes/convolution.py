"""Windows that slide over the inner axes: convolutions, poolings, Unfold and Fold."""

from __future__ import annotations

from onnx2ncnn_opt.ir.codes import PadMode
from onnx2ncnn_opt.ir.dim import Dim, Shape, product
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.shapes.registry import equal, fail, need_rank, parts, shape_of

# The parameters of the padding before and after each axis.
_PADS = {"w": ("pad_left", "pad_right"), "h": ("pad_top", "pad_bottom"), "d": ("pad_front", "pad_behind")}
_OUTPUT_PADS = {"w": "output_pad_right", "h": "output_pad_bottom", "d": "output_pad_behind"}
_SAME_PADS = (-233, -234)


def _axes(layer: Layer) -> str:
    """Return the axes that the layer slides over, by ncnn's names, outermost first."""
    return "w" if layer.type.endswith("1D") else "dhw" if layer.type.endswith("3D") else "hw"


def _positive(layer: Layer, name: str, axes: str) -> list[int]:
    """Return a parameter for each axis; ncnn divides by strides, and reads beyond the blob with a kernel of 0."""
    values = [layer[f"{name}_{axis}"] for axis in axes]
    if min(values) < 1:
        fail(layer, f"a {name} of {values}")
    return values


def _pads(layer: Layer, axes: str) -> list[tuple[int, int]]:
    return [(layer[_PADS[axis][0]], layer[_PADS[axis][1]]) for axis in axes]


def _slide(layer: Layer, sizes: Shape, kernel: tuple[Dim, ...] | list[int], axes: str) -> Shape:
    """Return the output sizes of a convolution.

    SAME counts only if every pad says so; ncnn ignores other negative pads.
    """
    pads = _pads(layer, axes)
    flat = [pad for pair in pads for pad in pair]
    same = any(all(pad == mode for pad in flat) for mode in _SAME_PADS)
    if max(flat) <= 0:
        pads = [(0, 0)] * len(axes)
    elif min(flat) < 0:
        fail(layer, f"pads {flat} mix positive and negative")
    found = []
    strides, dilations = _positive(layer, "stride", axes), _positive(layer, "dilation", axes)
    for axis, size, length, stride, dilation, (before, after) in zip(
        axes, sizes, kernel, strides, dilations, pads, strict=True
    ):
        if same:
            found.append((size - 1) // stride + 1)
            continue
        extent = (length - 1) * dilation + 1
        room = size + (before + after) - extent
        if isinstance(room, int) and room < 0:
            fail(layer, f"the kernel spans {extent} along {axis}, the padded input has {size + (before + after)}")
        found.append(room // stride + 1)
    return tuple(found)


def _check_channels(layer: Layer, channels: Dim, outputs: int, kernel: list[int]) -> None:
    """Check the input's channels: with others than the weights', ncnn computes garbage or reads beyond the weights."""
    group = layer["group"] if "DepthWise" in layer.type else 1
    if outputs < 1 or group < 1 or outputs % group:
        fail(layer, f"num_output {outputs} in {group} groups")
    if isinstance(channels, int) and channels % group:
        fail(layer, f"{channels} input channels in {group} groups")
    taps = outputs // group * product(kernel)
    assert isinstance(taps, int)
    found, rest = divmod(layer["weight_data_size"], taps)
    if rest:
        fail(layer, f"weight_data_size {layer['weight_data_size']} is not a multiple of {taps}")
    equal(layer, found, channels, "the input channels of the weights and of the blob")


@shape_of(
    *("Convolution", "ConvolutionDepthWise", "Convolution1D", "ConvolutionDepthWise1D"),
    *("Convolution3D", "ConvolutionDepthWise3D"),
)
def convolution(layer: Layer, x: Shape, *dynamic: Shape) -> Shape:
    """Return (num_output, output sizes); a weight that is an input has its ONNX shape [O, I/group, kernel...]."""
    axes = _axes(layer)
    if _weights_are_input(layer):
        need_rank(layer, x, len(axes) + 1)
        weight = _dynamic_weight(layer, dynamic, axes)
        group = layer["group"] if "DepthWise" in layer.type else 1
        equal(layer, weight[1] * group, x[0], "the input channels of the weights and of the blob")
        return weight[0], *_slide(layer, x[1:], weight[2:], axes)
    kernel = _positive(layer, "kernel", axes)
    if layer.type == "Convolution" and len(x) == 1 and kernel == [1, 1]:
        # Deprecated in ncnn, but it does compute an InnerProduct.
        _check_channels(layer, x[0], layer["num_output"], kernel)
        return (layer["num_output"],)
    need_rank(layer, x, len(axes) + 1)
    _check_channels(layer, x[0], layer["num_output"], kernel)
    return layer["num_output"], *_slide(layer, x[1:], kernel, axes)


def _weights_are_input(layer: Layer) -> bool:
    return "dynamic_weight" in layer.params and bool(layer["dynamic_weight"])


def _dynamic_weight(layer: Layer, dynamic: tuple[Shape, ...], axes: str) -> Shape:
    if len(dynamic) < 1 + bool(layer["bias_term"]):
        fail(layer, "with dynamic_weight the weights (and the bias) are further inputs")
    weight = dynamic[0]
    if len(weight) != len(axes) + 2:
        fail(layer, f"weights given as an input must be {len(axes) + 2}-D")
    return weight


@shape_of(
    *("Deconvolution", "DeconvolutionDepthWise", "Deconvolution1D", "DeconvolutionDepthWise1D"),
    *("Deconvolution3D", "DeconvolutionDepthWise3D"),
)
def deconvolution(layer: Layer, x: Shape, *dynamic: Shape) -> Shape:
    """Return (num_output, output sizes); a weight that is an input has its ONNX shape [I, O/group, kernel...].

    Pads cut the full output. `output_w` and so on count only with SAME pads, and only if given for every axis.
    """
    axes = _axes(layer)
    need_rank(layer, x, len(axes) + 1)
    channels: Dim
    kernel: list[Dim]
    if _weights_are_input(layer):
        weight = _dynamic_weight(layer, dynamic, axes)
        channels = weight[1] * (layer["group"] if "DepthWise" in layer.type else 1)
        equal(layer, weight[0], x[0], "the input channels of the weights and of the blob")
        kernel = list(weight[2:])
    else:
        constant = _positive(layer, "kernel", axes)
        _check_channels(layer, x[0], layer["num_output"], constant)
        channels, kernel = layer["num_output"], [*constant]
    full = [
        (size - 1) * layer[f"stride_{axis}"] + (length - 1) * layer[f"dilation_{axis}"] + 1 + layer[_OUTPUT_PADS[axis]]
        for axis, size, length in zip(axes, x[1:], kernel, strict=True)
    ]
    pads = _pads(layer, axes)
    flat = [pad for pair in pads for pad in pair]
    if max(flat) > 0:
        if min(flat) < 0:
            fail(layer, f"pads {flat} mix positive and negative")
        return channels, *(size - (before + after) for size, (before, after) in zip(full, pads, strict=True))
    wanted = [layer[f"output_{axis}"] for axis in axes]
    if min(wanted) <= 0:
        return channels, *full
    if not any(pad in _SAME_PADS for pad in flat):
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
    kernel = _positive(layer, "kernel", "hw")
    _check_channels(layer, x[0], layer["num_output"], kernel)
    if min(pad for pair in _pads(layer, "hw") for pad in pair) < 0:
        fail(layer, "negative pads, SAME included, are not for it")
    sizes = _slide(layer, x[1:], kernel, "hw")
    taps = kernel[0] * kernel[1]
    for blob, channels, name in ((offset, 2 * taps, "offset"), (mask, taps, "mask")):
        if blob is not None:
            need_rank(layer, blob, 3)
            for have, want in zip(blob, (channels, *sizes), strict=True):
                equal(layer, have, want, f"sizes of the {name} and of what it is for")
    return layer["num_output"], *sizes


@shape_of("Pooling", "Pooling1D", "Pooling3D")
def pooling(layer: Layer, x: Shape) -> Shape:
    """Return (channels, output sizes); (channels) for global pooling."""
    axes = _axes(layer)
    need_rank(layer, x, len(axes) + 1)
    if layer["global_pooling"]:
        return x[:1]
    sizes = x[1:]
    if layer["adaptive_pooling"]:
        wanted = tuple(layer[f"out_{axis}"] for axis in axes)
        if layer.type == "Pooling1D" and wanted == (-233,):
            fail(layer, "out_w -233 is not for it")
        return x[0], *(size if want == -233 else want for want, size in zip(wanted, sizes, strict=True))
    mode, found = layer["pad_mode"], []
    if mode not in list(PadMode):
        fail(layer, f"pad_mode {mode} is unknown")
    kernel, strides = _positive(layer, "kernel", axes), _positive(layer, "stride", axes)
    for axis, size, length, stride, pads in zip(axes, sizes, kernel, strides, _pads(layer, axes), strict=True):
        if mode >= 2:  # SAME
            found.append((size - 1) // stride + 1)
            continue
        room = size + sum(pads) - length
        if isinstance(room, int) and room < 0:
            fail(layer, f"the kernel spans {length} along {axis}, the padded input has {size + sum(pads)}")
        # Mode 0 pads the tail so that nothing of the input is left out.
        found.append((room + (stride - 1 if mode == PadMode.FULL else 0)) // stride + 1)
    return x[0], *found


@shape_of("Unfold")
def unfold(layer: Layer, x: Shape) -> Shape:
    """Return (channels * kernel_h * kernel_w, number of windows)."""
    need_rank(layer, x, 3)
    kernel = _positive(layer, "kernel", "hw")
    return x[0] * product(kernel), product(_slide(layer, x[1:], kernel, "hw"))


@shape_of("Fold")
def fold(layer: Layer, x: Shape) -> Shape:
    """Return (channels, output_h, output_w) for (channels * kernel_h * kernel_w, number of windows)."""
    need_rank(layer, x, 2)
    kernel = _positive(layer, "kernel", "hw")
    sizes = (layer["output_h"], layer["output_w"])
    equal(layer, x[1], product(_slide(layer, sizes, kernel, "hw")), "the number of columns and of windows")
    taps = kernel[0] * kernel[1]
    return parts(layer, x[0], taps, "rows"), *sizes
