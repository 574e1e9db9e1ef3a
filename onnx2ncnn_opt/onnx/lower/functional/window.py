"""Common parts of convolutions and poolings: parameters per axis, pads, and ONNX's auto_pad."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from onnx2ncnn_opt.ir.codes import SAME_LOWER, SAME_UPPER
from onnx2ncnn_opt.ir.windows import SIDES
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.value import Ints, Tensor

# By number of spatial axes: their names, outermost first as in ONNX, and the suffix of ncnn's layer types.
AXES = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}
SUFFIX = {1: "1D", 2: "", 3: "3D"}


class ConvAttributes(NamedTuple):
    """The attributes of ONNX's convolutions; () means zeros or ones for each axis."""

    auto_pad: str = "NOTSET"
    dilations: Ints = ()
    group: int = 1
    kernel_shape: Ints = ()
    pads: Ints = ()
    strides: Ints = ()


class PoolAttributes(NamedTuple):
    """The attributes that ONNX's poolings share."""

    kernel_shape: Ints
    auto_pad: str = "NOTSET"
    ceil_mode: int = 0
    pads: Ints = ()
    strides: Ints = ()


Padded: TypeAlias = ConvAttributes | PoolAttributes


def spatial(name: str, values: Sequence[int]) -> dict[str, int]:
    """Return values per spatial axis as ncnn's parameters such as ``kernel_w``."""
    return {f"{name}_{axis}": int(value) for axis, value in zip(AXES[len(values)], values, strict=True)}


def window_params(kernel: Ints, strides: Ints, pads: Ints, dilations: Ints = ()) -> dict[str, Any]:
    """Return the parameters of a window that moves over a padded operand."""
    params = spatial("kernel", kernel) | spatial("stride", strides) | pad_params(pads)
    return params | spatial("dilation", dilations) if dilations else params


def pad_params(pads: Sequence[int]) -> dict[str, int]:
    """Return ONNX pads (all begins, then all ends) as ncnn's parameters."""
    names = [f"pad_{SIDES[axis][end]}" for end in (0, 1) for axis in AXES[len(pads) // 2]]
    return {name: int(pad) for name, pad in zip(names, pads, strict=True)}


def same_pads(
    im: ImportContext, x: Tensor, attrs: Padded, kernel: Ints, dilation: Ints, stride: Ints, *, explicit: bool = False
) -> Ints:
    """Return the pads that `auto_pad` stands for (ONNX Conv, opset 11).

    Unless they have to be `explicit`, they may all be ncnn's code for pads that depend on dynamic sizes.
    """
    n, shape, auto_pad, pads = len(kernel), x.shape[2:], attrs.auto_pad, attrs.pads
    if auto_pad in ("NOTSET", ""):
        if any(p < 0 for p in pads):
            raise im.refuse(f"pads {pads} are negative", "export it with a Slice before it")
        return tuple(pads) or (0,) * 2 * n
    if auto_pad == "VALID":
        return (0,) * 2 * n
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        raise im.invalid(f"auto_pad {auto_pad} is not known")
    totals = []
    reaches = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    depends = any(s != 1 and r and not isinstance(size, int) for size, r, s in zip(shape, reaches, stride, strict=True))
    # ncnn cannot pad where windows skip elements, and puts the odd pad of a depth after it.
    skips = any(r + 1 < s for r, s in zip(reaches, stride, strict=True))
    if depends and not (explicit or skips or (n == 3 and auto_pad == "SAME_LOWER")):
        return (SAME_UPPER if auto_pad == "SAME_UPPER" else SAME_LOWER,) * 2 * n
    for size, total, s in zip(shape, reaches, stride, strict=True):
        if s != 1 and total:
            [length] = im.fixed([size], f"auto_pad {auto_pad} depends on a dynamic dimension")
            total = max((-(-length // s) - 1) * s + total + 1 - length, 0)
        totals.append(total)
    return halves(totals, auto_pad)


def halves(totals: Sequence[int], auto_pad: str) -> Ints:
    """Return pads (all begins, then all ends) with these sums; SAME_UPPER makes the end pad of an odd sum larger."""
    begins = [(max(total, 0) + (auto_pad != "SAME_UPPER")) // 2 for total in totals]
    return (*begins, *(total - begin for total, begin in zip(totals, begins, strict=True)))
