"""Models that end in nodes for which ncnn has no layer: a net, and a tail after it."""

from collections.abc import Callable
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser

from onnx2ncnn_opt import Net, convert
from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.errors import UnsupportedError, UsageError
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.onnx.cut.minimum_cut import Network
from onnx2ncnn_opt.plugin import tail as plugged
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.tail.numpy_source import numpy_program
from onnx2ncnn_opt.tail.reader import read_tail
from onnx2ncnn_opt.tail.registry import TAIL_OPS
from testing import present
from testing.command import run_well
from testing.models import serialized
from testing.programs import output_of
from testing.tails import Library, same_bits


def model(body: str, inputs: str = "float[1,3,8,8] x", outputs: str = "float[1,4] y", opset: int = 18) -> bytes:
    """Return a model of text: a convolution `f` of 4 channels of the input x, and the nodes of the body."""
    weights = ", ".join(str(round(np.sin(i), 3)) for i in range(4 * 3 * 3 * 3))
    text = f"""<ir_version: 8, opset_import: ["": {opset}]>
    g ({inputs}) => ({outputs}) <float[4,3,3,3] w = {{{weights}}}> {{
        f = Conv <pads = [1, 1, 1, 1]> (x, w)
        {body}
    }}"""
    proto = parser.parse_model(text)
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


def converted(data: bytes, **options: Any) -> Conversion:
    """Return a right net; verification has compared the whole."""
    conversion = convert(data, **options)
    assert conversion.report is not None
    assert conversion.report.ok, conversion.report
    return conversion


def operators(conversion: Conversion) -> list[str]:
    """Return the operators of the tail's nodes."""
    return [] if conversion.tail is None else [node.op_type for node in conversion.tail.model.graph.node]


TOP = "flat = Reshape <> (f, shape) shape = Constant <value_ints = [1, 256]> ()"
FLAT = "s = Constant <value_ints = [1, -1]> ()  r = Reshape (f, s)  "
BEST = FLAT.replace("[1, -1]", "[16, -1]") + "k = Constant <value_ints = [4]> ()  y, i = TopK (r, k)  "
BOTH = "float[16,4] y, int64[16,4] i"


def test_a_large_top_k_follows_the_net() -> None:
    conversion = converted(model(BEST, outputs=BOTH))
    # A reshape costs a layer in the net and nothing in the tail.
    assert operators(conversion) == ["Reshape", "TopK"]
    assert [layer.type for layer in conversion.graph] == ["Input", "Convolution"]
    assert conversion.cut == ("f",)


@pytest.mark.parametrize(("count", "expected"), [(1, False), (8, True)])
def test_nodes_that_pick_by_one_index(count: int, expected: bool) -> None:
    """Look at the neighbours of the best pixel, as heads of keypoints do: each node is a few layers."""
    body = FLAT + "i = ArgMax <axis = 1> (r)  n = Constant <value_int = 255> ()  "
    for each in range(count):
        body += f"s{each} = Constant <value_int = {each}> ()  a{each} = Add (i, s{each})  "
        body += f"j{each} = Min (a{each}, n)  g{each} = GatherElements <axis = 1> (r, j{each})  "
    body += f"y = Concat <axis = 1> ({', '.join(f'g{each}' for each in range(count))})"
    conversion = converted(model(body, outputs=f"float[1,{count}] y"))
    assert (operators(conversion)[:1] == ["Reshape"]) == expected


def test_a_node_of_which_only_the_shape_is_read_may_have_many_layers() -> None:
    body = "row = Gather <axis = 2> (f, i)  size = Shape (row)  y = Expand (z, size)"
    data = model(body, inputs="float[1,3,h,8] x, int64 i, float[1] z", outputs="float[1,4,8] y")
    assert not operators(converted(data))


def test_a_node_that_only_batches_refuse_stays_in_the_net() -> None:
    body = """count = Shape<start = 0, end = 1> (x)  rest = Constant<value_ints = [0, 8, 8]> ()
        shape = Concat<axis = 0> (count, rest)  none = ConstantOfShape (shape)
        nothing = Floor (none)  y = Concat<axis = 1> (f, nothing)"""
    conversion = converted(model(body, "float[n,3,8,8] x", "float[n,4,8,8] y"))
    assert conversion.tail is None


