"""No pass loses a parameter that it does not know, an opt-out of fp16, or a blob that somebody else reads too.

Each net of the fixtures in which a pass finds something is spoiled in one of these ways, at each of its layers in turn.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.rewrite.events import Applied
from onnx2ncnn_opt.rewrite.pipeline import run
from onnx2ncnn_opt.rewrite.rule import Pass
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from testing.pass_cases import FOLDER, Case, load
from tests.passes.test_fixtures import BY_NAME, assert_same, compute, rounding_of

_UNKNOWN = 99
_MASK = 4
_SOME = 2  # cases of a pass, each with every layer; all with --thorough


def positive(name: str, thorough: bool) -> list[Case]:
    cases = load(FOLDER / f"{name}.md")
    found = [case for case in cases if not case.is_unchanged and any(True for _ in spoilt(case))]
    return found if thorough else found[:_SOME]


def spoilt(case: Case) -> Iterator[tuple[Graph, Layer]]:
    """The net, again for each of its layers."""
    for i, layer in enumerate(case.net()):
        if layer.type not in ("Input", "Split"):
            graph = case.net()
            yield graph, graph.layers[i]


def applied(graph: Graph, rewrite: Pass) -> list[Applied]:
    return [event for event in run(graph, [rewrite], check=True) if isinstance(event, Applied)]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_an_unknown_parameter(name: str, thorough: bool) -> None:
    for case in positive(name, thorough):
        for graph, layer in spoilt(case):
            layer.params[_UNKNOWN] = 1
            applied(graph, BY_NAME[name])
            assert any(_UNKNOWN in each.params for each in graph), f"{case}: lost from {layer}"


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_feature_mask(name: str, thorough: bool) -> None:
    for case in positive(name, thorough):
        for graph, layer in spoilt(case):
            layer.params["featmask"] = _MASK
            made = [event.after for event in applied(graph, BY_NAME[name])]
            # What only vanished computed nothing.
            masked = any(each["featmask"] & _MASK for each in graph)
            assert masked or not any(made), f"{case}: lost from {layer}"


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_second_reader(name: str, tmp_path: Path, worker: NcnnWorker, thorough: bool) -> None:
    for case in positive(name, thorough):
        for graph, layer in spoilt(case):
            feeds = case.feeds(graph)
            add_readers(graph, layer)
            names = sorted(blob.name for blob in graph.outputs)
            expected, rounding = compute(graph, feeds, tmp_path / "before", worker), rounding_of(graph, worker)
            if applied(graph, BY_NAME[name]):
                assert sorted(blob.name for blob in graph.outputs) == names
                # Not bit by bit: a blob that is read twice is packed in another way, which x86 rounds in another way.
                assert_same(compute(graph, feeds, tmp_path / "after", worker), expected, rounding)


def add_readers(graph: Graph, layer: Layer) -> None:
    """A layer more after each output of a layer."""
    for blob in layer.outputs:
        reader = graph.add(Layer("AbsVal", f"{blob.name}_reader", [blob], [Blob(f"{blob.name}_read")]))
        assign_shapes(reader)
        graph.outputs = [*graph.outputs, reader.output]
