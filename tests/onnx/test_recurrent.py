"""LSTM, GRU and RNN as bare nodes, in every direction and layout, with and without states."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from testing.compared import compare, compare_nodes, model_of, types

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DIRECTIONS = ("forward", "reverse", "bidirectional")
# ncnn's sigmoid and tanh are off by 1e-7 per step, and states carry it on.
REL = 2e-5


def arrays(
    kind: str, count: int, steps: int, batch: int, size: int, hidden: int, layout: int, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    gates = GATES[kind]
    x = normal(batch, steps, size) if layout else normal(steps, batch, size)
    states = {
        name: normal(batch, count, hidden) if layout else normal(count, batch, hidden)
        for name in (("h", "c") if kind == "LSTM" else ("h",))
    }
    weights = {
        "w": normal(count, gates * hidden, size),
        "r": normal(count, gates * hidden, hidden),
        "b": normal(count, 2 * gates * hidden),
    }
    return {"x": x, **states}, weights


def node(kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    if kind == "GRU":
        attributes = {"linear_before_reset": 1, **attributes}
    return helper.make_node(kind, inputs, outputs, **attributes)


VARIANTS = list(
    itertools.product(("LSTM", "GRU", "RNN"), DIRECTIONS, (1, 3), ("none", "zero", "constant", "fed"), (True, False))
)


@pytest.mark.parametrize(("kind", "direction", "batch", "state", "bias"), VARIANTS)
def test_variants(kind: str, direction: str, batch: int, state: str, bias: bool) -> None:
    """All outputs, with states that are absent, zero, constant and fed."""
    seed = VARIANTS.index((kind, direction, batch, state, bias))
    steps, size, hidden = 1 + seed % 6, 1 + seed % 5, 1 + seed % 7
    count = 2 if direction == "bidirectional" else 1
    fed, weights = arrays(kind, count, steps, batch, size, hidden, 0, seed)
    states = [name for name in fed if name != "x"]
    inputs, constants = {"x": fed["x"]}, dict(weights)
    if not bias:
        del constants["b"]
    if state == "fed":
        inputs = fed
    elif state != "none":
        constants |= {name: fed[name] * (state == "constant") for name in states}
    names = ["x", "w", "r", "b" if bias else "", ""] + (states if state != "none" else [])
    outputs = ["y", "y_h", "y_c"] if kind == "LSTM" else ["y", "y_h"]
    made = node(kind, names, outputs, hidden_size=hidden, direction=direction)
    compare_nodes(made, inputs, constants, outputs=outputs, rel=REL)


# ONNX Runtime has no layout 1: its result is that of transposed operands with layout 0.
@pytest.mark.parametrize(("kind", "direction", "batch"), list(itertools.product(GATES, DIRECTIONS, (1, 2))))
@pytest.mark.parametrize("written_out", [False, True])
def test_layout_1(kind: str, direction: str, batch: int, written_out: bool) -> None:
    count = 2 if direction == "bidirectional" else 1
    inputs, weights = arrays(kind, count, 4, batch, 3, 5, 1, 7)
    states = [name for name in inputs if name != "x"]
    outputs = ["y", "y_h", "y_c"] if kind == "LSTM" else ["y", "y_h"]
    attributes = {"hidden_size": 5, "direction": direction} | ({"clip": 0.5} if written_out else {})
    batched = model_of(
        [node(kind, ["x", "w", "r", "b", "", *states], outputs, layout=1, **attributes)],
        inputs,
        weights,
        outputs=outputs,
    )
    turned = [helper.make_node("Transpose", [name], [f"{name}_t"], perm=[1, 0, 2]) for name in inputs]
    turned.append(
        node(kind, ["x_t", "w", "r", "b", "", *(f"{s}_t" for s in states)], [f"{o}_t" for o in outputs], **attributes)
    )
    perms = [[2, 0, 1, 3], [1, 0, 2], [1, 0, 2]]
    turned += [helper.make_node("Transpose", [f"{o}_t"], [o], perm=p) for o, p in zip(outputs, perms, strict=False)]
    compare(batched, inputs, rel=REL, reference=model_of(turned, inputs, weights, outputs=outputs))


def test_only_the_last_state_is_used() -> None:
    inputs, weights = arrays("LSTM", 2, 5, 1, 3, 4, 0, 1)
    del inputs["h"], inputs["c"]
    made = node("LSTM", ["x", "w", "r", "b"], ["", "y"], hidden_size=4, direction="bidirectional")
    compare_nodes(made, inputs, weights, rel=REL)


def test_as_torch_exports_it() -> None:
    """Two directions side by side: the squeeze, transpose and reshape after the node cost nothing."""
    inputs, weights = arrays("GRU", 2, 6, 1, 3, 4, 0, 1)
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        node("GRU", ["t", "w", "r", "b", "", "h"], ["g", "n"], hidden_size=4, direction="bidirectional"),
        helper.make_node("Transpose", ["g"], ["gt"], perm=[2, 0, 1, 3]),
        helper.make_node("Reshape", ["gt", "shape"], ["y"]),
    ]
    constants = {**weights, "h": np.zeros((2, 1, 4), np.float32), "shape": np.array([1, 6, 8])}
    conversion = compare_nodes(nodes, {"x": inputs["x"].transpose(1, 0, 2)}, constants, rel=REL)
    assert types(conversion) == ["GRU"]


WRITTEN_OUT: list[tuple[str, dict[str, Any]]] = [
    ("GRU", {"linear_before_reset": 0}),
    ("GRU", {"linear_before_reset": 0, "activations": ["HardSigmoid", "Relu"], "activation_alpha": [0.3]}),
    ("GRU", {"activations": ["Sigmoid", "Elu"], "activation_alpha": [0.7], "clip": 0.5}),
    ("LSTM", {"p": True}),
    ("LSTM", {"p": True, "clip": 0.5}),
    ("LSTM", {"activations": ["Sigmoid", "Softsign", "LeakyRelu"], "activation_alpha": [0.2]}),
    ("RNN", {"activations": ["Affine"], "activation_alpha": [0.5], "activation_beta": [0.1]}),
    ("RNN", {"activations": ["Relu"], "clip": 2.0}),
    ("RNN", {"activations": ["Softplus"]}),
    *((kind, {"fed": True}) for kind in GATES),
    *((kind, {"lengths": True}) for kind in GATES),
]


@pytest.mark.parametrize(("kind", "asked"), WRITTEN_OUT)
@pytest.mark.parametrize(
    ("direction", "batch", "state"), [("forward", 1, False), ("reverse", 2, True), ("bidirectional", 3, True)]
)
def test_written_out(kind: str, asked: dict[str, Any], direction: str, batch: int, state: bool) -> None:
    """What ncnn's layers do not have, step by step."""
    count = 2 if direction == "bidirectional" else 1
    inputs, constants = arrays(kind, count, 3, batch, 4, 5, 0, 1)
    attributes = dict(asked)
    for name in ("activations", "activation_alpha", "activation_beta"):
        if name in attributes:
            attributes[name] = attributes[name] * count
    names = ["x", "w", "r", "b", "", "h" if state else "", "c" if state and kind == "LSTM" else "", ""]
    if attributes.pop("lengths", False):
        names[4], constants["l"] = "l", np.array([2, 3, 1][:batch], np.int32)
    if attributes.pop("p", False):
        names[7], constants["p"] = "p", np.full((count, 15), 0.4, np.float32)
    if attributes.pop("fed", False):
        inputs, constants = inputs | constants, {}
    outputs = ["y", "yh"] + (["yc"] if kind == "LSTM" else [])
    made = node(kind, names[: 8 if kind == "LSTM" else 6], outputs, hidden_size=5, direction=direction, **attributes)
    used = {name: array for name, array in inputs.items() if name in names}
    conversion = compare_nodes(made, used, constants, rel=REL, outputs=outputs)
    # One sequence that ends early is the layer over fewer steps, which `fuse_lstm` and its like find out.
    is_shorter = "lengths" in asked and batch == 1
    assert (kind in types(conversion)) == is_shorter


