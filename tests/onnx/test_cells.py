"""Loops, Scans and written-out steps that compute an LSTM, a GRU or an RNN become that layer; others stay."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest

from testing.compared import compare, types

STEPS, INPUTS, HIDDEN = 5, 3, 4
SIZES = {"lstm": 4, "gru": 3, "rnn": 1}

# A step as exporters write it: h0 and c0 are the states before, h1 and c1 those after.
LSTM = """
    xw = MatMul(xt, w)
    hu = MatMul(h0, u)
    s = Add(xw, hu)
    g = Add(s, b)
    gi, gf, gc, go = Split<axis = 1>(g, four)
    i = Sigmoid(gi)
    f = Sigmoid(gf)
    o = Sigmoid(go)
    n = Tanh(gc)
    kept = Mul(f, c0)
    new = Mul(i, n)
    c1 = Add(kept, new)
    t = Tanh(c1)
    h1 = Mul(o, t)
"""
# Keras with reset_after: gates z, r, h; the state is z * h0 + (1 - z) * n.
GRU = """
    xw = MatMul(xt, w)
    xb = Add(xw, b)
    hu = MatMul(h0, u)
    hb = Add(hu, e)
    xz, xr, xn = Split<axis = 1>(xb, three)
    hz, hr, hn = Split<axis = 1>(hb, three)
    sz = Add(xz, hz)
    z = Sigmoid(sz)
    sr = Add(xr, hr)
    r = Sigmoid(sr)
    rn = Mul(r, hn)
    sn = Add(xn, rn)
    n = Tanh(sn)
    kept = Mul(z, h0)
    rest = Sub(one, z)
    new = Mul(rest, n)
    h1 = Add(kept, new)
    c1 = Identity(c0)
"""
RNN = """
    xw = MatMul(xt, w)
    hu = MatMul(h0, u)
    s = Add(xw, hu)
    g = Add(s, b)
    h1 = Tanh(g)
    c1 = Identity(c0)
