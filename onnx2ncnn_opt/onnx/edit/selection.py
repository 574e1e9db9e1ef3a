"""An exported NonMaxSuppression whose rows fill a table of fixed size becomes `SelectRows`, which ncnn computes.

Exporters drop candidates by NonZero of a mask, take rows of the others at the chosen indices, and pad them with zeros.
With all candidates in the place of these choices, the same nodes compute a table of all rows:

    boxes[scores > conf] -> NonMaxSuppression -> rows[scores > conf][chosen][:most] -> Pad
    SelectRows(boxes, scores, rows; most, iou, conf)

To prove that, the nodes in between run with some candidates, and have to give these rows. They only move elements, or
treat them one by one, so how they depend on candidates does not depend on numbers.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser, shape_inference

from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.read.structure import OWN, ROWS

SELECTED = "nms"  # the change of a model, as --append names it
# Operators that move elements, or compute each from those at its place.
_PLAIN = frozenset({"Add", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Gather", "GatherND", "Max"})
_PLAIN |= {"Identity", "Min", "Mul", "Pad", "Reshape", "Shape", "Slice", "Split", "Squeeze", "Sub", "Transpose"}
_PLAIN |= {"Unsqueeze", "Where"}
_MOST_NUMBERS, _MOST_ROWS = 2**23, 2**20  # that candidates have, and of the table: a file may say any size
_OLDEST = 13  # the first opset in which Unsqueeze has its axes as an input
_FIRST_WITH_FUNCTIONS = 8  # of ONNX's formats
# Of onnx.reference.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError)
_CALL = """g (float boxes, float scores, float table) => (float padded) <
    int64[2] of_boxes = {{-1, 4}}, int64[2] of_scores = {{1, -1}}, int64[2] of_table = {{{count}, -1}},
    int64[{rank}] of_rows = {{{shape}}}, int64[1] most = {{{most}}},
    float[1] iou = {{{iou}}}, float[1] conf = {{{conf}}}
> {{
    box_rows = Reshape(boxes, of_boxes) corners = Transpose(box_rows) best_scores = Reshape(scores, of_scores)
    rows = Reshape(table, of_table) columns = Transpose(rows)
    candidates = Concat<axis = 0>(corners, best_scores, columns)
    best = onnx2ncnn_opt.SelectRows(candidates, most, iou, conf) padded = Reshape(best, of_rows)
}}"""
_BODY = """g (float candidates) => (float best) <
    int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4}, int64[1] five = {5},
    int64[1] end = {1000000}
> {
    score_row = Slice(candidates, four, five, zero) score = Unsqueeze(score_row, zero)
    turned = Transpose(candidates) box_columns = Slice(turned, zero, four, one) box = Unsqueeze(box_columns, zero)
    indices = NonMaxSuppression(box, score, most, iou, conf) index = Gather<axis = 1>(indices, two)
    all_rows = Slice(turned, five, end, one) found = GatherND(all_rows, index)
    sizes = Shape(index) count = Gather(sizes, zero) missing = Sub(most, count)
    pads = Concat<axis = 0>(zero, zero, missing, zero) best = Pad(found, pads)
}"""


def select_in_net(model: onnx.ModelProto) -> bool:
    """Put SelectRows in the place of the model's NonMaxSuppression; return False if its rows mean something else."""
    nodes, choices = list(model.graph.node), [x for x in model.graph.node if x.op_type == "NonMaxSuppression"]
    pads = [node for node in _after(nodes, choices[0].output) if node.op_type == "Pad"] if len(choices) == 1 else []
    filters = (
        [x for x in _before(nodes, [*choices[0].input, *pads[0].output]) if x.op_type == "NonZero"] if pads else []
    )
    makers = [node for node in nodes if {node.input[0] for node in filters} & {*node.output}]
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    if [node.op_type for node in makers] != ["Greater"] or len(pads) != 1 or opset < _OLDEST:
        return False
    positions = [node.output[0] for node in filters]
    try:
        return _Choice(model, choices[0], pads[0], makers[0], positions).replaced()
    except _FAILURES:
        return False


