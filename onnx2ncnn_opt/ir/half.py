"""Facts about fp16 in ncnn: which numbers and layers have 16 bits by default, on ARM (asimdhp) and on GPUs.

The facts are those of ncnn's source of 2026-07-22, src/layer/arm/*_asimdhp.cpp. `half_sums` has the errors of sums.
"""

from collections.abc import Iterator, Mapping
from math import log2
from types import MappingProxyType

import numpy as np

from onnx2ncnn_opt.ir.attention import ATTENTION, key_count
from onnx2ncnn_opt.ir.dim import Dim, Shape, at_least, exact_div, is_fixed, product
from onnx2ncnn_opt.ir.features import FP32, Device, Feature
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.int8 import CRASH_OF_GPUS, crashes_gpus, may_use_winograd
from onnx2ncnn_opt.ir.weight import Array

LARGEST = 65504.0  # beyond it fp16 has only infinity
SMALLEST = 2.0**-24  # below half of it fp16 has only 0
_LARGEST_SIDE = 1024  # pixels: up to this side, fp16 distinguishes the centres of neighbours
COMPUTED_SIDE = 768  # pixels: also if fp16 computes the centres, as index * (2 / side) + 1 / side - 1
COUNTED = 2048  # from here on, adding 1 changes nothing in fp16
ABSORBING = 1e8  # from here on, adding a score changes nothing in float32
INFINITE = 3.4e38  # numbers from here on mean infinity, as the fill values of masks
_LANES = 8  # partial sums of the exponentials of a row of scores on ARM
_LONGEST = 4 * (2**16 - 1)  # elements along an axis on a GPU: in groups of four, of which it starts 65,535
INPUT_MARGIN = 2.0  # numbers may be this many times larger for untried inputs

# Layers whose weights are fp16 if their input is.
HALF_WEIGHTS = frozenset(
    {"Convolution", "Convolution1D", "ConvolutionDepthWise", "Deconvolution", "DeconvolutionDepthWise", "Gemm"}
    | {"InnerProduct", "MultiHeadAttention", "LSTM", "GRU", "RNN"}
)


def to_half(numbers: Array) -> Array:
    """Round numbers to fp16, and return them in float32."""
    if numbers.ndim and numbers.dtype == np.float32 and np.abs(numbers).max(initial=0.0) < LARGEST:
        # Adding and subtracting a number 2**13 times as large rounds likewise, in a quarter of the time.
        bits = numbers.view(np.uint32) & np.uint32(0xFF << 23)
        np.maximum(bits, np.uint32((127 - 14) << 23), out=bits)
        bits += np.uint32(13 << 23 | 1 << 22)
        rounded = numbers + bits.view(np.float32)
        rounded -= bits.view(np.float32)
        return np.asarray(rounded)
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).astype(np.float32)


def largest_number(layer: Layer) -> float:
    """Return the largest of a layer's parameters and weights of `LayerSpec.half`; a BatchNorm has those of its Scale.

    Sources: ncnn's src/layer/arm/*_asimdhp.cpp, src/layer/vulkan/*.cpp and their shaders (``afp(...)``).
    """
    layer = _as_scale(layer)
    spec = layer.spec
    if spec is None or (layer.type == "BinaryOp" and not layer["with_scalar"]):
        return 0.0
    arrays = [layer.weights[name] for name in spec.half if name in layer.weights]
    arrays += [np.asarray(layer[name], np.float32) for name in spec.half if name in spec.by_name]
    return max((float(np.abs(array).max(initial=0.0)) for array in arrays), default=0.0)


def _as_scale(layer: Layer) -> Layer:
    """Return the Scale that a BatchNorm's kernels compute; another layer unchanged."""
    if layer.type != "BatchNorm":
        return layer
    slope, mean, var, bias = (layer.weights[f"{name}_data"] for name in ("slope", "mean", "var", "bias"))
    with np.errstate(all="ignore"):
        factor = slope / np.sqrt(var + np.float32(layer["eps"]))
        weights = {"scale_data": factor, "bias_data": bias - factor * mean}
    return Layer("Scale", layer.name, params={"scale_data_size": slope.size, "bias_term": 1}, weights=weights)


def winograd_tile(layer: Layer) -> int:
    """Return the side, in outputs, of winograd's tiles for a layer computed in fp16 on ARM; 0 without winograd.

    convolution_arm_asimdhp.cpp, create_pipeline_fp16s.
    """
    if not may_use_winograd(layer) or layer["featmask"] & (Feature.NO_WINOGRAD | Feature.NO_FP16_ARITHMETIC):
        return 0
    outputs = layer["num_output"]
    inputs = layer["weight_data_size"] // 9 // outputs if outputs else 0
    if max(inputs, outputs) < 16:
        return 0
    if inputs <= 128 and outputs <= 128:
        return 6
    return 4 if min(inputs, outputs) >= 16 else 2


