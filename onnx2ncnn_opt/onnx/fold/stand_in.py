"""Shapes and types in place of a refused node's results: the importer goes on to the nodes after it.

One run then names everything that keeps a model from being converted. Only ONNX's own inference says what comes out;
where it knows less than every size, nothing stands in, and the nodes that read it are not asked.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx
import onnx_ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import helper, numpy_helper

from onnx2ncnn_opt.ir.dim import Dim, Shape, texts
from onnx2ncnn_opt.onnx.value import Constant, Item, Tensor, TensorSequence

_LARGEST_GIVEN = 4096  # elements of a constant that inference gets with its numbers; weights are told by their shapes

Inferred: TypeAlias = "tuple[Shape, np.dtype[np.generic]] | None"


def inferred_outputs(
    node: onnx_ir.Node, operands: Sequence[Item | None], opsets: Mapping[str, int]
) -> Sequence[Inferred]:
    """Shape and type of each output; None if they are not known, or may be those of a constant."""
    nothing: list[Inferred] = [None] * len(node.outputs)
    subgraphs = (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS)
    if node.domain or any(attribute.type in subgraphs for attribute in node.attributes.values()):
        return nothing
    given = [operand for operand in operands if operand is not None]
    if not any(isinstance(operand, Tensor) for operand in given) or not all(map(_typed, given)):
        return nothing
    proto = onnx_ir.serde.serialize_node(node)
    del proto.input[:], proto.output[:]
    proto.input.extend("" if operand is None else f"x{i}" for i, operand in enumerate(operands))
    proto.output.extend(f"y{i}" for i in range(len(node.outputs)))
    sizes: dict[str, Dim] = {}
    inputs, constants = [], []
    for i, operand in enumerate(operands):
        if operand is None or isinstance(operand, TensorSequence):
            continue
        sizes |= {str(size): size for size in operand.shape}
        dims = texts(operand.shape)
        element = helper.np_dtype_to_tensor_dtype(np.dtype(operand.dtype.type))
        inputs.append(helper.make_tensor_value_info(f"x{i}", element, dims))
        if isinstance(operand, Constant) and operand.array.size <= _LARGEST_GIVEN:
            constants.append(numpy_helper.from_array(operand.array, f"x{i}"))
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output]
    graph = helper.make_graph([proto], "g", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opsets.get("", 1))])
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError, DecodeError):
        return nothing
    return [_read(value.type.tensor_type, sizes) for value in inferred.graph.output]


def _typed(operand: Item) -> bool:
    return not isinstance(operand, TensorSequence) and operand.dtype.kind in "biuf"


def _read(tensor: onnx.TypeProto.Tensor, sizes: Mapping[str, Dim]) -> Inferred:
    if not tensor.HasField("shape") or not tensor.elem_type:
        return None
    shape = [sizes.get(dim.dim_param) if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if dtype.kind not in "biuf" or any(size is None or (isinstance(size, int) and size < 1) for size in shape):
        return None
    return tuple(size for size in shape if size is not None), dtype
