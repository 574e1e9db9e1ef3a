"""Refusals of models: they say everything at once, and how to go on."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import Unsupported, UnsupportedError
from testing.models import parsed, refusal, serialized


def test_nodes_after_a_refused_one_are_checked_too() -> None:
    """A BERT that was exported to train has a Dropout in every layer."""
    steps = " ".join(
        f"d{i} = Dropout(x{i}, ratio, training) m{i} = MatMul(d{i}, w) x{i + 1} = Relu(m{i})" for i in range(6)
    )
    error = refusal(
        "(float[1, N, 4] x0) => (float[1, N, 4] x6) "
        f"<float ratio = {{0.1}}, bool training = {{1}}, float[4, 4] w = {{{', '.join(['0.5'] * 16)}}}> {{ {steps} }}"
    )
    assert [node.node for node in error.nodes] == [f"d{i}" for i in range(6)]
    assert str(error) == (
        "cannot express 6 nodes in ncnn:\n  6 nodes, Dropout 'd0', Dropout 'd1', Dropout 'd2' and 3 more: "
        "training_mode is true; export the model in eval mode"
    )


def test_an_unknown_operator_has_one_reason() -> None:
    error = refusal("(float[1, 4] x) => (float y, float z) { y = Erfc(x) z = Erfc(y) }")
    assert {node.reason for node in error.nodes} == {"opset 17 has no such operator"}
    assert len(error.nodes) == 2


def test_outputs_of_refused_nodes_have_shape_and_type() -> None:
    """A flattened image is refused where it is pooled, and its mask where numbers are looked for: as after any node."""
    error = refusal(
        "(float[1, 3, 8, 8] x) => (float y, float z, int64 n) <float ratio = {0.1}, bool training = {1}> {"
        " d, m = Dropout(x, ratio, training) f = Flatten<axis = 0>(d) y = LpPool<kernel_shape = [2, 2]>(f)"
        " s = Shape(d) i = Cast<to = 7>(m) z = Erf(d) n = Unique(i) }"
    )
    assert [node.node for node in error.nodes] == ["d", "y", "n"]


def test_the_body_of_an_if_is_checked_to_its_end() -> None:
    error = refusal(
        "(float[2, 3] x) => (float[2, 3] y) <float ratio = {0.1}, bool training = {1}> {"
        " y = If(training) <then_branch = a () => (float[2, 3] t)"
        " { d = Dropout(x, ratio, training) e = Dropout(d, ratio, training) t = Neg(e) },"
        " else_branch = b () => (float[2, 3] q) { q = Neg(x) }> }"
    )
    assert [node.node for node in error.nodes] == ["d", "e"]


def test_attributes_that_are_missing_or_of_no_type() -> None:
    """What looks for batches, caches and shapes does so before a node's attributes are checked."""
    loop = helper.make_node("Loop", ["n", "c", "x"], ["y"])
    cache = helper.make_node("Concat", ["p", "p"], ["y"])
    untyped = helper.make_node("Conv", ["x", "w"], ["y"])
    untyped.attribute.add(name="pads")
    lookup = helper.make_node("Gather", ["x"], ["y"])
    declared = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 3, 4]) for name in "pxwy"}
    declared |= {"n": helper.make_tensor_value_info("n", TensorProto.INT64, [])}
    declared |= {"c": helper.make_tensor_value_info("c", TensorProto.BOOL, [])}
    for node, problem in (
        (loop, "body is missing"),
        (cache, "axis is missing"),
        (untyped, "pads is of type UNDEFINED"),
        (lookup, "input indices is missing"),
    ):
        inputs = [declared[name] for name in dict.fromkeys(node.input)]
        model = helper.make_model(
            helper.make_graph([node], "g", inputs, [declared["y"]]), opset_imports=[helper.make_opsetid("", 17)]
        )
        with pytest.raises(UnsupportedError, match=problem):
            lower(model, tail="never")


def test_a_number_of_groups_that_is_no_integer() -> None:
    """The sizes of weights name those of inputs before attributes are checked."""
    model = serialized(
        "(float[1, n, 8, 8] x) => (float y) { y = Conv<group = 2.0>(x, w) }", 17, w=np.ones((2, 1, 3, 3))
    )
    with pytest.raises(UnsupportedError, match="attribute group is of type FLOAT, not INT"):
        lower(model)


