"""Assignments to masked elements, ``x[mask] = 0`` and ``x[mask] = f(x[mask])``, as Where.

Exporters write the positions of the elements, how many they are, the number as often or a function of the elements that
GatherND takes there, and a scatter. TorchScript's exporter writes no types of values whose sizes are dynamic, and cuts
the new elements to the number of the positions.
"""

from collections.abc import Callable

import onnx_ir

from onnx2ncnn_opt.onnx.read.structure import attributes_of, before, quiet, strip

_IR_VERSION = 10


def choose_by_masks(graph: onnx_ir.Graph, is_elementwise: Callable[[onnx_ir.Node], bool]) -> None:
    """Turn each scatter to all elements that a mask chooses into Where, if new elements depend only on their places."""
    scatters = [node for node in graph if node.op_type == "ScatterND"]
    if scatters and any(node.op_type == "NonZero" and None in (x and x.dtype for x in node.inputs) for node in graph):
        from onnx_ir.passes.common import ShapeInferencePass  # slow to import, and few models need it

        with quiet():
            ShapeInferencePass(strict_mode=False)(onnx_ir.Model(graph, ir_version=_IR_VERSION))
    for node in scatters:
        data, positions, updates = node.inputs
        mask = _mask(positions, data)
        is_plain = mask is not None and attributes_of(node).get("reduction", "none") == "none"
        new = _for_all(_uncut(updates), mask, node, is_elementwise) if is_plain else None
        if new is not None:
            node.op_type = "Where"
            node.attributes.clear()
            for index, operand in enumerate((mask, new, data)):
                node.replace_input_with(index, operand)
    strip(graph)


def _uncut(updates: onnx_ir.Value | None) -> onnx_ir.Value | None:
    """Return the row that a Slice cuts to the number of the positions: it has as many elements, which stay in order."""
    cut = _made(updates, "Slice")
    row = before(cut.inputs[0], ("Reshape",)) if cut and len(cut.inputs) < 5 and cut.inputs[0] else None
    return row if row is not None and row.shape is not None and len(row.shape) == 1 else updates


def _for_all(
    value: onnx_ir.Value | None,
    mask: onnx_ir.Value | None,
    scatter: onnx_ir.Node,
    is_elementwise: Callable[[onnx_ir.Node], bool],
) -> onnx_ir.Value | None:
    """Return a value for all elements instead of those that the mask chooses; None if that is not known."""
    if value is None:
        return None
    value = before(value, ("Expand", "Reshape"))  # it has an element for each position
    made = value.producer()
    if made is None:
        return value if value.const_value is not None and value.const_value.size == 1 else None
    if made.op_type == "GatherND":
        return made.inputs[0] if _mask(made.inputs[1], made.inputs[0]) is mask else None
    operands = [_for_all(x, mask, scatter, is_elementwise) for x in made.inputs] if is_elementwise(made) else [None]
    if None in operands:
        return None
    copy = onnx_ir.Node(made.domain, made.op_type, operands, made.attributes.values())
    copy.outputs[0].name = f"{value.name}_for_{scatter.outputs[0].name}"
    scatter.prepend(copy)
    return copy.outputs[0]


def _mask(positions: onnx_ir.Value | None, x: onnx_ir.Value | None) -> onnx_ir.Value | None:
    """Return the mask of x whose true elements are at the positions; None for others."""
    rows = _made(positions, "Transpose")
    found = rows and _made(rows.inputs[0], "NonZero")
    return _covering(found.inputs[0], x) if found else None


def _made(value: onnx_ir.Value | None, kind: str) -> onnx_ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == kind else None


def _covering(mask: onnx_ir.Value | None, x: onnx_ir.Value | None) -> onnx_ir.Value | None:
    """Return a mask that certainly has the shape of x, before its expansion; None for others."""
    if mask is None or x is None or mask.dtype is not onnx_ir.DataType.BOOL:
        return None
    expand = _made(mask, "Expand")
    shape = expand and _made(expand.inputs[1], "Shape")
    is_expanded = shape and shape.inputs[0] is x and attributes_of(shape) in ({}, {"start": 0})
    is_known = x.shape is not None and all(isinstance(size, int) or size.value for size in x.shape)
    if is_expanded or (is_known and mask.shape == x.shape):
        return expand.inputs[0] if expand else mask
    return None
