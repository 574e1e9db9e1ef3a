"""The peak memory of blobs in ncnn, and an order of evaluation with a lower peak.

ncnn evaluates a net recursively, from an output: before a layer it computes the layer's bottoms, in their order. It
frees a blob when the last consumer has run (Splits only share it). So the order of lines in a .param file has no
effect, but the order of a layer's bottoms does: the first one stays in memory while ncnn computes the second.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, prod
from typing import NamedTuple

from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise
from onnx2ncnn_opt.ir.dim import Shape, is_fixed
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.spec import Trait

# BinaryOp's operations that give the same bits as their reverse forms with exchanged operands.
_EXCHANGED = {code: code.exchanged for code in (BinaryOp.ADD, BinaryOp.MUL, BinaryOp.SUB, BinaryOp.RSUB)}
_BUDGET = 400_000  # the layers that the search for a better order may simulate
_LEAST_TRIES = 8  # the orders that it tries even of huge nets


@dataclass(frozen=True)
class Memory:
    """An estimate: blobs need `peak` bytes at once, without the `unknown` blobs of unknown size.

    `course` has the layers in the order in which ncnn runs them, with the bytes of all blobs at that time. Workspace
    inside layers, padding of channels to a SIMD width, and weights are not included.
    """

    peak: int
    unknown: int
    waiting: tuple[Layer, ...] = field(repr=False)  # the layer of the peak, then those that have some bottoms already
    course: tuple[tuple[Layer, int], ...] = field(repr=False)


def blob_bytes(shape: Shape | None) -> int | None:
    """Return the bytes of a float32 Mat; channels start at multiples of 16 bytes. None if a size is dynamic."""
    if not is_fixed(shape):
        return None
    return shape[0] * (-(-4 * prod(shape[1:]) // 16) * 16) if len(shape) > 2 else 4 * prod(shape)


def most_items(graph: Graph) -> int | None:
    """Return the largest batch count of a blob; None if one is dynamic."""
    counts = [1, *(blob.batch for layer in graph for blob in layer.outputs)]
    return max(counts) if is_fixed(counts) else None


def peak_memory(graph: Graph) -> Memory:
    """Simulate ncnn in light mode for one item: all inputs are fed, then the outputs are extracted one by one."""
    return _Simulation(graph, _sizes(graph)).run()


def _sizes(graph: Graph) -> dict[Blob, int | None]:
    return {blob: blob_bytes(blob.shape) for layer in graph for blob in layer.outputs}


def lower_peak(graph: Graph) -> set[Layer]:
    """Exchange operands if that lowers the peak and keeps every bit; return the changed layers.

    These are sums, products and differences of two blobs of equal shape. A net with dynamic sizes stays as it is.
    """
    changed: set[Layer] = set()
    sizes = _sizes(graph)
    best = _Simulation(graph, sizes).run()
    tries = max(_BUDGET // max(len(graph), 1), _LEAST_TRIES)
    tried: set[Layer] = set()
    while not best.unknown and tries > 0:
        layer = next((layer for layer in best.waiting if layer not in tried and _is_exchangeable(layer)), None)
        if layer is None:
            break
        tried.add(layer)
        tries -= 1
        _exchange(graph, layer)
        exchanged = _Simulation(graph, sizes, best.peak).run()
        if exchanged.peak >= best.peak:
            _exchange(graph, layer)
            continue
        best = exchanged
        tried.clear()
        changed ^= {layer}
    return changed


def _is_exchangeable(layer: Layer) -> bool:
    is_plain = layer.computes(Eltwise.PROD, Eltwise.SUM) and not layer["coeffs"]
    if len(layer.inputs) != 2 or not (is_plain or layer.computes(*_EXCHANGED, scalar=False)):
        return False
    a, b = layer.inputs
    return a is not b and a.shape == b.shape and a.shape is not None and a.batch == b.batch


def _exchange(graph: Graph, layer: Layer) -> None:
    graph.set_inputs(layer, layer.inputs[::-1])
    if layer.type == "BinaryOp" and (exchanged := _EXCHANGED[layer["op_type"]]) != layer["op_type"]:
        layer.params["op_type"] = exchanged


class _Pending(NamedTuple):
    """A layer whose bottoms are being computed, and the layer that waits for it."""

    layer: Layer
    bottoms: Iterator[Blob]
    above: "_Pending | None"


class _Simulation:
    """One evaluation of a net; it stops when the peak reaches `limit` bytes."""

    def __init__(self, graph: Graph, sizes: Mapping[Blob, int | None], limit: float = inf) -> None:
        self.graph, self.sizes, self.limit = graph, sizes, limit
        self.now = self.peak = 0
        self.peak_layer: Layer | None = None
        self.waiting: _Pending | None = None
        self.uses: dict[Blob, int] = {}  # the remaining uses
        self.buffer: dict[Blob, list[int]] = {}  # size, and number of blobs that share it
        self.unknown = 0
        self.course: list[tuple[Layer, int]] = []

    def run(self) -> Memory:
        for layer in self.graph:
            for blob in layer.outputs:
                self.unknown += self.sizes[blob] is None
                self.uses[blob] = len(blob.users) + blob.is_output
            if layer.type == "Input":
                self.allocate(layer)
        self.peak = self.now
        for blob in self.graph.outputs:
            self.evaluate(blob)
        waiting = [self.peak_layer] if self.peak_layer else []
        while self.waiting is not None:
            waiting.append(self.waiting.layer)
            self.waiting = self.waiting.above
        return Memory(self.peak, self.unknown, tuple(waiting), tuple(self.course))

    def evaluate(self, output: Blob) -> None:
        """Run the layers that an output needs, in ncnn's order."""
        pending = self.needed(output, None)
        while pending is not None and self.peak < self.limit:
            for blob in pending.bottoms:
                if (needed := self.needed(blob, pending)) is not pending:
                    pending = needed
                    break
            else:
                layer, pending = pending.layer, pending.above
                self.forward(layer, pending)

    def needed(self, blob: Blob, above: _Pending | None) -> _Pending | None:
        """Return the layer that has to run next for a blob: its producer, or `above` if the blob is there already."""
        if blob in self.buffer or blob.producer is None:
            return above
        return _Pending(blob.producer, iter(blob.producer.inputs), above)

    def forward(self, layer: Layer, above: _Pending | None) -> None:
        sources = layer.inputs * len(layer.outputs) if layer.type == "Split" else layer.inputs
        shares = layer.has(Trait.SHARES) and len(sources) == len(layer.outputs)
        if shares or self.is_inplace(layer):
            for blob, source in zip(layer.outputs, sources, strict=True):
                self.buffer[blob] = self.buffer[source]
                self.buffer[blob][1] += 1
        else:
            self.allocate(layer)
        self.course.append((layer, self.now))
        if self.now > self.peak:
            self.peak, self.peak_layer, self.waiting = self.now, layer, above
        for blob in dict.fromkeys(layer.inputs):
            self.uses[blob] -= 1
        for blob in dict.fromkeys((*layer.inputs, *layer.outputs)):
            if not self.uses[blob]:
                self.free(blob)

    def is_inplace(self, layer: Layer) -> bool:
        """Return whether the layer writes over its input: it can, and nothing else needs the input."""
        if layer.spec is None or not layer.spec.inplace or not len(layer.inputs) == len(layer.outputs) == 1:
            return False
        return self.uses[layer.input] == 1 and self.buffer[layer.input][1] == 1

    def allocate(self, layer: Layer) -> None:
        for blob in layer.outputs:
            size = self.sizes[blob] or 0
            self.buffer[blob] = [size, 1]
            self.now += size

    def free(self, blob: Blob) -> None:
        buffer = self.buffer[blob]
        buffer[1] -= 1
        if not buffer[1]:
            self.now -= buffer[0]
