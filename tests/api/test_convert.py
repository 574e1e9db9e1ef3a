"""The whole path on real exports: converted, verified in both runtimes, and at rest after one run of the passes.

Of each model of full size one exporter, in turn; all with --thorough.
"""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt import passes
from onnx2ncnn_opt.api.convert import convert
from onnx2ncnn_opt.api.dynamic_cost import cost_of_dynamic
from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.errors import UnsupportedError, UsageError
from onnx2ncnn_opt.inputs.draws import Wanted
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.param.splits import count_layers
from onnx2ncnn_opt.rewrite.events import Applied
from onnx2ncnn_opt.runtime.base import Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.report import VerifyReport
from testing import present
from testing.exports import MODELS, ROOT, SKELETONS, SMALL, one_of_each, refilled, sampled
from testing.models import parsed, write_model
from testing.optimized import apply_passes
from testing.worker import WORKER, listed


@pytest.fixture(scope="module", params=sampled(MODELS, [*SMALL, *one_of_each(SKELETONS)]))
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def conversion(model: Path) -> Conversion:
    return lower(refilled(model))


def test_the_net_agrees_with_the_model(model: Path, conversion: Conversion) -> None:
    is_large = model in SKELETONS  # of full size: they run on an ordinary and a large input
    report = conversion.verify(Verification(wanted=Wanted() if is_large else None), worker=WORKER)
    report.check()
    if largest(report) >= 1e-4:
        # Large inputs have larger errors. A final Sigmoid or Clip keeps outputs below 1, so that relative errors grow,
        # with winograd and on each CPU otherwise. The plain kernels keep to the bound, as do all on ordinary inputs.
        if not is_large:
            assert largest(conversion.verify(Verification(exact=True), worker=WORKER)) < 1e-4
        report = conversion.verify(Verification(wanted=Wanted(seeds=3, ranges=((-2, 2),))), worker=WORKER)
    # Folding and other sums cost a few units in the last place; 1e-4 of the largest value is far from any wrong layer.
    assert largest(report) < 1e-4


def largest(report: VerifyReport) -> float:
    """The largest error of all outputs."""
    return max(math.inf if output.max_rel is None else output.max_rel for output in report.outputs)


def test_a_second_run_changes_nothing(conversion: Conversion) -> None:
    conversion.graph.check()
    assert not [event for event in passes.run(conversion.graph, check=True) if isinstance(event, Applied)]


def test_saved_files_are_read_back_unchanged(model: Path, conversion: Conversion, tmp_path: Path) -> None:
    files = conversion.save(tmp_path / "net")
    types = {line.split()[0] for line in files.param.read_text().splitlines()[2:]}
    assert types <= _FOLDED.get(model.stem.split(".")[0], types)
    net = read_net(files.param, files.bin)
    assert net.trailing_bytes == 0
    manifest = read_manifest(files.manifest)
    assert replace(manifest, sha256={}) == conversion.manifest()
    assert {entry.blob for entry in manifest.outputs} == {blob.name for blob in net.graph.outputs}
    assert {entry.blob for entry in manifest.inputs} == {blob.name for blob in net.graph.inputs}
    assert not [event for event in passes.run(net.graph, check=True) if isinstance(event, Applied)]
    inputs, outputs = listed(files.param)
    if model.stem == "loops.ts":  # its first output needs the second one
        outputs.reverse()
    assert inputs == [entry.blob for entry in manifest.inputs]
    assert outputs == [entry.blob for entry in manifest.outputs]


# What an optimised CNN consists of: anything else would be a fold that was missed.
_FOLDED = {
    "residual": {"Input", "Convolution", "Pooling", "BinaryOp", "ReLU", "Split", "InnerProduct", "Reduction"},
    "inverted": {
        *("Input", "Convolution", "ConvolutionDepthWise", "BinaryOp", "InnerProduct", "Pooling", "Reduction", "Split"),
        *("Swish", "HardSigmoid", "Softmax"),
    },
    "shuffle": {
        *("Input", "Convolution", "ConvolutionDepthWise", "Slice", "Concat", "ShuffleChannel", "InnerProduct"),
        *("Pooling", "Reduction", "Split"),
    },
    "video": {
        *("Input", "Convolution", "Pooling3D", "InnerProduct", "Reduction"),
        *("Padding", "Reshape", "Crop", "Concat", "Split"),  # around a convolution that was one of volumes
    },
}


