"""The estimate of memory against a literal simulation of ncnn's recursion, and the order that lowers it."""

import numpy as np
import pytest

from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.memory import blob_bytes, lower_peak, peak_memory
from onnx2ncnn_opt.param.splits import Line, list_layers
from onnx2ncnn_opt.param.text import format_param
from testing.param_text import net
from testing.random_layers import RandomNet


class Recursion:
    """ncnn's forward_layer with reference counts, on the written net with its Splits."""

    def __init__(self, graph: Graph) -> None:
        listing = list_layers(graph)
        self.producer = {top: line for line in listing.lines for top in line.tops}
        self.mats: dict[str, int] = {}  # blob -> buffer
        self.counts: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.peak = 0
        for line in listing.lines:
            if line.type == "Input":
                self.run(line)
        # Outputs stay with the caller.
        for blob in graph.outputs:
            self.extract(listing.names[blob])

    def extract(self, name: str) -> None:
        if name not in self.mats:
            line = self.producer[name]
            for bottom in line.bottoms:
                self.extract(bottom)
            self.run(line)

    def run(self, line: Line) -> None:
        if line.type == "Split":
            shared = [self.mats[line.bottoms[0]]] * len(line.tops)
        elif (line.type == "Noop" and len(line.bottoms) == len(line.tops)) or self.is_inplace(line):
            shared = [self.mats[name] for name in line.bottoms]
        else:
            assert line.layer
            shared = []
            for blob in line.layer.outputs:
                shared.append(len(self.sizes))
                self.sizes[shared[-1]] = blob_bytes(blob.shape) or 0
        for top, buffer in zip(line.tops, shared, strict=True):
            self.mats[top] = buffer
            self.counts[buffer] = self.counts.get(buffer, 0) + 1
        self.peak = max(self.peak, sum(self.sizes[buffer] for buffer, count in self.counts.items() if count))
        for name in dict.fromkeys(line.bottoms):
            self.counts[self.mats[name]] -= 1

    def is_inplace(self, line: Line) -> bool:
        spec = line.layer and line.layer.spec
        if not spec or not spec.inplace or len(line.bottoms) != 1 or len(line.tops) != 1:
            return False
        return self.counts[self.mats[line.bottoms[0]]] == 1


@pytest.mark.parametrize("seed", range(200))
def test_the_estimate_is_that_of_the_recursion(seed: int) -> None:
    graph = RandomNet(seed).graph
    # Layers that nothing needs are never run.
    assert peak_memory(graph).peak == Recursion(graph).peak


def test_bytes() -> None:
    assert blob_bytes((5,)) == 20
    assert blob_bytes((5, 3)) == 60
    assert blob_bytes((5, 3, 3)) == 5 * 48  # channels are aligned to 16 bytes
    assert blob_bytes((2, 3, 3, 3)) == 2 * 112
    assert blob_bytes(None) is None


def branches(first: str, second: str, operation: str) -> Graph:
    return net(
        "Input in 0 1 x 0=8 1=8 2=4",
        "Input in2 0 1 small 0=1 1=1 2=4",
        "Interp up 1 1 small a 0=1 3=8 4=8",
        "Convolution c 1 1 x big 0=64 1=1 6=256",
        "Convolution d 1 1 big b 0=4 1=1 6=256",
        f"{operation.split()[0]} m 2 1 {first} {second} out {' '.join(operation.split()[1:])}",
    )


@pytest.mark.parametrize(
    ("operation", "exchanged"),
    [("BinaryOp 0=0", 0), ("BinaryOp 0=2", 2), ("BinaryOp 0=1", 7), ("BinaryOp 0=7", 1), ("Eltwise 0=1", 1)],
)
def test_the_larger_operand_comes_first(operation: str, exchanged: int) -> None:
    """While the first operand waits, the second one's 64 channels are computed: exchanged, nothing waits for them."""
    graph = branches("a", "b", operation)
    before = peak_memory(graph)
    (layer,) = lower_peak(graph)
    after = peak_memory(graph)
    assert before.peak - after.peak == 4 * 256 - 4 * 16  # operand a, but for the input that it is made from
    assert (layer.name, layer["op_type"], [blob.name for blob in layer.inputs]) == ("m", exchanged, ["b", "a"])
    assert lower_peak(graph) == set()


@pytest.mark.parametrize(
    "operation", ["BinaryOp 0=3", "BinaryOp 0=4", "Eltwise 0=1 -23301=2,1.0,2.0", "Concat", "Eltwise 0=2"]
)
def test_operands_that_may_not_change_places(operation: str) -> None:
    assert lower_peak(branches("a", "b", operation)) == set()


def test_a_good_order_stays() -> None:
    graph = branches("b", "a", "BinaryOp")
    text = format_param(graph)
    assert lower_peak(graph) == set()
    assert format_param(graph) == text


def test_unknown_sizes() -> None:
    graph = net("Input in 0 1 x", "ReLU r 1 1 x y")
    memory = peak_memory(graph)
    assert (memory.peak, memory.unknown) == (0, 2)


def test_the_waiting_layers_and_the_place_of_the_peak() -> None:
    memory = peak_memory(branches("a", "b", "BinaryOp 0=0"))
    assert [layer.name for layer in memory.waiting] == ["c", "d", "m"]


def test_a_deep_net_needs_no_deep_stack() -> None:
    lines = [f"Sigmoid s{i} 1 1 b{i} b{i + 1}" for i in range(5_000)]
    assert peak_memory(net("Input in 0 1 b0 0=16", *lines)).peak == 64


def test_time_is_bounded() -> None:
    graph = branches("a", "b", "BinaryOp 0=0")
    last = graph.outputs[0]
    for i in range(3000):
        last = graph.add(Layer("BinaryOp", f"n{i}", [last, last], [type(last)(f"n{i}", last.shape)])).output
    graph.outputs = [last]
    assert len(lower_peak(graph)) == 1
    assert np.isfinite(peak_memory(graph).peak)


def test_the_course_has_every_layer_that_runs_and_the_peak() -> None:
    graph = net("Input in 0 1 x 0=8 1=8", "ReLU a 1 1 x y", "Softmax b 1 1 y z", "Concat c 2 1 y z o")
    graph.outputs = [blob for layer in graph for blob in layer.outputs if blob.name == "o"]
    memory = peak_memory(graph)
    assert [layer.name for layer, _ in memory.course] == ["a", "b", "c"]
    assert max(size for _, size in memory.course) == memory.peak
