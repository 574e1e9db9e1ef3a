"""Call of an importer: a node's operands and attributes, converted to the types of the function's signature."""

import inspect
from typing import Any, get_args

import onnx_ir

from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.fold.cells import numbers, or_none
from onnx2ncnn_opt.onnx.lower.checks import Refusal
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.read.schema import allows_floats
from onnx2ncnn_opt.onnx.read.structure import attributes_of
from onnx2ncnn_opt.onnx.registry import Input, OnnxOp
from onnx2ncnn_opt.onnx.value import Constant, Ints, Item, Sizes, SymbolicTensor, Tensor, TensorSequence, is_float


def call(im: ImportContext, op: OnnxOp, node: onnx_ir.Node, operands: list[Item | None]) -> list[Item | None]:
    """Return the results of a node, one for each of its outputs; raise Refusal if ncnn cannot compute them."""
    arguments = _arguments(im, op, operands)
    attributes = attributes_of(node)
    for name in attributes:
        if name not in op.attributes:
            raise Refusal(f"attribute {name} is not known")
    for name, default in op.attributes.items():
        if default is inspect.Parameter.empty and name not in attributes:
            raise Refusal(f"attribute {name} is missing")
    for name, group in op.groups.items():
        attributes[name] = group(**{field: attributes.pop(field) for field in group._fields if field in attributes})
    result = op.function(im, *op.grouped(arguments), **attributes)
    results = list(result) if isinstance(result, tuple) else [result]
    count = len(node.outputs)
    missing = [node.outputs[i].name for i in range(len(results), count) if im.is_used(i)]
    if missing:
        raise Refusal(f"output {missing[-1]} is used, but ncnn cannot give it", "leave out what uses it with --outputs")
    return [*results, *[None] * count][:count]


def _arguments(im: ImportContext, op: OnnxOp, operands: list[Item | None]) -> list[Any]:
    count = len(op.inputs)
    if op.variadic is None and any(operand is not None for operand in operands[count:]):
        raise Refusal(f"it has {len(operands)} inputs, but takes {count}")
    further = [] if op.variadic is None else [Input("input", op.variadic, False)] * (len(operands) - count)
    pairs = zip((*op.inputs, *further), (*operands, *[None] * (count - len(operands))), strict=False)
    return [_argument(im, op, i, declared, operand) for i, (declared, operand) in enumerate(pairs)]


def _argument(im: ImportContext, op: OnnxOp, i: int, declared: Input, operand: Item | None) -> Any:
    if operand is None:
        if not declared.optional:
            raise Refusal(f"input {declared.name} is missing")
        return None
    if declared.type == Item:
        return operand
    if isinstance(operand, TensorSequence) or declared.type == TensorSequence:
        if declared.type != TensorSequence or not isinstance(operand, TensorSequence):
            article = "a" if isinstance(operand, TensorSequence) else "not a"
            raise Refusal(f"input {declared.name} is {article} sequence")
        return operand
    if operand.dtype.kind == "c":
        raise Refusal(f"input {declared.name} is {operand.dtype}: ncnn has real numbers only")
    if declared.type in (Array, Ints, Sizes, Constant):
        if isinstance(operand, Tensor):
            hint = "it is computed at run time; export the model with a fixed value for it"
            raise Refusal(f"input {declared.name} must be constant", im.value_hint(i, hint))
        is_allowed = declared.type == Sizes and allows_floats(op.domain, op.name, op.since, i)
        if declared.type in (Ints, Sizes) and operand.dtype.kind not in "iu" and not is_allowed:
            raise Refusal(f"input {declared.name} is {operand.dtype}, not of integers")
        return _constant_argument(declared, operand)
    if not isinstance(operand, Constant) and not op.integers and not is_float(operand.dtype):
        raise Refusal(f"input {declared.name} is {operand.dtype}: ncnn computes in floats only here")
    is_unexpected = isinstance(operand, SymbolicTensor) and SymbolicTensor not in get_args(declared.type)
    return im.tensor(operand) if declared.type == Tensor or is_unexpected else operand


def _constant_argument(declared: Input, operand: Constant | SymbolicTensor) -> Any:
    """Return an operand that is known now as the type that the signature declares."""
    elements = operand.array.reshape(-1) if isinstance(operand, Constant) else or_none(numbers, operand)
    if elements is None or (isinstance(operand, SymbolicTensor) and declared.type != Sizes):
        raise Refusal(f"input {declared.name} depends on a dynamic dimension", "bind it with --shape")
    if declared.type == Sizes:
        return tuple(size if isinstance(size, Sym) else int(size) for size in elements)
    if declared.type == Ints or isinstance(operand, SymbolicTensor):
        return tuple(map(int, elements))
    return operand if declared.type == Constant else operand.array