def faulty_kernels(
    layer: Layer, minimum: Mapping[Dim, int] = MappingProxyType({})
) -> Iterator[tuple[Feature, str, Device | None]]:
    """Yield the faulty kernels of a layer: the feature mask that avoids it, the fault, and the device if it is one.

    `minimum` has the least values of sizes that the net is right for, such as 512 - n: 0.
    """
    gaps = [0, *(size for size, least in minimum.items() if least >= 0)]

    def may_exceed(size: Dim, most: int) -> bool:
        return not any(at_least(most - size - gap, 0) for gap in gaps)

    if _is_strided_depthwise(layer):
        reason = "ncnn's fp16 kernel on ARM for 3x3, stride 2, reads a wrong row where the width is 4n+2 or 4n+3"
        yield Feature.NO_FP16_ARITHMETIC, reason, "arm"
    if layer.type == "Permute" and _permutes_odd_channels(layer):
        reason = "ncnn's 16-bit kernel on GPUs moves 4n channels of an odd number of elements to wrong places"
        yield Feature.NO_VULKAN, reason, "vulkan"
    if layer.type in ("GroupNorm", "InstanceNorm") and may_exceed(_group_size(layer), _LONGEST):
        yield Feature.NO_VULKAN, f"GPUs leave out what is beyond {_LONGEST:,} elements of a group", "vulkan"
    if layer.type != "Input" and any(map(_is_too_long, (*layer.inputs, *layer.outputs))):
        reason = f"GPUs leave out what is beyond {_LONGEST:,} elements of an axis"
        yield Feature.NO_VULKAN, reason, "vulkan"
    if layer.type == "Interp" and not _has_exact_places(layer):
        yield Feature.NO_FP16_ARITHMETIC, "GPUs compute the coordinates of its pixels in fp16", "vulkan"
    if crashes_gpus(layer):
        yield Feature.NO_VULKAN, CRASH_OF_GPUS, "vulkan"
    count = softmax_size(layer, layer.input.shape or ()) if layer.type == "Softmax" else 0
    if may_exceed(count, COUNTED):
        reason = f"it adds up {count} exponentials in fp16, which counts to {COUNTED}"
        if isinstance(count, int):  # else rows may be short, and a cast of all scores is slow
            yield FP32, reason, "arm"
        yield Feature.NO_FP16_ARITHMETIC, reason, "vulkan"
    is_sdpa = layer.type == "SDPA"
    if layer.type in ATTENTION and may_exceed(keys := key_count(layer), COUNTED if is_sdpa else COUNTED // 2):
        # Without fp16 arithmetic ARM still counts in fp16. Rows of a dynamic size may be short, and casts are slow.
        features = FP32 if isinstance(keys, int) and keys > _LANES * COUNTED else Feature.NO_FP16_ARITHMETIC
        yield features, f"it adds up the values of {keys} keys in fp16", "arm" if is_sdpa else None


def _has_exact_places(interp: Layer) -> bool:
    """Return True if fp16 holds all coordinates of pixels: of one pixel, or of short sides with a factor 2, 4, 8 ..."""
    before, after = interp.inputs[0].shape, interp.output.shape
    if before is None or after is None:
        return False
    sides = [(a, b) for a, b in zip(before[1:], after[1:], strict=False) if a != 1]
    return all(
        is_fixed(side)
        and max(side) <= _LARGEST_SIDE
        and (side[0] == side[1] or (log2(side[1] / side[0]).is_integer() and not interp["align_corner"]))
        for side in sides
    )


def _group_size(norm: Layer) -> Dim:
    """Return the number of elements that a GroupNorm or InstanceNorm adds up; 0 if it is not known."""
    shape = norm.input.shape or (0,)
    return product(shape) // norm["group"] if norm.type == "GroupNorm" else product(shape[1:])


def _is_too_long(blob: Blob) -> bool:
    """Return True for a blob that ncnn spoils on GPUs, in 32 bits, too: it does not divide a dispatch (command.cpp).

    Measured on an NVIDIA H100, along w of 1-D blobs, h, and c. The depth counts with the height.
    """
    shape = blob.shape or ()
    sizes = shape if len(shape) < 4 else (shape[0], product(shape[1:3]), shape[3])
    return any(isinstance(size, int) and size > _LONGEST for size in sizes)


def softmax_size(layer: Layer, shape: Shape) -> Dim:
    """Return the number of elements in a row of a Softmax; 0 without such an axis, where ncnn changes nothing."""
    axis = layer["axis"]
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


def _is_strided_depthwise(layer: Layer) -> bool:
    """Return True for convolutions that ARM computes in convdw3x3s2_pack8_fp16sa_neon, with a wrong result.

    Its loop over two columns reads the last column of rows 2 and 3 from row 1 (convolutiondepthwise_3x3_pack8_fp16s.h).
    If the output's width is 4n+2 or 4n+3, the last columns are wrong.
    """
    channels = layer["group"] if layer.type == "ConvolutionDepthWise" else 0
    if not channels or channels % 8 or layer["num_output"] != channels:
        return False
    window = {name: (layer[f"{name}_w"], layer[f"{name}_h"]) for name in ("kernel", "stride", "dilation")}
    if window != {"kernel": (3, 3), "stride": (2, 2), "dilation": (1, 1)}:
        return False
    width = layer.output.shape[-1] if layer.output.shape else None
    return not isinstance(width, int) or width % 4 > 1


def _permutes_odd_channels(layer: Layer) -> bool:
    """Return True if c stays the outermost axis and may be a multiple of 4, and w * h * d may be odd.

    permute_pack4.comp divides an index in units of `cstep` by w * h * d. ncnn aligns channels to 16 bytes, and four
    16-bit numbers are 8 bytes. So if w * h * d is odd, `cstep` is larger by one.
    """
    shape = layer.input.shape
    last = 5 if shape is None else {3: 1, 4: 5}.get(len(shape), 0)
    if not 1 <= layer["order_type"] <= last:
        return False
    c, *inner = shape or (4,)
    return not (isinstance(c, int) and c % 4) and exact_div(product(inner), 2) is None


def computes_in_half(layer: Layer) -> bool:
    """Return True if a layer's mask lets devices compute it in fp16: ARM's Softmax does, unless storage has 32 bits."""
    features = Feature.NO_FP16_STORAGE | (Feature.NO_FP16_ARITHMETIC if layer.type != "Softmax" else 0)
    return not layer["featmask"] & features