@pytest.mark.parametrize(("tail", "expected"), [("auto", True), ("only-needed", False), ("never", False)])
def test_the_option_tail(tail: str, expected: bool) -> None:
    assert bool(operators(converted(model(BEST, outputs=BOTH), tail=tail))) == expected


@pytest.mark.parametrize(
    ("body", "outputs", "reason"),
    [
        (BEST.replace("[4]", "[400]"), BOTH, "k is 400, for an axis of 16 elements"),
        (
            "e = Constant <value_floats = [1.0, 2.0, 3.0]> ()  z = Add (f, e)  y = NonZero (z)",
            "int64[4,n] y",
            "Add 'z'",
        ),
    ],
)
def test_a_node_that_no_runtime_takes_is_in_no_tail(body: str, outputs: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        convert(model(body, outputs=outputs), verification=None)


def test_a_node_without_layers_is_refused_without_a_tail() -> None:
    data = model("y = NonZero (f)", outputs="int64[4,n] y")
    with pytest.raises(UnsupportedError, match="NonZero"):
        convert(data, tail="never")
    assert operators(converted(data, tail="only-needed")) == ["NonZero"]


def test_rows_are_items_where_a_tail_would_follow_otherwise() -> None:
    text = "(float[n,4,3] x, int64[n,2,3] i) => (float[n,2,3] y) { y = GatherElements <axis = 1> (x, i) }"
    proto = parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g ' + text)
    conversion = converted(proto.SerializeToString())
    assert conversion.tail is None
    assert [entry.batch_axis for entry in conversion.manifest().inputs] == [0, 0]


def test_a_net_without_a_tail_is_the_same(tmp_path: Path) -> None:
    data = model("y = Relu (f)", outputs="float[1,4,8,8] y")
    for tail in ("auto", "never"):
        converted(data, tail=tail).save(tmp_path / tail)
    for end in ("param", "bin", "json"):
        assert (tmp_path / f"auto.ncnn.{end}").read_bytes() == (tmp_path / f"never.ncnn.{end}").read_bytes()
    assert not (tmp_path / "auto.ncnn.tail.onnx").exists()


# Nodes of a tail that would leave traces in the rest of the net if it were not imported without them.
TRACES = {
    "a limit of a dynamic size": (
        "i = Constant <value_ints = [5]> ()  g = Gather <axis = 2> (f, i)  "
        "q = Concat <axis = 2> (f, g)  y = NonZero (q)",
        "float[1,3,h,8] x",
        "int64[4,n] y",
    ),
    "a layer that both need": (
        "t = Transpose <perm = [0, 2, 3, 1]> (f)  s = Constant <value_ints = [16, 16]> ()  r = Reshape (t, s)  "
        "d = Concat <axis = 1> (r, r)  y = NonZero (d)  u = Transpose <perm = [0, 2, 3, 1]> (f)  z = MatMul (u, v)",
        "float[1,3,8,8] x, float[4,5] v",
        "int64[2,n] y, float[1,8,8,5] z",
    ),
    "a name": (
        "[deep] b = LogSoftmax (f)  deep_out = Mul (b, b)  y = NonZero (deep_out)",
        "float[1,3,8,8] x",
        "int64[4,n] y",
    ),
    "equal sizes": (
        'y = NonZero (f)  z = Einsum <equation = "ij,jk->ik"> (a, b)',
        "float[1,3,8,8] x, float[2,n] a, float[m,3] b",
        "int64[4,k] y, float[2,3] z",
    ),
    "an input that has a size": (
        "zero = Constant <value_int = 0> ()  one = Constant <value_int = 1> ()  s = Shape <start = 3> (x)  "
        "w_ = Squeeze (s)  i = Range (zero, w_, one)  c = Cast <to = 1> (i)  z = Mul (f, c)  y = NonZero (v)",
        "float[w] v, float[1,3,8,w] x",
        "int64[1,n] y, float[1,4,8,w] z",
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_the_net_is_that_of_the_model_cut_by_hand(name: str, tmp_path: Path) -> None:
    data = model(*TRACES[name], opset=20)
    found = lower(data)
    by_hand = lower(data, outputs=found.cut, tail="never")
    assert found.tail is not None
    assert found.minimum == by_hand.minimum
    assert found.save(tmp_path / "net").param.read_text() == by_hand.save(tmp_path / "cut").param.read_text()


def test_a_tail_of_an_earlier_net_goes(tmp_path: Path) -> None:
    for body, outputs in ((BEST, BOTH), ("y = Relu (f)", "float[1,4,8,8] y")):
        converted(model(body, outputs=outputs)).save(tmp_path / "net")
    assert not (tmp_path / "net.ncnn.tail.onnx").exists()


def test_fewest_numbers_cross() -> None:
    # The maximum over channels has a quarter of the numbers, and ncnn computes it; the tail has its reshape.
    body = "a = Constant <value_ints = [1]> ()  m = ReduceMax (f, a)  " + BEST.replace("(f, s)", "(m, s)")
    conversion = converted(model(body, outputs=BOTH))
    assert conversion.cut == ("m",)
    # Expand makes numbers of fewer ones: it moves to the tail.
    body = "a = Constant <value_ints = [2, 3]> ()  m = ReduceMax (f, a)  e = Constant <value_ints = [1, 4, 64, 64]> () "
    body += " b = Expand (m, e)  " + BEST.replace("(f, s)", "(b, s)")
    conversion = converted(model(body, outputs=BOTH))
    assert conversion.cut == ("m",)
    assert "Expand" in operators(conversion)


def test_one_blob_for_both_sides_and_an_output_that_the_tail_reads() -> None:
    body = "z = Relu (f)  v = Sigmoid (z)  " + BEST.replace("(f, s)", "(z, s)")
    outputs = "float[1,4,8,8] z, float[1,4,8,8] v, " + BOTH
    conversion = converted(model(body, outputs=outputs))
    assert conversion.cut == ("z", "v")
    assert [entry.name for entry in conversion.manifest().model_outputs] == ["z", "v", "y", "i"]


def test_two_tails_in_different_branches() -> None:
    body = "a, b = Split <axis = 1, num_outputs = 2> (f)  p = Relu (a)  q = Neg (b)  y = NonZero (p)  z = NonZero (q)"
    conversion = converted(model(body, outputs="int64[4,n] y, int64[4,m] z"))
    assert set(operators(conversion)) >= {"NonZero"}
    assert set(conversion.cut) == {"f"}


def test_a_tail_in_the_middle_is_refused_with_both_parts() -> None:
    body = "i = NonZero (f)  c = Cast <to = 1> (i)  u = Unsqueeze (c, zero)  t = Transpose <perm = [0, 2, 1]> (u)  "
    body = "zero = Constant <value_ints = [0]> ()  " + body + "k = ConstantOfShape (ones)  y = Conv (t, v)"
    body = "ones = Constant <value_ints = [1]> ()  " + body.replace("k = ConstantOfShape (ones)  ", "")
    body = body.replace("(t, v)", "(u, v)")
    data = model(body, inputs="float[1,3,8,8] x, float[2,4,1] v", outputs="float[1,2,n] y")
    with pytest.raises(UnsupportedError) as caught:
        convert(data)
    assert "NonZero 'i' can follow a net, but Conv 'y' depends on it" in str(caught.value)
    assert str(caught.value).endswith("needs a net again")
    assert (caught.value.cuts[0], caught.value.second) == (("u",), (["u", "v"], ["y"]))
    assert operators(converted(data, outputs=["u"])) == ["NonZero", "Cast", "Unsqueeze"]
    assert converted(model("i = NonZero (f)  y = Neg (f)"), outputs=["i", "y"]).cut == ("f", "y")


SIGN = np.sign(np.sin(np.arange(4 * 3 * 3 * 3)).sum())  # of the sum of f for x = 1
BRANCHES = """
    total = ReduceSum <keepdims = 0> (f)
    zero = Constant <value_float = 0.0> ()
    positive = Greater (total, zero)
    y, i = If (positive) <
        then_branch = g1 () => (y1, i1) {
            k = Constant <value_ints = [3]> ()
            y1, i1 = TopK (f, k)
        },
        else_branch = g2 () => (y2, i2) {
            below = Constant <value_float = -40.0> ()
            less = Less (total, below)
            y2 = If (less) <
                then_branch = g3 () => (y3) { y3 = Neg (f) },
                else_branch = g4 () => (y4) { k = Constant <value_ints = [-1]> ()  y4 = Reshape (f, k) }
            >
            i2 = Constant <value_ints = [7]> ()
        }
    >
"""


@pytest.mark.parametrize("language", ["Python", pytest.param("C++", marks=pytest.mark.needs("C++"))])
def test_a_branch_at_the_end(tmp_path: Path, language: str) -> None:
    """Take each of three branches, which give results of other ranks, in NumPy, and as a program."""
    data = model(BRANCHES, outputs="float y, int64 i")
    conversion = converted(data)
    conversion.save(tmp_path / "net")
    program, space = read_tail(present(conversion.tail).data), dict[str, Any](np=np)
    exec("import base64\n" + numpy_program(program), space)
    library, ranks = Library(tmp_path, {"net": program}) if language == "C++" else None, set()
    f = OrtRunner(data, outputs=["f"])
    with Net(tmp_path / "net", isolated=False) as net:
        for scale in (1, -1e-3, -1e3):
            feeds = {"x": np.full((1, 3, 8, 8), scale * SIGN, np.float32)}
            expected = OrtRunner(data).run_any(feeds)
            ranks.add((expected["y"].ndim, expected["i"].ndim))
            for name, array in net.run(feeds).items():
                np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-3)
            cut = f.run_any(feeds)
            own = program.run(cut)
            found = library.run("net", cut) if library else space["tail"](*cut.values())
            assert not isinstance(found, int)
            assert all(same_bits(np.asarray(found[name]), array) for name, array in own.items())
    assert ranks == {(4, 4), (1, 1), (4, 1)}


def test_a_branch_that_needs_a_net_is_refused() -> None:
    branch = "y1 = Conv <pads = [1, 1, 1, 1]> (x, w)"
    with pytest.raises(UnsupportedError, match="Conv 'y1' is in a branch of it and needs a net again"):
        convert(model(BRANCHES.replace("y1, i1 = TopK (f, k)", f"{branch} i1 = Identity (k)"), outputs=BOTH))


def test_outputs_without_a_shape(tmp_path: Path) -> None:
    """Say in the manifest what is known of them: of an output of the tail, and of one of the net."""
    data = onnx.load_from_string(model("n = NonZero (f)  r = Relu (f)", outputs="int64[4,k] n, float[1,4,8,8] r"))
    for output in data.graph.output:
        output.type.tensor_type.ClearField("shape")
    converted(data.SerializeToString()).save(tmp_path / "net")
    manifest = read_manifest(tmp_path / "net.ncnn.json")
    assert [entry.shape for entry in manifest.model_outputs] == [(4, None), (1, 4, 8, 8)]


def test_an_output_of_six_axes() -> None:
    body = "s = Constant <value_ints = [1, 2, 2, 2, 4, 2, 4]> ()  r = Reshape (f, s)  "
    body += "y = Transpose <perm = [0, 1, 3, 2, 4, 6, 5]> (r)"
    conversion = converted(model(body, outputs="float[1,2,2,2,4,4,2] y"))
    assert operators(conversion) == ["Reshape", "Transpose"]
    with pytest.raises(UnsupportedError):
        convert(model(body, outputs="float[1,2,2,2,4,4,2] y"), tail="never")


def test_indices_above_the_integers_of_float32() -> None:
    # (index + 2^24) * 3: a float32 would lose the last bits.
    body = BEST + "o = Constant <value_ints = [16777217]> ()  c = Constant <value_ints = [3]> ()  "
    body += "j = Add (i, o)  n = Mul (j, c)"
    conversion = converted(model(body, outputs="int64[2,4] n"))
    assert set(operators(conversion)) >= {"TopK", "Add", "Mul"}


@pytest.mark.parametrize("kind", ["float16", "uint8"])
def test_types_of_outputs(kind: str) -> None:
    number = {"float16": 10, "uint8": 2}[kind]
    body = BEST + f"a = Abs (y)  z = Cast <to = {number}> (a)"
    conversion = converted(model(body, outputs=f"{kind}[2,4] z"))
    assert conversion.manifest().model_outputs[0].dtype == kind


def of_floats(kind: str) -> bytes:
    """Return a model that computes in floats of this kind, and returns the large numbers that it finds."""
    draw, dtype = np.random.default_rng(0), np.dtype(kind)
    text = f"({kind}[1,24] x) => ({kind}[m] y) {{ f = MatMul (x, w)  b = Greater (f, two)  n = NonZero (b)"
    weights: dict[str, Any] = {"w": draw.standard_normal((24, 16)).astype(dtype), "two": np.array([2], dtype)}
    return serialized(text + "  t = Transpose (n)  g = GatherND (f, t)  y = Mul (g, two) }", **weights)


def test_the_type_of_an_inner_value_of_sizes() -> None:
    """The model does not declare it, and neither the net's values nor the tail's nodes tell it."""
    body = (
        "i = NonZero (f) s = Shape <start = 3> (x) n = Squeeze (s) zero = Constant <value_int = 0> () "
        "one = Constant <value_int = 1> () r = Range (zero, n, one) y = Cast <to = 1> (i)"
    )
    found = converted(model(body, "float[1,3,8,W] x", "float[4,N] y"), outputs=["i", "r"])
    assert [entry.dtype for entry in present(found.manifest().tail).outputs] == ["int64", "int64"]


@pytest.mark.parametrize("kind", ["float16", "double"])
def test_floats_of_the_model(kind: str, tmp_path: Path) -> None:
    """The net computes in float32; its tail has the model's types."""
    data = of_floats(kind)
    converted(data).save(tmp_path / "net")
    x = np.random.default_rng(0).standard_normal((1, 24)).astype(kind)
    with Net(tmp_path / "net") as net:
        found = net.run({"x": x})["y"]
    expected = OrtRunner(data).run({"x": x})["y"]
    assert found.dtype == expected.dtype == np.dtype(kind)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_the_cpp_program_rounds_to_float16(tmp_path: Path, compiles: Callable[[Path], None]) -> None:
    lower(of_floats("float16")).save(tmp_path / "net")
    run_well(tmp_path, "example", "net", "-o", "main.cpp")
    assert "float32_to_float16" in (tmp_path / "main.cpp").read_text()
    compiles(tmp_path / "main.cpp")


def test_names_that_python_uses(tmp_path: Path) -> None:
    """A constant may have the name of a builtin, or one that decides what a program does."""
    names = ("__name__", "__builtins__", "__debug__", "min", "np", "letterbox", "top_k")
    body = " ".join(f"s{i} = Mul (x{i}, {name}) x{i + 1} = TopK (s{i}, k)" for i, name in enumerate(names))
    text = f"(float[6] x0) => (float[m] x{len(names)}) <int64[1] k = {{3}}> {{ {body} }}"
    constants: dict[str, Any] = {name: np.full(1, 2, np.float32) for name in names}
    program = read_tail(serialized(text, **constants))
    x = np.arange(6, dtype=np.float32)
    printed = f"import numpy as np\nimport base64\n{numpy_program(program)}"
    printed += f"if __name__ == '__main__':\n    print(tail(np.array({x.tolist()}, np.float32)))\n"
    (tmp_path / "program.py").write_text(printed)
    assert output_of(tmp_path / "program.py").strip() == str(program.run({"x0": x}))


def test_nothing_is_found() -> None:
    body = (
        "t = Constant <value_floats = [1e9]> ()  b = Greater (f, t)  n = NonZero (b)  z = Transpose <perm = [1, 0]> (n)"
    )
    conversion = converted(model(body, outputs="int64[n,4] z"))
    assert {row.name for row in present(conversion.report).outputs} >= {"z"}


@pytest.mark.parametrize("batch", ["2", "n"])
def test_batches_and_dynamic_sizes(batch: str, tmp_path: Path) -> None:
    data = model(
        BEST.replace("[1, -1]", "[0, -1]"), f"float[{batch},3,h,w] x", f"float[{batch},4] y, int64[{batch},4] i"
    )
    converted(data).save(tmp_path / "net")
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 5)).astype(np.float32)
    with Net(tmp_path / "net") as net:
        found = net.run({"x": x})
    expected = OrtRunner(data).run({"x": x})
    np.testing.assert_array_equal(found["i"], expected["i"])
    np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-5)


