"""What fixtures/ops/control.md cannot say: names, bounds, refusals of several nodes, models that are cut."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from onnx2ncnn_opt.onnx.importer import MOST_INLINED
from testing.compared import compare, types

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g '
X = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def refusals(text: str) -> list[str]:
    with pytest.raises(UnsupportedError) as error:
        lower(model(text))
    return [str(node) for node in error.value.nodes]


def loop(trips: str, body: str, signature: str = "(float[2, 3] x) => (float[2, 3] y)") -> str:
    return f"""{signature} {{
        m = Constant<value_int = {trips}>()
        [the_loop] y = Loop(m, , x) <
            body = body (int64 i, bool go, float[2, 3] a) => (bool on, float[2, 3] b) {{ on = Identity(go) {body} }}
        >
    }}"""


def test_names_of_a_body_end_with_it() -> None:
    """`a` means something else within and after the loop."""
    text = """(float[2, 3] x) => (float[2, 3] y, float[2, 3] z) {
        t = Neg(x)
        m = Constant<value_int = 2>()
        s = Loop(m, , t) <
            body = body (int64 i, bool go, float[2, 3] a) => (bool on, float[2, 3] b) {
                u = Mul(a, t)
                b = Add(u, x)
                on = Identity(go)
            }
        >
        a = Exp(t)
        y = Add(s, a)
        z = Sub(a, t)
    }"""
    compare(model(text), {"x": X})


def test_a_loop_in_a_branch_in_a_loop() -> None:
    inner = """
        zero = Constant<value_int = 0>()
        first = Equal(i, zero)
        b = If(first) <
            then_branch = then () => (float[2, 3] p) {
                p = Loop(m, , a) <
                    body = deep (int64 j, bool going, float[2, 3] c) => (bool further, float[2, 3] d) {
                        further = Identity(going)
                        d = Tanh(c)
                    }
                >
            },
            else_branch = other () => (float[2, 3] q) { q = Add(a, x) }
        >"""
    conversion = compare(model(loop("2", inner)), {"x": X})
    assert types(conversion) == ["TanH", "TanH", "BinaryOp"]


def test_one_body_twice_has_different_layers() -> None:
    conversion = lower(model(loop("3", "[step] c = Tanh(a) b = Exp(c)")), optimize=False)
    names = [layer.name for layer in conversion.graph]
    assert names == ["x", "step", "b", "step_1", "b_1", "step_2", "b_2"]
    assert {layer.origin for layer in conversion.graph if layer.type == "TanH"} == {("step",)}


def test_a_loop_that_is_too_long_is_named_with_its_bound() -> None:
    [reason] = refusals(loop("12345678", "b = Neg(a)"))
    assert reason == (
        f"Loop 'the_loop': its 12345678 iterations of 2 nodes are too many: loops may have {MOST_INLINED} in all; "
        "export the loop with fewer iterations"
    )
    [reason] = refusals(loop("9223372036854775807", "b = Neg(a)"))
    assert "its 9223372036854775807 iterations" in reason


def test_loops_without_an_end_or_without_nodes() -> None:
    text = """(float[2, 3] x) => (float[2, 3] y) {
        y = Loop(, , x) <body = body (int64 i, bool go, float[2, 3] a) => (bool go, float[2, 3] a) { }>
    }"""
    [reason] = refusals(text)
    assert f"its iterations of 0 nodes are too many: loops may have {MOST_INLINED} in all" in reason


def test_every_unsupported_node_is_told_once() -> None:
    reasons = refusals(loop("4", "n = NonZero(a) f = Cast<to = 1>(n) d = Unique(a) e = Mul(f, d) b = Add(a, e)"))
    assert [reason.split(":")[0] for reason in reasons] == ["NonZero 'n'", "Unique 'd'"]


def test_nodes_after_a_refused_loop_are_still_looked_at() -> None:
    text = """(float[2, 3] x, int64 m) => (float y) {
        t = Loop(m, , x) <body = body (int64 i, bool go, float[2, 3] a) => (bool go, float[2, 3] b) { b = Neg(a) }>
        y = Unique(t)
    }"""
    loop_reason, other = refusals(text)
    reason = "its number of iterations is computed at run time, and ncnn has no loops"
    assert loop_reason == f"Loop 't': {reason}; bind it with --value m=..."
    assert other.startswith("Unique 'y'")


def test_a_body_of_another_form() -> None:
    text = """(float[2, 3] x) => (float[2, 3] y) {
        m = Constant<value_int = 2>()
        y = Loop(m, , x) <body = body (int64 i, bool go) => (bool go, float[2, 3] b) { b = Neg(x) }>
    }"""
    assert "its body takes 2 and gives 2 values" in refusals(text)[0]
    text = """(float[2, 3] x) => (float[2, 3] y) {
        y = Scan(x) <num_scan_inputs = 1, body = body (float[3] a, float[3] c) => (float[3] b) { b = Neg(a) }>
    }"""
    assert "its body takes 2 values, not 1" in refusals(text)[0]


def test_a_sequence_goes_nowhere_else() -> None:
    text = """(float[2, 3] x) => (float[2, 3] y) { s = SequenceConstruct(x, x) y = Neg(s) }"""
    assert "input x is a sequence" in refusals(text)[0]
    text = """(float[2, 3] x) => (float[2, 3] y) <int64 p = {0}> { t = Neg(x) y = SequenceAt(t, p) }"""
    assert "input sequence is not a sequence" in refusals(text)[0]
