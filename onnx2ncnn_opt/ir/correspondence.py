"""Layers that correspond in two graphs, by their type and their place in the data flow, not by name."""

from collections import defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.weight import digest

_SURE_ROW = 2  # a row of this many equal layers is no accident
Key = Callable[[Layer], Hashable]


def corresponding(a: Graph, b: Graph) -> dict[Layer, Layer]:
    """Map layers of `a` to layers of `b`, of the same type; the steps:

    1. Layers that are equal, with all layers above them or all layers below them.
    2. Layers whose parameters and weights occur once in each graph.
    3. Consumers and producers of paired layers: first equal ones, then with equal parameters, then of equal type.
    4. Rows of layers with equal parameters, in the order of the graphs.
    """
    return _Pairing(a, b).run()


def parameters(layer: Layer) -> dict[str, Any]:
    """Return a layer's parameters without defaults: floats as float32, arrays as tuples."""
    plain = layer.having().without_defaults().params
    return {str(name): plain_value(layer, name, value) for name, value in plain.items()}


def plain_value(layer: Layer, name: str | int, value: Any) -> Any:
    """Return a parameter's value as the reader would return it."""
    param = layer.spec.by_name.get(name) if layer.spec and isinstance(name, str) else None
    is_float = param is not None and param.kind.startswith("float")

    def plain(item: Any) -> Any:
        return float(np.float32(item)) if is_float or isinstance(item, (float, np.floating)) else item

    return tuple(map(plain, value)) if isinstance(value, (tuple, list, np.ndarray)) else plain(value)


class _Pairing:
    def __init__(self, a: Graph, b: Graph) -> None:
        self.a, self.b = a, b
        self.pairs: dict[Layer, Layer] = {}
        self.taken: set[Layer] = set()
        self.numbers: dict[Hashable, int] = {}
        self.structure: dict[Layer, int] = {}
        self.own: dict[Layer, int] = {}
        for layer in (*a, *b):
            structure = (layer.type, frozenset(parameters(layer).items()))
            weights = tuple((name, digest(weight)) for name, weight in layer.weights.stored_items())
            self.structure[layer] = self.number(structure)
            self.own[layer] = self.number((structure, weights))

    def run(self) -> dict[Layer, Layer]:
        labels = _input_labels(self.a, self.b)
        up, down = self.upwards(labels), self.downwards()
        self.pair_groups(lambda layer: (up[layer], down[layer]))
        self.pair_groups(up.__getitem__)
        self.pair_groups(down.__getitem__)
        self.pair_groups(self.own.__getitem__, lambda group: len(group) == 1 and len(group[0].weights) > 0)
        for x, y in _public_pairs(self.a.outputs, self.b.outputs):
            self.pair_producers(x, y, lambda layer: layer.type)
        self.spread(self.own.__getitem__)
        self.spread(self.structure.__getitem__)
        self.pair_rows(_SURE_ROW)
        self.spread(self.structure.__getitem__)
        self.spread(lambda layer: layer.type)
        self.pair_rows(1)
        self.spread(lambda layer: layer.type)
        return self.pairs

    def number(self, key: Hashable) -> int:
        """Return a small number for a key; equal keys have the same number."""
        return self.numbers.setdefault(key, len(self.numbers))

    def upwards(self, labels: Mapping[Blob, Hashable]) -> dict[Layer, int]:
        """Return a number for each layer; two are equal if the layers and all layers above them are."""
        numbers: dict[Layer, int] = {}
        for layer in (*self.a, *self.b):
            if layer.type == "Input":
                numbers[layer] = self.number(("input", tuple(labels[blob] for blob in layer.outputs)))
                continue
            reads = tuple((numbers[blob.producer], _position(blob)) for blob in layer.inputs if blob.producer)
            numbers[layer] = self.number(("up", self.own[layer], reads))
        return numbers

    def downwards(self) -> dict[Layer, int]:
        """Return a number for each layer; two are equal if the layers and all layers below them are."""
        numbers: dict[Layer, int] = {}
        for layer in (*reversed(self.a), *reversed(self.b)):
            uses = tuple(
                (blob.is_output, tuple(sorted((numbers[user], slot) for user, slot in _readers(blob))))
                for blob in layer.outputs
            )
            numbers[layer] = self.number(("down", self.own[layer], uses))
        return numbers

    def pair(self, x: Layer, y: Layer) -> None:
        self.pairs[x] = y
        self.taken.add(y)

    def unpaired(self) -> tuple[list[Layer], list[Layer]]:
        return [x for x in self.a if x not in self.pairs], [y for y in self.b if y not in self.taken]

    def pair_groups(self, key: Key, fits: Callable[[list[Layer]], bool] = bool) -> None:
        """Pair the remaining layers with equal keys that `fits` accepts, in order, if both graphs have equally many."""
        from_a, from_b = (_grouped(layers, key) for layers in self.unpaired())
        for value, group in from_a.items():
            if fits(group):
                self.pair_all(group, from_b.get(value, []))

    def pair_producers(self, x: Blob, y: Blob, key: Key) -> list[Layer]:
        p, q = x.known_producer, y.known_producer
        if p in self.pairs or q in self.taken or p.type != q.type or key(p) != key(q) or _position(x) != _position(y):
            return []
        self.pair(p, q)
        return [p]

    def pair_all(self, from_a: Sequence[Layer], from_b: Sequence[Layer]) -> list[Layer]:
        """Pair two lists of layers if they are equally long: first by name, then in order."""
        if len(from_a) != len(from_b):
            return []
        by_name = {y.name: y for y in from_b}
        named = [(x, by_name[x.name]) for x in from_a if x.name in by_name]
        done = {layer for pair in named for layer in pair}
        rest = zip((x for x in from_a if x not in done), (y for y in from_b if y not in done), strict=False)
        for x, y in (*named, *rest):
            self.pair(x, y)
        return list(from_a)

    def spread(self, key: Key) -> None:
        """Pair producers and consumers of paired layers, again and again, if their keys are equal."""
        queue = deque(self.pairs)
        while queue:
            x = queue.popleft()
            y = self.pairs[x]
            for from_a, from_b in zip(x.inputs, y.inputs, strict=False):
                queue.extend(self.pair_producers(from_a, from_b, key))
            for from_a, from_b in zip(x.outputs, y.outputs, strict=False):
                readers = _grouped_readers(from_a, key, self.pairs)
                others = _grouped_readers(from_b, key, self.taken)
                for value, group in readers.items():
                    queue.extend(self.pair_all(group, others.get(value, [])))

    def pair_rows(self, least: int) -> None:
        """Pair rows of at least `least` layers of equal structure among the remaining ones."""
        from_a, from_b = self.unpaired()
        a, b = ([self.structure[layer] for layer in layers] for layers in (from_a, from_b))
        rows = SequenceMatcher(None, a, b, autojunk=False)
        for block in rows.get_matching_blocks():
            if block.size >= least:
                for x, y in zip(from_a[block.a : block.a + block.size], from_b[block.b :], strict=False):
                    self.pair(x, y)


