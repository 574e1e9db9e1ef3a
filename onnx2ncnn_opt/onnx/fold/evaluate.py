"""Constant folding of one node, by the operator implementations of onnx.reference, or by numpy.

What exporters make of sizes takes a few operators, each of which is one numpy function (`_NUMPY`): importing
onnx.reference takes longer than a small model's conversion.

Only operators of the table below are evaluated: they are deterministic, have no subgraphs, and a bound of their result
is known before they run, so that a shape of a few bytes in a model cannot ask for all memory. They are held against
ONNX Runtime at every version in the tests; `since` is the first opset at which the implementation is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir

from onnx2ncnn_opt.ir.weight import Array

LIMIT = 256 * 2**20  # bytes of all results of a node
_WIDEST = 8  # bytes of the widest element

Inputs: TypeAlias = Sequence[Array | None]
_Bound: TypeAlias = Callable[
    [Sequence[Any], Mapping[str, Any]], int
]  # inputs and attributes -> elements of the results


class CannotFold(Exception):
    """The node was not evaluated; the message says why. No error of the model: the node just stays."""


class TooLarge(CannotFold):
    """The node makes more of its constants than may be made: no layer could either."""


@dataclass(frozen=True)
class _Operator:
    bound: _Bound
    since: int = 7


def can_fold(node: onnx_ir.Node) -> bool:
    """Whether a node of this operator may fold, if all its inputs are constant."""
    return node.domain == "" and (node.op_type in _OPERATORS or node.op_type == "Shape")


def evaluate_node(node: onnx_ir.Node, inputs: Inputs, opsets: Mapping[str, int], *, limit: int = LIMIT) -> list[Array]:
    """The results of a node with constant inputs (None for an input that is left out), at the model's opsets.

    Raises:
        TooLarge: its results may be larger than `limit` bytes, and larger than its inputs.
        CannotFold: the operator cannot be evaluated, its results may be larger than `limit` bytes, or it does not take
            these inputs or attributes.
    """
    opset = opsets.get("", 0)
    operator = _OPERATORS.get(node.op_type) if node.domain == "" else None
    if operator is None or opset < operator.since:
        raise CannotFold(f"{node.op_type} of domain '{node.domain or 'ai.onnx'}' is not folded at opset {opset}")
    try:
        proto, attributes = _with_defaults(node, opset)
        elements = operator.bound(inputs, attributes)
        if elements * _WIDEST > limit:
            reason = f"its result of up to {elements} elements is too large: {limit // _WIDEST} are the most to compute"
            grows = elements > sum(array.size for array in inputs if array is not None)
            raise (TooLarge if grows else CannotFold)(reason)
        with np.errstate(all="ignore"):
            plain = _with_numpy(node.op_type, inputs, attributes)
            if plain is not None:
                return [np.asarray(plain)]
            import onnx.reference.ops

            implementation = onnx.reference.ops.load_op("", node.op_type, opset)
            parameters = {"log": _ignore, "opsets": {"": opset}, "new_ops": None, "verbose": 0}
            results = implementation(proto, parameters).run(*_scalars(node, inputs))
    except _FAILURES as error:
        reason = " ".join(str(error).split())[:200]
        raise CannotFold(f"{node.op_type} cannot be evaluated: {reason}") from None
    if len(results) < len(node.outputs) or not all(isinstance(result, np.ndarray) for result in results):
        raise CannotFold(f"{node.op_type} gives no tensors for its {len(node.outputs)} outputs")
    return list(results[: len(node.outputs)])


def _with_numpy(operator: str, inputs: Inputs, attributes: Mapping[str, Any]) -> Any | None:
    """The result of an operator of `_NUMPY`; None where it is none, or where its inputs are not the usual ones."""
    function = _NUMPY.get(operator)
    given = [array for array in inputs if array is not None]
    if function is None or len(given) < len(inputs) or not all(array.dtype in _USUAL for array in given):
        return None
    if operator in _OF_ONE_TYPE and len({array.dtype for array in given}) > 1:
        return None
    return function(given, attributes)


def _axes(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[int, ...]:
    """The axes of Squeeze and Unsqueeze, which became an input."""
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


def _scalars(node: onnx_ir.Node, inputs: Inputs) -> list[Array | None]:
    """The inputs; the axis of CumSum is a scalar, for which torch and ONNX Runtime also take a vector of one."""
    if node.op_type != "CumSum":
        return list(inputs)
    x, axis = inputs
    return [x, None if axis is None else axis.reshape(())]


def _with_defaults(node: onnx_ir.Node, opset: int) -> tuple[onnx.NodeProto, dict[str, Any]]:
    """The node with its opset's defaults filled in (onnx.reference would take the newest ones), and all attributes."""
    proto = onnx_ir.serde.serialize_node(node)
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    given = {attribute.name for attribute in proto.attribute}
    if not given <= set(schema.attributes):
        raise CannotFold(f"{node.op_type} has no attribute '{min(given - set(schema.attributes))}' at opset {opset}")
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type != onnx.AttributeProto.UNDEFINED:
            proto.attribute.append(attribute.default_value)
    return proto, {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in proto.attribute}


