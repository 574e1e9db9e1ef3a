import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.errors import CrashError, RunError, UsageError
from onnx2ncnn_opt.runtime import base
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker, as_ncnn
from testing.handmade import CRASH, ENDLESS, RELU, raw, tagged, write_net

X = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)


def failure(result: Array | Failure) -> Failure:
    assert isinstance(result, Failure)
    return result


def runner_of(folder: Path, worker: NcnnWorker, *lines: str, weights: bytes = b"", stem: str = "net") -> NcnnRunner:
    return NcnnRunner(*write_net(folder, *lines, weights=weights, stem=stem), worker=worker)


def test_names_of_inputs_and_outputs(tmp_path: Path, worker: NcnnWorker) -> None:
    lines = ("Input in 0 2 a b", "Split s 1 2 a a0 a1", "BinaryOp add 2 1 a0 b sum", "ReLU r 1 1 a1 y")
    runner = runner_of(tmp_path, worker, *lines)
    assert runner.input_names() == ["a", "b"]
    assert runner.output_names() == ["sum", "y"]


def test_a_run_gives_all_outputs_by_name(tmp_path: Path, worker: NcnnWorker) -> None:
    lines = ("Input in 0 1 x", "Split s 1 2 x a b", "ReLU r 1 1 a y", "UnaryOp n 1 1 b z 0=1")
    outputs = runner_of(tmp_path, worker, *lines).run({"x": X})
    assert set(outputs) == {"y", "z"}
    np.testing.assert_array_equal(outputs["y"], np.maximum(X, 0))
    np.testing.assert_array_equal(outputs["z"], -X)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 5, 7), (2, 3, 5, 7), (3_000_000,)])
def test_arrays_keep_rank_shape_and_order(tmp_path: Path, worker: NcnnWorker, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    # A view that is not C-contiguous, which the binding on its own would misread.
    x = np.asfortranarray(x)
    [y] = runner_of(tmp_path, worker, *RELU).run({"x": x}).values()
    np.testing.assert_array_equal(y, np.maximum(x, 0))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_batch_goes_in_and_comes_out_at_its_axis(tmp_path: Path, worker: NcnnWorker, axis: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4), dtype=np.float32)
    lines = ("Input in 0 1 x", "Reduction sum 1 1 x y 0=0 1=1 4=0")
    net = runner_of(tmp_path, worker, *lines)
    # Reduced are the axes that are not the batch, all of them: one number for each of the batch.
    [y] = net.run({"x": Feed(x, axis)}, [Fetch("y", 0)]).values()
    others = tuple(i for i in range(3) if i != axis)
    np.testing.assert_allclose(y, x.sum(axis=others)[:, None], rtol=1e-5)
    relu = runner_of(tmp_path, worker, *RELU, stem="relu")
    np.testing.assert_array_equal(relu.run({"x": Feed(x, axis)}, [Fetch("y", axis)])["y"], np.maximum(x, 0))


def test_an_unexpected_batch_is_a_failure(tmp_path: Path, worker: NcnnWorker) -> None:
    results = runner_of(tmp_path, worker, *RELU).extract({"x": Feed(X, 0)}, ["y"])
    assert "batch of 2" in failure(results["y"]).reason


def test_integers_go_in_as_int32_and_are_read_as_bits(tmp_path: Path, worker: NcnnWorker) -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    lines = ("Input in 0 1 i", "Embed e 1 1 i y 0=3 1=4 2=0 3=12")
    net = runner_of(tmp_path, worker, *lines, weights=tagged(table))
    np.testing.assert_array_equal(net.run({"i": np.array([3, 0], np.int64)})["y"], table[[3, 0]])
    same = runner_of(tmp_path, worker, "Input in 0 1 i", "Noop n 1 1 i j", stem="noop")
    bits = same.run({"i": np.array([-7, 2**31 - 1])}, [Fetch("j", integer=True)])["j"]
    assert bits.dtype == np.int32
    assert bits.tolist() == [-7, 2**31 - 1]


def test_element_types_that_ncnn_knows() -> None:
    for dtype in (np.int64, np.bool_, np.uint8, np.int8):
        assert as_ncnn(np.ones(2, dtype)).dtype == np.int32
    for number in (np.float64, np.float16, np.float32):
        assert as_ncnn(np.ones(2, number)).dtype == np.float32
    assert as_ncnn(np.array(5.0)).shape == (1,)
    with pytest.raises(UsageError, match="32 bits"):
        as_ncnn(np.array([2**31]))