@dataclass
class _Choice:
    """The nodes of a model that choose rows: `positions` are those of the scores `above` a limit."""

    model: onnx.ModelProto
    nms: onnx.NodeProto
    pad: onnx.NodeProto
    above: onnx.NodeProto
    positions: list[str]

    def __post_init__(self) -> None:
        graph, nodes = self.model.graph, list(self.model.graph.node)
        self.ends = [*self.nms.input[:2], self.pad.output[0]]
        chosen = {*self.positions, self.nms.output[0]}
        changing = {node.output[0] for node in _after(nodes, chosen)} - chosen
        self.inner = [node for node in _before(nodes, self.ends) if node.output[0] in changing]
        made = {value for node in self.inner for value in node.output}
        read = {x for node in nodes if node.output[0] in changing - made for x in node.input}
        # Other nodes may read values that are the same for all choices.
        self.ends += sorted((read | {value.name for value in graph.output}) & made - {*self.ends})
        of_inputs = {node.output[0] for node in _after(nodes, [value.name for value in graph.input])}
        fixed = [node for node in nodes if node.output[0] not in of_inputs and node.op_type != "Constant"]
        self.fixed = _before(fixed, [value for node in self.inner for value in node.input])
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        tensors |= {node.output[0]: node.attribute[0].t for node in nodes if node.op_type == "Constant"}
        read = {value for node in (self.above, self.nms, *self.fixed, *self.inner) for value in node.input}
        self.constants = {name: numpy_helper.to_array(tensors[name]) for name in sorted(read & tensors.keys())}
        inferred = shape_inference.infer_shapes(self.model, data_prop=True).graph
        types = {value.name: value.type.tensor_type for value in (*inferred.value_info, *graph.input)}
        made |= {value for node in self.fixed for value in node.output} | {*self.constants, *chosen, ""}
        shapes = {
            x: [d.dim_value for d in types[x].shape.dim] for node in self.inner for x in node.input if x not in made
        }
        if sum(map(math.prod, shapes.values())) > _MOST_NUMBERS:
            raise ValueError("the model says that its candidates have more numbers than a detector's")
        draw, kinds = np.random.default_rng(0), {x: types[x].elem_type for x in shapes}
        numbers = {x: 1 + 3 * draw.random(shape) for x, shape in shapes.items()}  # as they move only, any will do
        self.feeds = {x: a.astype(helper.tensor_dtype_to_np_dtype(kinds[x])) for x, a in numbers.items()}
        self.count = types[self.above.output[0]].shape.dim[0].dim_value

    def run(self, kept: Array, chosen: Array, outputs: Sequence[str]) -> list[Array]:
        """Return values if these candidates pass the limit, and NonMaxSuppression chooses some of them."""
        from onnx.reference import ReferenceEvaluator  # its import takes longer than converting a small model

        triples = np.stack([np.zeros_like(chosen), np.zeros_like(chosen), chosen], 1)
        feeds = {**self.feeds, **dict.fromkeys(self.positions, kept[None]), self.nms.output[0]: triples}
        ports = [[helper.make_empty_tensor_value_info(x) for x in dict.fromkeys(names)] for names in (feeds, outputs)]
        tensors = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(_before([*self.fixed, *self.inner], outputs), "rows", ports[0], ports[1], tensors)
        model = helper.make_model(graph, opset_imports=self.model.opset_import)
        return list(ReferenceEvaluator(model).run([*outputs], feeds))

    def most(self) -> int:
        """Return the number of rows, and let all rows pass; 0 if the rows mean something else."""
        count, every, draw = self.count, np.arange(self.count), np.random.default_rng(0)
        if np.sum(self.run(every, every[:0], [self.pad.input[1]])) > _MOST_ROWS:
            return 0
        padded, size = self.run(every, every[:0], self.ends)[2], 0
        slices = [node for node in _after(self.inner, self.nms.output) if node.op_type == "Slice"]
        limits = []
        for node in slices:
            before, after = self.run(every, every, [node.input[0], node.output[0]])
            if len(before) == count and 0 < len(after) < count and np.array_equal(before[: len(after)], after):
                limits.append(node)
                size = len(after)
        numbers = [(n, m) for n in (count, count // 2, 1) for m in {0, 1, size, size + 1, n} if m <= n]
        cases = [(np.sort(draw.choice(count, n, replace=False)), draw.permutation(n)[:m]) for n, m in numbers]
        known = [self.run(*case, self.ends) for case in cases]
        for node in limits:
            node.op_type = "Identity"
            del node.input[1:]
        for node in [node for node in self.inner if node.op_type == "Concat"]:  # models with errors need no empty rows
            parts = zip(node.input, self.run(every, every, node.input), strict=True)
            node.input[:] = [name for name, part in parts if part.size] or node.input[:1]
        boxes, scores, table, *others = self.run(every, every, [*self.ends[:2], self.pad.input[0], *self.ends[3:]])
        compared = self.feeds.get(self.above.input[0], np.zeros(0))
        if boxes.shape != (1, count, 4) or not np.array_equal(scores, compared.reshape(1, 1, -1)) or table.size % count:
            return 0
        table, right = table.reshape(count, -1), np.zeros((padded.size // (table.size // count), table.size // count))
        for (kept, chosen), (own_boxes, own_scores, own_rows, *own_others) in zip(cases, known, strict=True):
            rows = np.concatenate([table[kept[chosen]][: len(right)], right[len(chosen) :]])
            pairs = (own_boxes, boxes[:, kept]), (own_scores, scores[:, :, kept]), (own_rows.ravel(), rows.ravel())
            if not all(np.array_equal(*pair) for pair in (*pairs, *zip(own_others, others, strict=True))):
                return 0
        self.shape = padded.shape
        return len(right)

    def replaced(self) -> bool:
        """Replace the nodes, if these are such rows; return whether they are."""
        is_plain = all(not node.domain and node.op_type in _PLAIN for node in self.inner)
        if not is_plain or not 2 <= self.count <= _MOST_NUMBERS:
            return False
        limit, iou, own = map(self.number, (self.nms.input[2:], self.nms.input[3:], self.nms.input[4:]), (0, 0, -1e30))
        conf, most = self.number(self.above.input[1:], np.nan), self.most()
        if any(a.i for a in self.nms.attribute) or not 0 < most <= limit or np.isnan([iou, own, conf]).any():
            return False
        graph, names = self.model.graph, dict(zip(("boxes", "scores", "padded"), self.ends, strict=False))
        names["table"], prefix = self.pad.input[0], free_name(graph, ROWS)
        shape, fixed = ", ".join(map(str, self.shape)), {"count": self.count, "most": most, "rank": len(self.shape)}
        call = named_nodes(_CALL.format(**fixed, iou=iou, conf=max(conf, own), shape=shape), names, prefix)
        every = np.arange(self.count)
        arrays = {
            **dict.fromkeys(self.positions, every[None]),
            self.nms.output[0]: every[:, None] * np.array([0, 0, 1]),
        }
        nodes = [x for x in graph.node if x.output[0] not in arrays]
        at = [node.output[0] for node in nodes].index(self.pad.output[0])
        del graph.node[:]
        graph.node.extend([*nodes[:at], *call.node, *nodes[at + 1 :]])
        graph.initializer.extend((*call.initializer, *(numpy_helper.from_array(a, x) for x, a in arrays.items())))
        names = {name: names[name] for name in ("candidates", "most", "iou", "conf", "best")}
        body = named_nodes(_BODY, dict(names), prefix)
        constants = [helper.make_node("Constant", [], [x.name], value=x) for x in body.initializer]
        *inputs, output = names.values()
        add_function(self.model, ROWS, inputs, output, [*constants, *body.node])
        graph.output.append(helper.make_tensor_value_info(inputs[0], TensorProto.FLOAT, None))  # to compare it
        return True

    def number(self, names: Sequence[str], default: float) -> float:
        """Return the first constant; NaN if it is another value."""
        name = names[0] if names else ""
        return float(self.constants[name].item()) if name in self.constants else np.nan if name else default


def named_nodes(text: str, names: dict[str, str], prefix: str) -> onnx.GraphProto:
    """Return the nodes of a text; its values get these names, and others begin with a prefix."""
    graph = parser.parse_graph(text)
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.setdefault(value, f"{prefix}/{value}") for value in side]
        node.name = node.output[0]
    for constant in graph.initializer:
        constant.name = names.setdefault(constant.name, f"{prefix}/{constant.name}")
    return graph


def free_name(graph: onnx.GraphProto, name: str) -> str:
    """Return a name, changed if a value of the graph has it before "/"."""
    values = (*graph.input, *graph.output, *graph.initializer)
    taken = (*(value.name for value in values), *(output for node in graph.node for output in node.output))
    return NamePool(each.partition("/")[0] for each in taken).take(name)


def add_function(
    model: onnx.ModelProto, name: str, inputs: Sequence[str], output: str, nodes: Sequence[onnx.NodeProto]
) -> None:
    """Add a function of ours to a model; its values have the names of a call."""
    opsets = [entry for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    model.functions.append(helper.make_function(OWN, name, inputs, [output], nodes, opsets))
    model.opset_import.append(helper.make_opsetid(OWN, 1))
    model.ir_version = max(model.ir_version, _FIRST_WITH_FUNCTIONS)


def _after(nodes: Sequence[onnx.NodeProto], values: Collection[str]) -> list[onnx.NodeProto]:
    """Return the nodes that depend on values."""
    reached = {*values}
    found = []
    for node in nodes:
        if not reached.isdisjoint(node.input):
            reached.update(node.output)
            found.append(node)
    return found


def _before(nodes: Sequence[onnx.NodeProto], values: Collection[str]) -> list[onnx.NodeProto]:
    """Return the nodes that compute values."""
    needed = {*values} - {""}
    found = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed.update(filter(None, node.input))
            found.append(node)
    return found[::-1]
