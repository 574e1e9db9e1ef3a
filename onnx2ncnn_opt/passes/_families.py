"""Groups of layer types that passes treat alike, by the names of ncnnoptimize, which treats each group as one type."""

from collections.abc import Mapping
from itertools import chain


def _of_any_rank(*types: str) -> dict[str, tuple[str, ...]]:
    return {type.lower(): (type, f"{type}1D", f"{type}3D") for type in types}


CONVOLUTIONS = _of_any_rank("Convolution", "ConvolutionDepthWise")
DECONVOLUTIONS = _of_any_rank("Deconvolution", "DeconvolutionDepthWise")
# Layers with weights per output channel and a fused activation.
WEIGHTED = {**CONVOLUTIONS, **DECONVOLUTIONS, "innerproduct": ("InnerProduct",)}
# Layers into which a factor and an offset per channel can be folded.
FOLDING = {**WEIGHTED, "batchnorm": ("BatchNorm",), "scale": ("Scale",)}


def types_of(families: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return all layer types of families."""
    return tuple(chain.from_iterable(families.values()))
