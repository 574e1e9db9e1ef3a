"""Random valid ONNX models: steps (random_steps.py) propose nodes, ONNX Runtime evaluates them at once.

Every value is known for each of the sizes that a model is made for, so no step has to compute a shape. A model never
gets a node that ONNX Runtime does not take, or whose result is empty, huge or not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing import formulas

MOST_ELEMENTS = 4096
LARGEST = 1e3
"""Of floats; integers may have 2**20, which leaves room for sums that float32 holds exactly."""

# Four and more channels are what ncnn packs.
SIZES = (1, 2, 3, 4, 5, 6, 8)
LENGTHS = range(1, 34)
"""Of a last axis, at times: whole packs of 4, 8 and 16, and what is left over."""

Array = Any
Shape = tuple[int, ...]
Declared = tuple[int | str, ...]


class NoFit(Exception):
    """A step finds no operand, or proposes a node that is not valid."""


Step = Callable[["Builder"], object]


@dataclass
class Builder:
    """A model under construction.

    `values` holds every tensor made so far, as it is at each of the sizes that the model is made for. Steps look at the
    first of these.
    """

    rng: np.random.Generator
    opset: int = 23
    inputs: dict[str, Declared] = field(default_factory=dict)
    values: dict[str, list[Array]] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)
    is_within: bool = False

    def pick(self, kinds: str = "f", ranks: Sequence[int] = range(7)) -> str:
        """Return a tensor of these kinds of elements and ranks, preferably a late one."""
        names = self.named(lambda a: a.dtype.kind in kinds and a.ndim in ranks)
        if not names:
            raise NoFit
        return names[max(int(i) for i in self.rng.integers(len(names), size=2))]

    def named(self, fits: Callable[[Array], bool]) -> list[str]:
        """Return the tensors that fit at the first sizes; hidden ones never do."""
        return [name for name, (a, *_) in self.values.items() if name not in self.hidden and fits(a)]

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor at the first sizes."""
        return tuple(self.values[name][0].shape)

    def least(self, name: str) -> Shape:
        """Return the smallest size that each axis of a tensor has."""
        return tuple(np.min([array.shape for array in self.values[name]], axis=0).tolist())

    def constant(self, array: Any) -> str:
        """Return an initializer."""
        name = f"k{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def ints(self, *values: int) -> str:
        """Return an initializer of integers in a row."""
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float) -> str:
        """Return an initializer of one number: of int64 for an int."""
        return self.constant(np.array(value, np.int64 if isinstance(value, int) else np.float32))

    def floats(self, shape: Iterable[int]) -> str:
        """Return an initializer of random floats."""
        return self.constant(self.rng.standard_normal(tuple(shape)).astype(np.float32))

    def operand(self, shape: Shape) -> str:
        """Return floats of this shape: a tensor that has it, or an initializer."""
        names = self.named(lambda a: a.shape == shape and a.dtype == np.float32)
        return self.choice(names) if names and self.chance(0.4) else self.floats(shape)

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return bool(self.rng.random() < probability)

    def choice(self, options: Sequence[Any]) -> Any:
        """Return one of them."""
        return options[int(self.rng.integers(len(options)))]

    def number(self, low: int, high: int) -> int:
        """Return a number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def axis(self, rank: int) -> int:
        """Return an axis, sometimes counted from the end."""
        if rank == 0:
            raise NoFit
        axis = self.number(0, rank - 1)
        return axis - rank if self.chance(0.3) else axis

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Append a node of one output; return its name."""
        return self.many(1, operator, *inputs, **attributes)[0]

    def many(self, count: int, operator: str, *inputs: str, **attributes: Any) -> list[str]:
        """Append a node of several outputs; return their names."""
        names = [f"t{len(self.values) + i}" for i in range(count)]
        node = helper.make_node(operator, inputs, names, name=f"n{len(self.nodes)}", **attributes)
        known = [evaluate(node, self.opset, self._at(i)) for i in range(self._runs)]
        ranks = [[array.ndim for array in arrays] for arrays in known]
        if ranks != ranks[:1] * self._runs or not all(
            _is_usable(a, self.is_within) for arrays in known for a in arrays
        ):
            raise NoFit
        self.nodes.append(node)
        self.values.update((name, [arrays[i] for arrays in known]) for i, name in enumerate(names))
        return names

    def reduce(self, operator: str, x: str, axes: Sequence[int], **attributes: Any) -> str:
        """Append a reduction over some axes, which are an attribute in older opsets, or over all."""
        if axes and (self.opset >= 18 or operator == "ReduceSum"):
            return self.node(operator, x, self.ints(*axes), **attributes)
        return self.node(operator, x, **({"axes": [*axes]} if axes else {}), **attributes)

    def write(self, text: str, **operands: str) -> str:
        """Append the nodes of a formula, with some of its alternatives; return its value."""
        text = formulas.drawn(text, self.choice)
        return str(formulas.evaluate(text, operands, lambda number: self.constant(np.float32(number)), self.node))

    def steps(self, steps: Sequence[Step], tries: int) -> Iterator[None]:
        """Try random ones of the steps, and yield after each that fits."""
        for _ in range(tries):
            try:
                self.choice(steps)(self)
            except NoFit:
                continue
            yield

    def guarded(self, text: str, **operands: str) -> str:
        """Write out a formula; NaN, infinities, zeros and large numbers within it stay hidden."""
        before = len(self.nodes), len(self.values), len(self.constants)
        self.is_within = True
        try:
            result = self.write(text, **operands)
            if not all(_is_usable(array) for array in self.values[result]):
                raise NoFit
        except NoFit:
            del self.nodes[before[0] :]
            for table, count in ((self.values, before[1]), (self.constants, before[2])):
                for name in list(table)[count:]:
                    del table[name]
            raise
        finally:
            self.is_within = False
        self.hidden.update(name for name in list(self.values)[before[1] :] if name != result)
        return result

    @property
    def _runs(self) -> int:
        return len(next(iter(self.values.values())))

    def _at(self, run: int) -> dict[str, Array]:
        return self.constants | {name: arrays[run] for name, arrays in self.values.items()}


