"""Sizes of inputs: as the model declares them, and as the caller gives them: names, sums and gaps among numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import ModelError, UsageError
from onnx2ncnn_opt.ir.dim import Shape, symbol
from onnx2ncnn_opt.onnx.read.load import load_model
from testing.models import parsed
from testing.worker import WORKER


def shapes_of(inputs: str, shapes: dict[str, list[Any]]) -> dict[str, str]:
    names = [part.split()[-1] for part in inputs.split(", float")]
    nodes = " ".join(f"o{i} = Identity({name})" for i, name in enumerate(names))
    outputs = ", ".join(f"float o{i}" for i in range(len(names)))
    loaded = load_model(parsed(f"({inputs}) => ({outputs}) {{ {nodes} }}"), shapes=shapes)
    return {info.name: ",".join(map(str, info.shape)) for info in loaded.inputs}


@pytest.mark.parametrize(
    ("inputs", "shapes", "bound"),
    [
        ("float[n,3,h,w] x", {"x": [1, 3, None, "?"]}, {"x": "1,3,h,w"}),
        ("float[n,s] x", {"x": [1, "S"]}, {"x": "1,S"}),
        ("float[a,b] x, float[c,d] y", {"x": ["N", "S"], "y": ["N", "S"]}, {"x": "N,S", "y": "N,S"}),
        ("float[a,b] x, float[b,d] y", {"x": [None, "S"]}, {"x": "a,S", "y": "S,d"}),
        (
            "float[a] x, float[b] y, float[c] m",
            {"x": ["P"], "y": ["S"], "m": ["P+S"]},
            {"x": "P", "y": "S", "m": "P + S"},
        ),
        ("float[a] x, float[b] m", {"x": [3], "m": ["a+S"]}, {"x": "3", "m": "3 + S"}),
        ("float[8] x, float[b] y", {"x": ["S"], "y": ["2*S"]}, {"x": "8", "y": "16"}),
        ("float[a] x, float[12] m, float[b] y", {"m": ["a+b"], "y": [4]}, {"x": "8", "m": "12", "y": "4"}),
        ("float[s0] x, float[s1] y", {"x": ["s0"], "y": ["s0"]}, {"x": "s0", "y": "s0"}),
        ("float[a] x", {"x": ["(S + 1)//2"]}, {"x": "((1 + S)//(2))"}),
        ("float[a,b] x, float[a] m", {"x": ["16*a", "b"]}, {"x": "16*a_1,b", "m": "16*a_1"}),
        ("float[a,b] x", {"x": ["2*a", "3*a"]}, {"x": "2*a_1,3*a_1"}),
    ],
)
def test_inferred_sizes(inputs: str, shapes: dict[str, list[Any]], bound: dict[str, str]) -> None:
    assert shapes_of(inputs, shapes) == bound


@pytest.mark.parametrize("shapes", [{}, {"x": [8]}, {"y": [4]}])
def test_a_multiple_of_another_size(shapes: dict[str, list[int]]) -> None:
    """As torch writes ``2 * Dim("h")``; if no size is called n, ``2*n`` is only a name."""
    model = parsed("(float[a] x, float[h] y, float[b] z) => (float o) { p = Concat<axis = 0>(x, y) o = Mul(p, z) }")
    for value, name in zip(model.graph.input, ("2*h", "h", "2*n"), strict=True):
        value.type.tensor_type.shape.dim[0].dim_param = name
    x, y, z = (info.shape[0] for info in load_model(model, shapes=shapes).inputs)
    assert [str(x), str(y), str(z)] == (["8", "4", "2*n"] if shapes else ["2*h", "h", "2*n"])
    assert x == 2 * y


DYNAMIC = "float[N,3,H,W] x, float[N,7] ids"


@pytest.mark.parametrize(
    ("inputs", "shapes", "said"),
    [
        (DYNAMIC, {"img": [1]}, r"no input is called 'img'; inputs are: x: float\[N, 3, H, W\]; ids: float\[N, 7\]"),
        (DYNAMIC, {"x": [3, 4, 4]}, "has 3 sizes, the model wants 4"),
        (DYNAMIC, {"x": [1, 4, 4, 4]}, "axis 1 is 3 in the model, not 4"),
        (DYNAMIC, {"x": [0, 3, 4, 4]}, "0 is not a possible size"),
        (DYNAMIC, {"x": [-1, 3, 4, 4]}, "-1 is not a possible size"),
        (DYNAMIC, {"x": [2**31, 3, 4, 4]}, "2147483648 is not a possible size"),
        (DYNAMIC, {"x": [1, 3, 4, 4], "ids": [2, 7]}, "size 'N' cannot be both 1 and 2"),
        ("float[a,a] x", {"x": [1, 2]}, "size 'a' cannot be both 1 and 2"),
        ("float[a,a] x", {"x": ["a", "2*a"]}, "size 'a' cannot be both a_1 and 2[*]a_1"),
        ("float[8] x, float[9] y", {"x": ["S"], "y": ["S"]}, "axis 0 is 9 in the model, not 8"),
        ("float[a] x, float[12] m", {"x": ["P"], "m": ["P+S"]}, "axis 0 is 12 in the model, not P [+] S"),
        ("float[8] x", {"x": ["S*S"]}, r"axis 0 is 8 in the model, not S\*S"),
        ("float[8] x", {"x": ["S+9"]}, "axis 0 is 8 in the model, not 9 [+] S"),
        ("float[a] x", {"x": ["S T"]}, "'S T' is not a size; give a number, a name, a sum such as P[+]S, or [?]"),
        ("float[a] x", {"x": ["f(S)"]}, "is not a size"),
        ("float[a] x", {"x": ["8//S"]}, "is not a size"),
        ("float[a] x", {"x": ["S//0"]}, "is not a size"),
        ("float[a] x", {"x": ["S" * 1001]}, "is not a size"),
        ("float[a] x", {"x": [1.5]}, "1.5 is not a size"),
        ("float[a] x", {"x": [True]}, "True is not a possible size"),
        ("float[a] x", {"x": ["0"]}, "0 is not a possible size"),
    ],
)
def test_contradictory_shapes(inputs: str, shapes: dict[str, list[Any]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shapes_of(inputs, shapes)


def test_names_go_into_the_net_and_its_verification() -> None:
    """A mask as long as what is new and what was before: the names tell, and both runs know it."""
    model = parsed(
        "(float[b, s0, 4] past, float[b, s1, 4] x, float[b, s2] mask) => (float[b, s3, 4] y)"
        "<int64[1] two = {2}> { k = Concat<axis = 1>(past, x) m = Unsqueeze(mask, two) y = Mul(k, m) }"
    )
    conversion = lower(model, shapes={"past": [1, "P", None], "x": [None, "S", 4], "mask": [1, "P+S"]})
    manifest = conversion.manifest()
    assert [entry.shape for entry in manifest.inputs] == [(1, "P", 4), (1, "S", 4), (1, "P + S")]
    assert manifest.outputs[0].shape == (1, "P + S", 4)
    report = conversion.verify()
    report.check()
    assert all(set(sizes) == {"P", "S"} for sizes in report.sizes)


DYNAMIC_OUTPUTS = """(float[N,3,H,W] x, int64[N,7] ids, float[?,2] free) => (float[N,3,H,W] y, float[M] z) {
    y = Relu(x)  z = Identity(free) }"""


def test_dynamic_sizes_stay_symbols() -> None:
    loaded = load_model(parsed(DYNAMIC_OUTPUTS))
    n, h, w = map(symbol, "NHW")
    assert [info.shape for info in loaded.inputs] == [(n, 3, h, w), (n, 7), (symbol("free_0"), 2)]
    assert [info.shape for info in loaded.outputs] == [(n, 3, h, w), (symbol("M"),)]


def test_an_input_that_is_an_output_of_unknown_sizes_keeps_its_own() -> None:
    model = parsed("(float[2,n,1] x) => (float[?,?,?] x, float y) { y = ReduceMax(x) }")
    assert load_model(model).inputs[0].shape == (2, symbol("n"), 1)


def test_a_symbol_has_one_value_everywhere() -> None:
    loaded = load_model(parsed(DYNAMIC_OUTPUTS), shapes={"x": [2, 3, 32, 64]})
    assert [info.shape for info in loaded.inputs] == [(2, 3, 32, 64), (2, 7), (symbol("free_0"), 2)]
    assert loaded.outputs[0].shape == (2, 3, 32, 64)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(n=st.integers(1, 2**31 - 1), h=st.integers(1, 2**31 - 1))
def test_any_size_that_ncnn_can_count(n: int, h: int) -> None:
    loaded = load_model(parsed(DYNAMIC_OUTPUTS), shapes={"ids": (n, 7), "x": (n, 3, h, 1)})
    assert loaded.inputs[0].shape == (n, 3, h, 1)


def renamed(graph: str, names: Mapping[str, str], **weights: np.ndarray) -> onnx.ModelProto:
    """The model of a graph, with other names of sizes, which ONNX's text form may not have; "" is none."""
    model = parsed(graph)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]
    return model


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        ({"a": "3*s53", "b": "3", "c": "-1", "d": ""}, (symbol("3*s53"), 3, symbol("x_2"), symbol("x_3"))),
        ({"a": "x_2", "c": ""}, (symbol("x_2"), symbol("b"), symbol("x_2_1"), symbol("d"))),  # a new name is another
    ],
)
def test_odd_ways_to_write_a_size(names: dict[str, str], shape: Shape) -> None:
    model = renamed("(float[a,b,c,d] x) => (float y) { y = Relu(x) }", names)
    assert load_model(model).inputs[0].shape == shape


