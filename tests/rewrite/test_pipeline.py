"""Rules for every rewrite: inner blobs, public names, origins, events, limits and the fixpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt import passes
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import GraphError, PluginError, Stop, UsageError
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.passes import PASSES
from onnx2ncnn_opt.passes import run as optimise
from onnx2ncnn_opt.rewrite.events import Applied, Event, Failed, LayerRef, NearMiss
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.pipeline import run
from onnx2ncnn_opt.rewrite.rule import Miss, Pass, Replacement, Rewrite, attempt, graph_pass, require, rewrite
from testing.models import parsed
from testing.optimized import apply_passes
from testing.param_text import net, shown

X = "Input x 0 1 x 0=4 1=4 2=3"


@rewrite(op("ReLU", "outer")(op("ReLU", "inner")("x")), exact=True)
def merge(inner: Layer, outer: Layer, x: Blob) -> Layer:
    """two ReLUs   ⇒   one"""
    require(inner["slope"] == 0 and outer["slope"] == 0, "a slope")
    return inner.having(inputs=[x])


@rewrite(op("Swish", "swish")("x"), exact=False)
def expand(swish: Layer, x: Blob) -> list[Layer]:
    """Swish   ⇒   Sigmoid, product"""
    gate = Blob("gate")
    sigmoid = Layer("Sigmoid", f"{swish.name}_gate", [x], [gate])
    return [sigmoid, Layer("BinaryOp", swish.name, [x, gate], (), {"op_type": 2})]


@rewrite(op("Dropout")("x"), exact=True)
def drop(x: Blob) -> Blob:
    """Dropout   ⇒   nothing"""
    return x


def applied(events: list[Event]) -> list[str]:
    return [event.pass_name for event in events if isinstance(event, Applied)]


def reasons(events: list[Event]) -> list[str]:
    return [event.reason for event in events if isinstance(event, NearMiss)]


def test_a_layer_takes_the_place_and_the_output_of_the_root() -> None:
    graph = net(X, "ReLU a 1 1 x p", "ReLU b 1 1 p q", "Sigmoid s 1 1 q y")
    events = run(graph, [merge], check=True)
    assert shown(graph) == ["Input x:  -> x", "ReLU a: x -> q", "Sigmoid s: q -> y"]
    assert events == [Applied("merge", (LayerRef("ReLU", "a"), LayerRef("ReLU", "b")), (LayerRef("ReLU", "a"),))]
    assert str(events[0]) == "merge: ReLU 'a' + ReLU 'b' => ReLU 'a'"


def test_origins_and_feature_masks_are_united() -> None:
    graph = net(X, "ReLU a 1 1 x p 31=1", "ReLU b 1 1 p q", "ReLU c 1 1 q y 31=64")
    run(graph, [merge])
    (_, relu) = graph.layers
    assert (relu.origin, relu["featmask"]) == (("/a", "/b", "/c"), 65)


def test_constants_that_were_folded_are_an_origin_too() -> None:
    graph = net(X, "MemoryData c 0 1 c 0=1", "BinaryOp m 2 1 x c y 0=2")
    graph.layers[1].weights["data"] = [2.0]  # type: ignore[assignment]
    optimise(graph)
    (_, product) = graph.layers
    assert (product.origin, product["b"]) == (("/m", "/c"), 2.0)


@pytest.mark.parametrize(("inner", "root", "hint"), [("3,9,9,9", "3,4,4,3", (3, 4, 4, 3)), ("3,4,4,3", "", ())])
def test_a_shape_hint_is_that_of_the_root(inner: str, root: str, hint: tuple[int, ...]) -> None:
    lines = (f"ReLU a 1 1 x p -23330=4,{inner}", "ReLU b 1 1 p y" + (f" -23330=4,{root}" if root else ""))
    graph = net(X, *lines)
    run(graph, [merge])
    assert graph.layers[1]["shape_hints"] == hint


def test_an_inner_blob_that_is_used_elsewhere() -> None:
    graph = net(X, "ReLU a 1 1 x p", "Split s 1 2 p r t", "ReLU b 1 1 r q", "BinaryOp m 2 1 q t y 0=0")
    before = shown(graph)
    events = run(graph, [merge], check=True)
    assert shown(graph) == before
    assert events == [
        NearMiss("merge", (LayerRef("ReLU", "a"), LayerRef("ReLU", "b")), "'p' is also used by BinaryOp 'm'")
    ]


def test_an_inner_blob_that_is_an_operand_of_the_result() -> None:
    @rewrite(op("BinaryOp")(op("ReLU")("a"), op("ReLU")("b")), exact=True)
    def both(a: Blob, b: Blob) -> Layer:
        """two ReLUs and a sum   ⇒   a sum"""
        return Layer("BinaryOp", "sum", [a, b])

    graph = net(X, "ReLU a 1 1 x p", "Split s 1 2 p q r", "ReLU b 1 1 q t", "BinaryOp m 2 1 t r y 0=1")
    assert reasons(run(graph, [both], check=True)) == ["'p' is needed for itself, too"]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (("ReLU a 1 1 x p", "Split s 1 2 p r z", "ReLU b 1 1 r y"), "'z' is an output of the net"),
        (("ReLU a 1 1 x p 0=0.5", "ReLU b 1 1 p y"), "a slope"),
        (("ReLU a 1 1 x p 9=1", "ReLU b 1 1 p y"), "parameter 9 of ReLU 'a' is unknown"),
    ],
)
def test_near_misses_of_one_pattern(lines: tuple[str, ...], reason: str) -> None:
    (miss,) = run(net(X, *lines), [merge], check=True)
    assert str(miss) == f"merge: ReLU 'a' + ReLU 'b': {reason}"


def test_near_misses_that_came_to_be_rewritten_are_forgotten() -> None:
    graph = net(X, "Swish s 1 1 x a", "ReLU b 1 1 a c", "Split t 1 2 c d e", "ReLU f 1 1 d y", "ReLU g 1 1 e z")
    graph.outputs = graph.outputs[:1]
    assert reasons(run(graph, [merge])) == ["'c' is also used by ReLU 'g'", "'c' is also used by ReLU 'f'"]

    @graph_pass(exact=True)
    def remove_dead(graph: Graph) -> Iterator[Replacement]:
        """dead   ⇒   nothing"""
        for layer in reversed(graph):
            if layer.type != "Input" and not any(blob.uses for blob in layer.outputs):
                yield Replacement((layer,))

    # The merge comes first, is refused, and is asked again once the second use is gone.
    events = run(graph, [merge, remove_dead], check=True)
    assert applied(events) == ["remove_dead", "merge"]
    assert not reasons(events)


def test_near_misses_whose_pattern_is_gone_are_forgotten() -> None:
    @rewrite(op("ReLU", "leaky", slope=0.5)("x"), exact=True)
    def to_sigmoid(leaky: Layer, x: Blob) -> Layer:
        """ReLU   ⇒   Sigmoid"""
        return Layer("Sigmoid", leaky.name, [x])

    graph = net(X, "ReLU a 1 1 x p 0=0.5", "ReLU b 1 1 p y")
    events = run(graph, [merge, to_sigmoid])
    assert applied(events) == ["to_sigmoid"]
    assert not reasons(events)


@pytest.mark.parametrize("count", [1, 8, 9, 12])
def test_the_last_of_many_inputs_decides(count: int) -> None:
    names = [f"i{number}" for number in range(count - 1)]

    @rewrite(op("Concat")(*names, op("ReLU")("last")), exact=True)
    def second(last: Blob) -> Layer:
        """Concat   ⇒   Sigmoid"""
        return Layer("Sigmoid", "s", [last])

    for kind, found in (("ReLU", ["second"]), ("TanH", [])):
        inputs = [f"Input {name} 0 1 {name} 0=4" for name in names]
        graph = net(
            *inputs, "Input x 0 1 x 0=4", f"{kind} r 1 1 x p", f"Concat c {count} 1 {' '.join([*names, 'p'])} y"
        )
        assert applied(run(graph, [second], check=True)) == found


def test_elimination_keeps_the_names_of_inputs_and_outputs() -> None:
    inside = net(X, "Dropout a 1 1 x p", "ReLU b 1 1 p q", "Dropout c 1 1 q y")
    run(inside, [drop], check=True)
    assert shown(inside) == ["Input x:  -> x", "ReLU b: x -> y"]
    assert [blob.name for blob in inside.outputs] == ["y"]
    assert [layer.origin for layer in inside] == [("/x",), ("/b",)]

    across = net(X, "Dropout a 1 1 x y")
    assert reasons(run(across, [drop])) == ["both 'x' and 'y' are public names: an input and an output"]

    outputs = net(X, "ReLU b 1 1 x p", "Split s 1 2 p q z", "Dropout a 1 1 q y")
    assert reasons(run(outputs, [drop])) == ["both 'z' and 'y' are outputs of the net"]


def test_an_output_keeps_its_position() -> None:
    graph = net(X, "Split s 1 3 x a b c", "ReLU r 1 1 a p", "Dropout d 1 1 p y", "Sigmoid t 1 1 b z", "TanH u 1 1 c w")
    run(graph, [drop], check=True)
    assert [blob.name for blob in graph.outputs] == ["y", "z", "w"]


def test_expansion_names_its_blobs_apart_and_knows_their_shapes() -> None:
    graph = net(X, "ReLU r 1 1 x gate", "Swish s 1 1 gate a", "Swish t 1 1 a y")
    events = run(graph, [expand], check=True)
    assert shown(graph)[2:] == [
        "Sigmoid s_gate: gate -> gate_1",
        "BinaryOp s: gate gate_1 -> a",
        "Sigmoid t_gate: a -> gate_2",
        "BinaryOp t: a gate_2 -> y",
    ]
    assert {blob.shape for layer in graph for blob in layer.outputs} == {(3, 4, 4)}
    assert graph.layers[2].origin == graph.layers[3].origin == ("/s",)
    assert isinstance(events[0], Applied)
    assert [ref.type for ref in events[0].after] == ["Sigmoid", "BinaryOp"]


def test_a_pass_matches_layers_of_another_pass() -> None:
    graph = net(X, "ReLU a 1 1 x p", "Dropout d 1 1 p q", "ReLU b 1 1 q y")
    assert applied(run(graph, [merge, drop], check=True)) == ["drop", "merge"]
    assert shown(graph) == ["Input x:  -> x", "ReLU a: x -> y"]


def test_every_user_of_a_new_layer_is_matched_again() -> None:
    count = 20
    names = [f"b{i}" for i in range(count)]
    graph = net(
        "Input x 0 1 x 0=4",
        "InnerProduct p 1 1 x a 0=2 2=8",
        "Noop n 1 1 a b",
        "BinaryOp m 1 1 b c 0=2 1=1 2=2.0",
        f"Split s 1 {count} c {' '.join(names)}",
        *(f"Convolution f{i} 1 1 b{i} y{i} 0=2 1=1 6=4" for i in range(count)),
        f"Concat z {count} 1 {' '.join(f'y{i}' for i in range(count))} z",
    )
    for number, layer in enumerate(layer for layer in graph if "weight_data_size" in layer.params):
        layer.weights["weight_data"] = np.full(layer["weight_data_size"], number, np.float32)
    optimise(graph, check=True)
    assert [layer.type for layer in graph] == ["Input", *["InnerProduct"] * (1 + count), "Concat"]
    assert not applied(optimise(graph))


@pytest.mark.parametrize("limit", range(6))
def test_the_limit_counts_rewrites(limit: int) -> None:
    lines = [f"ReLU r{i} 1 1 {f'b{i - 1}' if i else 'x'} b{i}" for i in range(5)]
    graph = net(X, *lines)
    assert len(applied(run(graph, [merge], limit=limit, check=True))) == min(limit, 4)
    assert len(graph) == 6 - min(limit, 4)
    dead = net(X, *lines)
    dead.outputs = [dead.layers[0].output]
    assert len(applied(optimise(dead, limit=limit))) == min(limit, 5)  # a pass over the graph removes them


@graph_pass(exact=False)
def mish(graph: Graph) -> Iterator[Replacement | Miss]:
    """Sigmoid   ⇒   Mish"""

    def edit(layer: Layer) -> Replacement:
        require(not layer["featmask"], "a feature mask")
        return Replacement((layer,), takes={layer: Layer("Mish", layer.name, layer.inputs)})

    for layer in graph.layers:
        if layer.type == "Sigmoid":
            yield from attempt(layer, edit, layer)


def test_passes_over_the_graph_have_near_misses() -> None:
    graph = net(X, "Sigmoid a 1 1 x p 31=1", "Sigmoid b 1 1 p q", "Dropout d 1 1 q y")
    events = run(graph, [mish, drop])
    assert applied(events) == ["mish", "drop"]
    assert events[2:] == [NearMiss("mish", (LayerRef("Sigmoid", "a"),), "a feature mask")]
    assert shown(graph)[1:] == ["Sigmoid a: x -> p", "Mish b: p -> y"]


def test_a_veto_prevents_the_rewrite() -> None:
    for p, line in ((mish, "Sigmoid b 1 1 x y"), (expand, "Swish b 1 1 x y")):
        graph = net(X, line)
        before = shown(graph)
        events = run(graph, [p], veto=lambda layer: f"no {layer.type}")
        assert shown(graph) == before
        assert reasons(events) == ["no Mish" if p is mish else "no Sigmoid"]


def renamed(old: str, new: str) -> Rewrite:
    """A pass that gives layers another type."""

    @rewrite(op(old, "layer")("x"), exact=True)
    def to_other(layer: Layer, x: Blob) -> Layer:
        """one type   ⇒   another"""
        return Layer(new, layer.name, [x])

    return to_other


def test_passes_that_undo_each_other_are_an_error() -> None:
    both = [renamed("ReLU", "Sigmoid"), renamed("Sigmoid", "ReLU")]
    with pytest.raises(PluginError, match="do not come to an end; the last rewrite was to_"):
        run(net(X, "ReLU r 1 1 x y"), both, check=True)
    graph = net(X, "ReLU r 1 1 x y")
    *_, last = run(graph, both)
    assert isinstance(last, Failed)
    assert "do not come to an end" in last.reason
    graph.check()


def test_check_finds_the_rewrite_that_breaks_the_graph() -> None:
    @rewrite(op("ReLU", "layer")("x"), exact=True)
    def broken(layer: Layer, x: Blob) -> Layer:
        """ReLU   ⇒   BinaryOp without its second operand"""
        return Layer("BinaryOp", layer.name, [x, x], (), {"op_type": 99})

    with pytest.raises(PluginError, match=r"broken of the plug-in .*op_type=99"):
        run(net(X, "ReLU r 1 1 x y"), [broken], check=True)
    broken.function.__module__ = "onnx2ncnn_opt.passes.broken"
    with pytest.raises(GraphError, match="op_type=99"):
        run(net(X, "ReLU r 1 1 x y"), [broken], check=True)


def broken_pass(how: str) -> Pass:
    """A pass that breaks the second of two ReLUs, after it has changed the first."""

    @graph_pass(exact=True)
    def broken(graph: Graph) -> Iterator[Replacement]:
        first, second = (layer for layer in graph.layers if layer.type == "ReLU")
        yield Replacement((first,), takes={first: Layer("Sigmoid", "new", first.inputs)})
        new = Layer("ReLU", "other", second.inputs)
        match how:
            case "raises":
                raise KeyError("it")
            case "is interrupted":
                raise KeyboardInterrupt
            case "is interrupted in a class":
                raise RuntimeError from KeyboardInterrupt()
            case "is stopped":
                raise Stop(143)
            case "has no memory":
                raise MemoryError
            case "reads a later blob":
                new.inputs = graph.outputs
            case "has a weight too much":
                new.weights["bias_data"] = np.zeros(3, np.float32)
            case "takes a blob twice":
                third = Layer("ReLU", "third", second.inputs, first.outputs)
                yield Replacement((second,), takes={second: new}, added=[(third, second)])
        yield Replacement((second,), takes={second: new})

    return broken


BREAKING = {
    "raises": "KeyError: 'it'",
    "reads a later blob": "before anything produces it",
    "has a weight too much": "ReLU 'other' cannot hold the weights ['bias_data']",
    "takes a blob twice": "blob 'p' has two producers",
}


@pytest.mark.parametrize("how", BREAKING)
def test_a_pass_that_fails_is_left_out(how: str) -> None:
    lines = (X, "Dropout d 1 1 x o", "ReLU a 1 1 o p", "ReLU b 1 1 p q", "Dropout e 1 1 q y")
    graph, without = net(*lines), net(*lines)
    *events, failed = run(graph, [drop, broken_pass(how)])
    assert isinstance(failed, Failed)
    assert failed.pass_name == "broken"
    assert str(failed).startswith(f"the pass broken of the plug-in {__name__} failed: ")
    assert BREAKING[how] in failed.reason
    assert events == run(without, [drop], check=True)
    assert shown(graph) == shown(without)
    graph.check()
    assert [blob.name for blob in graph.outputs] == ["y"]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("is interrupted", KeyboardInterrupt),
        ("is interrupted in a class", RuntimeError),
        ("is stopped", Stop),
        ("has no memory", MemoryError),
    ],
)
def test_errors_that_are_no_fault_of_a_pass_end_the_run(how: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        run(net(X, "ReLU a 1 1 x p", "ReLU b 1 1 p y"), [broken_pass(how)])


def test_a_conversion_continues_without_a_failing_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @rewrite(op("ReLU")("x"), exact=True)
    def broken(x: Blob) -> Blob:
        """ReLU   ⇒   nothing"""
        raise ZeroDivisionError("by 0")

    broken.function.__module__ = "onnx2ncnn_opt.passes.broken"
    monkeypatch.setattr(passes, "PASSES", (broken, *PASSES))
    graph = "(float[1, 3, 4, 4] x) => (float y) <float k = {2}> { a = Relu(x) b = Mul(a, k) y = Mul(b, k) }"
    conversion = lower(parsed(graph, 17))
    assert conversion.failed == (Failed("broken", "the pass broken failed: ZeroDivisionError: by 0"),)
    assert conversion.verify().ok
    files = conversion.save(tmp_path / "net")
    assert "fuse_binaryop_binaryop" in {event.pass_name for event in conversion.applied}
    optimised = apply_passes(files.param, files.bin)
    assert optimised.failed == conversion.failed


def test_the_parameters_of_a_rule_are_captures() -> None:
    def function(y: Blob) -> Blob:
        return y

    with pytest.raises(TypeError, match="does not capture y"):
        Rewrite(function, exact=True, patterns=(op("ReLU")("x"),))


def test_blobs_of_other_batches_are_not_added_by_eltwise() -> None:
    lines = (X, "Input z 0 1 z 0=4 1=4 2=3", "BinaryOp m 1 1 x p 0=2 1=1 2=2.0", "BinaryOp a 2 1 p z y 0=0")
    graph = net(*lines)
    graph.inputs[0].batch = graph.layers[2].output.batch = graph.layers[3].output.batch = 5
    assert "fuse_binaryop_eltwise" not in applied(optimise(graph))
    assert "fuse_binaryop_eltwise" in applied(optimise(net(*lines)))


def test_names_of_passes_are_unique_and_can_be_skipped() -> None:
    assert len({p.name for p in PASSES}) == len(PASSES)
    assert all(p.summary and "⇒" in p.summary for p in PASSES)
    lines = (X, "ReLU r 1 1 x a", "Dropout d 1 1 a y")
    assert applied(optimise(net(*lines))) == ["eliminate_dropout"]
    assert not applied(optimise(net(*lines), skip=["eliminate_dropout"]))
    with pytest.raises(UsageError, match="no pass called eliminate_nothing"):
        optimise(net(*lines), skip=["eliminate_nothing"])


@pytest.mark.parametrize("size", [200, 400])
def test_work_grows_with_the_net_not_with_its_square(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0
    original = Rewrite.matches

    def counted(self: Rewrite, root: Layer) -> Iterator[object]:
        nonlocal tries
        tries += 1
        return original(self, root)

    monkeypatch.setattr(Rewrite, "matches", counted)
    lines = [f"Dropout d{i} 1 1 {f'b{i - 1}' if i else 'x'} b{i}" for i in range(size)]
    graph = net(X, *lines, f"ReLU r 1 1 b{size - 1} y")
    optimise(graph)
    assert len(graph) == 2
    assert tries <= 8 * size


def test_a_layer_that_many_became_names_each_node_once() -> None:
    part: tuple[Any, ...] = ("first",)
    for i in range(100_000):
        part = (part, (f"node {i}", "first"))
    origin = Layer("ReLU", "relu", origin=(part, part)).origin
    assert (origin[:2], len(origin)) == (("first", "node 0"), 100_001)
