"""The axes, groups and pads of layers whose window slides: convolutions, deconvolutions and poolings."""

from onnx2ncnn_opt.ir.graph import Layer

# ncnn's names of the axes, outermost first, by the last letters of the layer's type.
_AXES = {"1D": "w", "3D": "dhw"}
# ncnn's names of the start and the end of an axis; Padding pads the channels of a 3-D blob.
SIDES = {"w": ("left", "right"), "h": ("top", "bottom"), "c": ("front", "behind"), "d": ("front", "behind")}


def axes_of(layer: Layer) -> str:
    """Return the axes that the layer slides over, by ncnn's names, outermost first."""
    return _AXES.get(layer.type[-2:], "hw")


def groups_of(layer: Layer) -> int:
    """Return the number of groups of a convolution or deconvolution."""
    return int(layer["group"]) if "DepthWise" in layer.type else 1


def pads_of(layer: Layer) -> list[int]:
    """Return the pads in a layer's parameters, which may be codes, outermost axis first."""
    return [int(layer[f"pad_{side}"]) for axis in axes_of(layer) for side in SIDES[axis]]
