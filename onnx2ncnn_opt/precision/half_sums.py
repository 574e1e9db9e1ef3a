"""The errors of fp16 arithmetic inside ncnn's layers, as the ARM kernels (asimdhp) do it by default.

The rounding of a blob to fp16 is visible from outside; the sums inside a layer are not. Convolutions and matrix
products accumulate in fp16, term by term. 3x3 convolutions use winograd's transforms, whose numbers are up to a
hundred times larger than the inputs. This module estimates the errors on a sample: a few output channels at a few
tiles or positions, one of them with the largest input.

The facts are those of ncnn's source of 2026-07-22, src/layer/arm/*_asimdhp.cpp and convolution_3x3_winograd_fp16s.h.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from onnx2ncnn_opt.ir.attention import mask_slot
from onnx2ncnn_opt.ir.codes import Activation, GemmC, Reduction, UnaryOp
from onnx2ncnn_opt.ir.features import FP32, Device, Feature
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.half import INPUT_MARGIN, LARGEST, computes_in_half, softmax_size, to_half, winograd_tile
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.ir.windows import axes_of, groups_of, pads_of

_TILES, _CHANNELS, _QUERIES = 16, 6, 8
_ERROR_LEFT = 0.5  # NO_FP16_ARITHMETIC is enough for attention if it leaves at most this part of the error
_EXPONENTIAL_ERROR = 2e-5  # relative, of a probability for each exponential in its sum; on aarch64 and Vulkan
# The number of sums in a sample. The first `_AT_LARGEST` include the largest input; they only detect overflow.
_SUMS, _LEAST_SUMS, _TERMS_OF_ALL, _TERMS_OF_ROW, _AT_LARGEST = 256, 32, 2**18, 2**20, 8
# The partial sums of a kernel: of InnerProduct for a vector, and of Gemm for one row. There ARM has 8 or more, and a
# GPU 1; 5 is a compromise.
_LANES, _LANES_OF_ROW = 8, 5
_SAMPLE_MARGIN = 2.0  # winograd's sums may be this many times larger than in the sampled tiles and channels
_SQ2 = math.sqrt(2.0)

# For tiles of 6, 4 and 2 outputs: the finite points of the transforms, and the factors of the output's columns.
_WINOGRAD: Mapping[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    6: ((0, 1, -1, 2, -2, 0.5, -0.5), (1, 1, 1, 1, 1, 32, 32)),
    4: ((0, _SQ2 / 2, -_SQ2 / 2, _SQ2, -_SQ2), (1, 1, 1, 1, 1)),
    2: ((0, 1, -1), (1, 1, 1)),
}


class Inner(NamedTuple):
    """The effect of a layer's own arithmetic in fp16 on its output, estimated on a sample.

    `spread` lists equally frequent root mean squares of the error, in the output's units: one channel may have ten
    times the error of another. With one for each output element, the order is the same. `overflows` is True if a number
    inside became infinite; the feature mask `remedy` prevents that. `how` names the arithmetic; `device` is set if only
    one kind of device has it. `relative` is an error in units of the element.
    """

    how: str
    spread: tuple[float, ...] = ()
    overflows: bool = False
    remedy: Feature = Feature.NO_FP16_ARITHMETIC
    device: Device | None = None
    relative: float = 0.0

    @property
    def error(self) -> float:
        """The root mean square of the errors."""
        return _rms(np.array(self.spread))


def inner_arithmetic(layer: Layer, inputs: Sequence[Array]) -> tuple[Inner, ...]:
    """Return the effect of a layer's fp16 arithmetic; if it uses winograd, also the effect without winograd.

    `inputs` are its input blobs, in float32, without a batch. The result is empty for layers that accumulate in 32
    bits, and for unknown ones.
    """
    if not computes_in_half(layer) or not inputs:
        return ()
    effects = _EFFECTS.get(layer.type, _sums_of_products)
    with np.errstate(all="ignore"):  # this looks for infinity minus infinity
        return tuple(effects(layer, inputs, np.random.default_rng(0)))


def _floats(layer: Layer, name: str) -> Array | None:
    """Return a weight that is not quantised; None without it."""
    if name not in layer.weights or not layer.weights.stored(name).is_float:
        return None
    return np.asarray(layer.weights[name], np.float32)


def _indices(count: int, most: int, rng: np.random.Generator) -> Array:
    """Return `most` random indices below `count`; all if there are no more."""
    return np.arange(count) if count <= most else rng.choice(count, most, replace=False)


def _overflows(peak: float, margin: float = INPUT_MARGIN) -> bool:
    """Return True if numbers this large in a sample may be infinite in fp16 for other inputs."""
    return not peak <= LARGEST / margin


def _peak(numbers: Array) -> float:
    return float(np.abs(numbers).max(initial=0.0))


def _rms(errors: Array) -> float:
    """Return the root mean square of the finite errors."""
    finite = errors[np.isfinite(errors)]
    return float(np.sqrt(np.mean(np.square(finite, dtype=np.float64)))) if finite.size else 0.0


# ---- sums of products


def _sums_of_products(layer: Layer, inputs: Sequence[Array], rng: np.random.Generator) -> Iterator[Inner]:
    """Yield the effects of winograd, and of sums that are accumulated term by term."""
    x, tile = inputs[0], winograd_tile(layer)
    weight = _floats(layer, "weight_data")
    if tile and weight is not None and x.ndim == 3 and 9 * x.shape[0] * layer["num_output"] == weight.size:
        yield _winograd(layer, x, weight.reshape(layer["num_output"], -1, 3, 3), tile, rng)
    sample = None
    if layer.type in ("Convolution", "Convolution1D", "ConvolutionDepthWise"):
        sample = None if weight is None else _window_products(layer, x, weight, rng)
    elif (factors := _factors(layer, inputs)) is not None and factors[0].shape[1] == factors[1].shape[1]:
        sample = _row_products(*factors, rng)
    if sample is not None:
        yield _sum_effect(layer, *sample, _lanes(layer, x))


def _pairs(counts: Sequence[int], terms: int, rng: np.random.Generator) -> Iterator[Array]:
    """Yield for each count the random indices below it, one for each sum of a sample."""
    sums = max(min(_SUMS, _TERMS_OF_ALL // terms), _LEAST_SUMS)
    for count in counts:
        yield np.resize(_indices(count, sums, rng), sums)[rng.permutation(sums)]


def _row_products(rows: Array, columns: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return the products of random pairs of rows of two matrices, and the second rows, which are the channels.

    If the first matrix has one row, and the second is not large, they are all products, in the order of the result.
    """
    if len(rows) == 1 and columns.size <= _TERMS_OF_ROW:
        channels = np.append(np.zeros(_AT_LARGEST, int), np.arange(len(columns)))
        return to_half(rows) * to_half(columns)[channels], channels
    chosen, channels = _pairs((len(rows), len(columns)), rows.shape[1], rng)
    chosen[:_AT_LARGEST] = int(np.abs(rows).argmax()) // rows.shape[1]
    return to_half(rows[chosen]) * to_half(columns[channels]), channels