def test_a_negative_size_is_a_symbol() -> None:
    model = parsed("(float[1,3] x) => (float y) { y = Relu(x) }")
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = -1
    assert load_model(model).inputs[0].shape == (1, symbol("x_1"))


@pytest.mark.parametrize("text", ["?", "", " ", "-1", "None", "unk", "*", "#0"])
def test_texts_that_are_no_size(text: str) -> None:
    """Axes that share such a text differ, and any sizes fit them; so do the axes of other inputs."""
    graph = "(float[N,3,N,N] x, float[N,4] z) => (float[N,3,N,N] y, float[N,4] w) { y = Relu(x) w = Relu(z) }"
    model = renamed(graph, {"N": text})
    names = [symbol("x_0"), 3, symbol("x_2"), symbol("x_3")]
    loaded = load_model(model)
    assert [info.shape for info in loaded.inputs] == [tuple(names), (symbol("z_0"), 4)]
    assert len({str(size) for info in loaded.outputs for size in info.shape or ()}) == 6
    fixed = load_model(model, shapes={"x": (1, 3, 640, 480), "z": (7, 4)})
    assert [info.shape for info in fixed.inputs] == [(1, 3, 640, 480), (7, 4)]
    assert load_model(model, shapes={"x": (1, 3, None, "?")}).inputs[0].shape == (1, *names[1:])