DETECTOR = (
    "(float[1, 3, 16, 16] x) => (float[n, 4] boxes, float[1, 2] kind, int64[n, 3] chosen)"
    " <float[6, 3, 16, 16] w, int64[3] shape = {1, 4, 1}, int64[3] flat = {1, 1, 2}, int64 two = {2},"
    " int64[1] last = {2}, int64[1] one = {1}, int64[2] parts = {4, 2}> { zero = Sub(one, one)"
    " c = Conv(x, w) r = Relu(c) b, s = Split<axis = 1>(r, parts) t = Reshape(b, shape)"
    " bb = Transpose<perm = [0, 2, 1]>(t) ss = Reshape(s, flat) kind = Flatten(s)"
    " chosen = NonMaxSuppression(bb, ss) i = Gather<axis = 1>(chosen, two) q = Squeeze(bb, zero)"
    " boxes = Gather<axis = 0>(q, i) }"
)


def test_one_cut_loses_no_branch_of_a_detector() -> None:
    model = parsed(DETECTOR)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((6, 3, 16, 16), 0.01, np.float32), "w"))
    with pytest.raises(UnsupportedError) as error:
        lower(model, tail="never")
    [node] = error.value.nodes
    assert node.operator == "NonMaxSuppression"
    advice = error.value.advice
    assert advice.startswith("export the model without NMS, or convert the 9 of 12 nodes before them with --outputs ")
    cut = advice.split("--outputs ")[1].split(" ")[0].split(",")
    assert cut == ["bb", "ss", "kind", "q"]
    conversion = lower(model, outputs=cut)
    conversion.verify().check()
    assert conversion.model.lost == ()


def test_no_advice_where_every_node_has_its_cure() -> None:
    error = refusal("(float[1, 8] x, int64[1] k) => (float[1, n] y, int64[1, n] i) { r = Relu(x) y, i = TopK(r, k) }")
    assert error.advice == ""


def test_nothing_is_before_the_first_node() -> None:
    assert refusal("(float[4] x) => (float[n] y) { y = Unique(x) }").advice == ""


def test_nodes_after_a_lost_input_do_not_count_as_convertible() -> None:
    error = refusal(
        "(float[0, 3] x, float[1, 3] a) => (float[0, 3] y, float[1, 3] b, float[1, 3] c)"
        " { b = Relu(a) y = Relu(x) c = Neg(b) }"
    )
    assert error.advice.startswith("convert the 2 of 3 nodes before them with --outputs b,c ")


def test_a_note_names_outputs_that_a_cut_loses() -> None:
    model = parsed(
        "(float[4] x) => (float[4] a, float[4] b, float[4] c) { s = Relu(x) a = Neg(s) b = Abs(x) c = Add(a, b) }"
    )
    assert lower(model, outputs=["s"]).model.lost == ("b",)
    assert lower(model, outputs=["s", "b"]).model.lost == ()
    assert lower(model, outputs=["c"]).model.lost == ("a", "b")


@pytest.mark.parametrize(
    ("nodes", "lines"),
    [
        (
            [Unsupported("a", "Reshape", "[1, 2] cannot be reshaped to [3]", "bind sizes with --shape")] * 2,
            ["2 nodes, Reshape 'a', Reshape 'a': [1, 2] cannot be reshaped to [3]; bind sizes with --shape"],
        ),
        (
            [Unsupported(f"n{i}", "Crop", f"axis {i} of '{i}' is open", "bind it") for i in range(243)],
            [
                "243 nodes, Crop 'n0', Crop 'n1', Crop 'n2' and 240 more: axis 0 of '0' is open "
                "(the first; the others alike); bind it"
            ],
        ),
        (
            [Unsupported("a", "A", "r", "h"), Unsupported("b", "B", "r", ""), Unsupported("c", "C", "other", "h")],
            ["A 'a': r; h", "B 'b': r", "C 'c': other; h"],
        ),
    ],
)
def test_one_line_for_each_reason(nodes: list[Unsupported], lines: list[str]) -> None:
    assert str(UnsupportedError(nodes)).splitlines()[1:] == [f"  {line}" for line in lines]