def test_sizes_of_the_input_in_the_tail(tmp_path: Path) -> None:
    """Boxes in units of the picture: the tail needs a size that only the input has."""
    body = BEST + "d = Shape <start = 2, end = 3> (x)  z = Mod (i, d)"
    data = model(body.replace("[1, -1]", "[0, -1]"), "float[1,3,h,w] x", "int64[1,4] z")
    conversion = converted(data)
    assert present(conversion.tail).sizes == ("h",)


def test_an_input_of_the_tail_alone(tmp_path: Path) -> None:
    data = model(BEST + "z = Mul (y, scale)", "float[1,3,8,8] x, float[1,1] scale", "float[16,4] z")
    converted(data).save(tmp_path / "net")
    x, scale = np.zeros((1, 3, 8, 8), np.float32), np.full((1, 1), 3, np.float32)
    x[0, 1, 4, 4] = 1  # the convolution gives its weights
    with Net(tmp_path / "net") as net:
        assert [entry.name for entry in net.inputs] == ["x", "scale"]
        found = net.run({"x": x, "scale": scale})
        with pytest.raises(UsageError, match="scale"):
            net.run({"x": x})
    np.testing.assert_allclose(found["z"], OrtRunner(data).run({"x": x, "scale": scale})["z"], rtol=1e-5)


