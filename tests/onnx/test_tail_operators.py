"""Tail operators in NumPy and in C++: ONNX's conformance cases, and files that are no tails."""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import pytest
from onnx import helper

from onnx2ncnn_opt.errors import ModelError, RunError
from onnx2ncnn_opt.tail.program import Program
from onnx2ncnn_opt.tail.reader import read_tail
from onnx2ncnn_opt.tail.registry import TAIL_OPS
from testing.conformance import Case, collect
from testing.models import parsed
from testing.tails import CLANG, COMPILER, Library, merged, of_any_size, random_feeds, same_bits

# What a conformance case has that no tail has: text, sequences, other modes, types of fewer than 8 bits.
LEAST = 400
DRAWS = 6
# ONNX Runtime takes what ONNX forbids, and a tail refuses it: an axis without elements, empty operands of other shapes,
# an axis out of range or twice.
LENIENT = ("ArgMax", "ArgMin", "Concat", "CumSum", "Pad")


@cache
def programs() -> list[tuple[Case, Program]]:
    """Return the conformance cases that are tails."""
    found = []
    for case in collect():
        if all(not node.domain and node.op_type in TAIL_OPS for node in case.model.graph.node):
            try:
                found.append((case, read_tail(case.model.SerializeToString())))
            except ModelError:
                continue
    return found


def close(actual: Any, expected: Any, digits: float = 1e-6) -> bool:
    expected = np.asarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if expected.dtype.kind != "f":
        return bool(np.array_equal(actual, expected))
    epsilon = 1e-3 if expected.dtype == np.float16 else digits
    return bool(np.allclose(actual.astype(float), expected.astype(float), rtol=epsilon, atol=epsilon, equal_nan=True))


def test_there_are_many_cases() -> None:
    assert len(programs()) > LEAST
    assert {node.operator for _, program in programs() for node in program.nodes} > {
        "TopK",
        "NonMaxSuppression",
        "Unique",
        "Compress",
    }


def test_conformance_in_numpy() -> None:
    wrong = []
    for case, program in programs():
        found, digits = program.run(case.feeds), 1e-4 if "roialign" in case.name else 1e-6  # written with four decimals
        if not all(
            close(found[port.name], array, digits) for port, array in zip(program.outputs, case.expected, strict=True)
        ):
            wrong.append(case.name)
    assert wrong == []


def single() -> list[tuple[Case, Program]]:
    """Return the cases of one node without constants."""
    return [(case, program) for case, program in programs() if len(program.nodes) == 1 and not program.constants]


Draw: TypeAlias = tuple[dict[str, Any], Mapping[str, Any] | None]


@cache
def drawn() -> dict[str, list[Draw]]:
    """Return further arrays for these cases, of other sizes, with NumPy's results; None if it refuses them."""
    found = {}
    for case, program in single():
        chosen, draws = Random(case.name), list[Draw]()
        draw = np.random.default_rng(chosen.randrange(2**32))
        for _ in range(DRAWS):
            feeds = random_feeds(case.feeds, program, chosen, draw)
            # ONNX says nothing about the order of NaN, and ONNX Runtime's operators differ.
            feeds = {key: np.where(array != array, 1, array).astype(array.dtype) for key, array in feeds.items()}
            try:
                draws.append((feeds, of_any_size(program).run(feeds)))
            except RunError:
                draws.append((feeds, None))
        found[case.name] = draws
    return found


def session_of(model: onnx.ModelProto) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_sizes_that_depend_on_data() -> None:
    """After NonZero an axis has any size, none among them. Verification cannot choose it: ONNX Runtime decides here."""
    wrong, right = [], 0
    for case, program in single():
        model = onnx.ModelProto.FromString(case.model.SerializeToString())
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.ClearField("shape")
        try:
            session = session_of(model)
        except Exception:  # ONNX Runtime lacks the type, or the opset
            continue
        for feeds, ours in drawn()[case.name]:
            try:
                theirs = session.run(None, feeds)
            except Exception:  # it refuses these sizes
                continue
            if ours is None and program.nodes[0].operator in LENIENT:
                continue
            if ours is not None and all(map(close, (ours[port.name] for port in program.outputs), theirs)):
                right += 1
            else:
                wrong.append((case.name, feeds, ours, theirs))
    assert wrong == []
    assert right > 3 * LEAST


SLICE = parsed(
    "(float[n] x, int64[1] s, int64[1] e, int64[1] k) => (float[m] y) <int64[1] a = {0}> { y = Slice(x, s, e, a, k) }"
)
PARTS = parsed(
    f"(int64[n] x, int64[70] s) => (int64[2] y) {{ {', '.join(f'p{i}' for i in range(70))} = Split (x, s) "
    "y = Concat<axis = 0> (p69, p0) }"
)
ENDS = (-(2**63), -(2**31), -9, -3, -2, -1, 0, 1, 2, 3, 9, 2**31 - 1, 2**63 - 1)


def slices() -> Iterator[dict[str, Any]]:
    """Yield all slices of up to three elements."""
    for size, *numbers in product(range(4), ENDS, ENDS, (-(2**63), -2, -1, 1, 2, 2**63 - 1)):
        arrays = (np.array([number], np.int64) for number in numbers)
        yield {"x": np.arange(size, dtype=np.float32), **dict(zip("sek", arrays, strict=True))}


def test_every_slice() -> None:
    session, program = session_of(SLICE), read_tail(SLICE.SerializeToString())
    for feeds in slices():
        assert program.run(feeds)["y"].tolist() == session.run(None, feeds)[0].tolist(), feeds


