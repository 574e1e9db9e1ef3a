"""The names that a plug-in imports to define importers, passes and layers (docs/plugins.md)."""

from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.ir.codes import (
    Activation,
    BinaryOp,
    Direction,
    Eltwise,
    EpsMode,
    GemmC,
    Interp,
    Padding,
    PadMode,
    Pooling,
    Reduction,
    Sample,
    SamplePadding,
    UnaryOp,
)
from onnx2ncnn_opt.ir.custom import custom_layer
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.spec import CUSTOM, LayerSpec, Trait, WeightSpec, parse_params
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Item, Operand, Sizes, Tensor, TensorSequence, Value
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import (
    Replacement,
    attempt,
    fixed_shape,
    fixed_size,
    graph_pass,
    known_shape,
    require,
    rewrite,
)
from onnx2ncnn_opt.tail import registry as tail

__all__ = ["CUSTOM", "Activation", "Array", "BinaryOp", "Blob", "Constant", "Direction", "Eltwise", "EpsMode", "Error"]
__all__ += ["GemmC", "Graph", "ImportContext", "Interp", "Ints", "Item", "Layer", "LayerSpec", "Operand", "PadMode"]
__all__ += ["Padding", "Pooling", "Reduction", "Replacement", "Sample", "SamplePadding", "Sizes", "Tensor"]
__all__ += ["TensorSequence", "Trait", "UnaryOp", "Value", "WeightSpec", "attempt", "custom_layer", "fixed_shape"]
__all__ += ["fixed_size", "graph_pass", "known_shape", "onnx_op", "op", "parse_params", "require", "rewrite", "tail"]
