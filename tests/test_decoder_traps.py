"""Decoders that differ from the usual one in one way: right, or refused by name, and never a net that cannot start."""

import re
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt import Net, convert
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError, UsageError
from onnx2ncnn_opt.verification.options import Verification
from testing import present
from testing.decoders import MODEL, model_of

Pairs = tuple[tuple[str, str], ...]


def changed(*pairs: tuple[str, str], text: str = MODEL) -> str:
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def batch(size: str, dim: str) -> Pairs:
    """Return the changes to a model with a batch; `dim` is its size in a Reshape."""
    shapes = ("[1, S]", "[1, T]", "[1, 1, P, 8]", "[1, S, 50]", "[1, 1, T, 8]")
    targets = ("{1, -1, 2, 8}", "{1, -1, 1, 8}", "{1, -1, 16}")
    pairs = ((texts, sizes) for texts, sizes in ((shapes, f"[{size}"), (targets, f"{{{dim}")))
    return tuple((text, start + text[2:]) for texts, start in pairs for text in texts)


_START = MODEL.index("    seen = ")
_END = MODEL.index("    s2 = ")
BOOL_MASK: Pairs = (
    (MODEL[_START:_END], ""),
    ("int64[1, T] attention_mask", "bool[1, 1, S, T] seen"),
    ("float far = {10000.0}", "float low = {-3.4028235e38}"),
    ("s2 = Add(s1, mask)", "s2 = Where(seen, s1, low)"),
)
TOKENS_BEFORE_HEADS: Pairs = (
    ("[1, 1, P, 8]", "[1, P, 1, 8]"),
    ("[1, 1, T, 8]", "[1, T, 1, 8]"),
    ("    k = Transpose<perm = [0, 2, 1, 3]>(k1)\n    v = Transpose<perm = [0, 2, 1, 3]>(v1)\n", ""),
    (
        "Concat<axis = 2>(past_key, k)",
        "Concat<axis = 1>(past_key, k1)\n    k = Transpose<perm = [0, 2, 1, 3]>(present_key)",
    ),
    (
        "Concat<axis = 2>(past_value, v)",
        "Concat<axis = 1>(past_value, v1)\n    v = Transpose<perm = [0, 2, 1, 3]>(present_value)",
    ),
    ("(present_key)\n    s0", "(k)\n    s0"),
    ("MatMul(p, present_value)", "MatMul(p, v)"),
)
KEYS_ONLY: Pairs = (
    (", float[1, 1, P, 8] past_value", ""),
    (", float[1, 1, T, 8] present_value", ""),
    ("Concat<axis = 2>(past_value, v)", "Mul(present_key, unit)"),
    ("    v0 = MatMul(x, wv)\n    q1", "    q1"),
    ("    v1 = Reshape(v0, group)\n", ""),
    ("    v = Transpose<perm = [0, 2, 1, 3]>(v1)\n", ""),
)
SHARED: Pairs = (
    (
        "    o1 = ",
        "    z0 = MatMul(q, kt)\n    z1 = Add(z0, mask)\n    z2 = Softmax<axis = -1>(z1)\n"
        "    z3 = MatMul(z2, present_value)\n    both = Add(o0, z3)\n    o1 = ",
    ),
    ("(o0)\n    o2", "(both)\n    o2"),
)
SOFT_CAP: Pairs = (("    s1 = Mul(s0, scale)", "    c0 = Mul(s0, scale)\n    c1 = Tanh(c0)\n    s1 = Mul(c1, far)"),)
# What is no cache, and the words of the near miss.
STAYS: dict[str, tuple[Pairs, str]] = {
    "a batch of two": (batch("2", "2"), "'past_key' is a batch, and caches have none"),
    "a mask of four axes": (BOOL_MASK, "is not one value for each score|it is no SDPA"),
    "tokens before heads": (TOKENS_BEFORE_HEADS, "is not one value for each score|it is no SDPA"),
    "a past of keys only": (KEYS_ONLY, "'present_key' is used twice|has no past"),
    "two layers on one cache": (SHARED, "'present_key' is also used by SDPA"),
    "scores with a cap": (SOFT_CAP, "TanH .* caps its scores"),
    "values that the caller does not want": (((", float[1, 1, T, 8] present_value", ""),), "is no output of the net"),
}
NO_OUTPUTS = ((", float[1, 1, T, 8] present_key, float[1, 1, T, 8] present_value", ""),)


