"""Groups of layer types that passes treat alike."""

from collections.abc import Iterable
from typing import NamedTuple


class Family(NamedTuple):
    """Types that ncnnoptimize treats as one: its `name` in ncnnoptimize's passes, and ncnn's `types`."""

    name: str
    types: tuple[str, ...]


_SLIDING = ("Convolution", "ConvolutionDepthWise", "Deconvolution", "DeconvolutionDepthWise")
_BY_TYPE = tuple(Family(type.lower(), (type, f"{type}1D", f"{type}3D")) for type in _SLIDING)
CONVOLUTIONS = _BY_TYPE[:2]
# Layers with weights per output channel and a fused activation.
WEIGHTED = (*_BY_TYPE, Family("innerproduct", ("InnerProduct",)))
# Layers into which a factor and an offset per channel can be folded.
FOLDING = (*WEIGHTED, Family("batchnorm", ("BatchNorm",)), Family("scale", ("Scale",)))


def types_of(families: Iterable[Family]) -> tuple[str, ...]:
    """Return all layer types of families."""
    return tuple(type for family in families for type in family.types)
