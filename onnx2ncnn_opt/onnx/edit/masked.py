"""Assignments to masked elements, ``x[mask] = 0`` and ``x[mask] = f(x[mask])``, as Where.

Exporters write the positions of the elements, how many they are, the number as often or a function of the elements that
GatherND takes there, and a scatter. TorchScript's exporter writes no types of values whose sizes are dynamic, and cuts
the new elements to the number of the positions. ``x[torch.where(mask)]`` takes the positions apart, and joins their
columns again. `x.masked_scatter(mask, y)` takes the first elements of y, as many as there are positions.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir

from onnx2ncnn_opt.onnx.edit.model import model_of
from onnx2ncnn_opt.onnx.read.structure import attributes_of, before, quiet, strip

_Mask = tuple[onnx_ir.Value, int]  # a mask of x, and how many axes of x at the end it lacks: then it chooses rows
_LAST = ([1], [-1])  # the axis of columns in rows of positions


def choose_by_masks(graph: onnx_ir.Graph, is_elementwise: Callable[[onnx_ir.Node], bool]) -> None:
    """Turn each scatter to all elements that a mask chooses into Where, if new elements depend only on their places."""
    scatters = [node for node in graph if node.op_type == "ScatterND"]
    if scatters and any(node.op_type == "NonZero" and None in (x and x.dtype for x in node.inputs) for node in graph):
        from onnx_ir.passes.common import ShapeInferencePass  # slow to import, and few models need it

        with quiet():
            ShapeInferencePass(strict_mode=False)(model_of(graph))
    for node in scatters:
        data, positions, updates = node.inputs
        mask = _mask(positions, data)
        if mask is None or attributes_of(node).get("reduction", "none") != "none":
            continue
        new = _for_all(_uncut(updates), mask, node, is_elementwise)
        cut = _made(updates, "Slice")
        row = _made(cut.inputs[0], "Reshape") if cut and _numbers(cut)[0] == 0 else None
        if new is None and data and row and _numbers(row) == [-1] and mask[1] == 0:
            new = _in_order(graph, node, mask[0], data, row.outputs[0])
        if new is not None:
            node.op_type = "Where"
            node.attributes.clear()
            for index, operand in enumerate((_with_axes(graph, node, *mask), new, data)):
                node.replace_input_with(index, operand)
    strip(graph)


def _uncut(updates: onnx_ir.Value | None) -> onnx_ir.Value | None:
    """Return the row that a Slice cuts to the number of the positions: it has as many elements, which stay in order."""
    cut = _made(updates, "Slice")
    row = before(cut.inputs[0], ("Reshape",)) if cut and len(cut.inputs) < 5 and cut.inputs[0] else None
    return row if row is not None and row.shape is not None and len(row.shape) == 1 else updates


def _for_all(
    value: onnx_ir.Value | None,
    mask: _Mask,
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
        return made.inputs[0] if _mask(made.inputs[1], made.inputs[0]) == mask else None
    operands = [_for_all(x, mask, scatter, is_elementwise) for x in made.inputs] if is_elementwise(made) else [None]
    if None in operands:
        return None
    copy = onnx_ir.Node(made.domain, made.op_type, operands, made.attributes.values())
    copy.outputs[0].name = f"{value.name}_for_{scatter.outputs[0].name}"
    scatter.prepend(copy)
    return copy.outputs[0]


def _in_order(
    graph: onnx_ir.Graph, scatter: onnx_ir.Node, mask: onnx_ir.Value, x: onnx_ir.Value, row: onnx_ir.Value
) -> onnx_ir.Value:
    """Return for each element of x that a mask chooses the next one of a row, as torch's masked_scatter."""
    names = (f"{scatter.outputs[0].name}_of_mask_{number}" for number in itertools.count())

    def made(kind: str, *operands: onnx_ir.Value | Sequence[int] | int, **attributes: int) -> onnx_ir.Value:
        node = onnx_ir.node(kind, [x if isinstance(x, onnx_ir.Value) else constant(x) for x in operands], attributes)
        node.outputs[0].name = next(names)
        scatter.prepend(node)
        return node.outputs[0]

    def constant(numbers: Sequence[int] | int) -> onnx_ir.Value:
        value = onnx_ir.val(next(names), const_value=onnx_ir.tensor(np.array(numbers, np.int64)))
        graph.register_initializer(value)
        return value

    axes, columns = [*(mask.shape or ())], [*(x.shape or ())]
    size = places = made("Shape", x)
    if len(axes) == len(columns) and axes[-1:] == [1] and isinstance(columns[-1], int):  # it chooses rows of x
        places, columns = made("Concat", made("Slice", size, [0], [-1]), [1], axis=0), columns[-1:]
    else:
        columns = [1]
    chosen = made("Cast", made("Reshape", made("Expand", mask, places), [-1]), to=onnx_ir.DataType.INT64)
    index = made("Sub", made("CumSum", chosen, 0), 1)
    return made("Reshape", made("Gather", made("Reshape", row, [-1, *columns]), index), size)