@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param(COMPILER, id="C++", marks=pytest.mark.needs("C++")),
        pytest.param(CLANG, id="clang", marks=pytest.mark.needs("clang")),
    ],
)
def test_cpp_has_the_same_bits(tmp_path: Path, compiler: str) -> None:
    whole = merged([of_any_size(program) for _, program in programs()])
    cut, parts = read_tail(SLICE.SerializeToString()), read_tail(PARTS.SerializeToString())
    library = Library(tmp_path, {"all": whole, "slice": cut, "parts": parts}, "-O0", compiler=compiler)
    for number in range(DRAWS + 1):
        feeds: dict[str, Any] = {}
        for i, (case, _) in enumerate(programs()):
            others = drawn().get(case.name, [])
            possible = [case.feeds, *(arrays for arrays, results in others if results is not None)]
            feeds |= {f"{i}.{name}": array for name, array in possible[number % len(possible)].items()}
        found = library.run("all", feeds)
        assert isinstance(found, Mapping), str(whole.nodes[found - 1])
        expected = whole.run(feeds)
        assert [name for name, array in expected.items() if not same_bits(found[name], array)] == []
    for feeds in slices():
        found = library.run("slice", feeds)
        assert isinstance(found, Mapping)
        assert same_bits(found["y"], cut.run(feeds)["y"]), feeds
    found = library.run("parts", {"x": np.arange(70), "s": np.ones(70, np.int64)})
    assert isinstance(found, Mapping)
    assert found["y"].tolist() == [69, 0]


GRAPHS = {
    "an operator that no tail has": "(float[1,4,4] x) => (float[1] y) { y = Det(x) }",
    "a huge Expand": "(float[1] x) => (float[N] y) <int64[3] s = {1048576, 1048576, 64}> { y = Expand(x, s) }",
    "a huge Tile": "(float[4] x) => (float[N] y) <int64[1] s = {1099511627776}> { y = Tile(x, s) }",
    "a huge Range": "(float[1] x) => (int64[N] y) <int64 a = {0}, int64 b = {1099511627776}, int64 c = {1}>"
    "{ y = Range(a, b, c) }",
    "huge zeros": "(float[1] x) => (float[N] y) <int64[1] s = {1099511627776}> { y = ConstantOfShape(s) }",
    "a false index": "(float[4] x) => (float[1] y) <int64[1] i = {7}> { y = Gather(x, i) }",
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_hostile_tail(name: str) -> None:
    shape = (1, 4, 4) if "Det" in GRAPHS[name] else (4,) if "[4] x" in GRAPHS[name] else (1,)
    with pytest.raises((ModelError, RunError)):
        read_tail(parsed(GRAPHS[name]).SerializeToString()).run({"x": np.ones(shape, np.float32)})


def test_a_negative_tile_of_nothing() -> None:
    graph = "(float[0, 2] x) => (float[N, M] y) <int64[2] s = {2, -1}> { y = Tile(x, s) }"
    with pytest.raises(RunError):
        read_tail(parsed(graph).SerializeToString()).run({"x": np.ones((0, 2), np.float32)})


def test_damaged_bytes() -> None:
    data = parsed(
        "(float[8] x) => (float[2] y, int64[2] i) <int64[1] k = {2}> { y, i = TopK(x, k) }"
    ).SerializeToString()
    feeds = {"x": np.arange(8, dtype=np.float32)}
    np.testing.assert_array_equal(read_tail(data).run(feeds)["i"], [7, 6])
    random = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(data[: random.integers(1, len(data) + 1)])
        for at in random.integers(0, len(broken), 2):
            broken[at] = random.integers(256)
        try:
            read_tail(bytes(broken)).run(feeds)
        except (ModelError, RunError):
            continue
        except Exception as error:
            if type(error).__name__ != "UsageError":  # other shapes of the input
                raise


FLOATS = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)


def nested(depth: int, inner: str = "x") -> bytes:
    """Return an If in a branch of an If, and so on; the innermost reads the value `inner`."""
    name, graph = inner, helper.make_graph([helper.make_node("Neg", [inner], ["y"])], "g", [], [FLOATS])
    for _ in range(depth):
        other = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "g", [], [FLOATS])
        node = helper.make_node("If", ["c"], ["y"], name=name, then_branch=graph, else_branch=other)
        graph = helper.make_graph([node], "g", [], [FLOATS])
    inputs = {"x": (onnx.TensorProto.FLOAT, [2]), "c": (onnx.TensorProto.BOOL, [])}
    graph.input.extend(helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    return bytes(model.SerializeToString())


def test_nested_branches() -> None:
    """A branch may be eight deep, and nothing outside of it can name its values."""
    for holds, expected in ((True, [-1, 2]), (False, [1, 2])):
        feeds = {"x": np.array([1, -2], np.float32), "c": np.array(holds)}
        np.testing.assert_array_equal(read_tail(nested(8)).run(feeds)["y"], expected)
    for data, problem in ((nested(9), "8 others around"), (nested(1, "y\0" + "1"), "damaged"), (nested(1, "z"), "'z'")):
        with pytest.raises(ModelError, match=problem):
            read_tail(data)


def test_nodes_out_of_order() -> None:
    model = parsed("(float[4] x) => (float[4] y) { a = Relu(x) y = Neg(a) }")
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    with pytest.raises(ModelError, match="no node before it computes its input 'a'"):
        read_tail(model.SerializeToString())