def test_a_tail_that_is_missing_or_of_another_net(tmp_path: Path) -> None:
    files = converted(model(BEST, outputs=BOTH)).save(tmp_path / "net")
    assert read_manifest(files.manifest).tail is not None
    files.tail.write_bytes(files.tail.read_bytes() + b"\0")
    with pytest.raises(UsageError, match="onnx and its manifest are of two nets"):
        Net(tmp_path / "net")
    files.tail.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        Net(tmp_path / "net")


def test_an_operator_of_a_plug_in() -> None:
    """Register the determinant of matrices, which ncnn does not have, and convert a model that ends in it."""

    @plugged.tail_op("", "Det")
    def det(x: plugged.F) -> plugged.F:
        return np.asarray(np.linalg.det(x.astype(np.float64)).astype(x.dtype))

    try:
        conversion = converted(model("y = Det (f)", outputs="float[1,4] y"))
        assert operators(conversion) == ["Det"]
    finally:
        del TAIL_OPS["Det"]


EDGES = st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.integers(1, 9), max_size=14)


@given(EDGES)
@settings(max_examples=200, deadline=None)
def test_the_cut_is_a_minimum(edges: dict[tuple[int, int], int]) -> None:
    edges = {(a, b): size for (a, b), size in edges.items() if a != b}
    network = Network()
    for (a, b), size in edges.items():
        network.connect(a, b, size)
    side = present(network.sink_side(0, 5))
    assert 5 in side
    assert 0 not in side

    def cost(sink: set[int]) -> int:
        return sum(size for (a, b), size in edges.items() if a not in sink and b in sink)

    inner = (1, 2, 3, 4)
    sides = [{5, *some} for some in chain.from_iterable(combinations(inner, n) for n in range(5))]
    least = min(map(cost, sides))
    assert cost({int(str(vertex)) for vertex in side}) == least
    assert len(side) == min(len(each) for each in sides if cost(each) == least)