"""
STEP = {"lstm": LSTM, "gru": GRU, "rnn": RNN}


def constants(kind: str) -> str:
    """Declarations of the weights, which `filled` gives their numbers."""
    rows = SIZES[kind] * HIDDEN
    return f"""float[{INPUTS},{rows}] w, float[{HIDDEN},{rows}] u, float[{rows}] b, float[{rows}] e,
        int64[4] four = {{4,4,4,4}}, int64[3] three = {{4,4,4}}, float one = {{1}}, float[1,4] zeros = {{0,0,0,0}}"""


def filled(text: str, seed: int = 0) -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    rng = np.random.default_rng(seed)
    for value in model.graph.value_info:
        numbers = rng.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, value.name))
    del model.graph.value_info[:]
    return model


def looped(kind: str, states: str, batch: int = 1, step: str | None = None) -> str:
    """A Loop over the steps of x [steps, batch, inputs], as tf2onnx writes it."""
    given = states == "given"
    inputs = f"float[{STEPS},{batch},{INPUTS}] x" + (f", float[{batch},4] h, float[{batch},4] c" if given else "")
    start = "h, c" if given else "zeros, zeros"
    return f"""({inputs}) => (float[{STEPS},{batch},4] y, float[{batch},4] last, float[{batch},4] cell)
        <{constants(kind)}, int64 trips = {{{STEPS}}}, bool run = {{1}}> {{
        last, cell, y = Loop(trips, run, {start}) <
            body = body (int64 at, bool on, float[{batch},4] h0, float[{batch},4] c0)
                    => (bool on_, float[{batch},4] h1, float[{batch},4] c1, float[{batch},4] seen) {{
                on_ = Identity(on)
                xt = Gather<axis = 0>(x, at)
                {step or STEP[kind]}
                seen = Identity(h1)
            }}
        >
    }}"""


def scanned(kind: str, backwards: bool) -> str:
    """A Scan over x, whose results are put where they belong in time."""
    directions = "scan_input_directions = [1], scan_output_directions = [1]," if backwards else ""
    return f"""(float[{STEPS},1,{INPUTS}] x) => (float[{STEPS},1,4] y, float[1,4] last) <{constants(kind)}> {{
        last, cell, y = Scan<num_scan_inputs = 1, {directions}
            body = body (float[1,4] h0, float[1,4] c0, float[1,{INPUTS}] xt)
                    => (float[1,4] h1, float[1,4] c1, float[1,4] seen) {{
                {STEP[kind]}
                seen = Identity(h1)
            }}
        >(zeros, zeros, x)
    }}"""


def written_out(kind: str, steps: int = 3, step: str | None = None, end: str = "y = Identity(h{last})") -> str:
    """Steps one after another; x [1, steps, inputs] is taken apart by Slice and Squeeze."""
    lines = []
    for at in range(steps):
        text = step or STEP[kind]
        for name in ("h1", "c1"):
            text = text.replace(name, f"{name[0]}#{at + 1}")
        for name in ("h0", "c0"):
            text = text.replace(name, f"{name[0]}#{at}" if at else "zeros")
        names = {part.strip() for line in text.splitlines() if "=" in line for part in line.split("=")[0].split(",")}
        for name in sorted(names, key=len, reverse=True):
            if "#" not in name:
                text = "\n".join(_renamed(line, name, f"{name}_{at}") for line in text.splitlines())
        text = _renamed(text.replace("#", ""), "xt", f"xt_{at}")
        lines.append(f"at_{at} = Constant<value_int = {at}>()\n xt_{at} = Gather<axis = 1>(x, at_{at})\n{text}")
    return f"""(float[1,{steps},{INPUTS}] x) => (float[1,4] y) <{constants(kind)}> {{
        {"".join(lines)}
        {end.format(last=steps)}
    }}"""


def _renamed(text: str, name: str, new: str) -> str:
    return re.sub(rf"\b{name}\b(?!\s*=\s*[\d\[])", new, text)


def feeds(model: onnx.ModelProto) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        value.name: rng.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in model.graph.input
    }


@pytest.mark.parametrize("states", ["zero", "given"])
@pytest.mark.parametrize("kind", SIZES)
def test_a_loop(kind: str, states: str) -> None:
    model = filled(looped(kind, states))
    converted = compare(model, feeds(model))
    assert types(converted).count(kind.upper()) == 1
    assert not {"InnerProduct", "Gemm", "MatMul", "Sigmoid", "TanH"} & set(types(converted))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", SIZES)
def test_a_scan(kind: str, backwards: bool) -> None:
    model = filled(scanned(kind, backwards))
    converted = compare(model, feeds(model))
    assert types(converted).count(kind.upper()) == 1
    (layer,) = (layer for layer in converted.graph if layer.type == kind.upper())
    assert layer["direction"] == backwards


@pytest.mark.parametrize("kind", SIZES)
def test_steps_one_after_another(kind: str) -> None:
    model = filled(written_out(kind))
    converted = compare(model, feeds(model))
    assert set(types(converted)) <= {"Input", kind.upper(), "Reshape"}


def test_two_layers_of_cells() -> None:
    first = looped("lstm", "zero")
    second = first[first.index("last, cell, y = Loop") :].rstrip("} \n")
    for old, new in (("last, cell, y", "last2, cell2, z"), ("(x, at)", "(y, at)"), ("(xt, w)", "(xt, v)")):
        second = second.replace(old, new)
    inner = re.findall(r"\b(\w+)(?=[,\w ]*=)", LSTM.replace("axis", ""))
    inner += ["on_", "on", "at", "xt", "seen", "h0", "c0"]
    second = re.sub(rf"\b({'|'.join(inner)})\b", r"\1_2", second)
    text = first.rstrip("} \n").replace("<float[3,16] w", "<float[4,16] v, float[3,16] w")
    model = filled(f"{text} {second} }}".replace("float[5,1,4] y,", "float[5,1,4] z,"))
    converted = compare(model, feeds(model))
    assert types(converted).count("LSTM") == 2


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("gru", "hu = MatMul(h0, u)", "hq = Mul(h0, h0)\n hu = MatMul(hq, u)"),
        ("lstm", "f = Sigmoid(gf)", "f = HardSigmoid(gf)"),
        ("lstm", "t = Tanh(c1)", "t = Identity(c1)"),
        ("gru", "rest = Sub(one, z)", "rest = Sub(one, r)"),
        ("gru", "kept = Mul(z, h0)", "kept = Mul(z, zeros)"),
        ("rnn", "h1 = Tanh(g)", "h1 = Relu(g)"),
    ],
)
def test_what_is_not_a_cell_stays_right(kind: str, old: str, new: str) -> None:
    assert old in STEP[kind]
    model = filled(looped(kind, "given", step=STEP[kind].replace(old, new)))
    converted = compare(model, feeds(model))
    assert kind.upper() not in types(converted)


def test_gates_written_in_other_ways() -> None:
    """An update gate that lets new numbers in, and one gate for what is forgotten and what comes in."""
    step = GRU.replace("kept = Mul(z, h0)", "less = Sub(n, h0)").replace("rest = Sub(one, z)", "new = Mul(z, less)")
    step = step.replace("new = Mul(rest, n)", "").replace("h1 = Add(kept, new)", "h1 = Add(h0, new)")
    model = filled(looped("gru", "given", step=step))
    converted = compare(model, feeds(model))
    assert types(converted).count("GRU") == 1
    model = filled(looped("lstm", "given", step=LSTM.replace("new = Mul(i, n)", "new = Mul(f, n)")))
    converted = compare(model, feeds(model))
    assert types(converted).count("LSTM") == 1


@pytest.mark.parametrize("kind", SIZES)
def test_a_batch(kind: str) -> None:
    for states in ("zero", "given"):
        model = filled(
            looped(kind, states, batch=2).replace(
                "float[1,4] zeros = {0,0,0,0}", "float[2,4] zeros = {0,0,0,0,0,0,0,0}"
            )
        )
        converted = compare(model, feeds(model))
        assert types(converted).count(kind.upper()) == 1
        assert not {"InnerProduct", "Gemm", "MatMul", "Sigmoid", "TanH"} & set(types(converted))
    steps = written_out(kind, 5).replace("float[1,5", "float[3,5").replace("float[1,4] y", "float[3,4] y")
    model = filled(steps.replace("float[1,4] zeros = {0,0,0,0}", "float[3,4] zeros = {0,0,0,0,0,0,0,0,0,0,0,0}"))
    converted = compare(model, feeds(model))
    assert set(types(converted)) <= {"Input", kind.upper(), "Reshape"}
