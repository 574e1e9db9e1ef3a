"""The split of a model into a net and a tail: the nodes after the net, which index, sort, compare and calculate.

The tail contains all nodes that ncnn cannot express, or only with many layers, and all nodes that depend on them.
Further nodes move to the tail if that reduces the numbers that cross from the net to the tail: a minimum cut. Views
such as Reshape cost a layer in the net and nothing in the tail. So they move even if the count stays equal.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import onnx_ir

from onnx2ncnn_opt.errors import ModelError, Unsupported, UnsupportedError, lines_by_reason
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, named, names_in, product
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.view import MAX_DIMS
from onnx2ncnn_opt.onnx.cut.extract import Sizes, Tail, extract_tail, label
from onnx2ncnn_opt.onnx.cut.minimum_cut import Network
from onnx2ncnn_opt.onnx.cut.refusals import Refusals
from onnx2ncnn_opt.onnx.read.binding import InputInfo
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.read.structure import names_of, nodes_of, read_values
from onnx2ncnn_opt.onnx.value import Constant, Item, SymbolicTensor, Tensor
from onnx2ncnn_opt.tail.reader import read_tail
from onnx2ncnn_opt.tail.registry import ALL, TAIL_OPS

# A node that sorts or picks is cheaper in the tail if it becomes more layers than this. So are nodes that pick by the
# same indices if together they become more than twice as many.
MANY_LAYERS = 16
INDICES = frozenset({"ArgMax", "ArgMin", "TopK"})
PICKS = frozenset({"ArgMax", "ArgMin", "Gather", "GatherElements", "GatherND", "TopK"})
_USUAL_SIZE = 256  # of dynamic dimensions, for the count of numbers
_COST_OF_BLOB = 2**13  # numbers that cost as much as an additional blob
_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze"})
_MOST_SIZES = 64  # elements of a tensor that depends only on dynamic dimensions
_SOURCE, _SINK = "net", "tail"


def split(
    model: LoadedModel, refusals: Refusals, values: Mapping[str, Item | None], error: Callable[[], UnsupportedError]
) -> Tail:
    """Return the tail of a model; the model's graph does not change.

    `values` are those that the import computed, and `error` returns its error. Raises this error if a refused node, or
    a node that depends on it, is not a tail operator.
    """
    parts = _TailCandidates(model, values)
    needed = {*refusals.nodes, *parts.before_lost(refusals.lost)}
    if not needed <= parts.movable:
        raise parts.with_obstacle(error(), needed)
    nodes = sorted(parts.tail_of(needed) if needed else (), key=parts.order.__getitem__)
    read = parts.read_by(nodes)
    others = parts.others(nodes, read)
    problem = ""
    if nodes and (others or any(isinstance(item, Tensor) for item in read.values())):  # the net is not empty
        tail = extract_tail(model, nodes, read, others, tuple(parts.reasons(needed, refusals.unsupported)))
        try:
            read_tail(tail.data)
        except ModelError as damaged:  # an attribute or a type that tails lack
            problem = str(damaged)
        else:
            sizes = (size for shape in tail.shapes.values() for size in shape if isinstance(size, int))
            if (largest := max(sizes, default=0)) < 2**31:
                return tail
            problem = f"an output of {largest} elements along an axis is too large for a tail"
    whole = error()
    raise UnsupportedError(whole.nodes, "\n".join(filter(None, (whole.advice, problem))), *whole.cuts)


class Readers:
    """The readers of each node of a graph, and the nodes that a tail may contain, `movable`.

    Nodes for which `is_known` is true are ignored.
    """

    def __init__(self, graph: onnx_ir.Graph, is_known: Callable[[onnx_ir.Node], bool]) -> None:
        outer = {inner: node for node in graph if node.attributes for inner in nodes_of(node)}
        self.of: dict[onnx_ir.Node, list[onnx_ir.Node]] = {}
        self.movable: set[onnx_ir.Node] = set()
        for node in reversed(graph):
            if is_known(node):
                continue
            users = {outer.get(user, user) for value in node.outputs for user, _ in value.uses()}
            self.of[node] = [user for user in users if user in self.of]
            if _obstacle(node) is None and self.movable.issuperset(self.of[node]):
                self.movable.add(node)

    def after(self, nodes: Iterable[onnx_ir.Node]) -> set[onnx_ir.Node]:
        """Return these nodes and all nodes that depend on them."""
        return set(reached(nodes, lambda node: self.of.get(node, ())))


class _TailCandidates:
    """The nodes of a model that a tail may contain, `movable`, and the values between them."""

    def __init__(self, model: LoadedModel, values: Mapping[str, Item | None]) -> None:
        self._model, self._values = model, values
        self._inputs = {info.name: info for info in model.inputs}
        sizes = [size for info in model.inputs for size in info.shape if isinstance(size, Sym)]
        self._names = {name for size in sizes for name in size.names()}
        self.order = {node: number for number, node in enumerate(model.graph)}
        self._readers = Readers(model.graph, lambda node: all(map(self._is_known, node.outputs)))
        self.movable = self._readers.movable

    def _reads(self, node: onnx_ir.Node) -> list[onnx_ir.Value]:
        """Return the values that a node reads, without those inside of its subgraphs."""
        return [value for value in dict.fromkeys(read_values(node)) if value.graph is self._model.graph]

    def _is_known(self, value: onnx_ir.Value) -> bool:
        """Return True for a constant, and for a value that depends only on dynamic dimensions of the model's inputs."""
        item = self._values.get(value.name or "")
        return self._is_constant(value) or (isinstance(item, SymbolicTensor) and self._cells(item) is not None)

    def _cells(self, item: SymbolicTensor) -> list[Dim] | None:
        """Return the integers of a short tensor in terms of dynamic dimensions; None for other tensors."""
        count = product(item.shape)
        if item.rank > 1 or count != item.cells.size or item.cells.size > _MOST_SIZES or item.dtype.kind != "i":
            return None
        cells = [cell if isinstance(cell, Sym) else int(cell) for cell in item.cells.reshape(-1)]
        return cells if all(cell.names() <= self._names for cell in cells if isinstance(cell, Sym)) else None

    def before_lost(self, lost: Collection[str]) -> Iterator[onnx_ir.Node]:
        """Yield the nodes that compute a lost output, or read a lost input."""
        for value in (*self._model.graph.inputs, *self._model.graph.outputs):
            node = value.producer()
            if value.name in lost:
                yield from (user for user, _ in value.uses()) if node is None else [node]

    def with_obstacle(self, error: UnsupportedError, needed: Iterable[onnx_ir.Node]) -> UnsupportedError:
        """Return the error of the import, with the node that prevents a tail, and two nets if they are possible."""
        place, after, outputs = self.order.__getitem__, self._readers.after, self._model.graph.outputs
        nodes = sorted(needed, key=place)
        users = ((node, user, _obstacle(user)) for node in nodes for user in sorted(after([node]), key=place))
        obstacles = [(node, user, inner) for node, user, inner in users if inner is not None and inner is not node]
        if not obstacles:
            return error
        node, user, inner = obstacles[0]
        names = f"{node.op_type} '{label(node)}'", f"{inner.op_type} '{label(inner)}'"
        inside = "is in a branch of" if user is node else "depends on"
        problem = f"{names[0]} can follow a net, but {names[1]} {inside} it and needs a net again"
        second = after(user for _, user, _ in obstacles)
        if not all(node in self.movable if node in second else _obstacle(node) is None for node in nodes):
            return UnsupportedError(error.nodes, problem, *error.cuts)
        read = dict.fromkeys(x for node in self._model.graph if node in second for x in self._reads(node))
        inputs = [x for x in read if x.producer() not in second and not self._is_constant(x)]
        first = dict.fromkeys(x for x in (*inputs, *outputs) if x.producer() and x.producer() not in second)
        result = UnsupportedError(error.nodes, problem, names_of(first), *error.cuts)
        result.second = names_of(inputs), names_of(x for x in outputs if x.producer() in second)
        return result

    def _is_constant(self, value: onnx_ir.Value) -> bool:
        return isinstance(self._values.get(value.name or ""), Constant)

    def tail_of(self, needed: Iterable[onnx_ir.Node]) -> set[onnx_ir.Node]:
        """Return the `needed` nodes, all after them, and further nodes of a minimum cut; empty if there is no cut."""
        forced, network = self._readers.after(needed), Network()

        def vertex(node: onnx_ir.Node) -> onnx_ir.Node | str:
            return _SINK if node in forced else node if node in self.movable else _SOURCE

        for user in self.movable:
            for value in self._reads(user):
                node = value.producer()
                if self._is_known(value) or node in forced:
                    continue
                start = _SOURCE if node is None else vertex(node)
                if value not in network:
                    network.connect(start, value, self._numbers(value))
                network.connect(value, vertex(user), float("inf"))
                if start is not _SOURCE and user not in forced:
                    network.connect(user, start, float("inf"))  # readers of a tail node are in the tail
        side = network.sink_side(_SOURCE, _SINK)
        if side is None:
            return set()
        return self._with_views(forced | {node for node in self.movable if node in side})

    def _with_views(self, tail: set[onnx_ir.Node]) -> set[onnx_ir.Node]:
        views = [node for node in self.movable - tail if node.op_type in _VIEWS]
        for node in sorted(views, key=self.order.__getitem__, reverse=True):
            read = node.inputs[0]
            assert read is not None
            if self._readers.of[node] and tail.issuperset(self._readers.of[node]):
                is_crossing = any(user in tail for user, _ in read.uses())
                saved = sum(self._numbers(value) for value in node.outputs if value.uses())
                if self._crossing(read) is not None and (is_crossing or self._numbers(read) <= saved):
                    tail.add(node)
        return tail

    def _numbers(self, value: onnx_ir.Value) -> float:
        """Return the cost of a value that crosses, in numbers; infinite if it cannot cross."""
        shape = self._crossing(value)
        if shape is None:
            return float("inf")
        sizes = named(shape, dict.fromkeys(names_in(shape), _USUAL_SIZE))
        return _COST_OF_BLOB + float(str(product(sizes)))

    def _crossing(self, value: onnx_ir.Value) -> Shape | None:
        """Return the shape of a value that can cross from the net to the tail; None for others."""
        if value.name in self._inputs:
            info = self._inputs[value.name]
            return info.shape if info.dtype.numpy().name in ALL else None
        item = self._values.get(value.name or "")
        if not isinstance(item, Tensor) or item.dtype.name not in ALL:
            return None
        is_batched = item.rank == MAX_DIMS + 1 and any(isinstance(size, int) for size in item.shape)
        return item.shape if item.rank <= MAX_DIMS or is_batched else None

    def read_by(self, nodes: Iterable[onnx_ir.Node]) -> dict[str, Constant | Sizes | InputInfo | Tensor]:
        """Return the values that these nodes read and do not compute."""
        made = {value for node in nodes for value in node.outputs}
        read: dict[str, Constant | Sizes | InputInfo | Tensor] = {}
        for value in dict.fromkeys(value for node in nodes for value in self._reads(node)):
            name, item = value.name or "", self._values.get(value.name or "")
            if value in made or not name:
                continue
            if isinstance(item, SymbolicTensor):
                read[name] = Sizes(self._cells(item) or [], item.shape, item.dtype)
            elif name in self._inputs and not isinstance(item, Constant):
                read[name] = self._inputs[name]
            elif isinstance(item, (Constant, Tensor)):
                read[name] = item
        return read

    def others(self, nodes: Iterable[onnx_ir.Node], read: Collection[str]) -> dict[str, Item | None]:
        """Return the outputs of the model that these nodes neither compute nor read."""
        made = {value for node in nodes for value in node.outputs}
        names = [value.name or "" for value in self._model.graph.outputs if value not in made]
        return {name: self._values.get(name) for name in names if name not in read}

    def reasons(self, needed: Iterable[onnx_ir.Node], unsupported: Iterable[Unsupported]) -> list[str]:
        """Return the nodes that have to be in the tail, one line for each reason."""
        known = {node.node: node.reason for node in unsupported}
        nodes = []
        for node in sorted(needed, key=self.order.__getitem__):
            # A node without a reason of its own computes a lost output, or reads a lost input.
            values = (*node.outputs, *node.inputs)
            names = (*map(label, nodes_of(node)), *(value.name or "" for value in values if value))
            reason = next(known[name] for name in names if name in known)
            nodes.append(Unsupported(label(node), node.op_type, reason))
        return lines_by_reason(nodes)


def _obstacle(node: onnx_ir.Node) -> onnx_ir.Node | None:
    """Return the node that is not a tail operator: this one, or one in its branches; None if all are."""
    known = {"Constant", *TAIL_OPS}
    return next((inner for inner in nodes_of(node) if inner.domain or inner.op_type not in known), None)