@pytest.mark.parametrize("shape", [(1, 2, 1, 2, 1), (0, 3)])
def test_arrays_that_no_mat_can_hold_are_refused(tmp_path: Path, worker: NcnnWorker, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="one to four dimensions"):
        runner_of(tmp_path, worker, *RELU).run({"x": np.zeros(shape, np.float32)})


def test_exact_gives_equal_bits_where_winograd_does_not(tmp_path: Path, worker: NcnnWorker) -> None:
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((16, 12, 12), np.float32), rng.standard_normal((16, 16, 3, 3), np.float32)
    lines = ("Input in 0 1 x", "Convolution c 1 1 x y 0=16 1=3 5=1 6=2304")
    paths = write_net(tmp_path, *lines, weights=tagged(kernel) + raw(np.zeros(16)))
    exact = NcnnRunner(*paths, exact=True, worker=worker).run({"x": x})["y"]
    fast = NcnnRunner(*paths, worker=worker).run({"x": x})["y"]
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), axis=(1, 2))
    expected = np.einsum("chwij,ocij->ohw", windows, kernel.astype(np.float64))
    # Sums of 144 products: some ulp of the largest partial sum for the one, winograd's transforms for the other.
    assert np.abs(exact - expected).max() < 2e-5
    assert 2e-5 < np.abs(fast - expected).max() < 2e-3


def test_a_missing_output_has_its_own_failure(tmp_path: Path, worker: NcnnWorker) -> None:
    runner = runner_of(tmp_path, worker, *RELU)
    results = runner.extract({"x": X}, ["y", "nowhere"])
    np.testing.assert_array_equal(results["y"], np.maximum(X, 0))
    assert "nowhere" in failure(results["nowhere"]).reason  # in ncnn's own words
    with pytest.raises(RunError, match=r"could not compute(.|\n)*nowhere"):
        runner.run({"x": X}, ["y", "nowhere"])
    with pytest.raises(RunError, match="no blob 'q'"):
        runner.run({"q": X})


@pytest.mark.parametrize(
    ("lines", "weights", "said"),
    [
        (("Input in 0 1 x", "Foo f 1 1 x y"), b"", "layer Foo not exists"),
        (("Input in 0 1 x", "InnerProduct p 1 1 x y 0=2 1=0 2=6"), tagged([1, 2]), "load_model returned -1"),
    ],
)
def test_a_net_that_ncnn_refuses(
    tmp_path: Path, worker: NcnnWorker, lines: tuple[str, ...], weights: bytes, said: str
) -> None:
    paths = write_net(tmp_path, *lines, weights=weights)
    with pytest.raises(RunError, match=said) as refusal:
        NcnnRunner(*paths, worker=worker).output_names()
    assert not isinstance(refusal.value, CrashError)
    assert str(paths[0]) in str(refusal.value)
    with pytest.raises(RunError, match=r"missing\.param"):
        NcnnRunner(tmp_path / "missing.param", tmp_path / "missing.bin", worker=worker).run({"x": X})


def test_a_crash_is_reported_and_the_worker_continues(tmp_path: Path, worker: NcnnWorker) -> None:
    runner = runner_of(tmp_path, worker, *CRASH)
    results = runner.extract({"x": X}, ["y", "z", "x"])
    np.testing.assert_array_equal(results["y"], np.maximum(X, 0))
    assert failure(results["z"]).crashed
    assert "SIGSEGV" in failure(results["z"]).reason
    assert "not reached" in failure(results["x"]).reason
    with pytest.raises(RunError, match="SIGSEGV"):
        runner.run({"x": X})
    assert "y" in runner_of(tmp_path, worker, *RELU, stem="relu").run({"x": X})


def test_a_net_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    with NcnnRunner(*write_net(tmp_path, *ENDLESS), timeout=0.7) as runner:
        results = runner.extract({"x": X}, ["z"])
    assert "did not finish within 0.7 s" in failure(results["z"]).reason


def test_runners_take_turns_in_one_worker(tmp_path: Path, worker: NcnnWorker) -> None:
    relu = runner_of(tmp_path, worker, *RELU, stem="a")
    negative = runner_of(tmp_path, worker, "Input i 0 1 x", "UnaryOp n 1 1 x y 0=1", stem="b")
    for _ in range(2):
        np.testing.assert_array_equal(relu.run({"x": X})["y"], np.maximum(X, 0))
        np.testing.assert_array_equal(negative.run({"x": X})["y"], -X)


