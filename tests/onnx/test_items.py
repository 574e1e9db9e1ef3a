"""Batches whose items stay apart: what the rules of operators say, against ONNX Runtime item by item."""

from functools import partial

import pytest

from onnx2ncnn_opt.api.dynamic_cost import cost_of_dynamic
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.param.splits import count_layers
from testing.batches import ITEMS, choices, free_outputs, mixed_outputs, with_batch
from testing.models import parsed
from testing.op_cases import Case, fill_weights, load_cases

FILES: dict[str, list[Case]] = {}
for _case in load_cases():
    if _case.file != "budget":  # of too large models, ONNX Runtime makes too large tensors
        FILES.setdefault(_case.file, []).append(_case)


@pytest.mark.parametrize("file", FILES)
def test_items_that_stay_apart_are_computed_apart(file: str, thorough: bool) -> None:
    mixed = [
        (str(case), axes, outputs)
        for case in FILES[file][:: 1 if thorough else 8]
        for axes in choices(case.model())
        if (outputs := mixed_outputs(case.model(), axes, partial(case.feeds, sizes=case.sizes[0] | {"batch": ITEMS})))
    ]
    assert not mixed


def test_rules_say_that_items_stay_apart_where_they_do() -> None:
    count = sum(
        free_outputs(with_batch(case.model(), axes), axes) is not None
        for case in FILES["normalization"] + FILES["reduction"]
        for axes in choices(case.model())
    )
    assert count > 100


MIXED = {
    "the mean of all items": "m = ReduceMean <axes = [0]> (x)\n y = Sub (x, m)",
    "softmax over the items": "y = Softmax <axis = 0> (x)",
    "items times items": "t = Transpose <perm = [1, 0]> (x)\n y = MatMul (x, t)",
    "sums over the items": "zero = Constant <value_int = 0> ()\n y = CumSum (x, zero)",
    "the number of items": "s = Shape (x)\n z = Constant <value_int = 0> ()\n n = Gather (s, z)\n"
    " f = Cast <to = 1> (n)\n y = Mul (x, f)",
    "the number of the item": "s = Shape (x)\n z = Constant <value_int = 0> ()\n o = Constant <value_int = 1> ()\n"
    " n = Gather (s, z)\n r = Range (z, n, o)\n a = Constant <value_ints = [1]> ()\n u = Unsqueeze (r, a)\n"
    " f = Cast <to = 1> (u)\n y = Add (x, f)",
    "rows across items": "s = Constant <value_ints = [2, -1]> ()\n r = Reshape (x, s)\n y = Softmax <axis = 1> (r)",
    "the largest of all": "m = ReduceMax <keepdims = 1> (x)\n y = Sub (x, m)",
    "items the other way round": "b = Constant <value_ints = [-1]> ()\n e = Constant <value_ints = [-1000000]> ()\n"
    " a = Constant <value_ints = [0]> ()\n y = Slice (x, b, e, a, b)",
    "the first item": "z = Constant <value_int = 0> ()\n g = Gather (x, z)\n y = Sub (x, g)",
    "copies of all items": "r = Constant <value_ints = [2, 1]> ()\n y = Tile (x, r)",
}


@pytest.mark.parametrize("body", MIXED.values(), ids=MIXED)
def test_items_that_are_mixed_stay_in_the_net(body: str) -> None:
    assert free_outputs(parsed(f"(float[batch, 4] x) => (float[] y) {{ {body} }}"), {"x": 0}) is None


# Nodes that pick by the number r of each item, and whether each item picks its own elements.
PICKED = {
    "the item's elements": (
        "c = Unsqueeze (r, last)\n size = Concat <axis = 0> (rows, four, single)\n a = Expand (c, size)\n"
        " b = Expand (columns, size)\n i = Concat <axis = 2> (a, b)\n y = GatherND (x, i)",
        True,
    ),
    "the item's elements among all": ("i = Add (d, row)\n y = Gather (f, i)", True),
    "the element before these": ("e = Add (d, row)\n i = Sub (e, one)\n y = Gather (f, i)", False),
}


@pytest.mark.parametrize(("body", "is_own"), PICKED.values(), ids=PICKED)
def test_indices_that_count_the_items(body: str, is_own: bool) -> None:
    """As in the masks of exported transformers: the elements of item i are at i * 4 of all, or at (i, ...)."""
    model = parsed(
        "(float[batch, 4] x) => (float[] y) <int64 zero = {0}, int64 one = {1}, int64 width = {4},"
        " int64[1] flat = {-1}, int64[1] single = {1}, int64[2] last = {1, 2}, int64[1] four = {4},"
        " int64[4] row = {0, 1, 2, 3}, int64[1, 4, 1] columns = {3, 2, 1, 0}> {"
        " rows = Shape <start = 0, end = 1> (x)\n s = Shape (x)\n"
        " n = Gather (s, zero)\n r = Range (zero, n, one)\n q = Unsqueeze (r, single)\n d = Mul (q, width)\n"
        f" f = Reshape (x, flat)\n {body} }}"
    )
    assert (free_outputs(model, {"x": 0}) is not None) is is_own