def test_last_bits_of_sums_decide() -> None:
    """Means of a few levels are equal or not by the order of addition, and boxes by their scores."""
    nodes = """m = ReduceMean <axes = [1], keepdims = 0> (f)  one = Constant <value_ints = [1, 1, -1]> ()
        scores = Reshape (m, one)  t = Transpose <perm = [0, 2, 3, 1]> (f)  four = Constant <value_ints = [1, -1, 4]> ()
        boxes = Reshape (t, four)  most = Constant <value_ints = [20]> ()  overlap = Constant <value_floats = [0.3]> ()
        y = NonMaxSuppression <center_point_box = 1> (boxes, scores, most, overlap)"""
    assert "ReduceMean" in operators(converted(model(nodes, outputs="int64[n,3] y", opset=17)))


def test_last_bits_of_a_function_decide() -> None:
    """Sigmoids next to 1 are equal or not by their last bits, whatever errors the net has."""
    nodes = """s = Constant <value_ints = [1, -1]> ()  big = Constant <value_float = 9.0> ()  m = Mul (f, big)
        r = Reshape (m, s)  k = Constant <value_ints = [60]> ()  t, i = TopK (r, k)  p = Sigmoid (t)
        h = Constant <value_ints = [40]> ()  y, j = TopK (p, h)"""
    assert operators(converted(model(nodes, outputs="float[1,40] y, int64[1,40] j"))).count("TopK") == 2