def right(graph: str, opset: int = 17, **options: Any) -> Conversion:
    """Return the conversion of a model, which is verified."""
    conversion = lower(parsed(graph, opset), **options)
    conversion.verify(worker=WORKER).check()
    return conversion


def types(conversion: Conversion) -> set[str]:
    return {layer.type for layer in conversion.graph}


def test_inputs_of_any_layout_are_described_by_the_manifest() -> None:
    converted = right(
        "(float[4, 3, 8, 8] x, float[5] v) => (float[4, 3, 8, 8] y, float[5] w, float[8, 3, 8, 4] z)"
        "{ y = Relu(x) w = Neg(v) z = Transpose<perm = [3, 1, 2, 0]>(y) }"
    )
    assert [entry.batch_axis for entry in converted.manifest().inputs] == [None, None]


@pytest.mark.parametrize(
    "model",
    [
        # of a blob of rows of 4 numbers, of which the Input could only say that there are 4
        "(float[1,T,4] x) => (float[1,M] y) { a = Tanh(x) y = Flatten(a) }",
        # a batch becomes an axis, which for one image alone would be a Reshape
        "(float[N,3,1] x) => (float[2,N] y) <float[2,3,1] w = {1, 2, 3, 4, 5, 6}>"
        "{ a = Conv(x, w) b = Flatten(a) c = Transpose(b) y = Softmax(c) }",
    ],
    ids=["rows", "batch"],
)
def test_a_net_of_dynamic_sizes_is_optimised_for_all_of_them(model: str, tmp_path: Path) -> None:
    files = lower(parsed(model, 17)).save(tmp_path / "net")
    assert not apply_passes(files.param, files.bin).applied


def test_batches_are_kept_apart() -> None:
    kernel = np.random.default_rng(0).standard_normal((6, 3, 3, 3)).astype(np.float32)
    graph = (
        "(float[4, 3, 8, 8] x) => (float[4, 6] y, float[4] s) { c = Conv(x, k) r = Relu(c) p = GlobalAveragePool(r) "
        "y = Flatten(p) s = ReduceMax<axes = [1], keepdims = 0>(y) }"
    )
    converted = lower(parsed(graph, 13, k=kernel))
    converted.verify(worker=WORKER).check()
    assert converted.manifest().inputs[0].batch_axis == 0
    assert converted.manifest().outputs[0].batch_axis == 0


CUT = (
    "(float[1, 4, 6] x, float[2, 3] other) => (float[1, 6, 4] y, int64[2, n] best) <int64[2] shape = {4, 6}>"
    "{ r = Relu(x) t = Transpose<perm = [0, 2, 1]>(r) y = Neg(t) flat = Reshape(r, shape) best = NonZero(flat) "
    "unused = Abs(other) }"
)


def test_a_model_is_cut_before_unsupported_nodes() -> None:
    with pytest.raises(UnsupportedError, match="NonZero"):
        lower(parsed(CUT), tail="never")
    converted = right(CUT, outputs=["flat", "y"])
    assert [entry.name for entry in converted.manifest().outputs] == ["flat", "y"]
    assert [entry.name for entry in converted.manifest().inputs] == ["x"]


