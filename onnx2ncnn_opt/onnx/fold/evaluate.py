"""Constant folding of one node with the operators of onnx.reference, or of a tail.

Importing onnx.reference takes longer than converting a small model. So the operators that arithmetic on sizes needs
(`_EXACT`) come from the tail.

ONNX infers the size of the results first, because a shape of a few bytes could request all memory.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir
from onnx import TensorProto, numpy_helper

import onnx2ncnn_opt.tail.operators  # noqa: F401
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.inferred import inferred_types
from onnx2ncnn_opt.onnx.value import Constant
from onnx2ncnn_opt.tail.registry import TAIL_OPS

LIMIT = 2**30  # bytes of all results of a node; the weight of VGG's first Gemm counts 0.8 GB
_WIDEST = 8  # bytes of the widest element

Inputs: TypeAlias = Sequence[Array | None]


class CannotFold(Exception):
    """Raised if a node was not evaluated; the message gives the reason. This is not an error: the node stays."""


class TooLarge(CannotFold):
    """Raised if the node's results exceed the limit and its inputs: no layer could compute them either."""


def evaluate_node(node: onnx_ir.Node, inputs: Inputs, opset: int, *, limit: int = LIMIT) -> list[Array]:
    """Return the results of a node with constant inputs (None for an absent input), at the model's opset.

    Raises:
        TooLarge: its results may be larger than `limit` bytes, and larger than its inputs.
        CannotFold: the operator cannot be evaluated, its results may be larger than `limit` bytes, or it does not take
            these inputs or attributes.
    """
    try:
        proto, attributes = _with_defaults(node, opset)
        elements = _most_elements(proto, opset, inputs)
        if elements * _WIDEST > limit:
            reason = f"its result of up to {elements} elements is too large: {limit // _WIDEST} are the most to compute"
            grows = elements > sum(array.size for array in inputs if array is not None)
            raise (TooLarge if grows else CannotFold)(reason)
        if node.op_type == "ReduceMean" and inputs[0].size == 0:  # type: ignore[union-attr]
            raise CannotFold("ReduceMean has no result for an empty tensor")  # numpy warns
        with np.errstate(all="ignore"):
            plain = _as_in_tail(node.op_type, inputs, attributes)
            if plain is not None:
                return plain
            import onnx.reference.ops

            implementation = onnx.reference.ops.load_op("", node.op_type, opset)
            parameters = {"log": lambda *_: None, "opsets": {"": opset}, "new_ops": None, "verbose": 0}
            if node.op_type == "CumSum":  # its axis is a scalar; torch and ONNX Runtime also accept a vector of one
                inputs = (inputs[0], *(axis.reshape(()) for axis in inputs[1:] if axis is not None))
            results = implementation(proto, parameters).run(*inputs)
    except _FAILURES as error:
        reason = " ".join(str(error).split())[:200]
        raise CannotFold(f"{node.op_type} cannot be evaluated: {reason}") from None
    if len(results) < len(node.outputs) or not all(isinstance(result, np.ndarray) for result in results):
        raise CannotFold(f"{node.op_type} gives no tensors for its {len(node.outputs)} outputs")
    return list(results[: len(node.outputs)])


def _most_elements(node: onnx.NodeProto, opset: int, inputs: Inputs) -> int:
    """Return an upper bound of the number of elements of all results.

    ONNX cannot infer how many elements NonZero and Compress choose: at most all of the first input.
    """
    if not inputs:
        return 0  # a Constant is in the model already, however large
    if node.op_type == "Range":  # ONNX casts the quotient to 64 bits; if it does not fit, each CPU gives another number
        start, limit, step = (array.item() for array in inputs if array is not None)
        return max(0, int(-((start - limit) // step)))
    unknown = 0 if inputs[0] is None else inputs[0].size
    total = 0
    for type in inferred_types(node, opset, [None if array is None else Constant(array) for array in inputs]):
        if type is None or not type.HasField("shape"):
            raise CannotFold(f"{node.op_type} has no known result for these inputs")
        total += math.prod(dim.dim_value if dim.HasField("dim_value") else unknown for dim in type.shape.dim)
    return total


def _as_in_tail(operator: str, inputs: Inputs, attributes: Mapping[str, Any]) -> list[Array] | None:
    """Return the results of an operator of `_EXACT`; None for others, or if a tail lacks its types or attributes."""
    if operator not in _EXACT:
        return None
    op, options = TAIL_OPS[operator], dict(attributes)
    older = [options.pop(item.name) for item in op.inputs[len(inputs) :] if item.name in options]  # inputs later
    inputs = [*inputs, *(numpy_helper.to_array(x) if isinstance(x, TensorProto) else np.array(x) for x in older)]
    types = [None if array is None else array.dtype.name for array in inputs]
    if operator == "Cast":
        options["to"] = onnx_ir.DataType(options["to"]).numpy().name
    is_plain = {*types, options.get("to")} <= {*_TYPES, None} or operator == "Slice"  # onnx.reference clamps as Python
    if not is_plain or not options.keys() <= op.attributes.keys():
        return None
    if operator == "Range" and types[0] == "float32":  # a tail adds up the steps, as ONNX Runtime does
        return None
    try:
        op.types(types, options, 1)
    except ValueError:
        return None
    return op.run(inputs, options)


def _with_defaults(node: onnx_ir.Node, opset: int) -> tuple[onnx.NodeProto, dict[str, Any]]:
    """Return the node with its opset's defaults (onnx.reference uses the newest ones), and all attributes."""
    proto = onnx_ir.serde.serialize_node(node)
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    given = {attribute.name for attribute in proto.attribute}
    if not given <= set(schema.attributes):
        raise CannotFold(f"{node.op_type} has no attribute '{min(given - set(schema.attributes))}' at opset {opset}")
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type != onnx.AttributeProto.UNDEFINED:
            proto.attribute.append(attribute.default_value)
    return proto, {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in proto.attribute}


# Errors of onnx.reference and numpy for invalid inputs and attributes:
_FAILURES = (
    onnx.defs.SchemaError,  # the opset has no such operator
    TypeError,  # wrong dtype or number of inputs; op_run turns AttributeError inside an operator into it
    AttributeError,  # attribute of another kind than the constructor expects
    ValueError,  # incompatible shapes, numpy's AxisError
    IndexError,  # indices and axes out of range
    KeyError,  # element types without a numpy one
    ArithmeticError,  # division by zero, sizes beyond int64
    RuntimeError,  # RuntimeTypeError, RuntimeContextError, NotImplementedError: modes that are not implemented
    AssertionError,  # checks within the operators
    MemoryError,  # numpy refuses sizes beyond the address space
)


_TYPES = ("float32", "int32", "int64", "bool")
# Operators of which a tail and onnx.reference compute the same bits.
_EXACT = frozenset(
    (
        *("Add", "And", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Gather", "GatherElements"),
        *("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mul", "Not", "Range", "Reshape", "Slice", "Sqrt"),
        *("Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"),
    )
)