def test_values_equal_for_all_items_have_no_batch() -> None:
    """Zeros of as many rows as there are items would have one row."""
    model = parsed("(float[batch, 4] x) => (float[] y) { s = Shape (x) y = ConstantOfShape (s) }")
    assert free_outputs(model, {"x": 0}) is None


ATTENTION = """
(float[batch, 6, 8] x) => (float[] y)
<float[1, 1, 8] token = {1, 2, 3, 4, 5, 6, 7, 8}, float[8, 24] w, float[8] g, int64[1] zero = {0}, int64[1] one = {1},
 int64[2] ones = {1, 8}, int64[4] heads = {3, -1, 7, 4}> {
    s = Shape (x)
    n = Gather (s, zero)
    shape = Concat <axis = 0> (n, ones)
    tokens = Expand (token, shape)
    rows = Concat <axis = 1> (tokens, x)
    h = LayerNormalization (rows, g)
    qkv = MatMul (h, w)
    parts = Constant <value_ints = [0, 7, 3, 2, 4]> ()
    five = Reshape (qkv, parts)
    apart = Transpose <perm = [2, 0, 3, 1, 4]> (five)
    q, k, v = Split <axis = 0> (apart)
    axis = Constant <value_ints = [0]> ()
    q4 = Squeeze (q, axis)
    k4 = Squeeze (k, axis)
    v4 = Squeeze (v, axis)
    kt = Transpose <perm = [0, 1, 3, 2]> (k4)
    scores = MatMul (q4, kt)
    p = Softmax <axis = -1> (scores)
    o = MatMul (p, v4)
    back = Transpose <perm = [0, 2, 1, 3]> (o)
    flat = Constant <value_ints = [0, 7, 8]> ()
    z = Reshape (back, flat)
    y = Add (z, rows)
}
"""


def test_attention_with_a_class_token_costs_nothing_for_its_batch() -> None:
    model = parsed(ATTENTION, 17)
    fill_weights(model, 0)
    conversion = lower(model)
    assert count_layers(conversion.graph) == count_layers(lower(model, shapes={"x": (1, 6, 8)}).graph)
    assert not cost_of_dynamic(conversion)
    report = conversion.verify()
    assert report.ok
    assert {run["x"][0] for run in report.shapes} == {2, 3}


@pytest.mark.parametrize(
    "body",
    [
        "r = Reshape (t, ones) y = Mul (x, r)",
        "m = MatMul (x, four) a = Unsqueeze (m, two) y = Mul (x, a)",
        "m = MatMul (three, x) a = Unsqueeze (m, one) y = Mul (x, a)",
    ],
    ids=["a number for each item", "items times a vector", "a vector times items"],
)
def test_a_batch_that_costs_nothing(body: str) -> None:
    constants = (
        "int64[3] ones = {-1, 1, 1}, int64[1] one = {1}, int64[1] two = {2}, float[3] three = {1, 2, 3},"
        " float[4] four = {1, 2, 3, 4}, float[3, 3, 1] w = {1, 0, 0, 0, 1, 0, 0, 0, 1}"
    )
    inputs = "float[batch, 3, 4] x" + ", float[batch] t" * ("(t" in body)
    conversion = lower(parsed(f"({inputs}) => (float[] o) <{constants}> {{ {body} o = Conv (y, w) }}", 17))
    assert not cost_of_dynamic(conversion)
    assert all(port.batch_axis == 0 for port in conversion.inputs)
    assert conversion.verify().ok


def test_inputs_that_no_batch_of_mats_can_be() -> None:
    """The second has two rows for each item of the first."""
    model = parsed(
        "(float[batch, 3, 4] x, float[both, 3, 4] z) => (float[] o)"
        " <int64[4] pairs = {-1, 2, 3, 4}, float[3, 3, 1] w = {1, 0, 0, 0, 1, 0, 0, 0, 1}>"
        " { r = Reshape (z, pairs) m = ReduceMean <axes = [1], keepdims = 0> (r) y = Add (x, m) o = Conv (y, w) }",
        17,
    )
    assert lower(model, shapes={"x": ("batch", 3, 4), "z": ("batch+batch", 3, 4)}).verify().ok