def test_a_net_with_other_files_is_loaded_again(tmp_path: Path, worker: NcnnWorker) -> None:
    lines = ("Input in 0 1 x", "Bias b 1 1 x y 0=3")
    three, two = (np.full(3, number, np.float32) for number in (3, 2))
    nets = [runner_of(tmp_path, worker, *lines, weights=three.tobytes(), stem=stem) for stem in ("a", "b")]
    nets.append(NcnnRunner(nets[0].param, nets[1].bin, worker=worker))
    for net in nets:
        np.testing.assert_array_equal(net.run({"x": X})["y"], X + 3)
    write_net(tmp_path, *lines, weights=two.tobytes(), stem="b")
    again = NcnnRunner(nets[1].param, nets[1].bin, worker=worker)
    np.testing.assert_array_equal(again.run({"x": X})["y"], X + 2)


def test_a_refused_net_ends_nothing_but_the_net_before_it(tmp_path: Path, worker: NcnnWorker) -> None:
    relu = runner_of(tmp_path, worker, *RELU)
    with worker.session(relu) as process:
        pass
    with pytest.raises(RunError):
        runner_of(tmp_path, worker, "Foo f 0 1 x", stem="foo").output_names()
    np.testing.assert_array_equal(relu.run({"x": X})["y"], np.maximum(X, 0))
    with worker.session(relu) as same:
        assert same is process


def test_an_interrupt_is_for_the_caller_alone(tmp_path: Path, worker: NcnnWorker) -> None:
    # The terminal sends it to both.
    relu = runner_of(tmp_path, worker, *RELU)
    with worker.session(relu) as child:
        child.process.send_signal(signal.SIGINT)
    assert "y" in relu.run({"x": X})


def test_paths_with_odd_characters(tmp_path: Path, worker: NcnnWorker) -> None:
    assert "y" in runner_of(tmp_path / 'mödel "1"\n', worker, *RELU).run({"x": X})


def test_a_closed_worker_leaves_no_process_and_starts_again(tmp_path: Path) -> None:
    worker = NcnnWorker()
    runner = runner_of(tmp_path, worker, *RELU)
    with worker.session(runner) as child:
        pass
    worker.close()
    assert child.process.poll() is not None
    assert "y" in runner.run({"x": X})
    worker.close()


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys; sys.modules['ncnn'] = sys.modules['onnxruntime'] = None\n"
        "import onnx2ncnn_opt.runtime.ncnn, onnx2ncnn_opt.runtime.ort, onnx2ncnn_opt.verification.model"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "use",
    [
        "from onnx2ncnn_opt.runtime.ncnn import NcnnRunner as Runner; net = Path('a'), Path('b')",
        "from onnx2ncnn_opt.runtime.ort import OrtRunner as Runner; net = Path('a'),",
    ],
)
def test_a_missing_package_says_how_to_get_it(use: str) -> None:
    # With nothing left to import from, no package is installed.
    code = f"import sys; from pathlib import Path; {use}; sys.path.clear(); Runner(*net).run({{}})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UsageError" in ended.stderr
    assert re.search(r"the package (\w+), which is not installed: `pip install -U \1`", ended.stderr)


def test_times_of_blobs_and_of_a_run(tmp_path: Path, worker: NcnnWorker) -> None:
    lines = ("Input in 0 1 x", "Softmax s 1 1 x a", "Split p 1 2 a b c", "ReLU r 1 1 b y", "ReLU q 1 1 c z")
    runner = runner_of(tmp_path, worker, *lines)
    times = runner.time_blobs({"x": X}, ["a", "y", "z"], runs=3)
    assert (len(times.blobs), times.runs) == (3, 3)
    assert min(times.blobs) >= 0
    assert times.whole > 0
    assert runner.time_blobs({"x": X}, ["a"], runs=50, seconds=0.0).runs == 1
    with pytest.raises(RunError, match="blob 'nonsense': extract returned -1"):
        runner.time_blobs({"x": X}, ["nonsense"])
    assert runner.time_blobs({"x": X}, []).blobs == ()


def test_a_net_without_a_result_has_no_time(tmp_path: Path, worker: NcnnWorker) -> None:
    """Only what follows a selection of boxes may have none."""
    runner = runner_of(tmp_path, worker, "Input in 0 1 x", "Crop c 1 1 x y 0=99 3=2")
    with pytest.raises(RunError, match="extract returned -100"):
        runner.time({"x": X}, ["y"], 0.0)


def test_an_outdated_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    major, *rest = version("ncnn").split(".")
    newer = ".".join([major, *rest[:-1], str(int(rest[-1]) + 1)])
    monkeypatch.setitem(base.OLDEST, "ncnn", newer)
    with pytest.raises(UsageError, match=f"which is {version('ncnn')}, but has to be {newer} or newer"):
        base.require("ncnn")
    monkeypatch.setitem(base.OLDEST, "ncnn", version("ncnn"))
    base.require("ncnn")
