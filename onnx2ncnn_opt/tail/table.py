"""A tail whose NonMaxSuppression chooses rows of a table, so that the net can choose them itself.

Exporters drop candidates by NonZero of a mask, take rows of the others at the chosen indices, and pad them with zeros,
each in another spelling. With all candidates in the place of these choices, the same nodes compute a table of all rows:

    boxes[scores > conf] -> NonMaxSuppression -> rows[scores > conf][chosen][:most] -> Pad

To prove that, the nodes run with some candidates, and have to give these rows. They only move elements, or treat each
row alone, so how they depend on candidates does not depend on numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.tail.program import Node, Port, Program

# Operators that move numbers, or pick one of each row; and all that are here between candidates and rows.
EXACT = frozenset({"ArgMax", "Cast", "Concat", "Flatten", "Gather", "Greater", "Identity", "ReduceMax", "Reshape"})
EXACT |= {"Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
_NODES = EXACT | {"Add", "ConstantOfShape", "Div", "Equal", "Expand", "GatherND", "Max", "Min", "Mul", "Pad", "Shape"}
_NODES |= {"NonMaxSuppression", "NonZero", "ScatterElements", "ScatterND", "Sub", "Where"}
_MOST = 2**23  # numbers of candidates, and of padding: a file may say any size


class Table(NamedTuple):
    """The table from which NonMaxSuppression chooses `most` rows, and the shape of the result with rows of zeros.

    `read` are boxes, scores and the value before padding. With the values in `fixed` they are those of all candidates.
    """

    program: Program
    read: Sequence[str]
    fixed: Mapping[str, Array]
    iou: float
    conf: float
    most: int
    shape: tuple[int, ...]

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Return boxes, scores and rows of all candidates."""
        boxes, scores, *rows = _run(self.program, feeds, self.fixed, self.read)
        return [boxes[0], scores[0], *(each.reshape(len(boxes[0]), -1) for each in rows)]


def table_of(program: Program) -> Table:
    """Return the table from which a tail chooses rows, or, without a shape, the boxes of `--append nms:`.

    Raises ValueError, KeyError or RunError if the tail's rows mean something else.
    """
    nodes = {kind: [node for node in program.nodes if node.operator == kind] for kind in _NODES}
    [nms], filters, draw = nodes["NonMaxSuppression"], nodes["NonZero"], np.random.default_rng(0)
    allowed, iou, *limit = (program.constants[name].item() for name in nms.inputs[2:])
    if not filters:
        return Table(program, nms.inputs[:2], {}, iou, limit[0], allowed, ())
    [pad], [above], [output] = nodes["Pad"], nodes["Greater"], [port.name for port in program.outputs]
    is_other = any(nms.attributes.values()) or {*above.outputs} != {name for node in filters for name in node.inputs}
    shapes = [[int(size or 0) for size in port.shape] for port in program.inputs]
    if is_other or sum(map(len, nodes.values())) < len(program.nodes) or sum(map(prod, shapes)) > _MOST:
        raise ValueError("other nodes than those of a table, or too many candidates")
    # As numbers only move, any will do.
    feeds = {x.name: (1 + 3 * draw.random(n)).astype(x.dtype) for x, n in zip(program.inputs, shapes, strict=True)}
    [compared] = _run(program, feeds, {}, above.inputs[:1])
    count, every = compared.size, np.arange(compared.size)

    def fixed(kept: Array, chosen: Array) -> dict[str, Array]:
        """Return the values that choose, if these candidates pass the limit, and NonMaxSuppression chooses of them."""
        triples = np.stack([0 * chosen, 0 * chosen, chosen], 1)
        return {**{node.outputs[0]: kept[None] for node in filters}, nms.outputs[0]: triples}

    nothing, everything = fixed(every, every[:0]), fixed(every, every)
    if np.sum(_run(program, feeds, nothing, pad.inputs[1:2])) > _MOST:
        raise ValueError("too many rows")
    for node in nodes["Slice"]:  # of the chosen indices, to the best ones
        before, best = _run(program, feeds, everything, [node.inputs[0], node.outputs[0]])
        if np.array_equal(before, every) and 0 < len(best) < count and np.array_equal(best, every[: len(best)]):
            everything[node.outputs[0]] = every
    conf = max([program.constants[above.inputs[1]].item(), *limit])
    shape = _run(program, feeds, nothing, [output])[0].shape
    table = Table(program, (*nms.inputs[:2], pad.inputs[0]), everything, iou, conf, 0, shape)
    boxes, scores, rows = table.run(feeds)
    most = prod(shape) // rows.shape[1]
    if boxes.shape != (count, 4) or not np.array_equal(scores[0], compared.ravel()) or not 0 < most <= allowed:
        raise ValueError("other boxes, scores or rows")
    for n, m in ((i, j) for i in (count, count // 2, 1) for j in {0, 1, most, most + 1, i} if j <= i):
        kept, chosen = np.sort(draw.choice(count, n, replace=False)), draw.permutation(n)[:m]
        results = _run(program, feeds, fixed(kept, chosen), [*nms.inputs[:2], output])
        best = rows[kept[chosen]][:most]
        padded = np.pad(best, ((0, most - len(best)), (0, 0))).reshape(shape)
        if not all(map(np.array_equal, results, (boxes[None, kept], scores[None, :, kept], padded))):
            raise ValueError("the rows are not those of the table")
    return table._replace(most=most)


def _run(program: Program, feeds: Mapping[str, Array], fixed: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
    """Return values by name if others are `fixed`."""
    needed, nodes = {*names}, list[Node]()
    for node in reversed(program.nodes):
        if not needed.isdisjoint(node.outputs) and node.outputs[0] not in fixed:
            nodes.insert(0, node)
            needed.update(node.inputs)
    ports, constants = tuple(Port(name, "", ()) for name in names), {**program.constants, **fixed}
    results = replace(program, nodes=tuple(nodes), constants=constants, outputs=ports).run(feeds)
    return [results[name] for name in names]
