from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.cli.summary import stored_note, verdict
from onnx2ncnn_opt.errors import ModelError, RunError, UnprovenError, UsageError, VerificationError
from onnx2ncnn_opt.inputs.draws import draw_inputs
from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.manifest import Entry, LayerCount, Manifest, Source
from onnx2ncnn_opt.onnx.read.load import load_model
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.precision.search import EFFORTS
from onnx2ncnn_opt.report.results import shapes_lines
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verification import model_runs
from onnx2ncnn_opt.verification.model import ModelRuns
from onnx2ncnn_opt.verification.model import verify_net as verified
from onnx2ncnn_opt.verification.model_runs import DrawnRuns
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.report import VerifyReport
from testing import present
from testing.handmade import ENDLESS, raw, tagged, write_net
from testing.models import parsed, serialized, write_model
from testing.worker import WORKER

verify_net = partial(verified, worker=WORKER)


def entry(name: str, *shape: int | str | None, dtype: str = "float32", axis: int | None = 0, blob: str = "") -> Entry:
    return Entry(name, blob or name, shape, dtype, axis)


def manifest_of(inputs: list[Entry], outputs: list[Entry]) -> Manifest:
    return Manifest(tuple(inputs), tuple(outputs), Source("", 18), "test", "1.0", LayerCount(1, 1), ())


def statuses(report: VerifyReport) -> dict[str, str]:
    return {output.name: output.status for output in report.outputs}


# y = relu(x), z = -x
BOTH = "(float[1, 3, 4, 5] x) => (float[1, 3, 4, 5] y, float[1, 3, 4, 5] z) { y = Relu(x) z = Neg(x) }"
BOTH_NET = ("Input in 0 1 x", "Split s 1 2 x a b", "ReLU r 1 1 a y", "UnaryOp n 1 1 b z 0=1")


def test_a_right_net_by_names(tmp_path: Path) -> None:
    report = verify_net(write_model(tmp_path, BOTH), *write_net(tmp_path, *BOTH_NET), verification=Verification(seed=3))
    assert report.ok
    assert report.seed == 3
    assert [output.name for output in report.outputs] == ["y", "z"]
    for output in report.outputs:
        assert (output.status, output.message, output.blob) == ("ok", "", output.name)
        assert (output.max_abs, output.max_rel) == (0, 0)
        assert output.cosine == pytest.approx(1)
    report.check()


def test_a_net_that_pnnx_made() -> None:
    folder = Path(__file__).parent / "pnnx"
    report = verify_net(folder / "tiny.onnx", folder / "tiny.ncnn.param", folder / "tiny.ncnn.bin")
    assert report.ok
    assert [(output.name, output.blob) for output in report.outputs] == [("features", "out0"), ("scores", "out1")]