def _window_products(layer: Layer, x: Array, weight: Array, rng: np.random.Generator) -> tuple[Array, Array] | None:
    """Return the products of random windows of a convolution's input and its weights, and the channels."""
    axes, groups, (image, *_) = axes_of(layer), groups_of(layer), _padded(layer, x)
    height, stride, dilation = (layer[f"{name}_h"] if "h" in axes else 1 for name in ("kernel", "stride", "dilation"))
    taps = weight.reshape(layer["num_output"], -1, height, layer["kernel_w"])
    extents = (height - 1) * dilation + 1, (layer["kernel_w"] - 1) * layer["dilation_w"] + 1
    if taps.shape[1] * groups != len(image) or any(np.greater(extents, image.shape[1:])):
        return None
    steps = tuple(slice(None, None, step) for step in (stride, layer["stride_w"], dilation, layer["dilation_w"]))
    every = slice(None)
    windows = sliding_window_view(image.reshape(groups, -1, *image.shape[1:]), extents, (2, 3))[(every, every, *steps)]
    rows, columns = windows.shape[2:4]
    channels, places = _pairs((len(taps), rows * columns), taps[0].size, rng)
    top, left = _largest_at(image)
    places[:_AT_LARGEST] = min(top // stride, rows - 1) * columns + min(left // layer["stride_w"], columns - 1)
    patches = windows[channels * groups // len(taps), :, places // columns, places % columns]
    return to_half(taps[channels].reshape(len(channels), -1)) * to_half(patches.reshape(len(channels), -1)), channels


def _padded(layer: Layer, x: Array, tile: int = 1) -> tuple[Array, int, int]:
    """Return a convolution's input with its pads, (channels, height, width), and the sizes of what 3x3 makes of it.

    The input is padded further, so that the sizes are multiples of `tile`.
    """
    pads = np.reshape(pads_of(layer), (-1, 2))
    if pads.min() < 0:  # SAME
        extents = [(layer[f"kernel_{axis}"] - 1) * layer[f"dilation_{axis}"] for axis in axes_of(layer)]
        pads = np.array([(extent // 2, extent // 2) for extent in extents])
    x = x[:, None] if x.ndim == 2 else x
    pads = np.array([*[(0, 0)] * (3 - len(pads)), *pads])
    height, width = (np.array(x.shape) + pads.sum(1))[1:] - 2
    pads[1:, 1] += -height % tile, -width % tile
    return np.pad(x, pads), height, width


def _largest_at(image: Array) -> tuple[int, int]:
    """Return the row and column of the largest number."""
    at = image.argmax() if image.max(initial=0.0) >= -image.min(initial=0.0) else image.argmin()
    _, row, column = np.unravel_index(int(at), image.shape)
    return int(row), int(column)


def _factors(layer: Layer, inputs: Sequence[Array]) -> tuple[Array, Array] | None:
    """Return two matrices: the layer multiplies rows of the first and of the second; None for other layers."""
    x, given = inputs[0], list(inputs)
    if layer.type in ("MatMul", "Gemm"):
        a, b = given[:2] if layer.type == "MatMul" else (_operand(layer, name, given) for name in "AB")
        if a is None or b is None or min(a.ndim, b.ndim) < 2:
            return None
        a, b = (each.reshape(-1, *each.shape[-2:])[0] for each in (a, b))  # the first matrix of each stands for all
        return a.T if layer.type == "Gemm" and layer["transA"] else a, b if layer["transB"] else b.T
    weight = _floats(layer, "weight_data") if layer.type in ("InnerProduct", "Deconvolution") else None
    if weight is None:
        return None
    if layer.type == "InnerProduct":
        columns = weight.reshape(layer["num_output"], -1)
        return None if x.size % columns.shape[1] else (x.reshape(-1, columns.shape[1]), columns)
    if x.ndim != 3 or weight.size % (layer["num_output"] * x.shape[0]):
        return None
    return x.reshape(x.shape[0], -1).T, weight.reshape(layer["num_output"], x.shape[0], -1)[:, :, 0]


def _operand(layer: Layer, name: str, inputs: list[Array]) -> Array | None:
    """Return a factor of a Gemm, which takes inputs in their order; None if it is not known in floats."""
    if not layer[f"constant{name}"]:
        return inputs.pop(0) if inputs else None
    stored, size = _floats(layer, f"{name}_data"), layer["constantK"]
    is_first = layer["transA"] if name == "A" else not layer["transB"]
    return None if stored is None else stored.reshape((size, -1) if is_first else (-1, size))


def _lanes(layer: Layer, x: Array) -> int:
    if layer.type == "InnerProduct" and x.ndim != 2:
        return _LANES
    return _LANES_OF_ROW if layer.type == "Gemm" and x.ndim == 2 and len(x) == 1 else 1


def _sum_effect(layer: Layer, products: Array, channels: Array, lanes: int) -> Inner:
    """Return the effect of rounding each step of the sums along the last axis; a sum has `lanes` partial sums."""
    count = products.shape[-1]
    products = np.pad(products, [(0, 0), (0, -count % lanes)]).reshape(len(channels), -1, lanes)
    partial, errors, peak = _rounded_sums(products.swapaxes(0, 1), _bias(layer, channels)[:, None] / lanes)
    errors = _activated_errors(layer, partial.sum(-1), np.sqrt((errors**2).sum(-1)))[_AT_LARGEST:]
    is_complete = np.array_equal(channels[_AT_LARGEST:], np.arange(len(errors)))
    spread = np.nan_to_num(errors) if is_complete else errors[np.isfinite(errors)]
    return Inner(f"sums of {count} products", tuple(spread.tolist()), _overflows(peak))


def _rounded_sums(products: Array, start: Array | float = 0.0) -> tuple[Array, Array, float]:
    """Return sums along the first axis, their errors if each step rounds to fp16, and the largest partial sum.

    An error is the root of the sum of squares of the steps' errors, which are those of exact partial sums. The sums
    may overwrite the products.
    """
    is_term, totals = products != 0, np.ascontiguousarray(products, np.float32)
    totals[:1] += start
    for before, after in pairwise(totals):  # six times as fast as `cumsum`, which goes along columns
        after += before
    errors = to_half(totals)
    errors -= totals
    errors *= is_term  # adding 0 rounds nothing
    return totals[-1], np.sqrt(np.square(errors).sum(0)), _peak(totals)


def _bias(layer: Layer, channels: Array) -> Array:
    """Return the initial values of the sums of output channels."""
    name = "C_data" if layer.type == "Gemm" and layer["constant_broadcast_type_C"] == GemmC.N else "bias_data"
    if name not in layer.weights:
        return np.zeros(len(channels), np.float32)
    return np.asarray(layer.weights[name], np.float32).ravel()[channels]


def _activated_errors(layer: Layer, sums: Array, errors: Array) -> Array:
    """Return the errors after the activation; NaN for sums that it maps to 0, and for infinite errors."""
    high, exact, low = (_activated(layer, x) for x in (sums + errors, sums, sums - errors))
    sizes = np.abs(high - low) / 2
    return np.where((exact != 0) & np.isfinite(sizes), sizes, np.nan)


def _activated(layer: Layer, x: Array) -> Array:
    """Apply a layer's fused activation to numbers."""
    if layer.spec is None or not layer.spec.has_activation:
        return x
    function = _ACTIVATIONS.get(layer["activation_type"])
    return np.asarray(function(x, *layer["activation_params"])) if function else x


_ACTIVATIONS: Mapping[int, Callable[..., Array]] = {
    Activation.RELU: lambda x, *params: np.maximum(x, 0),
    Activation.LEAKYRELU: lambda x, slope, *params: np.where(x < 0, x * slope, x),
    Activation.CLIP: lambda x, low, high, *params: np.clip(x, low, high),
    Activation.SIGMOID: lambda x, *params: 1 / (1 + np.exp(-x)),
    Activation.MISH: lambda x, *params: x * np.tanh(np.logaddexp(0, x)),
    Activation.HARDSWISH: lambda x, alpha, beta, *params: x * np.clip(x * alpha + beta, 0, 1),
}


# ---- winograd


@cache
def _transforms(tile: int) -> tuple[Array, Array, Array]:
    """Return winograd's transforms of input, kernel and output (convolution_3x3_winograd_fp16s.h).

    They evaluate polynomials at the points of `_WINOGRAD` and at infinity, multiply, and interpolate.
    """
    points, factors = (np.array(numbers) for numbers in _WINOGRAD[tile])
    others = [np.delete(points, i) for i in range(len(points))]
    divisors = np.array([np.prod(point - rest) for point, rest in zip(points, others, strict=True)])
    input = np.array([*(np.append(np.poly(rest)[::-1], 0) for rest in others), np.poly(points)[::-1]])
    input[0], divisors[0] = input[0] / divisors[0], 1
    kernel = np.vstack([np.vander(points, 3, increasing=True) / (divisors * factors)[:, None], np.eye(3)[-1]])
    output = np.vstack([np.vander(points, tile, increasing=True) * factors[:, None], np.eye(tile)[-1]]).T
    return input.astype(np.float32), kernel.astype(np.float32), output.astype(np.float32, order="C")


def _in_steps(matrix: Array, x: Array) -> Array:
    """Return ``matrix @ x`` with each step of a sum rounded to fp16, as in winograd's transforms."""
    total = np.zeros((*x.shape[:-2], len(matrix), x.shape[-1]), np.float32)
    for column, row in zip(matrix.T, np.moveaxis(x, -2, 0), strict=True):
        total = to_half(total + column[:, None] * row[..., None, :])
    return total


def _winograd(layer: Layer, x: Array, weight: Array, tile: int, rng: np.random.Generator) -> Inner:
    """Return the effect of winograd in fp16, on some tiles of the input and the one with the largest number."""
    image, height, width = _padded(layer, x, tile)
    windows = _tiles(image, tile)
    # Tiles of all powers: edges and texture have a hundred times the power of flat tiles.
    mixed = _tiles(np.tensordot(rng.choice((-1.0, 1.0), (1, len(image))), image, 1), tile)[0]
    powers = np.square(_transforms(tile)[0] @ mixed @ _transforms(tile)[0].T).mean((-2, -1))
    order = np.argsort(powers, axis=None)
    largest = np.minimum(np.array(_largest_at(image)) // tile, np.array(powers.shape) - 1)
    chosen = np.append(
        order[np.linspace(0, order.size - 1, min(order.size, _TILES)).astype(int)],
        np.ravel_multi_index(tuple(largest), powers.shape),
    )
    rows, columns = np.unravel_index(chosen, powers.shape)
    channels = _indices(len(weight), max(_CHANNELS, _TILES * _CHANNELS // len(chosen)), rng)
    exact, errors, peak = _in_tiles(np.moveaxis(windows[:, rows, columns], 0, 1), weight[channels], tile)
    errors = _activated_errors(layer, exact + _bias(layer, channels)[:, None, None], errors)
    inside = np.arange(tile) < np.array((height - rows * tile, width - columns * tile))[..., None]
    errors = np.where((inside[0, :, :, None] & inside[1, :, None])[:, None], errors, np.nan)[:-1]
    spread = errors[np.isfinite(errors)]  # ncnn drops results beyond the output
    remedy = Feature.NO_FP16_ARITHMETIC | Feature.NO_WINOGRAD  # without the latter, GPUs do winograd in fp16
    overflows = _overflows(peak, INPUT_MARGIN * _SAMPLE_MARGIN)
    return Inner("winograd's sums", tuple(spread[_indices(len(spread), _SUMS, rng)].tolist()), overflows, remedy)


def _tiles(image: Array, tile: int) -> Array:
    """Return what each tile reads: (channels, rows, columns, tile + 2, tile + 2)."""
    return sliding_window_view(image, (tile + 2, tile + 2), (1, 2))[:, ::tile, ::tile]


def _in_tiles(tiles: Array, weight: Array, tile: int) -> tuple[Array, Array, float]:
    """Return the exact outputs of tiles, (tiles, outputs, tile, tile), their errors in fp16, and the largest number.

    Each step in fp16 adds its own error: the sums over inputs, and the transform of their rows, then of their columns.
    """
    itm, ktm, otm = _transforms(tile)
    kernels = ktm @ weight @ ktm.T
    half_done = _in_steps(itm, to_half(tiles))
    inputs = _in_steps(itm, half_done.swapaxes(-1, -2)).swapaxes(-1, -2)
    by_input = (to_half(kernels).swapaxes(0, 1)[:, None], inputs.swapaxes(0, 1)[:, :, None])
    sums, errors, peak = _rounded_sums(np.multiply(*by_input, order="C"))  # input, tile, output, side, side
    by_row = otm @ sums
    squares = otm**2 @ errors**2 + (_in_steps(otm, sums) - by_row) ** 2
    result = by_row @ otm.T
    steps = _in_steps(otm, by_row.swapaxes(-1, -2)).swapaxes(-1, -2) - result
    exact = otm @ np.einsum("ocij,tcij->toij", kernels, itm @ tiles @ itm.T, optimize=True) @ otm.T
    errors = np.sqrt(squares @ otm.T**2 + steps**2 + (result - exact) ** 2)
    return exact, errors, max(peak, *map(_peak, (half_done, inputs, by_row, result)))


# ---- layers without products of weights


def _attention(layer: Layer, inputs: Sequence[Array], rng: np.random.Generator) -> Iterator[Inner]:
    """Yield the effect of fp16 on attention, for some queries; ncnn scales the sums of products, not the queries."""
    if layer["kv_cache"]:
        return
    q, k, v = (array.reshape(-1, *array.shape[-2:]) for array in inputs[:3])
    k, v = (np.repeat(array, len(q) // len(array), axis=0) for array in (k, v))
    scale = layer["scale"] or q.shape[-1] ** -0.5
    _, largest, _ = np.unravel_index(int(np.abs(q).argmax()), q.shape)
    rows = np.append(_indices(q.shape[1], _QUERIES, rng), largest)
    slot = mask_slot(layer)
    mask = np.float32(0) if slot is None else inputs[slot].reshape(-1, *inputs[slot].shape[-2:])[:, rows]
    products = q[:, rows] @ np.swapaxes(k, 1, 2)
    scores = products * scale + mask
    stored = _rms(_softmax(to_half(scores)) @ v - _softmax(scores) @ v)
    # ARM also adds up the values in fp16, one for each key.
    terms = to_half(_softmax(scores))[..., None] * to_half(v)[:, None]
    _, of_values, _ = _rounded_sums(np.moveaxis(terms, -2, 0))
    peak, error = _peak(products), math.hypot(stored, _rms(of_values))
    # Without fp16 arithmetic the scores still have 16 bits on ARM, and on GPUs if a head's width is no multiple of 8.
    is_enough = peak * scale <= LARGEST / INPUT_MARGIN and stored <= _ERROR_LEFT * error
    remedy = Feature.NO_FP16_ARITHMETIC if is_enough else FP32
    yield Inner("attention's sums", (error,), _overflows(peak), remedy)


def _softmax(scores: Array) -> Array:
    exp = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exp / exp.sum(axis=-1, keepdims=True))


def _probabilities(layer: Layer, inputs: Sequence[Array], rng: np.random.Generator) -> Iterator[Inner]:
    """Yield the effect of accumulating exponentials one by one in fp16: most are less than the last place of their sum.

    softmax_arm_asimdhp.cpp, softmax_pass3.comp.
    """
    count = softmax_size(layer, inputs[0].shape)
    if isinstance(count, int) and count:
        yield Inner(f"sums of {count} exponentials", remedy=FP32, relative=_EXPONENTIAL_ERROR * count)


# Layers and activations that ncnn computes in several steps in fp16. Relative errors measured on aarch64 and Vulkan:
# 2.6e-4 for Sigmoid, 2.9e-4 for Swish, 4.9e-4 for Mish.
_FUNCTIONS = frozenset({"GELU", "HardSwish", "Interp", "Mish", "Sigmoid", "Softmax", "Swish"})
_FUNCTION_ERROR = 3e-4
_TANH_ERROR = 1.5e-4  # absolute, even near 0: GPUs compute 1 - 2 / (exp(2 * x) + 1)


def of_function(layer: Layer) -> Inner:
    """Return the effect of fp16 on a layer's function."""
    how = "the steps inside its function"
    if layer.type == "TanH" or layer.computes(UnaryOp.TANH):
        return Inner(how, (_TANH_ERROR,), relative=_FUNCTION_ERROR)
    fused = layer["activation_type"] if layer.spec is not None and layer.spec.has_activation else Activation.NONE
    is_inexact = layer.type in _FUNCTIONS or fused >= Activation.SIGMOID
    return Inner(how, relative=_FUNCTION_ERROR if is_inexact else 0.0)


# The terms that a Reduction accumulates.
_TERMS: Mapping[int, Callable[[Array], Array]] = {
    **dict.fromkeys((Reduction.SUM, Reduction.ASUM, Reduction.MEAN, Reduction.L1, Reduction.LOGSUM), np.abs),
    **dict.fromkeys((Reduction.SUMSQ, Reduction.L2), np.square),
    Reduction.LOGSUMEXP: np.exp,
}


def _reduced(layer: Layer, inputs: Sequence[Array], rng: np.random.Generator) -> Iterator[Inner]:
    """Yield the effect of accumulating in fp16, as GPUs do (reduction.comp); ARM accumulates in fp32."""
    x, terms = inputs[0], _TERMS.get(layer["operation"])
    if terms is None:
        return
    axes = None if layer["reduce_all"] else tuple(axis for axis in layer["axes"] if -x.ndim <= axis < x.ndim)
    largest = float(terms(x).sum(axes, dtype=np.float64).max(initial=0.0))
    yield Inner("its sums on GPUs", (), _overflows(largest), device="vulkan")


_EFFECTS: Mapping[str, Callable[[Layer, Sequence[Array], np.random.Generator], Iterator[Inner]]] = {
    "Reduction": _reduced,
    "Softmax": _probabilities,
    "SDPA": _attention,
}