@pytest.mark.parametrize("name", ["N", "a b", " n ", "x.1"])
def test_a_batch_is_not_as_large_as_an_image(name: str) -> None:
    """The name of an input's first axis contradicts itself on the third; on the second it may be a matrix."""
    graph = "(float[N,3,N,M] x, float[M,M,4] z) => (float[N,3,N,M] y, float[M,M,4] w) { y = Relu(x) w = Relu(z) }"
    model = renamed(graph, {"N": name, "M": f"{name}M"})
    m = symbol(f"{name}M")
    loaded = load_model(model)
    assert [info.shape for info in loaded.inputs] == [(symbol("x_0"), 3, symbol("x_2"), m), (m, m, 4)]
    again = load_model(model, shapes={info.name: tuple(map(str, info.shape)) for info in loaded.inputs})
    assert [info.shape for info in again.inputs] == [info.shape for info in loaded.inputs]


@pytest.mark.parametrize("name", ["?", "", " ", "None", "unk", "N"])
@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        (("N,N,N,N", "1,5,8,8"), [("x_0", 3, "x_2", "x_3"), (1, 5, 8, 8)]),
        (("N,N,8,8", "1,5,8,8"), [("x_0", 3, 8, 8), (1, 5, 8, 8)]),
        (("1,N,8,8", "2,N,9,9"), [(1, 3, 8, 8), (2, 5, 9, 9)]),
        (("1,N,N,8", "1,5,7,7"), [(1, 3, "x_2", 8), (1, 5, 7, 7)]),
    ],
)
def test_a_name_that_weights_contradict(
    name: str, shapes: Sequence[str], sizes: Sequence[tuple[int | str, ...]]
) -> None:
    """The kernels are for 3 and 5 channels, whatever else has the name."""
    inputs = f"(float[{shapes[0]}] x, float[{shapes[1]}] z)"
    graph = f"{inputs} => (float[A] y, float[B] w) {{ y = Conv(x, v) w = Conv(z, u) }}"
    model = renamed(graph, {"N": name}, v=np.ones((2, 3, 3, 3), "f4"), u=np.ones((2, 5, 3, 3), "f4"))
    found = [tuple(n if isinstance(n, int) else str(n) for n in info.shape) for info in load_model(model).inputs]
    assert found == sizes