@pytest.mark.parametrize("name", STAYS)
def test_pasts_that_are_no_caches_are_unchanged(name: str, tmp_path: Path) -> None:
    """The net is right with the past as it is fed, says why, and does not run from an empty past."""
    pairs, reason = STAYS[name]
    conversion = convert(model_of(changed(*pairs)), tmp_path / "net")
    assert present(conversion.report).ok
    manifest = conversion.manifest()
    assert not [entry for entry in (*manifest.inputs, *manifest.outputs) if entry.cache or entry.length]
    reasons = [miss.reason for miss in conversion.near_misses if miss.pass_name == "fuse_kv_cache"]
    assert any(re.search(reason, each) for each in reasons), reasons
    with Net(tmp_path / "net") as net:
        with pytest.raises(UsageError, match="has no caches of attention"):
            net.step([1, 2, 3])
        sizes = {"P": 0, "S": 3, "T": 3, "P + S": 3}
        shapes = {e.name: [n if isinstance(n, int) else sizes[str(n)] for n in e.shape] for e in net.inputs}
        with pytest.raises(UsageError, match="no empty ones"):
            net.run({e.name: np.ones(shapes[e.name], e.dtype) for e in net.inputs})


def test_a_past_that_is_no_output() -> None:
    """Whoever does not want the joined keys cannot go on: the past is an input like others."""
    conversion = convert(model_of(changed(*NO_OUTPUTS)))
    assert present(conversion.report).ok
    assert not any(entry.cache for entry in conversion.manifest().inputs)


NO_MASK: Pairs = (
    ("int64[1, T] attention_mask, ", ""),
    (
        MODEL[_START : MODEL.index("    own = ")],
        "    sizes = Shape(present_key)\n    all = Gather(sizes, two)\n    total = Squeeze(all)\n    i = Squeeze(one)\n"
        "    end = Add(total, i)\n    run = Range(i, end, i)\n    nth = Cast<to = 1>(run)\n"
        "    front = Sub(one, one)\n    count = Unsqueeze(nth, front)\n",
    ),
)
NO_POSITIONS: Pairs = (
    (", int64[1, S] position_ids", ""),
    (
        "    word = ",
        "    old = Shape(past_key)\n    rows_ = Gather(old, two)\n    from_ = Squeeze(rows_)\n"
        "    new = Shape(input_ids)\n    more = Gather(new, one)\n    length = Squeeze(more)\n"
        "    to_ = Add(from_, length)\n    by = Squeeze(one)\n"
        "    places_ = Range(from_, to_, by)\n    lead = Sub(one, one)\n    position_ids = Unsqueeze(places_, lead)\n"
        "    word = ",
    ),
)
# Two of eight experts for each token, as torch's exporter writes a dense mixture.
EXPERTS: Pairs = (
    (
        "    logits = MatMul(y, head)",
        "    gate = MatMul(y, wk)\n    odds = Softmax<axis = -1>(gate)\n    best, who = TopK<axis = -1>(odds, two)\n"
        "    none = Mul(odds, zero)\n    share = ScatterElements<axis = -1>(none, who, best)\n"
        "    turned = Transpose<perm = [1, 0]>(wv)\n    mixed = MatMul(share, turned)\n    experts = Mul(y, mixed)\n"
        "    logits = MatMul(experts, head)",
    ),
)
# The changes, and whether the net has to count tokens itself.
STARTS: dict[str, tuple[Pairs, bool]] = {
    "as it is": ((), False),
    "a dynamic batch is 1": (batch("B", "0"), False),
    "no mask": (NO_MASK, True),
    "no positions": (NO_POSITIONS, False),
    "neither": (NO_MASK + NO_POSITIONS, True),
    "experts": (EXPERTS, False),
}


@pytest.mark.parametrize("name", STARTS)
def test_it_starts_without_a_past(name: str, tmp_path: Path) -> None:
    """In chunks it gives what it gives for the whole, and refuses what is longer than the table of positions."""
    pairs, counts = STARTS[name]
    conversion = convert(model_of(changed(*pairs)), tmp_path / "net")
    assert present(conversion.report).ok
    entries = conversion.manifest().inputs
    assert [bool(entry.cache) for entry in entries].count(True) == 2
    assert any(entry.length for entry in entries) is counts
    with Net(tmp_path / "net") as net:
        whole = net.step([1, 2, 3, 4, 5])["logits"]
        net.reset()
        net.step([1, 2])
        np.testing.assert_allclose(net.step([3, 4, 5])["logits"], whole[:, 2:], atol=1e-5)
        with pytest.raises(UsageError, match=r"of 64 or less, not 65|has 5 to 64, but is an index into a table of 64"):
            net.step([1] * 60)