def test_a_cut_model_finds_its_external_data(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    (tmp_path / "weights").mkdir()
    onnx.save(parsed(CUT), path, save_as_external_data=True, location="weights/data", size_threshold=0)
    lower(path, outputs=["flat"]).verify(worker=WORKER).check()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outputs": ["flap"]}, "no value called flap; did you mean flat"),
        ({"outputs": ["y"], "batch_axes": {"x": 3}}, "no axis 3"),
        ({"outputs": ["y"], "batch_axes": {"z": 0}}, "no input is called 'z'"),
    ],
)
def test_cuts_and_batch_axes_of_nothing_are_a_wrong_use(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        lower(parsed(CUT), **options)


@pytest.mark.parametrize(("axis", "expected", "rank"), [(0, 0, 2), (-2, 1, 2), (None, None, 3)])
def test_the_batch_axis_can_be_chosen(axis: int | None, expected: int | None, rank: int) -> None:
    converted = right(CUT, outputs=["y"], batch_axes={"x": axis})
    assert converted.manifest().inputs[0].batch_axis == expected
    assert len(present(converted.graph.inputs[0].shape)) == rank


def test_norms_over_a_dynamic_length_that_was_rows_are_one_layer() -> None:
    """As XCiT normalises the tokens of each column of its heads."""
    model = (
        "(float[1, n, 12] x) => (float[1, 3, 4, n] y) <int64[4] cut = {0, 0, 3, 4}, float least = {1e-12}> {"
        " heads = Reshape(x, cut) q = Transpose<perm = [0, 2, 3, 1]>(heads) norm = ReduceL2<axes = [-1]>(q)"
        " positive = Clip(norm, least) size = Shape(q) large = Expand(positive, size) y = Div(q, large) }"
    )
    assert types(right(model)).isdisjoint({"Reduction", "BinaryOp"})


def test_an_older_release_gets_only_its_layers() -> None:
    model = refilled(ROOT / "fixtures" / "models" / "attention.ts.onnx")
    assert {"SDPA", "MultiHeadAttention"} & types(lower(model))
    older = lower(model, release=20250503)
    assert "SDPA" not in types(older)
    assert older.manifest().ncnn == "20250503"
    older.verify(worker=WORKER).check()


def test_an_older_release_gets_rotary_embeddings_in_parts() -> None:
    graph = (
        "(float[1, 2, 3, 2] x) => (float[1, 2, 3, 2] y)"
        "<float[3, 1] c = {1.0, 0.5, 0.25}, float[3, 1] s = {0.0, 0.75, 1.0}> { a, b = Split<axis = -1>(x) "
        "ac = Mul(a, c) bs = Mul(b, s) as = Mul(a, s) bc = Mul(b, c) d = Sub(ac, bs) e = Add(bc, as) "
        "y = Concat<axis = -1>(d, e) }"
    )
    assert "RotaryEmbed" in types(lower(parsed(graph, 17)))
    assert "RotaryEmbed" not in types(right(graph, release=20250503))


def test_an_operation_that_an_older_release_lacks_is_refused() -> None:
    graph = "(float[1, 4] x) => (float[1, 4] y) { y = Sign(x) }"
    right(graph)
    with pytest.raises(UnsupportedError, match="operation 20 needs ncnn 20260521 or newer, not 20250503"):
        lower(parsed(graph, 17), release=20250503)


def test_a_constant_that_is_nan_is_a_weight() -> None:
    """A layer's params cannot hold NaN; a MemoryData can."""
    graph = "(float[4] x) => (float[4] y, float[4] z) { y = Add(x, c) z = Add(x, d) }"
    model = parsed(graph, 17, c=np.float32(np.nan), d=np.array([1, np.nan, 3, 4], np.float32))
    x = Feed(np.arange(4, dtype=np.float32), None)
    with lower(model).staged() as files:
        assert not files.param.read_text().count("=nan")
        runner = NcnnRunner(files.param, files.bin, timeout=60, worker=WORKER)
        results = runner.run({"x": x}, [Fetch("y", None), Fetch("z", None)])
    np.testing.assert_array_equal(results["y"], np.full(4, np.nan))
    np.testing.assert_array_equal(results["z"], [1, np.nan, 5, 7])


@pytest.mark.parametrize(("operator", "expected"), [("PRelu", ["Convolution", "PReLU"]), ("Mul", ["Convolution"])])
def test_a_constant_that_was_expanded_is_one_for_each_channel(operator: str, expected: list[str]) -> None:
    """As BlazePalm has it: the slopes of the channels, expanded to the size of what they are for."""
    converted = right(
        "(float[1,2,5,7] x) => (float[1,3,5,7] y)"
        "<float[3,2,1,1] w = {1, 2, 3, 4, 5, 6}, float[1,3,1,1] k = {0.5, 0.25, 2}, int64[4] s = {1,3,5,7}>"
        f"{{ a = Conv(x, w) b = Expand(k, s) y = {operator}(a, b) }}"
    )
    assert [layer.type for layer in converted.graph if layer.type != "Input"] == expected


def test_a_squeeze_without_axes_keeps_dynamic_dimensions(tmp_path: Path) -> None:
    """Where one of them is 1, the model's tensors lose an axis more: the net is not for that size, and says so."""
    graph = "(float[batch, 8, h, 1] x) => (float y) { s = Squeeze(x) y = Softmax<axis = 1>(s) }"
    path = write_model(tmp_path, graph, opset=17)
    conversion = lower(path)
    report = conversion.verify(worker=WORKER)
    report.check()
    assert len(report.sizes) == 2
    assert all(size > 1 for sizes in report.sizes for size in sizes.values())
    files = conversion.save(tmp_path / "net")
    manifest = read_manifest(files.manifest)
    assert manifest.minimum == {"batch": 2, "h": 2}
    with pytest.raises(UsageError, match="the net is for batch of 2 or more, not 1; convert the model with a --shape"):
        verify_net(path, files.param, files.bin, Verification(shapes={"x": (1, 8, 5, 1)}), manifest=manifest)
    feeds = {"x": np.zeros((3, 8, 1, 1), np.float32)}
    with pytest.raises(UsageError, match="the net is for h of 2 or more, not 1"):
        verify_net(path, files.param, files.bin, Verification(feeds=feeds), manifest=manifest)
    fixed = lower(path, shapes={"x": (1, 8, 5, 1)})
    assert not fixed.minimum
    fixed.verify(worker=WORKER).check()


@pytest.mark.parametrize("name", ["?", " ", "N"])
def test_dimensions_with_names_that_name_no_size(name: str, tmp_path: Path) -> None:
    """Three axes that share such a name once became one symbol; the net ran at 2x3x2x2 and at no other ratio."""
    graph = (
        "(float[D,3,D,D] x) => (float[D,D,1] y) <int64[1] two = {2}, int64[2] rest = {-1, 3}> { n = Shape<end = 1>(x)"
        " t = Transpose<perm = [0, 2, 3, 1]>(x) shape = Concat<axis = 0>(n, rest) r = Reshape(t, shape)"
        " y = ReduceSum(r, two) }"
    )
    model = parsed(graph, 17)
    for value, axes in ((model.graph.input[0], (0, 2, 3)), (model.graph.output[0], (0, 1))):
        for axis in axes:
            value.type.tensor_type.shape.dim[axis].dim_param = name
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    for shapes in (None, {"x": (1, 3, 640, 480)}, {"x": (1, 3, "?", "?")}):
        conversion = lower(path, shapes=shapes)
        report = conversion.verify(worker=WORKER)
        report.check()
        assert not report.notes
        files = conversion.save(tmp_path / "net")
        image = Verification(feeds={"x": np.ones((1, 3, 640, 480), np.float32)})
        verify_net(path, files.param, files.bin, image, manifest=read_manifest(files.manifest)).check()


def test_a_note_says_that_verification_ran_at_tiny_sizes() -> None:
    """A name of a first axis is drawn as a batch; the model takes other sizes of a matrix, and has to run at them."""
    conversion = lower(parsed("(float[n, n] x, float[n, 20] z) => (float[n, 20] y) { y = MatMul(x, z) }", 17))
    said = "x ran at tiny sizes only, which proves little; give your sizes with --shape, or arrays with --inputs"
    assert conversion.verify(worker=WORKER).notes == (said,)
    feeds = {"x": np.ones((2, 2), np.float32), "z": np.ones((2, 20), np.float32)}
    assert not conversion.verify(worker=WORKER, verification=Verification(feeds=feeds)).notes
    fixed = lower(conversion.source, shapes={"x": (3, 3)})
    assert not fixed.verify(worker=WORKER).notes


def test_sizes_that_are_too_large_are_skipped() -> None:
    """Only rows of up to 21 numbers give outputs with elements; of the sizes tried first, some exceed the memory."""
    graph = (
        "(float[a, b, c] x) => (float[d, e] y) <int64[2] begin = {1, -11}, int64[2] end = {99999, 11},"
        " int64[2] axes = {0, 1}> { t = Flatten<axis = 1>(x) y = Slice(t, begin, end, axes) }"
    )
    lower(parsed(graph, 17)).verify(worker=WORKER).check()


def test_the_cost_of_dynamic_dimensions() -> None:
    """The token that a ViT puts before its patches is repeated for each image, here also for each row."""
    graph = (
        "(float[batch, 5, 4] x, float[batch, h, 4] z) => (float y, float w)"
        " <float[1, 1, 4] token = {1.0, 2.0, 3.0, 4.0}, int64[2] rest = {1, 4},"
        " int64[1] one = {1}, int64[1] four = {4}> {"
        " n = Shape<end = 1>(x) size = Concat<axis = 0>(n, rest) t = Expand(token, size)"
        " y = Concat<axis = 1>(t, x) h = Shape<start = 1, end = 2>(z)"
        " m = Concat<axis = 0>(one, h, four) s = Expand(token, m) w = Concat<axis = 2>(s, s) }"
    )
    model = parsed(graph, 17)
    conversion = lower(model)
    fixed = lower(model, shapes={"x": [1, None, None]})
    small = lower(model, shapes={"x": [1, 5, 4], "z": [1, 3, 4]})
    layers = [count_layers(each.graph) for each in (conversion, fixed, small)]
    costs = [before - after for before, after in pairwise(layers)]
    assert min(costs) > 1
    ran_at = {"batch": 2, "h": 3}
    batch, other = cost_of_dynamic(conversion, ran_at=ran_at)
    assert batch == f"batch is dynamic, which costs {costs[0]} layers; fix it with --shape x:1,?,?"
    fix = "your sizes, as in --shape x:1,?,? --shape z:1,3,?"
    assert other == f"h is dynamic, which costs {costs[1]} layers; fix it with {fix}"
    assert cost_of_dynamic(fixed, ran_at=ran_at) == [other.replace("--shape x:1,?,? --shape z:1,", "--shape z:?,")]
    named = lower(model, shapes={"x": [1, None, None], "z": [1, "h", None]})
    only_z = other.replace("--shape x:1,?,? --shape z:1,3,?", "--shape z:1,3,4")
    assert cost_of_dynamic(named, ran_at=ran_at) == [only_z]
    assert cost_of_dynamic(small, ran_at=ran_at) == []


def test_the_cost_of_sizes_that_are_only_equal() -> None:
    """Each needs its own option: in the file they have several names."""
    graph = (
        "(float[a, 5, 4] x, float[b, 5, 4] z) => (float y) <float[1, 1, 4] token = {1.0, 2.0, 3.0, 4.0},"
        " int64[2] rest = {1, 4}> { n = Shape<end = 1>(x) size = Concat<axis = 0>(n, rest) t = Expand(token, size)"
        " s = Add(x, z) y = Concat<axis = 1>(t, s) }"
    )
    [cost] = convert(parsed(graph, 17)).cost
    assert cost.startswith("a is dynamic")
    assert cost.endswith("fix it with --shape x:1,?,? --shape z:1,5,4")


def test_the_casts_of_masks_are_no_cost_of_dynamic_dimensions() -> None:
    graph = (
        "(float[n, 5, 4] x) => (float y)"
        " <float[1, 1, 4] token = {1.0, 2.0, 3.0, 4.0}, int64[2] rest = {1, 4}, float large = {300}> {"
        " s = Shape<end = 1>(x) size = Concat<axis = 0>(s, rest) t = Expand(token, size) c = Concat<axis = 1>(t, x)"
        " a = Mul(c, large) b = Mul(a, a) d = Mul(b, b) m = ReduceMean<axes = [2]>(d) q = Sqrt(m) r = Sqrt(q)"
        " y = Div(c, r) }"
    )
    model = parsed(graph, 17)
    verified, plain = convert(model), convert(model, verification=None)
    assert count_layers(verified.graph) > count_layers(plain.graph)
    assert verified.cost == plain.cost