@pytest.mark.parametrize(
    ("shape", "node", "weight", "sizes"),
    [
        ("a,b,c,d", "Conv<group = 2>(x, w)", (4, 3, 1, 1), "a,6,c,d"),
        ("a,b,c", "ConvTranspose(x, w)", (3, 4, 1), "a,3,c"),
        ("a,b,c", "MatMul(x, w)", (5, 2), "a,b,5"),
        ("a,b", "Gemm<transB = 1>(x, w)", (5, 2), "a,2"),
        ("a,b,c", "GRU<hidden_size = 2>(x, w, r)", (1, 6, 7), "a,b,7"),
    ],
)
def test_a_name_for_the_size_of_weights(shape: str, node: str, weight: tuple[int, ...], sizes: str) -> None:
    """Old exports name every axis; weights leave one of the names a single size."""
    graph = f"(float[{shape}] x) => (float[A] y) {{ y = {node} }}"
    model = renamed(graph, {}, w=np.ones(weight, "f4"), r=np.ones((1, 6, 2), "f4"))
    assert ",".join(map(str, load_model(model).inputs[0].shape)) == sizes


def test_an_unranked_input_needs_a_shape() -> None:
    model = parsed("(float[] x) => (float y) { y = Relu(x) }")
    with pytest.raises(ModelError, match=r"'x' declares no shape; give one, e\.g\. --shape x:"):
        load_model(model)
    assert load_model(model, shapes={"x": (1, 3, 8, 8)}).inputs[0].shape == (1, 3, 8, 8)


def test_a_size_that_ncnn_cannot_have() -> None:
    model = parsed("(float[1099511627776, 3] x) => (float y) { y = Relu(x) }")
    with pytest.raises(ModelError, match=r"'x' has the size 1099511627776; sizes in ncnn are less than 2\^31"):
        load_model(model)


def test_a_concat_binds_the_sizes_of_a_state_to_those_of_an_image() -> None:
    model = parsed(
        "(float[1, 2, H, W] x, float[1, 3, h, w] state) => (float y) "
        "{ half = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) y = Concat<axis = 1>(half, state) }",
        opset=18,
    )
    conversion = lower(model)
    assert conversion.manifest().inputs[1].shape == (1, 3, "((H)//(2))", "((W)//(2))")
    conversion.verify(worker=WORKER).check()