STATIC: Pairs = (
    ("[1, 1, P, 8]", "[1, 1, 32, 8]"),
    ("[1, 1, T, 8]", "[1, 1, 32, 8]"),
    ("int64[1, T]", "int64[1, 32]"),
    (
        "present_key = Concat<axis = 2>(past_key, k)",
        "at = Transpose<perm = [1, 0]>(position_ids)\n"
        "    lead = Sub(one, one)\n    both = Concat<axis = 0>(lead, one)\n"
        "    kr = Squeeze(k, both)\n    kp = Squeeze(past_key, both)\n    ks = ScatterND(kp, at, kr)\n"
        "    present_key = Unsqueeze(ks, both)",
    ),
    ("present_value = Concat<axis = 2>(past_value, v)", "present_value = Add(past_value, unit)"),
)


def test_a_cache_of_static_length_is_an_input() -> None:
    """The model writes rows at given positions; the caller gives the cache, as to ONNX Runtime."""
    conversion = lower(model_of(changed(*STATIC)))
    assert not any(entry.cache for entry in conversion.manifest().inputs)
    random = np.random.default_rng(0)
    past = {name: random.standard_normal((1, 1, 32, 8)).astype(np.float32) for name in ("past_key", "past_value")}
    tokens = {"input_ids": [[5, 2, 9]], "position_ids": [[7, 3, 31]], "attention_mask": [[1] * 32]}
    feeds = past | {name: np.array(numbers) for name, numbers in tokens.items()}
    assert conversion.verify(Verification(feeds=feeds)).ok


STATE: Pairs = (
    ("float[1, 1, P, 8] past_value)", "float[1, 1, P, 8] past_value, float[1, 1, 16] state)"),
    ("float[1, 1, T, 8] present_value)", "float[1, 1, T, 8] present_value, float[1, 1, 16] next_state)"),
    (
        "    logits = MatMul(y, head)",
        "    told = ReduceMean<axes = [1]>(y)\n    kept = Mul(state, scale)\n    next_state = Add(kept, told)\n"
        "    both_ = Add(y, next_state)\n    logits = MatMul(both_, head)",
    ),
)


def test_a_state_beside_attention_is_fed_by_the_caller(tmp_path: Path) -> None:
    conversion = convert(model_of(changed(*STATE)), tmp_path / "net")
    report = present(conversion.report)
    assert report.ok
    assert sum(bool(entry.cache) for entry in conversion.manifest().inputs) == 2
    with Net(tmp_path / "net") as net:
        first = net.step([1, 2, 3], {"state": np.zeros((1, 1, 16), np.float32)})
        second = net.step([4], {"state": first["next_state"]})["logits"]
        net.rewind(1)
        other = net.step([4], {"state": np.ones((1, 1, 16), np.float32)})["logits"]
    assert second.shape == other.shape == (1, 1, 50)
    assert np.abs(second - other).max() > 1e-3


SCANNED: Pairs = (
    ("float[1, 1, P, 8] past_value)", "float[1, 1, P, 8] past_value, float[1, 16] state)"),
    (
        "    logits = MatMul(y, head)",
        "    end, steps = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1], body = step "
        "(float[1, 16] old, float[1, 16] row) => (float[1, 16] new, float[1, 16] out) "
        "{ new = Add(old, row) out = Tanh(new) }>(state, y)\n    logits = MatMul(steps, head)",
    ),
)
ROUTED: Pairs = (
    (
        "    logits = MatMul(y, head)",
        "    gate = MatMul(y, wk)\n    rows_y = Squeeze(y, front_)\n    rows_g = Squeeze(gate, front_)\n"
        "    routed = com.microsoft.MoE<k = 2>(rows_y, rows_g, wq, wq)\n    logits = MatMul(routed, head)",
    ),
    ("    word = ", "    front_ = Sub(one, one)\n    word = "),
)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (SCANNED, "Scan 'end': its sequence has the dynamic length S"),
        (ROUTED, r"com\.microsoft::MoE"),
    ],
)
def test_layers_that_are_refused_by_name(pairs: Pairs, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        lower(model_of(changed(*pairs)), tail="never")
