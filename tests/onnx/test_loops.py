"""What fixtures/ops/control.md cannot say: names, bounds, refusals of several nodes, models that are cut."""

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.onnx.walk import MOST_INLINED
from testing.models import parsed, refusal


def refusals(text: str) -> list[str]:
    return [str(node) for node in refusal(text).nodes]


def loop(trips: str, body: str, signature: str = "(float[2, 3] x) => (float[2, 3] y)") -> str:
    return f"""{signature} {{
        m = Constant<value_int = {trips}>()
        [the_loop] y = Loop(m, , x) <
            body = body (int64 i, bool go, float[2, 3] a) => (bool on, float[2, 3] b) {{ on = Identity(go) {body} }}
        >
    }}"""


def test_one_body_twice_has_different_layers() -> None:
    conversion = lower(parsed(loop("3", "[step] c = Tanh(a) b = Exp(c)")), optimize=False)
    names = [layer.name for layer in conversion.graph]
    assert names == ["x", "step", "b", "step_1", "b_1", "step_2", "b_2"]
    assert {layer.origin for layer in conversion.graph if layer.type == "TanH"} == {("step",)}


def test_a_loop_that_is_too_long_is_named_with_its_bound() -> None:
    [reason] = refusals(loop("9223372036854775807", "b = Neg(a)"))
    assert reason == (
        "Loop 'the_loop': its 9223372036854775807 iterations of 2 nodes are too many: loops may have "
        f"{MOST_INLINED} in all; export the loop with fewer iterations"
    )


def test_every_unsupported_node_is_reported_once() -> None:
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
