"""The costs of ncnn's kernels, for every choice between layers.

They were measured with ncnn 1.0.20261020 on one thread of an x86 CPU with AVX-512 (docs/measurements.md). A layer
without a kernel for an architecture runs ncnn's plain loop there, which is not faster elsewhere.
"""

from collections.abc import Iterable
from math import prod

from onnx2ncnn_opt.ir.dim import Dim, Shape
from onnx2ncnn_opt.ir.graph import Layer

# Nanoseconds for one multiplication and addition of a layer with weights.
_NS_PER_PRODUCT = {
    "Convolution": 0.02,
    "Convolution1D": 0.04,
    "Convolution3D": 0.6,
    "ConvolutionDepthWise": 0.1,
    "ConvolutionDepthWise1D": 0.3,
    "ConvolutionDepthWise3D": 0.4,
    "Deconvolution": 0.02,
    "Deconvolution1D": 0.5,
    "Deconvolution3D": 0.5,
    "DeconvolutionDepthWise": 0.1,
    "DeconvolutionDepthWise1D": 0.3,
    "DeconvolutionDepthWise3D": 0.4,
}
# Up to this number of inputs and outputs, Convolution and Convolution1D run without a matrix product.
_FEW_CHANNELS = 16
_NS_PER_PRODUCT_OF_FEW = 0.06
# 3x3 kernels with stride 1. Without dilation ncnn uses winograd. It transforms the input (slower if that does not fit
# into a cache), the output, and the weights. With dilation ncnn copies the input for each tap; numbers of outputs other
# than multiples of 16 are slower still.
_NS_PER_PRODUCT_OF_WINOGRAD, _NS_PER_NUMBER_MADE, _NS_PER_WEIGHT = 0.0055, 1.0, 0.5
_NS_PER_NUMBER_READ, _NS_PER_NUMBER_FROM_MEMORY, _CACHED = 1.5, 3.0, 2**21
_NS_PER_PRODUCT_OF_DILATED, _NS_PER_PRODUCT_OF_UNEVEN, _NS_PER_NUMBER_COPIED = 0.0145, 0.03, 1.8
# Other 2-D convolutions whose kernel has several rows and columns are a matrix product: ncnn copies the input for each
# tap. A product takes longer on ARM.
_NS_PER_COPY, _NS_PER_PRODUCT_OF_MATRIX, _NS_PER_PRODUCT_ON_ARM = 0.8, 0.014, 0.05
# A grouped convolution that is not depthwise runs one small convolution for each group.
_GROUPED = {"ConvolutionDepthWise": "Convolution", "DeconvolutionDepthWise": "Deconvolution"}
_NS_PER_GROUP = 1_000.0
_NS_PER_SCORE = 0.65  # a query times a key of a head: in MultiHeadAttention more than in SDPA
_NS_PER_BYTE = 0.05  # read or written
_NS_PER_LAYER = 1_000.0
_USUAL_SIZE = 64  # replaces an unknown size; the tokens of an unknown image, H * W, are 64 * 64


def cost(layers: Iterable[Layer]) -> float:
    """Return the nanoseconds that layers take together: an estimate to compare forms of one computation.

    The layers need the shapes of their inputs; layers with weights need those of their outputs as well.
    """
    return sum(_NS_PER_LAYER + _products_cost(layer) + _NS_PER_BYTE * _bytes(layer) for layer in layers)


def surplus_of_attention(queries: Shape, keys: Dim) -> float:
    """Return the nanoseconds that MultiHeadAttention takes longer than SDPA, for (heads, queries) and keys."""
    return _NS_PER_SCORE * _size((*queries, keys))


def cost_of_results(shape: tuple[int, int], outputs: int, kernel: tuple[int, int]) -> float:
    """Return nanoseconds per input channel and result if `shape` (rows, columns) results share one im2col copy."""
    taps = (kernel[0] + shape[0] - 1) * (kernel[1] + shape[1] - 1)
    return taps * (_NS_PER_COPY / prod(shape) + _NS_PER_PRODUCT_ON_ARM * outputs)


def _products_cost(layer: Layer) -> float:
    if layer.type not in _NS_PER_PRODUCT:
        return 0.0
    channels = (layer.inputs[0].shape or (0,))[0]
    is_grouped = layer.type in _GROUPED and not layer["group"] == layer["num_output"] == channels
    kind = _GROUPED[layer.type] if is_grouped else layer.type
    rate = _NS_PER_PRODUCT[kind]
    has_few_channels = isinstance(channels, int) and max(channels, layer["num_output"]) <= _FEW_CHANNELS
    blob = layer.inputs[0] if layer.type.startswith("Deconvolution") else layer.outputs[0]
    products = layer["weight_data_size"] * _size((blob.shape or ())[1:])
    groups = layer["group"] * _NS_PER_GROUP if is_grouped else 0.0
    if layer.type in ("Convolution", "Convolution1D") and has_few_channels:
        rate = _NS_PER_PRODUCT_OF_FEW
    elif kind == "Convolution" and has_3x3_taps(layer):
        return _cost_of_3x3(layer, products) + groups
    elif kind == "Convolution" and min(layer["kernel_w"], layer["kernel_h"]) > 1:
        group = layer["group"] if is_grouped else 1
        rate = _NS_PER_PRODUCT_OF_MATRIX + _NS_PER_COPY * group / layer["num_output"]
    return float(products * rate + groups)


def _cost_of_3x3(layer: Layer, products: int) -> float:
    inputs, outputs = (_size(blob.shape or ()) for blob in (layer.inputs[0], layer.outputs[0]))
    if not layer["dilation_w"] == layer["dilation_h"] == 1:
        rate = _NS_PER_PRODUCT_OF_UNEVEN if layer["num_output"] % 16 else _NS_PER_PRODUCT_OF_DILATED
        return products * rate + inputs * _NS_PER_NUMBER_COPIED
    transforms = inputs * (_NS_PER_NUMBER_READ if inputs <= _CACHED else _NS_PER_NUMBER_FROM_MEMORY)
    transforms += outputs * _NS_PER_NUMBER_MADE + layer["weight_data_size"] * _NS_PER_WEIGHT
    return float(products * _NS_PER_PRODUCT_OF_WINOGRAD + transforms)


def has_3x3_taps(layer: Layer) -> bool:
    """Return whether a 2-D convolution has a 3x3 kernel, with any dilation, and stride 1."""
    return [layer[f"{name}_{axis}"] for name in ("kernel", "stride") for axis in "wh"] == [3, 3, 1, 1]


def _bytes(layer: Layer) -> int:
    blobs = 2 * layer.outputs if layer.type == "Crop" else (*layer.inputs, *layer.outputs)
    return sum(4 * _size((*(blob.shape or ()), blob.batch)) for blob in blobs)


def _size(shape: Shape | tuple[Dim, ...]) -> int:
    return prod(size if isinstance(size, int) else _USUAL_SIZE ** max(map(len, size.terms)) for size in shape)
