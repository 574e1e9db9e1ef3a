"""Conversion of a graph that computes in float16 to one in float32, without roundings to 16 bits."""

import numpy as np
import onnx_ir
from onnx_ir import DataType
from onnx_ir.traversal import RecursiveGraphIterator

from onnx2ncnn_opt.onnx.edit.editor import Editor, forget_types
from onnx2ncnn_opt.onnx.edit.model import to_bytes

_TYPES = ("to", "dtype")  # attributes that name the type of a result


def computes_in_float16(graph: onnx_ir.Graph) -> bool:
    """Return True if a node computes in float16; a Cast of weights that are stored in float16 does not."""
    values = (*graph.inputs, *graph.initializers.values())
    users = [node for value in values if value.dtype is DataType.FLOAT16 for node, _ in value.uses()]
    results = (node.attributes.get_int("to", 0) for node in graph if node.op_type == "Cast")
    return any(node.op_type != "Cast" for node in users) or DataType.FLOAT16 in results


def wide_model(graph: onnx_ir.Graph) -> bytes:
    """Compute all float16 numbers of a graph in float32, and return its model; its inputs stay."""
    editor = Editor(graph)
    for value in graph.initializers.values():
        if value.dtype is DataType.FLOAT16 and value.const_value is not None:
            value.const_value = _widened(value.const_value)
            value.dtype = DataType.FLOAT
    for node in RecursiveGraphIterator(graph):
        for name, attribute in list(node.attributes.items()):
            if attribute.type is onnx_ir.AttributeType.TENSOR and attribute.value.dtype is DataType.FLOAT16:
                node.attributes[name] = onnx_ir.AttrTensor(name, _widened(attribute.value))
            elif name in _TYPES and attribute.value == DataType.FLOAT16:
                node.attributes[name] = onnx_ir.AttrInt64(name, int(DataType.FLOAT))
    for value in graph.inputs:
        if value.dtype is DataType.FLOAT16:
            uses = list(value.uses())
            wide = editor.node("Cast", value, to=DataType.FLOAT)
            for node, index in uses:
                node.replace_input_with(index, wide)
    forget_types(graph)
    for value in graph.outputs:
        if value.dtype is DataType.FLOAT16:
            value.dtype = DataType.FLOAT
    return to_bytes(graph)


def _widened(tensor: onnx_ir.TensorProtocol) -> onnx_ir.TensorProtocol:
    return onnx_ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)
