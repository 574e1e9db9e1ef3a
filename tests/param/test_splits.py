"""Splits: seen through when reading, put in when writing, and no public name lost."""

from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.errors import GraphError
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.param.files import write_net
from onnx2ncnn_opt.param.splits import list_layers
from onnx2ncnn_opt.param.text import format_param, parse_param
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from testing.param_text import parsed


def listed(graph: Graph) -> list[str]:
    """The written layers, as short as they can be said: type, inputs, outputs."""
    return [" ".join((line.type, *line.bottoms, "->", *line.tops)) for line in list_layers(graph).lines]


CASES = {
    "a blob with two users": (
        ["Input i 0 1 x", "Split s 1 2 x a b", "BinaryOp add 2 1 a b y"],
        ["Input -> x", "BinaryOp x x -> y"],
    ),
    "two layers": (
        ["Input i 0 1 x", "Split s 1 2 x a b", "ReLU r 1 1 b y", "BinaryOp add 2 1 a y z"],
        ["Input -> x", "Split x -> x_0 x_1", "ReLU x_0 -> y", "BinaryOp x_1 y -> z"],
    ),
    "an output that is used": (
        ["Input i 0 1 x", "ReLU r 1 1 x a", "Split s 1 2 a y b", "TanH t 1 1 b z"],
        ["Input -> x", "ReLU x -> y_split", "Split y_split -> y_0 y", "TanH y_0 -> z"],
    ),
    "a Split into one": (
        ["Input i 0 1 x", "Split s 1 1 x a", "ReLU r 1 1 a y"],
        ["Input -> x", "Split x -> a", "ReLU a -> y"],
    ),
    "a Split into one output": (
        ["Input i 0 1 x", "ReLU r 1 1 x a", "Split s 1 1 a y"],
        ["Input -> x", "ReLU x -> y"],
    ),
    "an input that is an output": (
        ["Input i 0 1 x", "Split s 1 1 x y"],
        ["Input -> x", "Split x -> y"],
    ),
    "an input that is an output and used": (
        ["Input i 0 1 x", "Split s 1 2 x a y", "ReLU r 1 1 a z"],
        ["Input -> x", "Split x -> x_0 y", "ReLU x_0 -> z"],
    ),
    "two names for one output": (
        ["Input i 0 1 x", "ReLU r 1 1 x a", "Split s 1 2 a y z"],
        ["Input -> x", "ReLU x -> y_split", "Split y_split -> y z"],
    ),
    "two names for one output that is used": (
        ["Input i 0 1 x", "ReLU r 1 1 x a", "Split s 1 4 a b y c z", "BinaryOp add 2 1 b c w"],
        ["Input -> x", "ReLU x -> y_split", "Split y_split -> y_0 y z", "BinaryOp y_0 y_0 -> w"],
    ),
    "Splits of Splits": (
        [
            "Input i 0 1 x",
            "Split s 1 2 x a b",
            "Split t 1 2 a c d",
            "Split u 1 1 b y",
            "ReLU r 1 1 c e",
            "TanH q 1 1 d f",
        ],
        ["Input -> x", "Split x -> x_0 x_1 y", "ReLU x_0 -> e", "TanH x_1 -> f"],
    ),
    "a Split that only passes on stays": (
        ["Input i 0 1 x", "Split s 1 1 x a", "Split t 1 2 a b c", "ReLU r 1 1 b y", "TanH q 1 1 c z"],
        ["Input -> x", "Split x -> a", "Split a -> a_0 a_1", "ReLU a_0 -> y", "TanH a_1 -> z"],
    ),
    "no Split where ncnn needs one": (
        ["Input i 0 1 x", "ReLU r 1 1 x y", "TanH q 1 1 x z"],
        ["Input -> x", "Split x -> x_0 x_1", "ReLU x_0 -> y", "TanH x_1 -> z"],
    ),
    "names that are taken": (
        ["Input i 0 1 x", "Split s 1 2 x a b", "ReLU r 1 1 a x_0", "TanH q 1 1 b x_1"],
        ["Input -> x", "Split x -> x_0_1 x_1_1", "ReLU x_0_1 -> x_0", "TanH x_1_1 -> x_1"],
    ),
    "an input that nobody uses": (
        ["Input i 0 2 x w", "ReLU r 1 1 x y"],
        ["Input -> x w", "ReLU x -> y"],
    ),
    "several outputs of one layer": (
        ["Input i 0 1 x", "Slice s 1 2 x a b", "Split t 1 2 b c d", "BinaryOp m 2 1 a c e", "ReLU r 1 1 d f"],
        ["Input -> x", "Slice x -> a b", "Split b -> b_0 b_1", "BinaryOp a b_0 -> e", "ReLU b_1 -> f"],
    ),
}
DROPPED = {
    "a blob with two users": {"s"},
    "a Split into one output": {"s"},
    "Splits of Splits": {"t", "u"},
}