RIGHT = {
    "pnnx's names are matched by number": (
        "(float[1, 6] p, float[1, 6] q) => (float[1, 6] y, float[1, 6] z) { y = Sub(p, q) z = Neg(p) }",
        (
            "Input b 0 1 in1",
            "Input a 0 1 in0",
            "Split s 1 2 in0 a0 a1",
            "UnaryOp n 1 1 a1 out1 0=1",
            "BinaryOp sub 2 1 a0 in1 out0 0=1",
        ),
        ["out0", "out1"],
    ),
    "other names are matched by order": (
        "(float[1, 3, 4] x) => (float[1, 3, 4] y, float[1, 3] m, float[1, 3, 4] z) <int64[1] axes = {2}>"
        "{ y = Relu(x) m = ReduceSum<keepdims = 0>(x, axes) z = Neg(x) }",
        (
            "Input in 0 1 data",
            "Split s 1 3 data a b c",
            "ReLU r 1 1 a first",
            "Reduction m 1 1 b second 0=0 1=0 -23303=1,1 4=0 5=1",
            "UnaryOp n 1 1 c third 0=1",
        ),
        ["first", "second", "third"],
    ),
    "other names are matched by shape": (
        "(float[1, 3, 4] x) => (float[1, 3, 4] y, float[1, 3] m) <int64[1] axes = {2}>"
        "{ y = Relu(x) m = ReduceSum<keepdims = 0>(x, axes) }",
        (
            "Input in 0 1 data",
            "Split s 1 2 data a b",
            "Reduction m 1 1 b first 0=0 1=0 -23303=1,1 4=0 5=1",
            "ReLU r 1 1 a second",
        ),
        ["second", "first"],
    ),
    # A blob that is consumed is none of the net's outputs, but can be had before the others.
    "the net goes on from an output": (
        "(float[1, 4] x) => (float[1, 4] z, float[1, 4] y) { y = Relu(x) z = Neg(y) }",
        ("Input in 0 1 x", "ReLU r 1 1 x y", "UnaryOp n 1 1 y z 0=1"),
        ["z", "y"],
    ),
    # The sum over the outermost axis of the Mat is that over ONNX's axis 0 only if the net was made for all axes.
    "an axis that is kept is found out": (
        "(float[1, 3, 4] x) => (float[3, 4] y) <int64[1] axes = {0}> { y = ReduceSum<keepdims = 0>(x, axes) }",
        ("Input in 0 1 x", "Reduction m 1 1 x y 0=0 1=0 -23303=1,0 4=0 5=1"),
        ["y"],
    ),
    "a batch that the Mat carries is found out": (
        "(float[3, 4] x) => (float[3, 1] y) { axes = Constant<value_ints = [1]>() y = ReduceSum(x, axes) }",
        ("Input in 0 1 x", "Reduction m 1 1 x y 0=0 1=1 4=0"),
        ["y"],
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_nets(tmp_path: Path, case: str) -> None:
    graph, lines, blobs = RIGHT[case]
    report = verify_net(write_model(tmp_path, graph), *write_net(tmp_path, *lines))
    assert report.ok
    assert [output.blob for output in report.outputs] == blobs


def test_each_wrong_output_has_its_own_record(tmp_path: Path) -> None:
    names = ("right", "off", "shaped", "nan", "gone")
    outputs = ", ".join(f"float[1, 8] {name}" for name in names)
    graph = f"(float[1, 8] x) => ({outputs}) {{ right = Relu(x) {' '.join(f'{name} = Neg(x)' for name in names[1:])} }}"
    lines = (
        "Input in 0 1 x",
        "Split s 1 4 x a b c d",
        "ReLU r 1 1 a right",
        "UnaryOp n 1 1 b off 0=0",
        "Padding p 1 1 c shaped 2=1 3=1",
        "UnaryOp l 1 1 d nan 0=8",
    )
    report = verify_net(write_model(tmp_path, graph), *write_net(tmp_path, *lines))
    assert statuses(report) == dict(zip(names, ("ok", "mismatch", "shape", "nan", "missing"), strict=True))
    _, off, shaped, nan, gone = report.outputs
    assert shaped.message == "at seed 0, usual: its shape is [1, 10], the model's [1, 8]"
    assert "NaN in" in nan.message
    assert "right, off, shaped, nan" in gone.message
    assert present(off.max_abs) > 0.1
    with pytest.raises(VerificationError, match="4 of 5 outputs") as error:
        report.check()
    assert [line.split(":")[0].strip() for line in str(error.value).splitlines()[1:]] == [*names[1:]]


SIX_AXES = "(float[1, 2, 2, 1, 2, 2] x) => (float[1, 2, 2, 1, 2, 2] y) { y = Relu(x) }"


@pytest.mark.parametrize(
    ("graph", "lines", "expected", "message"),
    [
        (SIX_AXES, ["ReLU r 1 1 x y"], ["refused"], "one to four dimensions"),
        (BOTH, ["ReLU r 1 1 x y", "UnaryOp n 1 1 x z 0=1"], ["ok", "crashed"], "SIGSEGV"),
        (BOTH, ["Nonsense n 1 1 x y"], ["refused", "refused"], "Nonsense"),
        (
            "(float[2, 40] x) => (float[2, 40] y) { y = Relu(x) }",
            ["Clip c 1 1 x y 0=0.0 1=7.0"],  # a branch that seldom acts
            ["mismatch"],
            "large",
        ),
    ],
)
def test_wrong_nets(tmp_path: Path, graph: str, lines: list[str], expected: list[str], message: str) -> None:
    net = write_net(tmp_path, "Input in 0 1 x", *lines)
    report = verify_net(write_model(tmp_path, graph), *net)
    assert [output.status for output in report.outputs] == expected
    assert message in report.outputs[-1].message


def test_a_net_that_hangs_is_reported(tmp_path: Path) -> None:
    model = write_model(tmp_path, "(float[1, 2, 3] x) => (float[1, 2, 3] z) { z = Relu(x) }")
    report = verify_net(model, *write_net(tmp_path, *ENDLESS), verification=Verification(timeout=0.5))
    assert statuses(report) == {"z": "crashed"}
    assert "0.5 s" in report.outputs[0].message


def test_a_net_with_an_input_of_its_own(tmp_path: Path) -> None:
    lines = ("Input in 0 2 x w", "BinaryOp add 2 1 x w y 0=0")
    with pytest.raises(VerificationError, match="the net's input w is none of the model's, which are x"):
        verify_net(write_model(tmp_path, BOTH), *write_net(tmp_path, *lines))


@pytest.mark.parametrize(("axis", "shape"), [(0, (3, 2, 4)), (1, (2, 3, 4))])
def test_batch_axes_of_a_manifest(tmp_path: Path, axis: int, shape: tuple[int, ...]) -> None:
    sizes = ", ".join(map(str, shape))
    model = write_model(tmp_path, f"(float[{sizes}] x) => (float[{sizes}] y) {{ y = Softmax(x) }}")
    net = write_net(tmp_path, "Input in 0 1 data", "Softmax s 1 1 data result 0=1 1=1")
    x, y = entry("x", *shape, axis=axis, blob="data"), entry("y", *shape, axis=axis, blob="result")
    assert verify_net(model, *net, manifest=manifest_of([x], [y])).ok
    unbatched = manifest_of([x], [replace(y, batch_axis=None)])
    report = verify_net(model, *net, manifest=unbatched)
    assert statuses(report) == {"y": "missing"}
    assert "batch" in report.outputs[0].message


def test_with_a_manifest_shapes_are_exact(tmp_path: Path) -> None:
    model = write_model(tmp_path, "(float[1, 3, 4, 4] x) => (float[1, 3, 1, 1] y) { y = GlobalAveragePool(x) }")
    flat = write_net(tmp_path, "Input in 0 1 x", "Pooling p 1 1 x y 0=1 4=1")
    exact = write_net(tmp_path, "Input in 0 1 x", "Pooling p 1 1 x y 0=1 7=1 8=1 18=1", stem="exact")
    manifest = manifest_of([entry("x", 1, 3, 4, 4)], [entry("y", 1, 3, 1, 1)])
    assert verify_net(model, *flat).ok
    report = verify_net(model, *flat, manifest=manifest)
    assert statuses(report) == {"y": "shape"}
    assert "[1, 3]" in report.outputs[0].message
    assert verify_net(model, *exact, manifest=manifest).ok


def test_a_batch_that_the_manifest_leaves_open_is_tried(tmp_path: Path) -> None:
    model = write_model(tmp_path, "(float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }")
    manifest = manifest_of([entry("x", "N", 4)], [entry("y", "N", 4)])
    assert verify_net(model, *write_net(tmp_path, "Input in 0 1 x", "ReLU r 1 1 x y"), manifest=manifest).ok
    # Right for a batch of one only.
    net = write_net(tmp_path, "Input in 0 1 x", "ReLU r 1 1 x a", "Reshape s 1 1 a y 0=4 12=0", stem="one")
    assert not verify_net(model, *net, manifest=manifest).ok
    assert verify_net(model, *net, manifest=manifest, verification=Verification(shapes={"x": (1, 4)})).ok


def test_dynamic_sizes_are_run_at_two_values(tmp_path: Path) -> None:
    model = write_model(tmp_path, "(float[1, N, 4] x) => (float[1, N, 4] y) { y = Relu(x) }")
    manifest = manifest_of([entry("x", 1, "N", 4)], [entry("y", 1, "N", 4)])
    report = verify_net(model, *write_net(tmp_path, "Input in 0 1 x", "ReLU r 1 1 x y"), manifest=manifest)
    assert report.ok
    assert report.sizes == ({"N": 64}, {"N": 45})
    assert shapes_lines(report.shapes) == ["verified with: x [1, 64, 4] and [1, 45, 4]"]
    # Right for the first of them only.
    lines = "ReLU r 1 1 x a", "Padding p 1 1 a b 1=64", "Crop c 1 1 b y 9=0, 10=64, 11=0,"
    net = write_net(tmp_path, "Input in 0 1 x", *lines, stem="one")
    report = verify_net(model, *net, manifest=manifest)
    assert statuses(report) == {"y": "shape"}
    assert report.outputs[0].message == "at N=45, seed 0, usual: its shape is [1, 64, 4], the model's [1, 45, 4]"
    assert verify_net(model, *net, manifest=manifest, verification=Verification(shapes={"x": (1, 64, 4)})).ok


def test_sizes_with_only_zero_outputs_are_left_out(tmp_path: Path) -> None:
    """Fewer samples of a sound than a window has give no feature."""
    model = write_model(
        tmp_path,
        "(float[1, N] x) => (float[1, N] y) <int64[1] least = {100}> "
        "{ s = Shape<start = 1>(x) c = GreaterOrEqual(s, least) f = Cast<to = 1>(c) y = Mul(x, f) }",
    )
    manifest = manifest_of([entry("x", 1, "N")], [entry("y", 1, "N")])
    report = verify_net(model, *write_net(tmp_path, "Input in 0 1 x", "Dropout r 1 1 x y"), manifest=manifest)
    assert report.ok
    assert report.sizes == ({"N": 128}, {"N": 224})


def test_sizes_that_onnx_runtime_does_not_take_are_left_out(tmp_path: Path) -> None:
    graph = "(float[1, N] x) => (float[1, M, 32] y) { s = Constant<value_ints = [1, -1, 32]>() y = Reshape(x, s) }"
    model = write_model(tmp_path, graph)
    manifest = manifest_of([entry("x", 1, "N")], [entry("y", 1, None, 32)])
    net = write_net(tmp_path, "Input in 0 1 x", "Reshape r 1 1 x y 0=32 1=-1")
    report = verify_net(model, *net, manifest=manifest)
    assert report.ok
    assert report.sizes == ({"N": 64}, {"N": 96})
    five = write_model(tmp_path, graph.replace("1, -1, 32", "1, 2, 32"))
    one = verify_net(five, *net, manifest=manifest)
    assert one.sizes == ({"N": 64},)
    refused = "(ONNX Runtime refused all other sizes that were tried)"
    assert shapes_lines(one.shapes) == [f"verified with: x [1, 64] {refused}"]
    assert shapes_lines([{"a": (2,), "b": ()}, {"a": (3,), "b": ()}]) == ["verified with: a [2], b []; a [3], b []"]
    assert shapes_lines([dict.fromkeys("abcdef", (1,))] * 2)[0].endswith("d [1]; and 2 more inputs")
    with pytest.raises(RunError, match="ONNX Runtime failed"):
        verify_net(write_model(tmp_path, graph.replace("1, -1, 32", "1, 1, 32")), *net, manifest=manifest)


@pytest.mark.parametrize("total", ["T", "P + N"])
def test_a_dynamic_size_may_be_the_sum_of_others(tmp_path: Path, total: str) -> None:
    graph = (
        "(float[2, N, 4] x, float[2, P, 4] past, float[2, T, 4] mask) => (float[2, T, 4] y)"
        "{ all = Concat<axis = 1>(past, x) y = Add(all, mask) }"
    )
    model = write_model(tmp_path, graph)
    loaded = onnx.load(model)
    loaded.graph.input[2].type.tensor_type.shape.dim[1].dim_param = total
    onnx.save(loaded, model)
    inputs = [entry(name, 2, n, 4, axis=None) for name, n in (("x", "N"), ("past", "P"), ("mask", total))]
    manifest = manifest_of(inputs, [entry("y", 2, None, 4, axis=None)])
    lines = "Input in 0 3 x past mask", "Concat c 2 1 past x all 0=1", "BinaryOp a 2 1 all mask y 0=0"
    report = verify_net(model, *write_net(tmp_path, *lines), manifest=manifest)
    assert report.ok
    assert [sizes[total] for sizes in report.sizes] == [sizes["P"] + sizes["N"] for sizes in report.sizes]
    assert len(report.sizes) == 2


def test_a_scalar_is_a_mat_of_one(tmp_path: Path) -> None:
    model = write_model(tmp_path, "(float[5] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }")
    net = write_net(tmp_path, "Input in 0 1 x", "Reduction m 1 1 x y 0=0 1=1 4=0")
    manifest = manifest_of([entry("x", 5, axis=None)], [entry("y", axis=None)])
    assert verify_net(model, *net, manifest=manifest).ok


def test_the_manifest_of_another_model(tmp_path: Path) -> None:
    manifest = manifest_of([entry("other", 1, blob="x")], [])
    with pytest.raises(UsageError, match="the manifest belongs to another model: no input is called 'other'"):
        verify_net(write_model(tmp_path, BOTH), *write_net(tmp_path, *BOTH_NET), manifest=manifest)


def test_an_input_that_the_net_does_not_need(tmp_path: Path) -> None:
    model = write_model(tmp_path, "(float[1, 4] x, float[1, 4] unused) => (float[1, 4] y) { y = Relu(x) }")
    net = write_net(tmp_path, "Input in 0 1 x", "ReLU r 1 1 x y")
    assert verify_net(model, *net).ok
    manifest = manifest_of([entry("x", 1, 4), entry("unused", 1, 4)], [entry("y", 1, 4)])
    assert verify_net(model, *net, manifest=manifest).ok


EMBEDDING = (
    "(int64[1, N] ids) => (float[1, N, 3] y) <float[4, 3] table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}>"
    "{ y = Gather(table, ids) }"
)


EMBED = ("Input in 0 1 ids", "Embed e 1 1 ids y 0=3 1=4 2=0 3=12")


def test_integers_that_are_indexes(tmp_path: Path) -> None:
    model, net = write_model(tmp_path, EMBEDDING), write_net(tmp_path, *EMBED, weights=tagged(np.arange(12)))
    assert verify_net(model, *net).ok
    # Sizes as given, as the manifest has them, and as the inputs have them.
    assert verify_net(model, *net, verification=Verification(shapes={"ids": (1, 5)})).ok
    manifest = manifest_of([entry("ids", 1, 6, dtype="int64")], [entry("y", 1, 6, 3)])
    assert verify_net(model, *net, manifest=manifest).ok
    given = verify_net(model, *net, verification=Verification(feeds={"ids": np.array([[3, 3, 0]])}))
    assert (given.ok, given.seed) == (True, None)
    np.savez(tmp_path / "in.npz", np.array([[1, 2]], np.int32))
    assert verify_net(model, *net, verification=Verification(feeds=tmp_path / "in.npz")).ok
    shifted = write_net(tmp_path, *EMBED, weights=tagged(np.arange(12) + 1))
    assert statuses(verify_net(model, *shifted)) == {"y": "mismatch"}


def test_the_tolerance_is_the_callers(tmp_path: Path) -> None:
    model = write_model(tmp_path, "(float[1, 4] x) => (float[1, 4] y) { y = Identity(x) }")
    net = write_net(tmp_path, "Input in 0 1 x", "BinaryOp m 1 1 x y 0=2 1=1 2=1.0005")
    assert verify_net(model, *net, verification=Verification(rtol=1e-3)).ok
    assert not verify_net(model, *net, verification=Verification(rtol=1e-4)).ok
    # Winograd would be off by as much, but nothing is with ncnn's plain kernels.
    assert not verify_net(model, *net).ok


def test_plain_kernels_of_a_dilated_convolution(tmp_path: Path) -> None:
    """Without packing, ncnn crashes on x86 if the output is smaller than the dilation, as in DeepLab at small sizes."""
    weights = np.arange(36, dtype=np.float32).reshape(2, 2, 3, 3)
    text = "(float[1, 2, H, W] x) => (float[1, 2, H, W] y) { y = Conv<dilations = [6, 6], pads = [6, 6, 6, 6]>(x, w) }"
    model = tmp_path / "model.onnx"
    onnx.save(parsed(text, 18, w=weights), model)
    files = lower(model).save(tmp_path / "net")
    verification = Verification(exact=True, shapes={"x": (1, 2, 8, 4)})
    assert verify_net(model, files.param, files.bin, verification=verification).ok


def test_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((6, 4), np.float32), "b": rng.standard_normal(6, np.float32)}
    data = parsed("(float[1, 4] x) => (float[1, 6] y) { y = Gemm<transB = 1>(x, w, b) }", 18, **weights)
    path = tmp_path / "model.onnx"
    onnx.save(data, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    stored = tagged(weights["w"]) + raw(weights["b"])
    net = write_net(tmp_path, "Input in 0 1 x", "InnerProduct p 1 1 x y 0=6 1=1 2=24", weights=stored)
    report = verify_net(path, *net)
    assert report.ok
    # Four products and a bias in another order: a few ulp.
    assert present(report.outputs[0].max_rel) < 1e-6
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"weights\.bin"):
        verify_net(path, *net)


def test_inputs_that_onnxruntime_does_not_take(tmp_path: Path) -> None:
    graph = "(float[N, 4] x) => (float[N, 3] y) { shape = Constant<value_ints = [1, 3]>() y = Expand(x, shape) }"
    with pytest.raises(RunError, match="ONNX Runtime"):
        verify_net(write_model(tmp_path, graph), *write_net(tmp_path, *BOTH_NET))


def test_errors_only_at_zero(tmp_path: Path) -> None:
    graph = (
        "(float[1, 3, 5] x) => (float[1, 3, 5] y) <float z = {0}> { c = Greater(x, z) l = Log(x) y = Where(c, l, z) }"
    )
    model = write_model(tmp_path, graph)
    right = (
        *("Input in 0 1 x", "Split s 1 2 x a b", "Threshold t 1 1 a m 0=0.0", "BinaryOp o 1 1 b p 0=4 1=1 2=1e-30"),
        *("Log l 1 1 p q", "BinaryOp y 2 1 m q y 0=2"),
    )
    assert verify_net(model, *write_net(tmp_path, *right)).ok
    # As above, but 0 * log(0) at zero.
    wrong = [line.replace("2=1e-30", "2=0.0") for line in right]
    assert statuses(verify_net(model, *write_net(tmp_path, *wrong))) == {"y": "nan"}


def test_every_row_of_a_table_is_read(tmp_path: Path) -> None:
    table = np.arange(200 * 3, dtype=np.float32)
    data = serialized("(int64[1, 9] i) => (float[1, 9, 3] y) { y = Gather(w, i) }", w=table.reshape(200, 3))
    net = "Input in 0 1 i", "Embed e 1 1 i y 0=3 1=200 2=0 3=600"
    assert verify_net(data, *write_net(tmp_path, *net, weights=tagged(table))).ok
    for row in (0, 57, 199):
        wrong = table.copy()
        wrong[3 * row] += 50
        assert statuses(verify_net(data, *write_net(tmp_path, *net, weights=tagged(wrong)))) == {"y": "mismatch"}


def test_a_model_that_gives_no_number_proves_nothing(tmp_path: Path) -> None:
    graph = "(float[1, 4] x) => (float[1, 4] y) <float n = {-2}> { a = Abs(x) b = Mul(a, n) y = Sqrt(b) }"
    lines = "Input in 0 1 x", "UnaryOp a 1 1 x a 0=0", "BinaryOp m 1 1 a b 0=2 1=1 2=-2", "UnaryOp s 1 1 b y 0=5"
    ones = Verification(feeds={"x": np.ones((1, 4), np.float32)})
    report = verify_net(write_model(tmp_path, graph), *write_net(tmp_path, *lines), verification=ones)
    assert statuses(report) == {"y": "unproven"}
    assert (report.outputs[0].cosine, report.outputs[0].max_abs) == (None, None)
    assert report.notes == (
        "the model gives NaN for 'y': 4 NaN of 4; NaN is not compared; --inputs gives other inputs",
    )
    message = (
        "outputs are unproven:.*\n.*NaN in 4 of 4 elements; give inputs that suit the model with --inputs or --value"
    )
    with pytest.raises(UnprovenError, match=message) as caught:
        report.check()
    assert caught.value.exit_code == 2


def test_an_output_that_is_one_number_proves_little() -> None:
    conversion = lower(parsed("(float[1, 4] x) => (float[1, 4] y) <float zero = {0}> { y = Mul(x, zero) }"))
    [note] = conversion.verify(worker=WORKER).notes
    assert note == "'y' is 0 for all inputs tried, which proves little (weights of 0?)"


def test_a_model_that_gives_numbers_for_large_inputs_only() -> None:
    """A pitch tracker has its least and largest frequency as inputs, whose logarithms it takes."""
    graph = "(float[1, 8] x, float low, float high) => (float[1, 8] y) <float c = {400}> { "
    graph += "g = Mul(low, low) a = Sub(g, c) b = Log(a) d = Sub(high, low) e = Sqrt(d) f = Mul(x, b) y = Mul(f, e) }"
    report = lower(parsed(graph)).verify(worker=WORKER)
    assert report.ok
    assert any(draw.between is not None for draw in report.draws)


def test_inputs_that_leave_no_number_are_left_out() -> None:
    """A graph without edges has no softmax over its edges, and ncnn's ReLU turns NaN into 0."""
    graph = "(float[1, 4] x, float[1, 1] edge) => (float[1, 4] y) <float zero = {0}, float none = {-inf}> { "
    graph += "m = Equal(edge, zero) s = Where(m, none, edge) a = Softmax(s) p = Mul(x, a) y = Relu(p) }"
    report = lower(parsed(graph)).verify(worker=WORKER)
    assert report.ok
    assert report.notes == ()


GUMBEL = (
    "(float[1, 4] x, float[1, 4] u) => (int64[1] i) {"
    " a = Log(u) b = Neg(a) [outer] g = Log(b) s = Sub(x, g) i = ArgMax<axis = 1, keepdims = 0>(s) }"
)


def test_nan_inside_that_no_output_shows(caplog: pytest.LogCaptureFixture) -> None:
    """ArgMax hides NaN, and each runtime in its own way; noise between 0 and 1 gives none."""
    conversion = lower(parsed(GUMBEL))
    with pytest.raises(UnprovenError, match="Log 'outer' gives NaN at seed 0, usual, and a later node"):
        conversion.verify(worker=WORKER)
    assert not caplog.records
    x = np.array([[1, 5, 2, 4]], np.float32)
    inside = Verification(feeds={"x": x, "u": np.full((1, 4), 0.5, np.float32)})
    assert conversion.verify(inside, worker=WORKER).ok
    [difference] = [layer for layer in conversion.graph if layer.name == "s"]
    difference.params["op_type"] = BinaryOp.RSUB
    assert statuses(conversion.verify(inside, worker=WORKER)) == {"i": "mismatch"}


def test_elements_that_are_nan_in_the_model_are_left_out() -> None:
    """A Softmax of a row that is hidden: the model gives NaN, and nets may give 0."""
    graph = "(float[2, 4] x) => (float[2, 4] y) <float low = {-inf}, float none = {-1}>"
    conversion = lower(parsed(f"{graph} {{ m = Less(x, none) s = Where(m, low, x) y = Softmax(s) }}"))
    x = np.zeros((2, 4), np.float32)
    for hidden, status in (((), "ok"), ((1,), "ok"), ((0, 1), "unproven")):
        x[list(hidden)] = -5
        assert statuses(conversion.verify(Verification(feeds={"x": x}), worker=WORKER)) == {"y": status}
    report = lower(parsed("(float[1, 4] x) => (float[1, 4] y) { y = Sqrt(x) }"))
    x = np.array([[1, 4, 9, -1]], np.float32)
    assert report.verify(Verification(feeds={"x": x}), worker=WORKER).ok
    [root] = [layer for layer in report.graph if layer.type != "Input"]
    root.params["op_type"] = UnaryOp.ACOS
    assert statuses(report.verify(Verification(feeds={"x": x}), worker=WORKER)) == {"y": "nan"}


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    w = np.array([1, -np.inf], np.float32)
    data = serialized("(float[1, 2] x) => (float[1, 2] y) { y = Add(x, w) }", w=w)
    lines = "Input in 0 1 x", "MemoryData w 0 1 w 0=2", "BinaryOp a 2 1 x w y 0=0"
    net = write_net(tmp_path, *lines, weights=raw(np.array([1, -3.4028235e38], np.float32)))
    report = verify_net(data, *net)
    assert report.ok
    assert report.notes == ("the model's weight 'w' is not finite: 1 -inf of 2",)


def test_a_number_between_two_steps(tmp_path: Path) -> None:
    """A decoder's bytes: where a number is nearly whole, the last bit decides."""
    graph = (
        "(float[1, 3, 40, 40] x) => (uint8[1, 3, 40, 40] y) <float s = {3}, float t = {85}>"
        "{ a = Sigmoid(x) b = Mul(a, s) c = Mul(b, t) y = Cast<to = 2>(c) }"
    )
    lines = "Input in 0 1 x", "Sigmoid s 1 1 x a", "BinaryOp m 1 1 a b 0=2 1=1 2=255.0", "UnaryOp t 1 1 b y 0=19"
    model, net = write_model(tmp_path, graph), write_net(tmp_path, *lines)
    for seed in range(5):
        verify_net(model, *net, verification=Verification(seed=10 * seed)).check()
    rounded = write_net(tmp_path, *lines[:-1], "UnaryOp t 1 1 b y 0=18", stem="rounded")
    assert statuses(verify_net(model, *rounded)) == {"y": "mismatch"}


def test_costly_sizes_are_tried_last() -> None:
    """Attention over an image of 64 x 96 has 6,144 tokens: some models ran for a minute."""
    graph = "(float[1, 128, h, w] x) => (float[1, 128, n] y) <int64[3] flat = {1, 128, -1}> {"
    graph += " a = Reshape(x, flat) b = Transpose<perm = [0, 2, 1]>(a) c = MatMul(b, a) y = MatMul(a, c) }"
    conversion = lower(parsed(graph))
    assert conversion.manifest().macs == "256*h*h*w*w"
    assert [dict(sizes) for sizes in conversion.verify(worker=WORKER).sizes] == [{"h": 45, "w": 77}, {"h": 24, "w": 32}]
    # If a model refuses all of these, as one of nn.MultiheadAttention from TorchScript does, attention over an image of
    # 1024 x 1024 would need all the memory that there is.
    drawn = DrawnRuns(load_model(parsed(graph)), OrtRunner(serialized(graph)), conversion.manifest())
    tried = drawn._choices(None)
    assert max(sizes["h"] * sizes["w"] for sizes in tried) <= 224 * 256
    assert {"h": 3, "w": 2} in tried


def test_lengths_that_a_model_needs(tmp_path: Path) -> None:
    kernel = np.random.default_rng(0).standard_normal((1, 1, 1024), np.float32)
    data = serialized("(float[1, 1, N] x) => (float[1, 1, M] y) { y = Conv(x, w) }", w=kernel)
    manifest = manifest_of([entry("x", 1, 1, "N")], [entry("y", 1, 1, None)])
    lines = "Input in 0 1 x", "Convolution1D c 1 1 x y 0=1 1=1024 6=1024"
    report = verify_net(data, *write_net(tmp_path, *lines, weights=tagged(kernel)), manifest=manifest)
    report.check()
    assert [sizes["N"] for sizes in report.sizes] == [2048, 4096]


def test_sizes_that_cannot_be_found(tmp_path: Path) -> None:
    graph = "(float[1, N] x) => (float[7, 1] y) { s = Constant<value_ints = [7, 1]>() y = Reshape(x, s) }"
    manifest = manifest_of([entry("x", 1, "N")], [entry("y", 7, 1)])
    with pytest.raises(RunError, match="--inputs gives others, and --shape says how long N may be"):
        verify_net(write_model(tmp_path, graph), *write_net(tmp_path, *BOTH_NET), manifest=manifest)


def test_a_refusal_counts_before_sizes_that_are_too_large(tmp_path: Path) -> None:
    graph = "(float[1, A, B, C] x) => (float[7, 1] y) { s = Constant<value_ints = [7, 1]>() y = Reshape(x, s) }"
    manifest = manifest_of([entry("x", 1, "A", "B", "C")], [entry("y", 7, 1)])
    with pytest.raises(RunError, match=r"cannot be reshaped to the requested shape.*--shape says how long A, B, C may"):
        verify_net(write_model(tmp_path, graph), *write_net(tmp_path, *BOTH_NET), manifest=manifest)


def test_after_a_refusal_inputs_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A square of 16,000 numbers takes seconds to draw, and 2 GB of memory."""
    drawn = list[int]()

    def counted(*args: Any, **options: Any) -> dict[str, Any]:
        feeds = draw_inputs(*args, **options)
        drawn.append(max(array.size for array in feeds.values()))
        return feeds

    monkeypatch.setattr(model_runs, "draw_inputs", counted)
    graph = "(float[1, A, B] x) => (float[7, 1] y) { s = Constant<value_ints = [7, 1]>() y = Reshape(x, s) }"
    manifest = manifest_of([entry("x", 1, "A", "B")], [entry("y", 7, 1)])
    with pytest.raises(RunError, match="--shape says how long A, B may be"):
        verify_net(write_model(tmp_path, graph), *write_net(tmp_path, *BOTH_NET), manifest=manifest)
    assert 2**20 < max(drawn) <= 2**22


def test_a_model_that_takes_too_long(tmp_path: Path) -> None:
    graph = (
        "(float[1, 3] x) => (float[1, 3] y) <int64 n = {1000000000}, bool go = {1}> { y = Loop(n, go, x)"
        "<body = b (int64 i, bool c, float[1, 3] s) => (bool d, float[1, 3] t) { d = Identity(c) t = Cos(s) }> }"
    )
    how = Verification(feeds={"x": np.ones((1, 3), np.float32)}, timeout=1)
    with pytest.raises(RunError, match=r"ONNX Runtime did not finish within 1 s on .*--shape, --inputs"):
        verify_net(write_model(tmp_path, graph), *write_net(tmp_path, *BOTH_NET), verification=how)
    # Another process takes its place.
    assert verify_net(write_model(tmp_path, BOTH), *write_net(tmp_path, *BOTH_NET)).ok


def test_meaning_of_fp16_on_x86() -> None:
    row = OutputReport("y", "y", "ok", max_rel=1e-6)
    for checked, estimated, has_note in (
        ("x86-64 fp32", ", fp16 estimated", False),
        ("aarch64 fp32, fp16 (qemu)", "", False),
        ("x86-64 fp32, fp16 storage", ", fp16 estimated", True),
    ):
        report = VerifyReport((row,), 0, checked=checked)
        said = f"ok: net agrees with model (relative error 1.0e-06; {checked}{estimated})"
        assert verdict(report, "net", "model", is_estimated=True) == said
        assert bool(stored_note(report)) == has_note


SINE = "(float[64, 64] x) => (float[64, 64] y) { y = Sin(x) }"
SINE_NET = ("Input in 0 1 x", "UnaryOp s 1 1 x y 0=9")


def test_unusual_inputs_run_in_fp32_alone(tmp_path: Path) -> None:
    """The larger a number, the larger the error that rounding makes of its sine."""
    clipped = "Input in 0 1 x", "Clip c 1 1 x y 0=-20 1=20", "UnaryOp s 1 1 y z 0=9"
    model = write_model(tmp_path, SINE)
    for modes, lines, found in (
        (("fp32", "bf16"), SINE_NET, ["ok", "ok"]),
        (("fp32", "bf16"), clipped, ["mismatch", "ok"]),
    ):
        report = verify_net(model, *write_net(tmp_path, *lines), verification=Verification(modes=modes))
        assert [output.status for output in report.outputs] == found


def test_16_bits_are_verified_on_inputs_like_data(tmp_path: Path) -> None:
    """The biases suit pixels of 0..255."""
    text = "(float[1, 3, 32, 32] x) => (float[1, 4, 32, 32] y) { c = Conv(x, w, b) y = Sin(c) }"
    weight, bias = np.full((4, 3, 1, 1), 0.1, np.float32), np.full(4, 8, np.float32)
    lines = "Input in 0 1 x", "Convolution c 1 1 x c 0=4 1=1 5=1 6=12", "UnaryOp s 1 1 c y 0=9"
    net = write_net(tmp_path, *lines, weights=tagged(weight) + raw(bias))
    report = verify_net(
        write_model(tmp_path, text, w=weight, b=bias), *net, verification=Verification(modes=["fp32", "bf16"])
    )
    assert [output.status for output in report.outputs] == ["ok", "mismatch"]
    assert "at seed 0, data: off by" in report.outputs[1].message
    assert present(report.draws[-1].data).pixels == (0, 255)


def test_effort_decides_how_many_inputs_run(tmp_path: Path) -> None:
    model, net = write_model(tmp_path, BOTH), write_net(tmp_path, *BOTH_NET)
    quick, normal = (verify_net(model, *net, verification=Verification(effort=e)) for e in ("quick", "normal"))
    assert len(quick.draws) == 2 < len(normal.draws)
    assert quick.ok
    note = "the net ran on 2 sets of inputs; less useful inputs were left out; --effort thorough runs them"
    assert quick.notes == (note,)
    assert normal.notes == ()
    runs = ModelRuns(model, Verification(), None)
    runs.start -= EFFORTS["normal"][0]  # the time that the estimate of fp16 took counts, too
    assert verify_net(model, *net, verification=Verification(), runs=runs).draws == quick.draws
    with pytest.raises(UsageError, match="the effort has to be one of quick, normal, thorough, not 'most'"):
        Verification(effort="most")  # type: ignore[arg-type]
