"""The axes that a convolution, deconvolution or pooling slides over: sizes, taps and pads of each axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import SAME_LOWER, SAME_UPPER
from onnx2ncnn_opt.ir.dim import is_fixed
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.weight import Array, Encoding, Weight
from onnx2ncnn_opt.ir.windows import SIDES, axes_of, pads_of
from onnx2ncnn_opt.rewrite.rule import fixed_size, known_shape, require


@dataclass(frozen=True)
class Slide:
    """The slide along an axis of any size: tap i of output o reads element o * stride + i * dilation - before."""

    axis: str
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def extent(self) -> int:
        """The number of elements from the first tap to the last."""
        return (self.kernel - 1) * self.dilation + 1


@dataclass(frozen=True)
class Window(Slide):
    """The slide along an axis of known size."""

    size: int

    @property
    def outputs(self) -> int:
        """The output size of a convolution."""
        return (self.size + self.before + self.after - self.extent) // self.stride + 1

    @property
    def live_taps(self) -> tuple[int, ...]:
        """The taps that read an element of the blob, not only padding."""
        last = (self.outputs - 1) * self.stride
        return tuple(i for i in range(self.kernel) if self._reads(i * self.dilation - self.before, last))

    def _reads(self, first: int, span: int) -> bool:
        """Return True if first, first + stride, ..., or first + span is the index of an element."""
        inside = max(first, first % self.stride)  # the first index that is not negative
        return inside <= first + span and inside < self.size


def is_pointwise(layer: Layer) -> bool:
    """Return True if output i of a convolution or pooling reads only input i: one tap, no stride, no padding."""
    steps = [layer[f"{name}_{axis}"] for name in ("kernel", "stride") for axis in axes_of(layer)]
    return set(steps) == {1} and not any(pads_of(layer))


def has_known_sizes(layer: Layer) -> bool:
    """Return True if the axes that a layer slides over have fixed sizes."""
    shape, axes = layer.inputs[0].shape, axes_of(layer)
    return shape is not None and len(shape) == len(axes) + 1 and is_fixed(shape[1:])


def slides(layer: Layer) -> tuple[Slide, ...]:
    """Return the slides of a convolution, outermost axis first; only SAME pads need fixed sizes."""
    return windows(layer) if _pad_mode(layer) else _from_params(layer)


def _from_params(layer: Layer) -> tuple[Slide, ...]:
    """Return the slides with the pads of the parameters, which may be codes."""
    return tuple(
        Slide(
            axis,
            *(int(layer[f"{name}_{axis}"]) for name in ("kernel", "stride", "dilation")),
            *(int(layer[f"pad_{side}"]) for side in SIDES[axis]),
        )
        for axis in axes_of(layer)
    )


def _pad_mode(layer: Layer) -> int:
    """Return ncnn's code for SAME pads, or 0; refused for other negative pads."""
    pads = pads_of(layer)
    mode = pads[0] if len(set(pads)) == 1 and pads[0] in (SAME_UPPER, SAME_LOWER) else 0
    require(mode or min(pads) >= 0, f"'{layer.name}' has negative pads")
    return mode


def windows(layer: Layer) -> tuple[Window, ...]:
    """Return the windows of a convolution, outermost axis first; refused for dynamic sizes and unknown pads."""
    x, mode, slides = layer.inputs[0], _pad_mode(layer), _from_params(layer)
    known_shape(x, len(slides) + 1)
    result = []
    for i, slide in enumerate(slides, 1):
        size, axis, before, after = fixed_size(x, i), slide.axis, slide.before, slide.after
        if mode:
            total = slide.extent + (size - 1) // slide.stride * slide.stride - size
            require(total >= 0, f"'{layer.name}' skips elements of '{x.name}' at its end")
            # ncnn puts the odd pad of the depth after it in both modes.
            before = total // 2 if mode == SAME_UPPER or axis == "d" else total - total // 2
            require(axis != "d" or mode == SAME_UPPER or not total % 2, f"'{layer.name}' pads the depth unevenly")
            after = total - before
        result.append(Window(axis, slide.kernel, slide.stride, slide.dilation, before, after, size))
    return tuple(result)


def weight_of(layer: Layer) -> Array:
    """Return the stored weights of a convolution, in any encoding, as (outputs, inputs of a group, kernel sizes)."""
    sizes = [int(layer[f"kernel_{axis}"]) for axis in axes_of(layer)]
    data, rows = layer.weights.stored("weight_data").data, int(layer["num_output"])
    require(data.size % (rows * prod(sizes)) == 0, f"the weights of '{layer.name}' do not divide into taps")
    return data.reshape(rows, -1, *sizes)


def weight_with_zeros(layer: Layer) -> tuple[Weight, Array]:
    """Return the block and `weight_of` it, in an encoding that can store a zero: a TABLE may lack it."""
    stored, weight = layer.weights.stored("weight_data"), weight_of(layer)
    if stored.encoding is not Encoding.TABLE:
        return stored, weight
    weight = layer.weights["weight_data"].reshape(weight.shape)
    return Weight(weight), weight


def reordered(weight: Weight, array: Array) -> Weight:
    """Return a weight with its stored numbers reordered or selected, in the same encoding."""
    return Weight(np.ascontiguousarray(array).reshape(-1), weight.encoding, weight.table, weight.tag)


def window_params(slides: Sequence[Slide]) -> dict[str, Any]:
    """Return the parameters of a convolution with these slides."""
    params: dict[str, Any] = {}
    for window in slides:
        axis, (before, after) = window.axis, SIDES[window.axis]
        params |= {f"kernel_{axis}": window.kernel, f"stride_{axis}": window.stride}
        params |= {f"dilation_{axis}": window.dilation, f"pad_{before}": window.before, f"pad_{after}": window.after}
    return params