@pytest.mark.parametrize("case", CASES)
def test_reading_and_writing(case: str) -> None:
    lines, written = CASES[case]
    net = parsed(*lines)
    assert listed(net.graph) == written
    assert {split.layer for split in net.dropped_splits} == DROPPED.get(case, set())
    produced = [name for line in lines for name in line.split()[4:] if "=" not in name]
    unused = {name for name in produced if produced.count(name) == 1}
    assert {blob.name for blob in net.graph.outputs} == unused
    assert listed(parse_param(format_param(net.graph)).graph) == written
    net.graph.check()


@pytest.mark.parametrize("case", CASES)
def test_ncnn_returns_every_output_by_its_name(tmp_path: Path, worker: NcnnWorker, case: str) -> None:
    graph = parsed(*CASES[case][0]).graph
    paths = tmp_path / "net.param", tmp_path / "net.bin"
    x = np.linspace(-2, 2, 24, dtype=np.float32).reshape(2, 3, 4)
    for layer in graph:
        if layer.type == "Slice":
            layer.params["slices"] = (1, -233)
    write_net(graph, *paths)
    runner = NcnnRunner(*paths, worker=worker)
    assert sorted(runner.output_names()) == sorted(blob.name for blob in graph.outputs)
    outputs = runner.run({blob.name: x for blob in graph.inputs})
    computed = {"Split": x, "ReLU": np.maximum(x, 0)}
    for blob in graph.outputs:
        source = blob.producer
        while source is not None and source.type == "Split":
            source = source.input.producer
        if source is not None and source.type in computed and source.input.is_input:
            np.testing.assert_array_equal(outputs[blob.name], computed[source.type])


def test_reasons_for_dropping() -> None:
    net = parsed(*CASES["Splits of Splits"][0])
    assert [(split.layer, split.reason) for split in net.dropped_splits] == [
        ("t", "joined with 's', which splits the same blob"),
        ("u", "nothing needs a copy: there is only one use after it"),
    ]


def test_the_graph_is_unchanged() -> None:
    graph = parsed(*CASES["two names for one output that is used"][0]).graph
    before = (
        [(layer, layer.inputs, layer.outputs) for layer in graph],
        [b.name for layer in graph for b in layer.outputs],
    )
    format_param(graph)
    after = (
        [(layer, layer.inputs, layer.outputs) for layer in graph],
        [b.name for layer in graph for b in layer.outputs],
    )
    assert before == after


def test_a_split_in_the_graph_is_seen_through() -> None:
    """Whatever made it: its tops may be used like the tensor itself."""
    graph = Graph()
    x, y, z, a, b = (Blob(name) for name in "xyzab")
    graph.add(Layer("Input", "in", (), [x]))
    graph.add(Layer("ReLU", "relu", [x], [y]))
    graph.add(Layer("Split", "one", [y], [a, b]))
    graph.add(Layer("BinaryOp", "add", [a, y], [z]))
    graph.outputs = [z, b]
    assert listed(graph) == ["Input -> x", "ReLU x -> b_split", "Split b_split -> b_0 b", "BinaryOp b_0 b_0 -> z"]


def test_a_split_for_layers_on_the_cpu_stays_there() -> None:
    for masks, expected in ((("31=16", "31=16"), 16), (("31=16", ""), 0)):
        lines = (f"ReLU {name} 1 1 x {name} {mask}" for name, mask in zip("ab", masks, strict=True))
        (split,) = (
            line for line in list_layers(parsed("Input x 0 1 x 0=4", *lines).graph).lines if line.type == "Split"
        )
        assert split.featmask == expected


def test_an_input_cannot_be_returned_under_its_own_name() -> None:
    graph = parsed("Input i 0 1 x", "ReLU r 1 1 x y").graph
    graph.outputs = [*graph.outputs, *graph.inputs]
    with pytest.raises(GraphError, match="the input 'x' is used and is an output as well"):
        format_param(graph)


def test_use_before_production() -> None:
    graph = Graph()
    graph.add(Layer("ReLU", "relu", [Blob("x")], [Blob("y")]))
    with pytest.raises(GraphError, match="'relu' uses 'x' before anything produces it"):
        format_param(graph)


def test_names_are_made_safe_and_public_ones_are_returned() -> None:
    graph = Graph()
    x, y, z, w = Blob("my input"), Blob("b"), Blob(""), Blob("b")
    graph.add(Layer("Input", "the input", (), [x]))
    graph.add(Layer("ReLU", "", [x], [y]))
    graph.add(Layer("ReLU", "l" * 300, [y], [z]))
    graph.add(Layer("ReLU", "r", [z], [w]))
    graph.outputs = [w]
    assert listed(graph) == ["Input -> my_input", "ReLU my_input -> b_1", "ReLU b_1 -> blob", "ReLU blob -> b"]
    assert [line.name for line in list_layers(graph).lines] == ["the_input", "unnamed", "l" * 255, "r"]
    assert list_layers(graph).names == {x: "my_input", w: "b"}
