"""Results of nodes that are known at conversion, and need no layer: constants, and functions of dynamic sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import onnx_ir

from onnx2ncnn_opt.ir.dim import Dim, named, substituted
from onnx2ncnn_opt.onnx.fold import sizes
from onnx2ncnn_opt.onnx.fold.cells import Known, map_cells
from onnx2ncnn_opt.onnx.fold.evaluate import CannotFold, TooLarge, evaluate_node
from onnx2ncnn_opt.onnx.lower.checks import Refusal
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.memory_budget import MemoryBudget
from onnx2ncnn_opt.onnx.ops import folds
from onnx2ncnn_opt.onnx.read.structure import attributes_of
from onnx2ncnn_opt.onnx.value import Constant, NodeItems, Operand, SymbolicTensor

_DIVISORS = frozenset(range(1, 65))
_FRACTIONS = frozenset(n / 64 for n in range(1, 256))  # float32 computes them exactly times sizes up to 2**16


def folded(im: ImportContext, node: onnx_ir.Node, operands: NodeItems, budget: MemoryBudget) -> NodeItems | None:
    """Return the results of a node; None if its importer has to compute them."""
    if node.op_type in ("Shape", "Size") and not node.domain and isinstance(operands[0], Operand):
        shape, attributes = operands[0].shape, attributes_of(node)
        if node.op_type == "Size":
            return [sizes.size_of(shape)]
        return [sizes.shape_of(shape, attributes.get("start", 0), attributes.get("end"))]
    known = [x for x in operands if x is None or isinstance(x, (Constant, SymbolicTensor))]
    if len(known) < len(operands):
        return None
    if any(isinstance(x, SymbolicTensor) for x in known):
        result = _of_sizes(im, node, known)
        return None if result is None else [result]
    if not folds(node.domain, node.op_type, im.opset):
        return None
    arrays = [x.array if isinstance(x, Constant) else None for x in known]
    try:
        results = evaluate_node(node, arrays, im.opset)
    except TooLarge as error:
        raise Refusal(str(error), "export the model without it, or bind a smaller size with --shape") from None
    except CannotFold:
        return None
    budget.take(results)
    return [Constant(array) for array in results]


def _of_sizes(im: ImportContext, node: onnx_ir.Node, operands: Sequence[Known | None]) -> Known | None:
    if node.domain:
        return None
    result = sizes.evaluate(node.op_type, operands, attributes_of(node))
    if result is None and im.left(1):  # the sizes that demands leave may decide it
        operands_left = [x if x is None else _with_sizes(x, im.left(1)) for x in operands]
        result = sizes.evaluate(node.op_type, operands_left, attributes_of(node))
        result = None if result is None else _with_sizes(result, im.left(-1))
    if result is None and node.op_type == "Div":
        result = _quotient(im, *operands)
    if result is None and node.op_type in ("Mul", "Div"):
        result = _rounded(node, *operands)
    if isinstance(result, SymbolicTensor) and result.cells.dtype == object:
        cells = map_cells(lambda cell: im.within_limits(im.without_quotients(cell)), result.cells)
        return replace(result, cells=cells, shape=tuple(map(im.within_limits, result.shape)))
    return result


def _with_sizes(x: Known, values: Mapping[str, Dim]) -> Known:
    if isinstance(x, Constant):
        return x
    return replace(x, cells=map_cells(lambda cell: substituted(cell, values), x.cells), shape=named(x.shape, values))


def _rounded(node: onnx_ir.Node, a: Known | None, b: Known | None) -> Known | None:
    """Return a size times or by a number as all readers round it, if float32 computes that exactly; None for others."""
    is_product, rounding = node.op_type == "Mul", {"Floor" if kind == "Cast" else kind for kind in _roundings(node)}
    size, factor = (b, a) if is_product and isinstance(a, Constant) else (a, b)
    number = factor.scalar if isinstance(factor, Constant) else None
    if not isinstance(size, SymbolicTensor) or number is None or rounding not in ({"Floor"}, {"Ceil"}):
        return None
    if number not in (_FRACTIONS if is_product else _DIVISORS):
        return None
    times, parts = (Fraction(number) if is_product else 1 / Fraction(number)).as_integer_ratio()
    product = sizes.evaluate("Mul", [replace(size, dtype=np.dtype(np.int64)), Constant(np.array(times))], {})
    if rounding == {"Ceil"} and isinstance(product, SymbolicTensor):
        return replace(size, cells=map_cells(lambda cell: -(-cell // parts), product.cells))
    whole = sizes.evaluate("Div", [product, Constant(np.array(parts))], {})
    return replace(whole, dtype=size.dtype) if isinstance(whole, SymbolicTensor) else None


def _roundings(node: onnx_ir.Node) -> set[str]:
    """Return the operators that round a node's result, after Casts to floats and, but for Casts, whole summands."""
    roundings = {""} if node.outputs[0].is_graph_output() else set()
    for reader in node.outputs[0].consumers():
        target = onnx_ir.DataType(attributes_of(reader)["to"]) if reader.op_type == "Cast" else None
        added = reader.inputs[1].const_value if reader.op_type in ("Add", "Sub") and reader.inputs[1] else None
        if target is not None and target.is_floating_point():
            roundings |= _roundings(reader)
        elif added is not None and added.size == 1 and float(added.numpy().reshape(())).is_integer():
            roundings |= {kind.replace("Cast", "") for kind in _roundings(reader)}  # a Cast rounds a sum towards 0
        else:
            roundings.add("" if target is onnx_ir.DataType.BOOL else reader.op_type)
    return roundings


def _quotient(im: ImportContext, a: Known | None, b: Known | None) -> Known | None:
    """Return a // b, as ONNX divides sizes from 0 on; demand that they are. None for other operands."""
    cells = list(a.cells.flat) if isinstance(a, SymbolicTensor) and a.dtype.kind in "iu" else []
    if not cells or not all("#" not in str(cell) and im.try_demand(cell, 0) for cell in cells):
        return None
    rest = sizes.evaluate("Mod", [a, b], {})
    whole = sizes.evaluate("Sub", [a, rest], {}) if rest is not None else None
    return None if whole is None else sizes.evaluate("Div", [whole, b], {})