def test_too_many_steps_to_write_out() -> None:
    inputs, constants = arrays("GRU", 1, 65, 1, 4, 5, 0, 1)
    made = node("GRU", ["x", "w", "r", "b"], ["y"], hidden_size=5, linear_before_reset=0)
    with pytest.raises(UnsupportedError, match="65 steps one after the other"):
        lower(model_of([made], {"x": inputs["x"]}, constants))


@pytest.mark.parametrize(
    ("kind", "attributes", "extra", "reason"),
    [
        ("LSTM", {"activations": ["Sigmoid", "ScaledTanh", "Tanh"]}, {}, "activation scaledtanh"),
        ("RNN", {"activations": ["ThresholdedRelu"]}, {}, "activation thresholdedrelu"),
        ("LSTM", {"activations": ["Sigmoid", "Relu"]}, {}, "activations Sigmoid, Relu for 1 directions"),
        ("LSTM", {"input_forget": 1}, {}, "input_forget is 1"),
        ("LSTM", {}, {"p": np.ones((1, 8), np.float32)}, "input P has shape [1, 8], not [1, 12]"),
        (
            "LSTM",
            {"clip": 1.5},
            {"h": np.ones((1, 2, 4), np.float32)},
            "an initial state has shape [1, 2, 4], not [1, 1, 4]",
        ),
        ("LSTM", {}, {"h": np.ones((1, 2, 4), np.float32)}, "an initial state has shape [1, 2, 4], not [1, 1, 4]"),
        ("LSTM", {}, {"b": np.ones((1, 16), np.float32)}, "input B has shape [1, 16], not [1, 32]"),
    ],
)
def test_refused(kind: str, attributes: dict[str, Any], extra: dict[str, Any], reason: str) -> None:
    inputs, weights = arrays(kind, 1, 4, 1, 3, 4, 0, 0)
    constants = {**weights, **extra}
    names = ["x", "w", "r", "b", *(name if name in extra else "" for name in ("lens", "h", "c", "p"))]
    names = names[: {"LSTM": 8}.get(kind, 6)]
    made = node(kind, names, ["y"], hidden_size=4, **attributes)
    with pytest.raises(UnsupportedError) as error:
        lower(model_of([made], {"x": inputs["x"]}, constants))
    assert reason in str(error.value)


def test_what_says_nothing_is_taken() -> None:
    """Full sequence_lens, peepholes of 0 and the default activations by name."""
    inputs, weights = arrays("LSTM", 1, 4, 2, 3, 4, 0, 3)
    constants = {**weights, "lens": np.array([4, 4], np.int32), "p": np.zeros((1, 12), np.float32)}
    names = ["x", "w", "r", "b", "lens", "", "", "p"]
    made = node("LSTM", names, ["y"], hidden_size=4, activations=["Sigmoid", "Tanh", "Tanh"])
    compare_nodes(made, {"x": inputs["x"]}, constants, rel=REL)
