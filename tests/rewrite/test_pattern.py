"""Matches of patterns, and their captures."""

import re
from typing import Any

import pytest

from onnx2ncnn_opt.errors import PatternError
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.spec import CUSTOM, LayerSpec, parse_params
from onnx2ncnn_opt.rewrite.pattern import Match, Op, const, kept, matches, op
from testing.param_text import net

X = "Input x 0 1 x 0=4 1=4 2=3"


def found(pattern: Op, graph: Graph) -> list[Match]:
    return [match for layer in graph for match in matches(pattern, layer)]


def names(match: Match) -> dict[str, str]:
    return {capture: value.name for capture, value in match.captures.items()}


def test_types_and_captures() -> None:
    graph = net(X, "ReLU r 1 1 x a", "Sigmoid s 1 1 a y")
    pattern = op(("Sigmoid", "TanH"), "outer")(op("ReLU", "inner")("x"))
    (match,) = found(pattern, graph)
    assert names(match) == {"outer": "s", "inner": "r", "x": "x"}
    assert [layer.name for layer in match.layers] == ["s", "r"]
    assert pattern.captures == {"outer", "inner", "x"}
    assert pattern.depth == 2
    assert not found(op("Sigmoid")(op("TanH")), graph)


@pytest.mark.parametrize(
    ("params", "fits"),
    [
        ({"stride_w": 1}, True),
        ({"stride_h": 1, "pad_bottom": 1, "activation_type": 0}, True),
        ({"pad_left": 0}, False),
        ({"kernel_h": frozenset({1, 3})}, True),
        ({"kernel_h": frozenset({1, 5})}, False),
    ],
)
def test_parameters_are_compared_with_their_defaults(params: dict[str, Any], fits: bool) -> None:
    graph = net(X, "Convolution c 1 1 x y 0=2 1=3 4=1 6=54")
    assert bool(found(op("Convolution", "c", **params), graph)) == fits


def test_a_condition_on_the_layer() -> None:
    def has_short_name(layer: Layer) -> bool:
        return len(layer.name) < 3

    graph = net(X, "ReLU r1 1 1 x a", "ReLU longer 1 1 a y")
    assert [match.root.name for match in found(op("ReLU", where=has_short_name), graph)] == ["r1"]


def test_one_name_stands_for_one_blob() -> None:
    pattern = op("BinaryOp", op_type=2)("x", op("Sigmoid")("x"))
    gate = net(X, "Split s 1 2 x a b", "Sigmoid g 1 1 a c", "BinaryOp m 2 1 b c y 0=2")
    assert len(found(pattern, gate)) == 1
    other = net(X, "Input z 0 1 z 0=4 1=4 2=3", "Sigmoid g 1 1 z c", "BinaryOp m 2 1 x c y 0=2")
    assert not found(pattern, other)


def test_one_name_stands_for_one_layer() -> None:
    pattern = op("BinaryOp")(op("ReLU", "r")("x"), op("ReLU", "r"))
    one = net(X, "ReLU r 1 1 x a", "Split s 1 2 a b c", "BinaryOp m 2 1 b c y 0=1")
    (match,) = found(pattern, one)
    assert [layer.name for layer in match.layers] == ["m", "r"]
    two = net(X, "Split s 1 2 x a b", "ReLU r 1 1 a c", "ReLU t 1 1 b d", "BinaryOp m 2 1 c d y 0=1")
    assert not found(pattern, two)


@pytest.mark.parametrize(
    ("operator", "commutes"),
    [
        ("BinaryOp m 2 1 {} y 0=0", True),
        ("BinaryOp m 2 1 {} y 0=1", False),
        ("BinaryOp m 2 1 {} y 0=4", True),
        ("BinaryOp m 2 1 {} y 0=6", False),
        ("Eltwise m 2 1 {} y 0=1", True),
        ("Eltwise m 2 1 {} y 0=1 -23301=2,1.0,2.0", False),
        ("Concat m 2 1 {} y", False),
    ],
)
def test_operators_that_commute_match_in_both_orders(operator: str, commutes: bool) -> None:
    pattern = op(("BinaryOp", "Eltwise", "Concat"))("x", const("c"))
    right = net(X, "MemoryData c 0 1 c 0=4 1=4 2=3", operator.format("x c"))
    left = net(X, "MemoryData c 0 1 c 0=4 1=4 2=3", operator.format("c x"))
    assert len(found(pattern, right)) == 1
    assert len(found(pattern, left)) == int(commutes)


def test_the_number_of_inputs_counts_only_if_they_are_described() -> None:
    graph = net(X, "Input z 0 1 z 0=4 1=4 2=3", "Concat c 2 1 x z y")
    assert found(op("Concat"), graph)
    assert found(op("Concat")("a", "b"), graph)
    assert not found(op("Concat")("a"), graph)
    assert not found(op("Concat")("a", "b", "c"), graph)


def test_kept_layers_are_seen_but_not_matched() -> None:
    graph = net(X, "Pooling p 1 1 x a 0=1 4=1", "Flatten f 1 1 a y")
    (match,) = found(op("Flatten")(kept(op("Pooling", "pool", global_pooling=1))), graph)
    assert [layer.name for layer in match.layers] == ["f"]
    assert [layer.name for layer in match.kept] == ["p"]
    assert names(match) == {"pool": "p"}


def test_an_inner_layer_has_one_output() -> None:
    graph = net("Input x 0 1 x 0=4 1=4 2=4", "Slice s 1 2 x a b -23300=2,2,2", "BinaryOp m 2 1 a b y 0=0")
    assert not found(op("BinaryOp")(op("Slice"), op("Slice")), graph)
    assert found(op("BinaryOp")("a", "b"), graph)


@pytest.mark.parametrize(
    ("types", "params", "message"),
    [
        ("Convolutoin", {}, "ncnn has no layer type 'Convolutoin' (did you mean 'Convolution'?)"),
        (("ReLU", "Relu"), {}, "ncnn has no layer type 'Relu' (did you mean 'ReLU'?)"),
        ("ReLU", {"slop": 0}, "ReLU has no parameter 'slop' (did you mean 'slope'?)"),
        (("Convolution", "ReLU"), {"activation_type": 0}, "ReLU has no parameter 'activation_type'"),
    ],
)
def test_a_pattern_that_nothing_matches_is_an_error(types: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(PatternError, match=re.escape(message)):
        op(types, **params)


def test_a_custom_type_is_named_by_its_declaration() -> None:
    spec = LayerSpec("MyLayer", CUSTOM, params=parse_params("0 gain=1.0"))
    assert op(spec, gain=2.0).types == {"MyLayer"}
    with pytest.raises(PatternError, match="MyLayer has no parameter 'gian'"):
        op(spec, gian=2.0)
