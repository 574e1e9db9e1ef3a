"""Assignments of a number to masked elements, ``x[mask] = 0``, as Where.

Exporters write the positions of the elements, how many they are, the number as often, and a scatter.
"""

import onnx_ir

from onnx2ncnn_opt.onnx.read.structure import attributes_of, before, strip


def choose_by_masks(graph: onnx_ir.Graph) -> None:
    """Turn each scatter of one number to all elements that a mask chooses into Where."""
    for node in [node for node in graph if node.op_type == "ScatterND"]:
        data, positions, updates = node.inputs
        rows = _made(positions, "Transpose")
        found = rows and _made(rows.inputs[0], "NonZero")
        number = updates and before(updates, ("Expand", "Reshape"))
        is_number = number and number.const_value and number.const_value.size == 1
        if found and is_number and attributes_of(node).get("reduction", "none") == "none":
            mask = _covering(found.inputs[0], data)
            if mask is not None:
                node.op_type = "Where"
                node.attributes.clear()
                for index, operand in enumerate((mask, number, data)):
                    node.replace_input_with(index, operand)
    strip(graph)


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
