"""Layer types that passes treat alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Family(NamedTuple):
    """Types that are one in ncnnoptimize: `name` as in the names of its passes, `types` of ncnn's registry."""

    name: str
    types: tuple[str, ...]


_BY_AXES = ("Convolution", "ConvolutionDepthWise", "Deconvolution", "DeconvolutionDepthWise")
CONVOLUTIONS, DEPTHWISE, *DECONVOLUTIONS = (Family(t.lower(), (t, f"{t}1D", f"{t}3D")) for t in _BY_AXES)
# Everything that has weights per output channel and a fused activation.
WEIGHTED = (CONVOLUTIONS, DEPTHWISE, *DECONVOLUTIONS, Family("innerproduct", ("InnerProduct",)))
# Everything that takes up a factor and an offset per channel.
FOLDING = (*WEIGHTED, Family("batchnorm", ("BatchNorm",)), Family("scale", ("Scale",)))


def types_of(families: Iterable[Family]) -> tuple[str, ...]:
    """Return all layer types of families."""
    return tuple(type for family in families for type in family.types)
