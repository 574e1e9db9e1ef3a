"""Constant folding of one node, by the operator implementations of onnx.reference, or by numpy.

Arithmetic on sizes takes a few operators, and each is one numpy function (`_NUMPY`): importing
onnx.reference takes longer than a small model's conversion.

Only operators with a bound of their result (`bounds.py`) are evaluated: otherwise a shape of a few bytes in a model
cannot ask for all memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir

from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.bounds import Bound

LIMIT = 2**30  # bytes of all results of a node; the first Gemm of VGG has 0.8 GB so
_WIDEST = 8  # bytes of the widest element

Inputs: TypeAlias = Sequence[Array | None]


class CannotFold(Exception):
    """The node was not evaluated; the message says why. No error of the model: the node just stays."""


class TooLarge(CannotFold):
    """The node makes more of its constants than may be made: no layer could either."""


def evaluate_node(
    node: onnx_ir.Node, inputs: Inputs, opset: int, bound: Bound | None, *, limit: int = LIMIT
) -> list[Array]:
    """Return the results of a node with constant inputs (None for an input that is left out), at the model's opset.

    `bound` is None for an operator that does not fold.

    Raises:
        TooLarge: its results may be larger than `limit` bytes, and larger than its inputs.
        CannotFold: the operator cannot be evaluated, its results may be larger than `limit` bytes, or it does not take
            these inputs or attributes.
    """
    if bound is None:
        raise CannotFold(f"{node.op_type} of domain '{node.domain or 'ai.onnx'}' is not folded at opset {opset}")
    try:
        proto, attributes = _with_defaults(node, opset)
        elements = bound(inputs, attributes)
        if elements * _WIDEST > limit:
            reason = f"its result of up to {elements} elements is too large: {limit // _WIDEST} are the most to compute"
            grows = elements > sum(array.size for array in inputs if array is not None)
            raise (TooLarge if grows else CannotFold)(reason)
        if node.op_type == "ReduceMean" and inputs[0].size == 0:  # type: ignore[union-attr]
            raise CannotFold("ReduceMean has no result for an empty tensor")  # numpy warns
        with np.errstate(all="ignore"):
            plain = _with_numpy(node.op_type, inputs, attributes)
            if plain is not None:
                return [np.asarray(plain)]
            import onnx.reference.ops

            implementation = onnx.reference.ops.load_op("", node.op_type, opset)
            parameters = {"log": lambda *_: None, "opsets": {"": opset}, "new_ops": None, "verbose": 0}
            if node.op_type == "CumSum":  # its axis is a scalar, for which torch and ONNX Runtime take a vector of one
                inputs = (inputs[0], *(axis.reshape(()) for axis in inputs[1:] if axis is not None))
            results = implementation(proto, parameters).run(*inputs)
    except _FAILURES as error:
        reason = " ".join(str(error).split())[:200]
        raise CannotFold(f"{node.op_type} cannot be evaluated: {reason}") from None
    if len(results) < len(node.outputs) or not all(isinstance(result, np.ndarray) for result in results):
        raise CannotFold(f"{node.op_type} gives no tensors for its {len(node.outputs)} outputs")
    return list(results[: len(node.outputs)])


def _with_numpy(operator: str, inputs: Inputs, attributes: Mapping[str, Any]) -> Any | None:
    """Return the result of an operator of `_NUMPY`; None for other operators, or if its inputs are unusual."""
    given = [array for array in inputs if array is not None]
    types = {array.dtype for array in given}
    if operator not in _NUMPY or len(given) < len(inputs) or not types <= {*_USUAL}:
        return None
    if operator in _OF_ONE_TYPE and len(types) > 1:
        return None
    return _NUMPY[operator](given, attributes)


def _axes(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the axes of Squeeze and Unsqueeze, which became an input."""
    return tuple(inputs[1].tolist() if len(inputs) > 1 else attributes["axes"])