# What onnx.reference and numpy raise on inputs and attributes that an operator does not take:
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


def _ignore(*_: object) -> None:
    """Take the operators' log."""


def _first(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return inputs[0].size


def _sum(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return sum(x.size for x in inputs)


def _broadcast(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return _broadcast_size(*(x.shape for x in inputs if x is not None))


def _broadcast_size(*shapes: Sequence[int]) -> int:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return math.prod(max(sizes) for sizes in zip(*padded, strict=True))


def _rank(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return inputs[0].ndim


def _one(_: Sequence[Any], __: Mapping[str, Any]) -> Any:
    return 1


def _sizes(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return math.prod(inputs[0].tolist())


def _expand(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return _broadcast_size(inputs[0].shape, inputs[1].tolist())


def _tile(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return inputs[0].size * math.prod(inputs[1].tolist())


def _range(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    start, stop, step = (x.item() for x in inputs)
    return max(0, math.ceil((stop - start) / step))


def _pad(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    pads = list(attributes["pads"]) if "pads" in attributes else inputs[1].tolist()
    data = inputs[0]
    axes = inputs[3].tolist() if len(inputs) > 3 and inputs[3] is not None else range(data.ndim)
    sizes = list(data.shape)
    for i, axis in enumerate(axes):
        sizes[axis] += max(0, pads[i]) + max(0, pads[i + len(pads) // 2])
    return math.prod(sizes)


def _gather(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    data, indices = inputs
    return indices.size * (data.size // max(1, data.shape[attributes["axis"]]))


def _gather_nd(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    data, indices = inputs
    picked = indices.shape[-1] + attributes.get("batch_dims", 0)
    return (indices.size // max(1, indices.shape[-1])) * math.prod(data.shape[picked:])


def _second(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return inputs[1].size


def _one_hot(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return inputs[0].size * inputs[1].item()


def _matmul(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    a, b = inputs
    return (
        _broadcast_size(a.shape[:-2], b.shape[:-2]) * math.prod(a.shape[-2:-1]) * math.prod(b.shape[-1:][b.ndim < 2 :])
    )


def _gemm(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    a, b = inputs[:2]
    return a.shape[1 if attributes["transA"] else 0] * b.shape[0 if attributes["transB"] else 1]


def _non_zero(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return inputs[0].size * max(1, inputs[0].ndim)


def _twice(inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return 2 * inputs[0].size


def _table(bound: _Bound, names: str, since: int = 7) -> dict[str, _Operator]:
    return dict.fromkeys(names.split(), _Operator(bound, since))


_OPERATORS: Mapping[str, _Operator] = {
    **_table(
        _broadcast,
        "Add And BitwiseAnd BitwiseOr BitwiseXor Clip Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min "
        "Mod Mul Or Pow PRelu Sub Sum Where Xor",
    ),
    **_table(
        _first,
        "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast CastLike Ceil Celu Cos Cosh CumSum DequantizeLinear "
        "Elu Erf Exp EyeLike Floor HardSigmoid Identity IsInf IsNaN LeakyRelu Log Neg Not "
        "QuantizeLinear Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh "
        "ThresholdedRelu "
        "ArgMax ArgMin Compress DepthToSpace Flatten ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax "
        "ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Reshape ScatterElements ScatterND "
        "Slice SpaceToDepth Split Squeeze Transpose Trilu Unsqueeze",
    ),
    **_table(_first, "Hardmax LogSoftmax Softmax", since=13),
    **_table(_twice, "TopK"),
    **_table(_sum, "Concat"),
    **_table(_sizes, "ConstantOfShape"),
    **_table(_expand, "Expand"),
    **_table(_gather, "Gather"),
    **_table(_second, "GatherElements"),
    **_table(_gather_nd, "GatherND"),
    **_table(_gemm, "Gemm"),
    **_table(_matmul, "MatMul"),
    **_table(_non_zero, "NonZero"),
    **_table(_one_hot, "OneHot"),
    **_table(_pad, "Pad"),
    **_table(_range, "Range"),
    **_table(_rank, "Shape"),
    **_table(_one, "Constant Size"),  # a Constant is no larger than the model
    **_table(_tile, "Tile"),
}

# Elements for which numpy does what ONNX says.
_USUAL_KINDS = tuple(getattr(onnx_ir.DataType, name) for name in ("FLOAT", "INT32", "INT64", "BOOL"))
_USUAL = tuple(kind.numpy() for kind in _USUAL_KINDS)
_OF_ONE_TYPE = (
    "Add",
    "Concat",
    "Div",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "Mul",
    "Range",
    "Sub",
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
