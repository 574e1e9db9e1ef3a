"""Results of nodes that are known at conversion, and need no layer: constants, and functions of dynamic sizes."""

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir

from onnx2ncnn_opt.onnx.fold import sizes
from onnx2ncnn_opt.onnx.fold.cells import Known, map_cells
from onnx2ncnn_opt.onnx.fold.evaluate import CannotFold, TooLarge, evaluate_node
from onnx2ncnn_opt.onnx.lower.checks import Refusal
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.memory_budget import MemoryBudget
from onnx2ncnn_opt.onnx.ops import folds
from onnx2ncnn_opt.onnx.read.structure import attributes_of
from onnx2ncnn_opt.onnx.value import Constant, NodeItems, Operand, SymbolicTensor


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
    if result is None and node.op_type == "Div":
        result = _quotient(im, *operands)
    if isinstance(result, SymbolicTensor) and result.cells.dtype == object:
        return replace(result, cells=map_cells(im.without_quotients, result.cells))
    return result


def _quotient(im: ImportContext, a: Known | None, b: Known | None) -> Known | None:
    """Return a // b, as ONNX divides sizes from 0 on; demand that they are. None for other operands."""
    cells = list(a.cells.flat) if isinstance(a, SymbolicTensor) and a.dtype.kind in "iu" else []
    if not cells or not all("#" not in str(cell) and im.try_demand(cell, 0) for cell in cells):
        return None
    rest = sizes.evaluate("Mod", [a, b], {})
    whole = sizes.evaluate("Sub", [a, rest], {}) if rest is not None else None
    return None if whole is None else sizes.evaluate("Div", [whole, b], {})
