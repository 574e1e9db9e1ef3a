"""Nets written and read again: the same files, the same meaning."""

import io
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.weight import digest
from onnx2ncnn_opt.param.binary import load_weights, write_weights
from onnx2ncnn_opt.param.splits import list_layers
from onnx2ncnn_opt.param.text import format_param, parse_param
from testing.random_nets import random_graph

randoms = st.integers(0, 2**64 - 1).map(Random)


def written(graph: Graph) -> tuple[str, bytes]:
    stream = io.BytesIO()
    write_weights(graph, stream)
    return format_param(graph), stream.getvalue()


def read(text: str, weights: bytes) -> Graph:
    graph = parse_param(text.encode()).graph
    assert load_weights(graph, np.frombuffer(weights, np.uint8)) == 0
    return graph


@settings(max_examples=150, derandomize=True, deadline=None)
@given(randoms)
def test_a_read_net_is_written_unchanged(rng: Random) -> None:
    first = written(random_graph(rng))
    again = written(read(*first))
    assert again == first


@settings(max_examples=150, derandomize=True, deadline=None)
@given(randoms)
def test_a_written_net_is_read_unchanged(rng: Random) -> None:
    graph = random_graph(rng)
    copy = read(*written(graph))
    copy.check()
    same_net(graph, copy)


def without_splits(graph: Graph) -> tuple[list[Layer], dict[Blob, Blob]]:
    """The layers that compute something, and for every blob the one that such a layer made."""
    made: dict[Blob, Blob] = {}
    layers = []
    for layer in graph:
        if layer.type != "Split":
            layers.append(layer)
        made.update((blob, made[layer.input] if layer.type == "Split" else blob) for blob in layer.outputs)
    return layers, made


def same_net(graph: Graph, copy: Graph) -> None:
    """Both compute the same from the same: layers, weights, wiring, and what their public names stand for."""
    mine, made = without_splits(graph)
    theirs, made_there = without_splits(copy)
    assert [layer.type for layer in mine] == [layer.type for layer in theirs]
    twin: dict[Blob, Blob] = {}
    for layer, other in zip(mine, theirs, strict=True):
        assert [twin[made[blob]] for blob in layer.inputs] == [made_there[blob] for blob in other.inputs]
        twin.update(zip(layer.outputs, other.outputs, strict=True))
        same_values(layer, other)
        for name, weight in layer.weights.stored_items():
            assert digest(weight) == digest(other.weights.stored(name))
        assert list(layer.weights) == list(other.weights)
    names = list_layers(graph).names
    for blob in graph.inputs:
        assert twin[blob].name == names[blob]
        assert twin[blob].is_input
    promised = {blob.name: blob for blob in copy.outputs}
    for blob in graph.outputs:
        assert made_there[promised.pop(names[blob])] is twin[made[blob]]
    # Whatever else nobody reads is an output for ncnn, too.
    for blob in promised.values():
        assert not any(made[alias] is original and alias.uses for alias in made for original in [back(twin, blob)])


def back(twin: dict[Blob, Blob], blob: Blob) -> Blob:
    return next(original for original, copy in twin.items() if copy is blob)


def same_values(layer: Layer, other: Layer) -> None:
    """Every parameter has the same value and, where it is a float, the same bits."""
    for name in layer.params.keys() | other.params.keys():
        if name == "shape_hints":
            assert [blob.shape for blob in layer.outputs] == [blob.shape for blob in other.outputs]
            continue
        a, b = layer.params[name], other.params[name]
        assert np.array_equal(np.signbit(a), np.signbit(b)) if not isinstance(a, str) else a == b
        assert a == b or np.array_equal(np.float32(a), np.float32(b)), (layer.type, name, a, b)