def _quotient(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any | None:
    a, b = inputs
    return a // b if a.dtype.kind == "i" and (a >= 0).all() and (b > 0).all() else None


def _cast(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any | None:
    kind = onnx_ir.DataType(attributes["to"])
    is_usual = kind in _USUAL_KINDS and (inputs[0].dtype.kind != "f" or kind == onnx_ir.DataType.FLOAT)
    return inputs[0].astype(kind.numpy()) if is_usual else None


def _filling(attributes: Mapping[str, Any]) -> Any:
    value = attributes.get("value")
    return np.float32(0) if value is None else onnx.numpy_helper.to_array(value).reshape(())


def _gather_elements(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any | None:
    data, indices = inputs
    axis = attributes["axis"] % data.ndim
    others = [np.delete(array.shape, axis).tolist() for array in inputs if array.ndim == data.ndim]
    return np.take_along_axis(data, indices, axis) if others[0] == others[-1] and len(others) == 2 else None


def _slice(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any | None:
    if len(inputs) < 4:
        return None
    x, starts, ends, axes = inputs[:4]
    steps = inputs[4] if len(inputs) > 4 else np.ones_like(starts)
    parts = [slice(None)] * x.ndim
    for axis, *part in zip(*(array.tolist() for array in (axes, starts, ends, steps)), strict=True):
        parts[axis] = slice(*part)
    return x[tuple(parts)]


def _with_defaults(node: onnx_ir.Node, opset: int) -> tuple[onnx.NodeProto, dict[str, Any]]:
    """Return the node with its opset's defaults (onnx.reference would take the newest ones), and all attributes."""
    proto = onnx_ir.serde.serialize_node(node)
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    given = {attribute.name for attribute in proto.attribute}
    if not given <= set(schema.attributes):
        raise CannotFold(f"{node.op_type} has no attribute '{min(given - set(schema.attributes))}' at opset {opset}")
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type != onnx.AttributeProto.UNDEFINED:
            proto.attribute.append(attribute.default_value)
    return proto, {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in proto.attribute}


# Errors of onnx.reference and numpy for inputs and attributes that an operator does not take:
_FAILURES = (
    onnx.defs.SchemaError,  # the opset has no such operator
    TypeError,  # wrong dtype or number of inputs; op_run turns AttributeError inside an operator into it
    AttributeError,  # attribute of a kind that the constructor does not expect
    ValueError,  # shapes that do not fit, numpy's AxisError
    IndexError,  # indices and axes out of range
    KeyError,  # element types without a numpy one
    ArithmeticError,  # division by zero, sizes beyond int64
    RuntimeError,  # RuntimeTypeError, RuntimeContextError, NotImplementedError: modes that are not implemented
    AssertionError,  # checks within the operators
    MemoryError,  # numpy refuses sizes beyond the address space
)


# Elements for which numpy computes as ONNX specifies.
_USUAL_KINDS = tuple(getattr(onnx_ir.DataType, name) for name in ("FLOAT", "INT32", "INT64", "BOOL"))
_USUAL = tuple(kind.numpy() for kind in _USUAL_KINDS)
_OF_ONE_TYPE = (
    *("Add", "Concat", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mul", "Range", "Sub"),
)
_NUMPY: Mapping[str, Callable[[Sequence[Any], Mapping[str, Any]], Any]] = {
    "Add": lambda x, a: np.add(*x),
    "And": lambda x, a: np.logical_and(*x),
    "Cast": _cast,
    "Concat": lambda x, a: np.concatenate(x, a["axis"]),
    "ConstantOfShape": lambda x, a: np.full(x[0], _filling(a)),
    "Div": _quotient,
    "Equal": lambda x, a: np.equal(*x),
    "Expand": lambda x, a: np.broadcast_to(x[0], np.broadcast_shapes(x[0].shape, tuple(x[1]))).copy(),
    "Gather": lambda x, a: np.take(x[0], x[1], a["axis"]),
    "GatherElements": _gather_elements,
    "Greater": lambda x, a: np.greater(*x),
    "GreaterOrEqual": lambda x, a: np.greater_equal(*x),
    "Less": lambda x, a: np.less(*x),
    "LessOrEqual": lambda x, a: np.less_equal(*x),
    "Mul": lambda x, a: np.multiply(*x),
    "Not": lambda x, a: np.logical_not(x[0]),
    "Range": lambda x, a: np.arange(*(n.item() for n in x), dtype=x[0].dtype) if x[0].dtype.kind == "i" else None,
    "Reshape": lambda x, a: x[0].reshape(x[1]) if len(x) > 1 and (x[1] != 0).all() else None,
    "Slice": _slice,
    "Sqrt": lambda x, a: np.sqrt(x[0]),
    "Squeeze": lambda x, a: np.squeeze(x[0], _axes(x, a)) if len(x) > 1 or "axes" in a else None,
    "Sub": lambda x, a: np.subtract(*x),
    "Transpose": lambda x, a: np.transpose(x[0], a.get("perm")),
    "Unsqueeze": lambda x, a: np.expand_dims(x[0], _axes(x, a)),
    "Where": lambda x, a: np.where(*x) if x[1].dtype == x[2].dtype else None,
}
