"""Groups of layer types that passes treat alike."""


def _of_any_rank(*types: str) -> tuple[str, ...]:
    return tuple(f"{type}{rank}" for type in types for rank in ("", "1D", "3D"))


DEPTHWISE = _of_any_rank("ConvolutionDepthWise")
CONVOLUTIONS = (*_of_any_rank("Convolution"), *DEPTHWISE)
# Layers with weights per output channel and a fused activation.
WEIGHTED = (*CONVOLUTIONS, *_of_any_rank("Deconvolution", "DeconvolutionDepthWise"), "InnerProduct")
# Layers into which a factor and an offset per channel can be folded.
FOLDING = (*WEIGHTED, "BatchNorm", "Scale")
