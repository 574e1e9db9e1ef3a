"""The split of a model into a net and a tail: the nodes after the net, which index, sort, compare and calculate.

The tail has every node that ncnn cannot express, or only with many layers, and all nodes that depend on one of them.
Further nodes move to the tail if fewer numbers then cross from the net to the tail: a minimum cut. Reshape, Transpose
and their like cost a layer in the net and nothing in the tail, so they move if as many numbers cross.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import onnx_ir

from onnx2ncnn_opt.errors import ModelError, Unsupported, UnsupportedError, lines_by_reason
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, product
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.view import MAX_DIMS
from onnx2ncnn_opt.onnx.read.binding import InputInfo
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.read.structure import nodes_of, read_values
from onnx2ncnn_opt.onnx.tail.extract import Sizes, Tail, extracted, label
from onnx2ncnn_opt.onnx.tail.minimum_cut import Network
from onnx2ncnn_opt.onnx.tail.program import Program
from onnx2ncnn_opt.onnx.tail.registry import ALL, TAIL_OPS
from onnx2ncnn_opt.onnx.value import Constant, Item, SymbolicTensor, Tensor

# A node that sorts or picks, and becomes more layers than this, costs more in the net than in the tail. So do nodes
# that pick by one index and together are twice as many.
MANY_LAYERS = 16
INDICES = frozenset({"ArgMax", "ArgMin", "TopK"})
PICKS = frozenset({"ArgMax", "ArgMin", "Gather", "GatherElements", "GatherND", "TopK"})
_USUAL_SIZE = 256  # for dynamic dimensions, where numbers are counted
_EACH = 2**13  # numbers that cost as much as one blob more
_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze"})
_MOST_SIZES = 64  # numbers of a tensor that is known up to dynamic dimensions
_SOURCE, _SINK = "net", "tail"


class Walk(NamedTuple):
    """What became of a model's values and nodes in an import that ncnn cannot express."""

    unsupported: Sequence[Unsupported]
    error: Callable[[], UnsupportedError]  # makes the error of all these
    values: Mapping[str, Item | None]
    refused: Collection[onnx_ir.Node]
    lost: Collection[str]  # graph inputs and outputs that no Mat can hold


def split(model: LoadedModel, walk: Walk) -> tuple[Tail, Collection[onnx_ir.Node]]:
    """Return the tail of a model and its nodes; the model's graph stays as it is.

    Raises the error of the walk if a node that no net can have is no tail operator, or another node depends on it that
    no tail can have.
    """
    parts = _Parts(model, walk)
    needed = {*walk.refused, *parts.before_lost(walk.lost)}
    if not needed <= parts.movable:
        raise parts.refused(needed - parts.movable)
    nodes = sorted(parts.tail_of(needed) if needed else (), key=parts.order.__getitem__)
    read = parts.read_by(nodes)
    others = parts.others(nodes, read)
    problem = ""
    if nodes and (others or any(isinstance(item, Tensor) for item in read.values())):  # a net is left
        tail = extracted(model, nodes, read, others, tuple(parts.reasons(needed)))
        try:
            Program.read(tail.data)
        except ModelError as error:  # an attribute or a type that no tail has
            problem = str(error)
        else:
            return tail, nodes
    whole = walk.error()
    raise UnsupportedError(whole.nodes, "\n".join(filter(None, (whole.advice, problem))), *whole.cuts)