def evaluate(node: onnx.NodeProto, opset: int, known: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of a node; raise NoFit if ONNX Runtime does not take it."""
    feeds = {name: known[name] for name in node.input if name}
    graph = helper.make_graph([node], "node", [_info(name, a, a.shape) for name, a in feeds.items()], [])
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output)
    try:
        return list(OrtRunner(_model(graph, opset).SerializeToString()).run(feeds).values())
    except RunError as error:
        raise NoFit from error


def _model(graph: onnx.GraphProto, opset: int) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _info(name: str, array: Array, shape: Sequence[int | str | None]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)


def _is_usable(array: Array, is_within: bool = False) -> bool:
    """Return True if a tensor is neither empty nor large, and its numbers neither huge nor lost in rounding.

    Only its size counts within a guard.
    """
    if not 0 < array.size <= MOST_ELEMENTS or array.ndim > 6:
        return False
    if array.dtype.kind == "b" or is_within:
        return True
    largest = np.abs(array).max()
    return bool(1e-3 < largest < LARGEST if array.dtype.kind == "f" else largest <= 2**20)


@dataclass(frozen=True)
class RandomModel:
    """A model of known numbers: `values` are its tensors, at each of the sizes that it is made for."""

    opset: int
    inputs: Mapping[str, Declared]
    outputs: Sequence[str]
    nodes: Sequence[onnx.NodeProto]
    constants: dict[str, Array]
    values: Mapping[str, Sequence[Array]]

    def proto(self) -> onnx.ModelProto:
        """Return the model."""
        used = {name for node in self.nodes for name in node.input}
        is_open = any(isinstance(size, str) for shape in self.inputs.values() for size in shape)
        first = {name: arrays[0] for name, arrays in self.values.items()}
        graph = helper.make_graph(
            self.nodes,
            "random",
            [_info(name, first[name], shape) for name, shape in self.inputs.items()],
            [_info(n, first[n], [None] * first[n].ndim if is_open else first[n].shape) for n in self.outputs],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items() if name in used],
        )
        return _model(graph, self.opset)

    def feeds(self) -> list[dict[str, Array]]:
        """Return the inputs at each of the sizes."""
        return self._at_sizes(self.inputs)

    def expected(self) -> list[dict[str, Array]]:
        """Return the outputs at each of the sizes."""
        return self._at_sizes(self.outputs)

    def _at_sizes(self, names: Iterable[str]) -> list[dict[str, Array]]:
        names = list(names)
        return [dict(zip(names, arrays, strict=True)) for arrays in zip(*(self.values[n] for n in names), strict=True)]

    def cut(self, outputs: Sequence[str], inputs: Iterable[str] = ()) -> RandomModel:
        """Return the part of the model between tensors that become inputs, in addition to its own, and outputs."""
        given = dict(self.inputs)
        for name in inputs:
            shapes = [array.shape for array in self.values[name]]
            given[name] = tuple(
                size if all(other[i] == size for other in shapes) else f"{name}_{i}" for i, size in enumerate(shapes[0])
            )
        needed = set(outputs)
        nodes: list[onnx.NodeProto] = []
        for node in reversed(self.nodes):
            if needed.intersection(node.output) - given.keys():
                nodes.insert(0, _renamed(node, given))
                needed.update(node.input)
        kept = {name: shape for name, shape in given.items() if name in needed}
        return RandomModel(self.opset, kept, outputs, nodes, self.constants, self.values)


def _renamed(node: onnx.NodeProto, names: Iterable[str]) -> onnx.NodeProto:
    """Return the node with other names for the outputs that have become inputs."""
    node = onnx.NodeProto.FromString(node.SerializeToString())
    node.output[:] = [f"{name}_unread" if name in names else name for name in node.output]
    return node


def build(
    rng: np.random.Generator,
    steps: Sequence[Step],
    length: int,
    *,
    opset: int = 23,
    kinds: str = "f",
    is_open: bool = False,
    rows: float = 0.15,
) -> RandomModel:
    """Return a model of about so many nodes, made of these steps; its outputs are the values that no node reads.

    `rows` says how often an input's last axis is one of LENGTHS.
    """
    builder = Builder(rng, opset)
    _draw_inputs(builder, kinds, is_open, rows)
    for _ in builder.steps(steps, 6 * length):
        if len(builder.nodes) >= length:
            break
    return completed(builder)


def completed(builder: Builder) -> RandomModel:
    """Return the model of all nodes made so far; its outputs are the values that no node reads."""
    used = {name for node in builder.nodes for name in node.input} | builder.hidden
    outputs = [name for name in builder.values if name not in used]
    made = [name for name in builder.values if name not in {*builder.inputs, *builder.hidden}]
    if made and builder.chance(0.4):
        outputs.append(builder.choice(made))  # that others read as well
    if builder.chance(0.05):
        outputs.append(builder.choice([*builder.inputs]))
    if builder.chance(0.1):
        outputs.append(builder.node("Identity", outputs[-1]))
    outputs = [_deliverable(builder, name) for name in dict.fromkeys(outputs)]
    model = RandomModel(builder.opset, builder.inputs, outputs, builder.nodes, builder.constants, builder.values)
    return model.cut(outputs)


def _draw_inputs(builder: Builder, kinds: str, is_open: bool, rows: float) -> None:
    """Add one to three inputs; later ones are often related to the first."""
    sizes: dict[str, list[int]] = {}
    for number in range(builder.choice((1, 1, 2, 2, 3))):
        fixed = _input_shape(builder, rows)
        shape: Declared = fixed
        if is_open:
            shape = tuple(_open(builder, size, sizes) if builder.chance(0.4) else size for size in fixed)
        if number and builder.chance(0.6):
            shape = _related(builder, builder.inputs["x0"])
        add_input(builder, shape, sizes, builder.choice(kinds), 3 if is_open else 1)


def add_input(
    builder: Builder, shape: Declared, sizes: Mapping[str, Sequence[int]], kind: str = "f", runs: int = 1
) -> str:
    """Append an input; `sizes` has each dynamic size at each of the runs. Returns its name."""
    name = f"x{len(builder.inputs)}"
    shapes = [tuple(sizes[s][i] if isinstance(s, str) else s for s in shape) for i in range(runs)]
    builder.inputs[name] = shape
    builder.values[name] = [_draw(builder, kind, each) for each in shapes]
    return name


def _input_shape(builder: Builder, rows: float) -> Shape:
    rank = builder.choice((0, 1, 2, 3, 3, 4, 4, 4, 5) if builder.chance(0.3) else (2, 3, 4))
    shape = [builder.choice(SIZES) for _ in range(rank)]
    if shape and builder.chance(rows):
        shape[-1] = builder.choice(LENGTHS)
    while math.prod(shape) > MOST_ELEMENTS // 4:
        shape[builder.number(0, rank - 1)] = 1
    if rank > 1 and builder.chance(0.4):
        shape[0] = 1
    return tuple(shape)


def _open(builder: Builder, size: int, sizes: dict[str, list[int]]) -> str:
    """Return a size to leave dynamic. Two of its values are above 1: broadcasting at 1 alone is another model."""
    name, first = f"s{len(sizes)}", max(size, 2)
    sizes[name] = [first, builder.choice([n for n in range(2, 8) if n != first]), builder.number(1, 7)]
    return name


def _related(builder: Builder, shape: Declared) -> Declared:
    """Return a shape that broadcasts with another one, or has its axes in another order."""
    if builder.chance(0.3):
        return tuple(shape[i] for i in builder.rng.permutation(len(shape)))
    return tuple(1 if builder.chance(0.3) else size for size in shape[builder.number(0, len(shape)) :])


def _draw(builder: Builder, kind: str, shape: Shape) -> Array:
    if kind == "f":
        array = builder.rng.standard_normal(shape).astype(np.float32)
        if builder.chance(0.3):  # zeros, as masks and ReLUs leave them, and numbers that are equal to others
            zeros = builder.rng.random(shape) < 0.3
            signed = np.copysign(np.float32(0), builder.rng.standard_normal(shape).astype(np.float32))
            array = np.where(zeros & ~zeros.all(), signed, np.where(array > 1, np.round(array), array))
        return array
    if kind == "b":
        return builder.rng.integers(0, 2, shape).astype(bool)
    return builder.rng.integers(-4, 9, shape).astype(np.int64 if kind == "l" else np.int32)


def _deliverable(builder: Builder, name: str) -> str:
    """Return the tensor in a rank that a Mat can have."""
    rank = len(builder.shape(name))
    if rank <= 4 or (rank == 5 and builder.chance(0.2)):
        return name
    try:
        return builder.node("Flatten", name, axis=builder.number(1, rank - 1))
    except NoFit:  # bools
        return name
