"""Shape inference against the shapes that the real ncnn runtime computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import ShapeError
from onnx2ncnn_opt.ir.dim import Shape, Sym, known, product, symbol
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.shapes import infer_graph, infer_shapes
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.param.files import write_net
from onnx2ncnn_opt.runtime.base import Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from testing.layer_cases import FILE, Case, found, load_cases, make_layer, net_of

Params = dict[str | int, Any]
CASES = load_cases()
RUN = [case for case in CASES if case.runs]
# A part that is cut out is assumed to be inside where a size is a symbol; here its end is clamped.
CLAMPED = {"starts=1,-3 ends=-1,100 axes=0,1", "woffset=1 outw=100 outh=-233"}
NOT_CLAMPED = [case for case in RUN if case.parameters not in CLAMPED]
WITH_TRAITS = {spec.type for spec in LAYERS.values() if spec.traits or spec.bounds is not None}
DATA_DEPENDENT = {"DetectionOutput", "Proposal", "YoloDetectionOutput", "Yolov3DetectionOutput"}
NOT_IN_RUNTIME = {"ArgMax", "SPP"}


def runner_of(layer: Layer, folder: Path, worker: NcnnWorker) -> NcnnRunner:
    paths = folder / "net.param", folder / "net.bin"
    write_net(net_of(layer), *paths)
    return NcnnRunner(*paths, worker=worker)


def run(worker: NcnnWorker, layer: Layer, folder: Path, *, batched: bool = False) -> list[tuple[int, ...]]:
    """The shapes that ncnn computes; with the batch count first where `batched`."""
    axis = 0 if batched else None
    feeds = {}
    for blob in layer.inputs:
        assert blob.shape is not None
        sizes = (blob.batch, *blob.shape) if batched else blob.shape
        feeds[blob.name] = Feed(np.full([int(size) for size in sizes], 0.5, np.float32), axis)  # type: ignore[arg-type]
    results = runner_of(layer, folder, worker).run(feeds, [Fetch(blob.name, axis) for blob in layer.outputs])
    return [results[blob.name].shape for blob in layer.outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nets")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, worker: NcnnWorker, folder: Path, request: pytest.FixtureRequest) -> None:
    """A line of the table: the shapes in it, in the runtime, of symbols, of batches; and what its traits promise."""
    result = found(case.layer())
    if request.config.getoption("--update-fixtures"):
        text = FILE.read_text(encoding="utf-8")
        FILE.write_text(text.replace(case.line, case.line.removesuffix(case.expected) + result), encoding="utf-8")
        return
    assert result == case.expected
    if case in RUN:
        layer = case.layer()
        assert [shape for shape, _ in infer_shapes(layer)] == run(worker, layer, folder)
    if case in NOT_CLAMPED:
        symbols_give_the_same_sizes(case)
        batches_are_those_of_the_runtime(case, worker, folder)
        if case.type in WITH_TRAITS:
            traits_are_true_in_the_runtime(case, worker, folder)


def test_every_type_of_the_runtime_is_covered() -> None:
    assert {case.type for case in RUN} == set(LAYERS) - DATA_DEPENDENT - {"Input"} - NOT_IN_RUNTIME
    assert not WITH_TRAITS - {case.type for case in RUN}


def traits_are_true_in_the_runtime(case: Case, worker: NcnnWorker, folder: Path) -> None:
    layer = case.layer()
    shapes = [tuple(map(int, shape.split(","))) for shape in case.inputs.split()]
    rng = np.random.default_rng(0)
    inputs = [rng.permutation(np.linspace(-9, 9, int(np.prod(shape)), dtype=np.float32)) for shape in shapes]
    runner = runner_of(layer, folder, worker)

    def computed(arrays: list[NDArray[Any]]) -> NDArray[Any]:
        feeds = {b.name: a.reshape(shape) for b, a, shape in zip(layer.inputs, arrays, shapes, strict=True)}
        return np.concatenate([output.reshape(-1) for output in runner.run(feeds).values()])

    result = computed(inputs)
    if layer.has(Trait.ELEMENTWISE):
        order = rng.permutation(inputs[0].size)
        np.testing.assert_allclose(computed([inputs[0][order]]), result[order], rtol=1e-5, atol=1e-5)
    if layer.has(Trait.MOVES):
        assert np.isin(result, np.concatenate(inputs)).all()
    if layer.has(Trait.VIEW):
        assert np.array_equal(np.sort(result), np.sort(inputs[0]))
    bounds = LAYERS[case.type].bounds
    if bounds is not None:
        assert (bounds[0] <= result).all()
        assert (result <= bounds[1]).all()


def symbols_give_the_same_sizes(case: Case) -> None:
    """Every size a symbol at once (equal sizes the same one), and each of them alone; 1 stays: it may broadcast."""
    expected = infer_shapes(case.layer())
    sizes = {int(size) for size in case.inputs.replace(",", " ").split()} - {1}
    for chosen in (sizes, *({size} for size in sorted(sizes))):
        values = {f"s{size}": size for size in chosen}
        symbolic = infer_shapes(case.layer({size: symbol(f"s{size}") for size in chosen}))
        for (shape, _), (want, _) in zip(symbolic, expected, strict=True):
            if shape is not None:
                assert tuple(s.subs(values) if isinstance(s, Sym) else s for s in shape) == want


def batches_are_those_of_the_runtime(case: Case, worker: NcnnWorker, folder: Path) -> None:
    """All inputs in batches of 2, and then each of several inputs without one."""
    count = len(case.inputs.split())
    for single in range(-1, count) if count > 1 else (-1,):
        batches = [1 if i == single else 2 for i in range(count)]
        layer = case.layer(batches=batches)
        shapes = [(batch, *shape) for shape, batch in infer_shapes(layer) if shape is not None]
        assert shapes == run(worker, layer, folder, batched=True), batches


H, W, N = symbol("h"), symbol("w"), symbol("n")


def test_the_batch_is_common_to_all_inputs() -> None:
    assert infer_shapes(make_layer("BinaryOp", {}, [(2,), (2,)], batches=(1, N))) == [((2,), N)]
    with pytest.raises(ShapeError, match="the batch counts of its inputs must be equal, but are 2 and 3"):
        infer_shapes(make_layer("BinaryOp", {}, [(2,), (2,)], batches=(2, 3)))
    to_rows: Params = {"w": 3, "h": -1, "input_batch_axis": 0}
    assert infer_shapes(make_layer("Reshape", to_rows, [(2, 3)], batches=(N,))) == [((N * 2, 3), 1)]
    to_batch: Params = {"w": 3, "h": 2, "c": -1, "input_batch_axis": 233, "output_batch_axis": 0}
    assert infer_shapes(make_layer("Reshape", to_batch, [(N * 2, 3)])) == [((2, 3), N)]
    with pytest.raises(ShapeError, match="input_batch_axis is not given"):
        infer_shapes(make_layer("Reshape", {"w": 6, "output_batch_axis": 0}, [(2, 3)], batches=(2,)))


def test_sums_of_symbols() -> None:
    with pytest.raises(ShapeError, match=r"but are h and 1 \+ h"):
        infer_shapes(make_layer("BinaryOp", {}, [(H, 4), (H + 1, 4)]))
    with pytest.raises(ShapeError, match="elements do not fit"):
        infer_shapes(make_layer("Reshape", {"w": 4, "h": H + 2, "c": 1}, [(H, 4)]))


def test_an_unknown_type() -> None:
    assert infer_shapes(make_layer("NobodyKnows", {}, [(2, 3)])) == [(None, 1)]


def test_a_graph_is_filled_in_order() -> None:
    graph = Graph()
    x, y, z, weight = Blob("x", (3, H, W), N), Blob("y"), Blob("z"), Blob("weight")
    graph.add(Layer("Input", "x", (), [x]))
    graph.add(Layer("MemoryData", "weight", (), [weight], {"w": 1, "h": 1, "c": 3}))
    graph.add(Layer("BinaryOp", "scale", [x, weight], [y]))
    graph.add(Layer("Flatten", "flatten", [y], [z]))
    graph.outputs = [z]
    infer_graph(graph)
    assert (x.shape, weight.shape, y.shape) == ((3, H, W), (3, 1, 1), (3, H, W))
    assert z.shape == (product((3, H, W)),)
    assert (weight.batch, y.batch, z.batch) == (1, N, N)


def sizes(least: int = 1, most: int = 9) -> st.SearchStrategy[int]:
    return st.integers(least, most)


def each(names: str, least: int, most: int) -> dict[str, st.SearchStrategy[Any]]:
    """A size from `least` to `most` for each of the names."""
    return dict.fromkeys(names.split(), sizes(least, most))


KERNEL, STRIDE, DILATION = "kernel_w kernel_h", "stride_w stride_h", "dilation_w dilation_h"
PADS = "pad_left pad_right pad_top pad_bottom"
IMAGE = st.tuples(st.just(2), sizes(), sizes())

# What the fixed cases above may have missed: random parameters, where inference finds nothing wrong with them.
RANDOM: dict[str, tuple[dict[str, st.SearchStrategy[Any]], st.SearchStrategy[tuple[int, ...]]]] = {
    "Convolution": (each(KERNEL, 1, 4) | each(f"{STRIDE} {DILATION}", 1, 3) | each(PADS, 0, 3), IMAGE),
    "Pooling": (
        each(f"{KERNEL} {STRIDE}", 1, 4) | each(PADS, 0, 2) | each("pooling_type", 0, 1) | each("pad_mode", 0, 3),
        IMAGE,
    ),
    "Crop": (
        {
            "starts": st.tuples(st.integers(-4, 3), st.sampled_from([-233, -2, 0, 1])),
            "ends": st.tuples(st.integers(-2, 9), st.sampled_from([-233, -1, 0, 3, 1 << 30])),
            "axes": st.permutations([0, -1, 1]).map(lambda axes: tuple(axes[:2])),
        },
        st.tuples(sizes(3, 6), sizes(3, 6), sizes(3, 6)),
    ),
    "Interp": (
        {
            "resize_type": st.sampled_from([1, 2]),
            "height_scale": st.floats(0.25, 3, width=32).map(lambda scale: round(scale, 6)),
            "width_scale": st.sampled_from([0.5, 2.0, 0.3333333, 1.1, 0.7]),
            "output_height": st.sampled_from([0, 0, 5]),
            "output_width": st.sampled_from([0, 0, 4]),
        },
        st.tuples(st.just(2), sizes(4, 40), sizes(4, 40)),
    ),
    "Deconvolution": (
        each(KERNEL, 1, 4)
        | each(f"{STRIDE} {DILATION}", 1, 3)
        | each(PADS, 0, 2)
        | each("output_pad_right output_pad_bottom", 0, 1),
        st.tuples(st.just(2), sizes(1, 6), sizes(1, 6)),
    ),
}


@pytest.mark.parametrize("type", RANDOM)
def test_random_parameters(worker: NcnnWorker, tmp_path: Path, type: str) -> None:
    compared = 0
    drawn, shapes = RANDOM[type]

    @settings(derandomize=True, max_examples=50, deadline=None, database=None)
    @given(st.fixed_dictionaries(drawn), shapes)
    def compare(params: dict[str | int, Any], shape: tuple[int, ...]) -> None:
        nonlocal compared
        if "onvolution" in type:
            weights = 3 * shape[0] * params["kernel_w"] * params["kernel_h"]
            params = {**params, "num_output": 3, "weight_data_size": weights}
        layer = make_layer(type, params, [shape])
        try:
            found = [shape for shape, _ in infer_shapes(layer)]
        except ShapeError:
            return
        assert found == run(worker, layer, tmp_path)
        compared += 1

    compare()
    assert compared > 20


def check_like_numpy(type: str, a: Shape, b: Shape, compute: Callable[..., Any]) -> None:
    """Compare a layer's shape with the one that numpy computes; both refuse, or none."""
    layer = make_layer(type, {}, [a, b])
    try:
        expected = np.shape(compute(np.zeros(known(a)), np.zeros(known(b)))) or (1,)
    except ValueError:
        with pytest.raises(ShapeError):
            infer_shapes(layer)
    else:
        assert infer_shapes(layer) == [(expected, 1)]


@settings(derandomize=True, max_examples=100, deadline=None, database=None)
@given(st.lists(sizes(1, 3), min_size=1, max_size=4), st.lists(sizes(1, 3), min_size=1, max_size=4))
def test_matmul_accepts_the_same_shapes_as_numpy(a: list[int], b: list[int]) -> None:
    check_like_numpy("MatMul", tuple(a), tuple(b), np.matmul)


@settings(derandomize=True, max_examples=100, deadline=None, database=None)
@given(st.lists(st.tuples(sizes(1, 3), sizes(1, 3)), min_size=1, max_size=4))
def test_equal_ranks_broadcast_as_in_numpy(pairs: list[tuple[int, int]]) -> None:
    check_like_numpy("BinaryOp", tuple(a for a, _ in pairs), tuple(b for _, b in pairs), np.add)
