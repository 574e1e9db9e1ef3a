"""Layer types that passes treat alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Family(NamedTuple):
    """Types that are one in ncnnoptimize: `name` as in the names of its passes, `types` of ncnn's registry."""

    name: str
    types: tuple[str, ...]


def _with_1d_and_3d(type: str) -> Family:
    return Family(type.lower(), (type, f"{type}1D", f"{type}3D"))


# Everything that has weights per output channel and a fused activation.
WEIGHTED = (
    _with_1d_and_3d("Convolution"),
    _with_1d_and_3d("ConvolutionDepthWise"),
    _with_1d_and_3d("Deconvolution"),
    _with_1d_and_3d("DeconvolutionDepthWise"),
    Family("innerproduct", ("InnerProduct",)),
)
# Everything that takes up a factor and an offset per channel.
FOLDING = (*WEIGHTED, Family("batchnorm", ("BatchNorm",)), Family("scale", ("Scale",)))


def types_of(families: Iterable[Family]) -> tuple[str, ...]:
    """Return all layer types of families."""
    return tuple(type for family in families for type in family.types)
