"""ONNX's own type and shape inference for one node."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError, infer_node_outputs

from onnx2ncnn_opt.ir.dim import texts
from onnx2ncnn_opt.onnx.value import Constant, Item, TensorSequence

_MOST_VALUES = 4096  # elements of constants whose values inference gets; of larger ones (weights) it gets the shape


def inferred_types(
    node: onnx.NodeProto, opset: int, operands: Sequence[Item | None]
) -> list[onnx.TypeProto.Tensor | None]:
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