def _with_axes(graph: onnx_ir.Graph, scatter: onnx_ir.Node, mask: onnx_ir.Value, count: int) -> onnx_ir.Value:
    """Return a mask with axes of size 1 at the end."""
    if not count:
        return mask
    name = f"{mask.name}_for_{scatter.outputs[0].name}"
    sizes = np.array([0] * len(mask.shape or ()) + [1] * count)  # 0 leaves an axis as it is
    shape = onnx_ir.val(f"{name}_shape", const_value=onnx_ir.tensor(sizes))
    graph.register_initializer(shape)
    reshape = onnx_ir.Node("", "Reshape", (mask, shape))
    reshape.outputs[0].name = name
    scatter.prepend(reshape)
    return reshape.outputs[0]


def _mask(positions: onnx_ir.Value | None, x: onnx_ir.Value | None) -> _Mask | None:
    """Return the mask of x whose true elements are at the positions; None for others."""
    joined, columns = _made(positions, "Concat"), [positions]
    if joined and [attributes_of(joined).get("axis")] in _LAST:
        columns = [_column(value, index) for index, value in enumerate(joined.inputs)]
    rows = _made(columns[0], "Transpose") if len(set(columns)) == 1 else None
    found = rows and _made(rows.inputs[0], "NonZero")
    mask = found.inputs[0] if found else None
    is_whole = mask is not None and (not joined or (mask.shape is not None and len(mask.shape) == len(columns)))
    return _covering(mask, x) if is_whole else None


def _column(value: onnx_ir.Value | None, index: int) -> onnx_ir.Value | None:
    """Return the positions of which a value is the column `index`; None for others."""
    for kind in ("Unsqueeze", "Expand", "Squeeze"):  # torch joins rows of numbers
        view = _made(value, kind)
        if view and kind == "Unsqueeze" and attributes_of(view).get("axes", _numbers(view)) not in _LAST:
            return None
        value = view.inputs[0] if view else value
    split, cut = _made(value, "Split"), _made(value, "Slice")
    if split and value is not None and value.index() == index and [attributes_of(split).get("axis")] in _LAST:
        return split.inputs[0]
    return cut.inputs[0] if cut and _numbers(cut)[:3] == [index, index + 1, 1] else None


def _numbers(node: onnx_ir.Node) -> list[int | None]:
    """Return the operands of one constant number each, without the first operand; None for others."""
    constants = [value.const_value if value is not None else None for value in node.inputs[1:]]
    return [each.numpy().item() if each is not None and each.size == 1 else None for each in constants]


def _made(value: onnx_ir.Value | None, kind: str) -> onnx_ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == kind else None


def _covering(mask: onnx_ir.Value | None, x: onnx_ir.Value | None) -> _Mask | None:
    """Return a mask that certainly has the shape of x, before its expansion, or its first sizes; None for others."""
    if mask is None or x is None or mask.dtype is not onnx_ir.DataType.BOOL:
        return None
    expand = _made(mask, "Expand")
    before_expand = expand.inputs[0] if expand else mask
    shape = _made(expand.inputs[1], "Shape") if expand else None
    if before_expand is not None and shape and shape.inputs[0] is x and attributes_of(shape) in ({}, {"start": 0}):
        return before_expand, 0
    if x.shape is None or mask.shape is None or not all(isinstance(size, int) or size.value for size in x.shape):
        return None
    lacks = len(x.shape) - len(mask.shape)
    is_first = lacks >= 0 and [*mask.shape] == [*x.shape][: len(mask.shape)]
    return (mask if lacks or before_expand is None else before_expand, lacks) if is_first else None