class Readers:
    """The nodes of a graph that read each node, and those that a tail may have, `movable`.

    Nodes that `is_known` holds for are left out.
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
        """Return these nodes and all that depend on them."""
        return set(reached(nodes, lambda node: self.of.get(node, ())))


class _Parts:
    """The nodes of a model that a tail may have, `movable`, and the values between them."""

    def __init__(self, model: LoadedModel, walk: Walk) -> None:
        self._model, self._walk = model, walk
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
        """Return True for a constant, and for what is known up to the dynamic dimensions of the model's inputs."""
        item = self._walk.values.get(value.name or "")
        return isinstance(item, Constant) or (isinstance(item, SymbolicTensor) and self._cells(item) is not None)

    def _cells(self, item: SymbolicTensor) -> list[Dim] | None:
        """Return the integers of a short tensor in terms of dynamic dimensions; None for other tensors."""
        count = product(item.shape)
        if item.rank > 1 or count != item.cells.size or item.cells.size > _MOST_SIZES or item.dtype.kind != "i":
            return None
        cells = [cell if isinstance(cell, Sym) else int(cell) for cell in item.cells.reshape(-1)]
        return cells if all(cell.names() <= self._names for cell in cells if isinstance(cell, Sym)) else None

    def before_lost(self, lost: Collection[str]) -> Iterator[onnx_ir.Node]:
        """Yield the nodes that make an output that no Mat holds, or read such an input."""
        for value in (*self._model.graph.inputs, *self._model.graph.outputs):
            node = value.producer()
            if value.name in lost:
                yield from (user for user, _ in value.uses()) if node is None else [node]

    def refused(self, nodes: Iterable[onnx_ir.Node]) -> UnsupportedError:
        """Return the error of the walk, with the node that prevents a tail."""
        error = self._walk.error()
        for node in sorted(nodes, key=self.order.__getitem__):
            after = sorted(self._readers.after([node]), key=self.order.__getitem__)
            user, wall = next(((each, wall) for each in after if (wall := _obstacle(each))), (node, None))
            values = [value.name or "" for value in self._reads(user) if value.producer() and not self._is_known(value)]
            if wall is not None and wall is not node and values:
                names = f"{node.op_type} '{label(node)}'", f"{wall.op_type} '{label(wall)}'"
                inside = "is in a branch of" if user is node else "depends on"
                problem = f"{names[0]} can follow a net, but {names[1]} {inside} it and needs a net again"
                plan = f"make two nets, the first up to {', '.join(values)}, the second from there (docs/failed.md)"
                return UnsupportedError(error.nodes, problem, values, *error.cuts, plan=plan)
        return error

    def tail_of(self, needed: Iterable[onnx_ir.Node]) -> set[onnx_ir.Node]:
        """Return the `needed` nodes, all after them, and those that save numbers; none if no cut is possible."""
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
                    network.connect(user, start, float("inf"))  # a tail ends nowhere else
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
                is_read = any(user in tail for user, _ in read.uses())
                made = sum(self._numbers(value) for value in node.outputs if value.uses())
                if self._numbers(read) <= (float("inf") if is_read else made) and self._may_cross(read):
                    tail.add(node)
        return tail

    def _numbers(self, value: onnx_ir.Value) -> float:
        """Return how many numbers cross with a value; infinite if it cannot cross."""
        if not self._may_cross(value):
            return float("inf")
        sizes = (
            size.subs(dict.fromkeys(size.names(), _USUAL_SIZE)) if isinstance(size, Sym) else size
            for size in self._shape(value)
        )
        return _EACH + float(str(product(sizes)))

    def _shape(self, value: onnx_ir.Value) -> Shape:
        if value.name in self._inputs:
            return self._inputs[value.name].shape
        item = self._walk.values[value.name or ""]
        assert isinstance(item, Tensor)
        return item.shape

    def _may_cross(self, value: onnx_ir.Value) -> bool:
        if value.name in self._inputs:
            return self._inputs[value.name].dtype.numpy().name in ALL
        item = self._walk.values.get(value.name or "")
        if not isinstance(item, Tensor) or item.dtype.name not in ALL:
            return False
        is_batched = item.rank == MAX_DIMS + 1 and any(isinstance(size, int) for size in item.shape)
        return item.rank <= MAX_DIMS or is_batched

    def read_by(self, nodes: Iterable[onnx_ir.Node]) -> dict[str, Constant | Sizes | InputInfo | Tensor]:
        """Return the values that these nodes read and do not make."""
        made = {value for node in nodes for value in node.outputs}
        found: dict[str, Constant | Sizes | InputInfo | Tensor] = {}
        for value in dict.fromkeys(value for node in nodes for value in self._reads(node)):
            name, item = value.name or "", self._walk.values.get(value.name or "")
            if value in made or not name:
                continue
            if isinstance(item, SymbolicTensor):
                found[name] = Sizes(self._cells(item) or [], item.shape, item.dtype)
            elif isinstance(item, Constant):
                found[name] = item
            elif name in self._inputs:
                found[name] = self._inputs[name]
            elif isinstance(item, Tensor):
                found[name] = item
        return found

    def others(self, nodes: Iterable[onnx_ir.Node], read: Collection[str]) -> dict[str, Item | None]:
        """Return the outputs of the model that these nodes neither make nor read."""
        made = {value for node in nodes for value in node.outputs}
        names = [value.name or "" for value in self._model.graph.outputs if value not in made]
        return {name: self._walk.values.get(name) for name in names if name not in read}

    def reasons(self, needed: Iterable[onnx_ir.Node]) -> list[str]:
        """Return the nodes that are in the tail for their own sake, those of one reason in one line."""
        known = {node.node: node.reason for node in self._walk.unsupported}
        nodes = []
        for node in sorted(needed, key=self.order.__getitem__):
            # A node without a reason of its own makes a lost output, or reads a lost input.
            names = (label(node), *(value.name or "" for value in (*node.outputs, *node.inputs) if value))
            reason = next(known[name] for name in names if name in known)
            nodes.append(Unsupported(label(node), node.op_type, reason))
        return lines_by_reason(nodes)


def _obstacle(node: onnx_ir.Node) -> onnx_ir.Node | None:
    """Return the node that no tail can have: this one, or one in its branches; None if there is none."""
    known = {"Constant", *TAIL_OPS}
    return next((each for each in nodes_of(node) if each.domain or each.op_type not in known), None)
