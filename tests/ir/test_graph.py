"""Def-use links, edits, iteration and the checks of the graph."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.errors import GraphError
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer, check_layer
from onnx2ncnn_opt.ir.weight import Encoding, Weight, digest


def chain(*types: str) -> Graph:
    """Input, then one layer of each type after the other; the last blob is the output."""
    graph = Graph()
    blob = Blob("in", (2, 3, 4))
    graph.add(Layer("Input", "in", (), [blob]))
    for i, type in enumerate(types):
        following = Blob(f"b{i}")
        graph.add(Layer(type, f"l{i}", [blob], [following]))
        blob = following
    graph.outputs = [blob]
    return graph


def names(graph: Graph) -> list[str]:
    return [layer.name for layer in graph]


def test_links_between_blobs_and_layers() -> None:
    graph = chain("ReLU", "AbsVal")
    relu, absval = graph.layers[1:]
    assert relu.output.producer is relu
    assert list(relu.output.users) == [absval]
    assert (relu.output.uses, absval.output.uses) == (1, 1)
    assert graph.inputs == (relu.input,)
    assert relu.input.is_input
    assert not relu.output.is_input
    assert graph.outputs == (absval.output,)
    both = graph.add(Layer("BinaryOp", "add", [relu.output, relu.output], [Blob("sum")]))
    assert relu.output.uses == 3
    assert list(relu.output.users) == [absval, both]
    graph.check()


def test_outputs_are_uses() -> None:
    graph = chain("ReLU", "AbsVal")
    middle, last = graph.layers[1].output, graph.layers[2].output
    graph.outputs = [last, middle, last]
    assert graph.outputs == (last, middle)
    assert (middle.uses, middle.is_output) == (2, True)
    graph.outputs = [last]
    assert (middle.uses, middle.is_output) == (1, False)


def test_add_before_another_layer() -> None:
    graph = chain("ReLU")
    relu = graph.layers[1]
    mid = Blob("mid")
    graph.add(Layer("AbsVal", "new", [relu.input], [mid]), before=relu)
    graph.set_inputs(relu, [mid])
    assert names(graph) == ["in", "new", "l0"]
    assert [layer.name for layer in reversed(graph)] == ["l0", "new", "in"]
    assert len(graph) == 3
    graph.check()


def test_replace_takes_over_the_outputs() -> None:
    graph = chain("ReLU", "AbsVal")
    relu = graph.layers[1]
    new = graph.replace(relu, relu.having(type="TanH"))
    assert names(graph) == ["in", "l0", "l1"]
    assert new.output.producer is new
    assert new.output.name == "b0"
    assert new.input.users == (new,)
    assert relu.graph is None
    graph.check()


def test_a_copy_shares_only_the_arrays_of_weights() -> None:
    graph = Graph()
    x = graph.add(Layer("Input", "in", (), [Blob("x", (3,))])).output
    layer = graph.add(Layer("PReLU", "p", [x], [Blob("y")], {"num_slope": 1}, {"slope_data": np.ones(1, np.float32)}))
    graph.outputs = [layer.output]
    copy = graph.copy()
    copy.check()
    [_, other] = copy
    assert (other.input.shape, [blob.name for blob in copy.outputs]) == ((3,), ["y"])
    assert other.weights["slope_data"] is layer.weights["slope_data"]
    other.params["num_slope"], other.weights["slope_data"] = 3, np.zeros(3, np.float32)
    other.output.name = "z"
    graph.check()
    assert (layer["num_slope"], layer.weights["slope_data"].size, layer.output.name) == (1, 1, "y")


def test_redirect_and_remove() -> None:
    graph = chain("Dropout", "AbsVal")
    dropout = graph.layers[1]
    with pytest.raises(GraphError, match="'l0' cannot be removed: 'b0' is still used"):
        graph.remove(dropout)
    graph.redirect(dropout.output, dropout.input)
    graph.remove(dropout)
    assert names(graph) == ["in", "l1"]
    graph.check()


def test_edits_that_cannot_be() -> None:
    graph = chain("ReLU")
    relu = graph.layers[1]
    with pytest.raises(GraphError, match="already in a graph"):
        graph.add(relu)
    with pytest.raises(GraphError, match="'b0' has two producers: 'l0' and 'twice'"):
        graph.add(Layer("ReLU", "twice", [relu.input], [relu.output]))
    graph = chain("ReLU")
    with pytest.raises(GraphError, match="has 2 outputs, 'l0' has 1"):
        graph.replace(graph.layers[1], Layer("Noop", "two", graph.inputs, [Blob("x"), Blob("y")]))


ACTIONS = ["keep", "remove", "replace", "add before", "add behind", "remove next", "remove both"]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=12))
def test_iteration_sees_every_layer_once_during_edits(actions: list[str]) -> None:
    graph = chain(*["ReLU"] * len(actions))
    plan = dict(zip([f"l{i}" for i in range(len(actions))], actions, strict=True))
    seen: list[str] = []
    removed: set[str] = set()

    def remove(layer: Layer) -> None:
        graph.outputs = [blob if blob is not layer.output else layer.input for blob in graph.outputs]
        graph.redirect(layer.output, layer.input)
        graph.remove(layer)
        removed.add(layer.name)

    for layer in graph:
        seen.append(layer.name)
        action = plan.get(layer.name, "keep")
        if action == "remove":
            remove(layer)
        elif action == "replace":
            graph.replace(layer, layer.having(type="TanH"))
        elif action == "add before":
            graph.add(Layer("AbsVal", "before", [layer.input], [Blob(f"{layer.name}-x")]), before=layer)
        elif action == "add behind" and layer.output.users:
            behind = layer.output.users[0]
            graph.add(Layer("AbsVal", "behind", [layer.input], [Blob(f"{layer.name}-y")]), before=behind)
        elif action.startswith("remove"):
            if layer.output.users and layer.output.users[0].name in plan:
                remove(layer.output.users[0])
            if action == "remove both":
                remove(layer)
        graph.check()
    kept = [name for name in seen if name.startswith("l") and name not in removed]
    assert kept == [name for name in plan if name not in removed]
    assert [name for name in names(graph) if name.startswith("l")] == kept


def test_removal_while_iterating_backwards() -> None:
    graph = chain("ReLU", "AbsVal", "TanH")
    graph.outputs = [graph.inputs[0]]
    for layer in reversed(graph):
        if layer.type != "Input":
            graph.remove(layer)
    assert names(graph) == ["in"]


def test_params_and_defaults() -> None:
    conv = Layer("Convolution", "conv", params={"kernel_w": 3, "stride_w": 2, 29: 7})
    assert conv["kernel_h"] == 3
    assert conv["stride_h"] == 2
    assert conv["pad_bottom"] == 0
    assert conv.get("dilation_w") == 1
    assert (conv.get("featmask"), conv.get("shape_hints"), conv.get("group", 2)) == (0, (), 2)
    with pytest.raises(KeyError, match="custom layer type Mine has no parameter w"):
        Layer("Mine", "mine")["w"]
    other = conv.having(stride_w=None, kernel_h=5, weights={"bias_data": np.zeros(1)})
    assert (other["stride_h"], other["kernel_h"], other.params[29]) == (1, 5, 7)
    assert other.weights["bias_data"].dtype == np.float32
    assert "bias_data" not in conv.weights


def test_weights_in_every_encoding_give_numbers() -> None:
    half = Weight(np.array([0.5, -2], np.float16), Encoding.FP16)
    bfloat = Weight((np.array([0.5, -2], np.float32).view(np.uint32) >> 16).astype(np.uint16), Encoding.BF16)
    table = Weight(np.array([1, 0], np.uint8), Encoding.TABLE, np.array([-2, 0.5] + [0] * 254, np.float32))
    for weight in (half, bfloat, table):
        assert weight.array.tolist() == [0.5, -2]
        assert weight.array.dtype == np.float32
        assert weight.is_float
    others = bfloat, table, Weight(table.data, Encoding.TABLE, table.table, tag=2)
    assert len({digest(weight) for weight in (half, *others)}) == 4
    assert not Weight(np.zeros(2, np.int8), Encoding.INT8).is_float
    assert not Weight(np.zeros(2, np.int32)).is_float


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda graph, relu, absval: graph.set_inputs(relu, [absval.output]), "layer 'l0' uses 'b1' before anything"),
        (lambda graph, relu, absval: setattr(relu.output, "name", "in"), "two blobs are called 'in'"),
        (
            lambda graph, relu, absval: setattr(relu.output, "producer", absval),
            "blob 'b0' does not know its producer 'l0'",
        ),
        (
            lambda graph, relu, absval: setattr(graph, "outputs", [Blob("nowhere")]),
            "no layer produces the output 'nowhere'",
        ),
        (lambda graph, relu, absval: graph.set_inputs(relu, [relu.input] * 2), "ReLU 'l0' has 2 inputs, needs 1"),
    ],
)
def test_check_names_the_fault(spoil: Callable[[Graph, Layer, Layer], None], message: str) -> None:
    graph = chain("ReLU", "AbsVal")
    spoil(graph, *graph.layers[1:])
    with pytest.raises(GraphError, match=message):
        graph.check()


def test_check_counts_uses() -> None:
    graph = chain("ReLU")
    graph.add(Layer("BinaryOp", "add", [graph.inputs[0], graph.inputs[0]], [Blob("sum")]))
    graph.inputs[0]._users.popitem()
    with pytest.raises(GraphError, match="blob 'in' counts 1 uses, but has 3"):
        graph.check()


def blobs(count: int) -> list[Blob]:
    return [Blob(str(i)) for i in range(count)]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Layer("MatMul", "x", blobs(1), blobs(1)), "MatMul 'x' has 1 inputs, needs 2"),
        (Layer("Proposal", "x", blobs(3), blobs(3)), "Proposal 'x' has 3 outputs, needs 1 to 2"),
        (Layer("Concat", "x", [], blobs(1)), "Concat 'x' has 0 inputs, needs 1 or more"),
        (Layer("BinaryOp", "x", blobs(2), blobs(1), {"with_scalar": 1}), "'x' must have one input and one output"),
        (Layer("UnaryOp", "x", blobs(1), blobs(1), {"op_type": 99}), "UnaryOp 'x': op_type=99 is none of"),
        (Layer("Bias", "x", blobs(1), blobs(1), {"bias_data_size": 2}), "Bias 'x' lacks its weight bias_data"),
        (
            Layer("Bias", "x", blobs(1), blobs(1), {"bias_data_size": 2}, {"bias_data": np.zeros(3)}),
            "Bias 'x': bias_data has 3 elements, the parameters say 2",
        ),
    ],
)
def test_check_of_a_layer(layer: Layer, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        check_layer(layer)


def test_check_lets_custom_layers_be() -> None:
    check_layer(Layer("Mine", "x", blobs(7), blobs(3), {0: 1}))
