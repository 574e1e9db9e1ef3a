"""ONNX's own type and shape inference for one node."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx
import onnx_ir
from onnx import helper, numpy_helper
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError, infer_node_outputs

from onnx2ncnn_opt.ir.dim import Dim, Shape, texts
from onnx2ncnn_opt.onnx.value import Constant, NodeItems, Tensor, TensorSequence, held_as_float

Inferred: TypeAlias = "tuple[Shape, np.dtype[np.generic]] | None"

_MOST_VALUES = 4096  # elements of constants whose values inference gets; of larger ones (weights) it gets the shape


def inferred_types(node: onnx.NodeProto, opset: int, operands: NodeItems) -> list[onnx.TypeProto.Tensor | None]:
    """Return the type of each output; None if ONNX infers none."""
    types: dict[str, onnx.TypeProto] = {}
    numbers: dict[str, onnx.TensorProto] = {}
    try:
        for name, operand in zip(node.input, operands, strict=True):
            if operand is None or isinstance(operand, TensorSequence):
                continue
            element = helper.np_dtype_to_tensor_dtype(np.dtype(operand.dtype.type))
            types[name] = helper.make_tensor_type_proto(element, texts(operand.shape))
            if isinstance(operand, Constant) and operand.array.size <= _MOST_VALUES:
                numbers[name] = numpy_helper.from_array(operand.array, name)
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        if not schema.has_type_and_shape_inference_function:  # old versions of Compress and GreaterOrEqual
            schema = onnx.defs.get_schema(node.op_type)
        opsets = [helper.make_opsetid("", opset)]
        inferred = infer_node_outputs(schema, node, types, numbers, opset_imports=opsets, ir_version=10)
    except (onnx.defs.SchemaError, ValidationError, InferenceError, KeyError, ValueError, TypeError, RuntimeError):
        return [None] * len(node.output)  # the importer of the node reports the error
    return [inferred[name].tensor_type if name in inferred else None for name in node.output]


def inferred_outputs(node: onnx_ir.Node, operands: NodeItems, opsets: Mapping[str, int]) -> Sequence[Inferred]:
    """Return the shape and type of each output; None if they are unknown, or the output may be a constant.

    The importer continues after a refused node with tensors of these shapes, so one error lists all refused nodes.
    """
    unknown: list[Inferred] = [None] * len(node.outputs)
    subgraphs = (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS)
    if node.domain or any(attribute.type in subgraphs for attribute in node.attributes.values()):
        return unknown
    given = [operand for operand in operands if operand is not None]
    is_numeric = (not isinstance(operand, TensorSequence) and operand.dtype.kind in "biuf" for operand in given)
    if not any(isinstance(operand, Tensor) for operand in given) or not all(is_numeric):
        return unknown
    sizes = {str(size): size for operand in given if not isinstance(operand, TensorSequence) for size in operand.shape}
    try:
        types = inferred_types(onnx_ir.serde.serialize_node(node), opsets.get("", 1), operands)
    except onnx_ir.serde.SerdeError:  # an attribute without a type
        return unknown
    x, k = given[0], given[-1]
    if node.op_type == "TopK" and isinstance(x, Tensor) and isinstance(k, Constant) and types[0] is not None:
        shape = list(x.shape)  # ONNX infers none if the axis is of dynamic size
        shape[node.attributes.get_int("axis", -1)] = k.array.item()
        dtypes = x.dtype, held_as_float(np.dtype(np.int64))
        return [(tuple(shape), dtype) if k.array > 0 else None for dtype in dtypes]
    return [None if type is None else _read(type, sizes) for type in types]


def _read(tensor: onnx.TypeProto.Tensor, sizes: Mapping[str, Dim]) -> Inferred:
    if not tensor.HasField("shape") or not tensor.elem_type:
        return None
    shape = [sizes.get(dim.dim_param) if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if dtype.kind not in "biuf" or any(size is None or (isinstance(size, int) and size < 1) for size in shape):
        return None
    return tuple(size for size in shape if size is not None), held_as_float(dtype)