def _input_labels(a: Graph, b: Graph) -> dict[Blob, Hashable]:
    labels: dict[Blob, Hashable] = {blob: (number, blob.name) for number, g in enumerate((a, b)) for blob in g.inputs}
    for number, (x, y) in enumerate(_public_pairs(a.inputs, b.inputs)):
        labels[x] = labels[y] = number
    return labels


def _public_pairs(from_a: Sequence[Blob], from_b: Sequence[Blob]) -> Iterable[tuple[Blob, Blob]]:
    """Yield the inputs or outputs that belong together: first by name, then in order."""
    by_name, names = {blob.name: blob for blob in from_b}, {blob.name for blob in from_a}
    yield from ((blob, by_name[blob.name]) for blob in from_a if blob.name in by_name)
    rest = [blob for blob in from_a if blob.name not in by_name], [blob for blob in from_b if blob.name not in names]
    yield from zip(*rest, strict=False)


def _position(blob: Blob) -> int:
    return blob.known_producer.outputs.index(blob)


def _readers(blob: Blob) -> Iterator[tuple[Layer, int]]:
    for user in blob.users:
        yield from ((user, slot) for slot, read in enumerate(user.inputs) if read is blob)


def _grouped(layers: Iterable[Layer], key: Key) -> dict[Hashable, list[Layer]]:
    groups: dict[Hashable, list[Layer]] = defaultdict(list)
    for layer in layers:
        groups[key(layer)].append(layer)
    return groups


def _grouped_readers(blob: Blob, key: Key, taken: Container[Layer]) -> dict[Hashable, list[Layer]]:
    """Return the unpaired consumers of a blob, by their type, key and the first input that reads it."""
    free = (user for user in blob.users if user not in taken)
    return _grouped(free, lambda user: (user.type, key(user), user.inputs.index(blob)))
