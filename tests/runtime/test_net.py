import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import pytest

from onnx2ncnn_opt import Net, verify
from onnx2ncnn_opt.api.inspect import inspect
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import CrashError, RunError, UsageError
from testing.command import run
from testing.handmade import CRASH, write_net
from testing.models import parsed, serialized

# Every type: integers and bools that are fed and come out as they are, and that are computed; scalars; a dynamic size.
MIXED = """(int64[N, 5] i, float[N, 5] x, bool[N, 5] m, float s)
    => (float[N, 5] y, int64[N, 5] j, int64[N] k, bool[N, 5] b, float t, int64[N, 5] same, bool[N, 5] flags)
    <int64 one = {1}>
    { f = Cast<to = 1>(i) fx = Mul(f, x) y = Where(m, fx, x) j = Add(i, one) k = ArgMax<axis = 1, keepdims = 0>(x)
      b = Not(m) r = ReduceSum<keepdims = 0>(x) t = Add(r, s) same = Identity(i) flags = Identity(m) }"""
RNG = np.random.default_rng(0)
FEEDS: dict[str, Any] = {
    "i": np.arange(-4, 6).reshape(2, 5),
    "x": RNG.standard_normal((2, 5), np.float32),
    "m": RNG.random((2, 5)) > 0.5,
    "s": np.asarray(2.5, np.float32),
}


def save(folder: Path, graph: str, stem: str = "net", **options: Any) -> bytes:
    model = serialized(graph)
    lower(model, **options).save(folder / stem)
    return model


def expected(model: bytes | str, feeds: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(model)
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("mixed")
    return folder / "net", save(folder, MIXED)


@pytest.fixture(scope="module")
def net(mixed: tuple[Path, bytes]) -> Iterator[Net]:
    with Net(mixed[0]) as net:
        yield net


@pytest.mark.parametrize("isolated", [True, False])
def test_results_agree_with_onnx_runtime_in_type_and_shape(mixed: tuple[Path, bytes], isolated: bool) -> None:
    prefix, model = mixed
    with Net(prefix, isolated=isolated, threads=1) as net:
        results = net.run(FEEDS)
    reference = expected(model, FEEDS)
    assert list(results) == list(reference)
    for name, array in reference.items():
        array = np.asarray(array)
        assert (results[name].dtype, results[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_allclose(results[name], array, rtol=1e-6, atol=1e-6, err_msg=name)


def test_lists_and_numbers_as_inputs_and_chosen_outputs(net: Net) -> None:
    feeds = {"i": [[1, 2, 3, 4, 5]], "x": [[0.5] * 5], "m": [[True] * 5], "s": 1}
    results = net.run(feeds, outputs=["same", "t"])
    assert list(results) == ["same", "t"]
    assert results["same"].tolist() == [[1, 2, 3, 4, 5]]
    assert results["t"].tolist() == 3.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 4))}, r"the model takes x: float32\[N, 5\] \(N is 2\), not an array of shape \[2, 4\]"),
        ({"x": np.zeros((3, 5))}, r"x: float32\[N, 5\] \(N is 2\), not an array of shape \[3, 5\]"),
        ({"i": np.zeros((2, 5))}, r"the model takes i: int64\[N, 5\], not an array of float64"),
        ({"x": np.zeros((2, 5))}, r"x: float32\[N, 5\], not an array of float64 \(cast=True converts it\)$"),
        ({"x": np.zeros((2, 5), np.uint8)}, r"not an array of uint8 \(cast=True converts it\); pixels of 0..255 need"),
        ({"i": np.full((2, 5), 2**40)}, "integers have 32 bits"),
        ({"z": 1.0}, "the model has the inputs i, x, m, s; given are i, x, m, s, z"),
        ({"x": [[1.0], [1.0, 2.0]]}, "what is given is not an array"),
    ],
)
def test_arrays_that_do_not_fit(net: Net, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        net.run({**FEEDS, **change})


def test_arrays_of_other_types_are_cast_on_demand(net: Net) -> None:
    feeds = {**FEEDS, "x": np.full((2, 5), 200, np.uint8)}
    wanted = net.run({**FEEDS, "x": np.full((2, 5), 200, np.float32)})["y"]
    np.testing.assert_array_equal(net.run(feeds, cast=True)["y"], wanted)


def test_names_that_the_model_does_not_have(net: Net) -> None:
    with pytest.raises(UsageError, match="the model has no output 'q'; its outputs are y, j, k, b, t, same, flags"):
        net.run(FEEDS, outputs=["q"])
    with pytest.raises(UsageError, match="outputs has to be a list"):
        net.run(FEEDS, outputs="y")
    with pytest.raises(UsageError, match="given are none"):
        net.run({})


def test_a_batch_and_a_mode(tmp_path: Path) -> None:
    conv = "(float[N, 3, 9, 7] x) => (float[N, 4, 9, 7] y) { y = Conv<pads = [1, 1, 1, 1]>(x, w) }"
    model = parsed(conv, w=RNG.standard_normal((4, 3, 3, 3), np.float32))
    saved = lower(model).save(tmp_path / "net")
    x = RNG.standard_normal((3, 3, 9, 7), np.float32)
    right = expected(model.SerializeToString(), {"x": x})["y"]
    for mode, relative in (("fp32", 1e-3), ("bf16", 3e-2)):
        with Net(saved.param, mode=mode) as net:
            got = net.run({"x": x})["y"]
        assert got.shape == right.shape
        assert np.abs(got - right).max() <= relative * np.abs(right).max()
        assert (mode == "fp32") == (np.abs(got - right).max() <= 1e-4 * np.abs(right).max())


def test_a_net_without_a_manifest_has_the_names_of_blobs(tmp_path: Path) -> None:
    write_net(tmp_path, "Input in 0 1 in0", "ReLU r 1 1 in0 out0")
    x = np.array([[-1, 2], [3, -4]], np.float32)
    for isolated in (True, False):
        with Net(tmp_path / "net", isolated=isolated) as net:
            assert net.run({"in0": x})["out0"].tolist() == [[0, 2], [3, 0]]
            with pytest.raises(UsageError, match="the net has the inputs in0; given are x"):
                net.run({"x": x})
            with pytest.raises(RunError, match="could not compute outputs"):
                net.run({"in0": x}, ["out1"])


def test_sizes_that_are_said_in_others_have_to_be_that(tmp_path: Path) -> None:
    save(
        tmp_path,
        "(float[1, P] past, float[1, S] new, float[1, T] mask) => (float[1, T] y) "
        "{ all = Concat<axis = 1>(past, new) y = Mul(all, mask) }",
        shapes={"past": (1, "P"), "new": (1, "S"), "mask": (1, "P+S")},
    )
    with Net(tmp_path / "net") as net:
        assert net.run({"past": [[1, 2]], "new": [[3]], "mask": [[1, 0, 1]]})["y"].tolist() == [[1, 0, 3]]
        with pytest.raises(UsageError, match=r"has to be 3 beside the other sizes, but an array has 4"):
            net.run({"past": [[1, 2]], "new": [[3]], "mask": [[1, 0, 1, 1]]})


def test_inputs_that_were_bound(tmp_path: Path) -> None:
    save(tmp_path, "(float[1, 4] x, float k) => (float[1, 4] y) { y = Mul(x, k) }", values={"k": 3})
    with Net(tmp_path / "net") as net:
        assert net.run({"x": [[1, 2, 3, 4]]})["y"].tolist() == [[3, 6, 9, 12]]
        assert net.run({"x": [[1, 2, 3, 4]], "k": 3})["y"].tolist() == [[3, 6, 9, 12]]
        with pytest.raises(UsageError, match="input k is bound to 3"):
            net.run({"x": [[1, 2, 3, 4]], "k": 4})


def test_missing_nets_and_nets_of_another_manifest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no net at"):
        Net(tmp_path / "none")
    save(tmp_path, "(float[1, 4] x) => (float[1, 4] y) { y = Relu(x) }")
    with pytest.raises(UsageError, match="isolated=False runs the net in this process, which is not on 'vulkan'"):
        Net(tmp_path / "net", on="vulkan", isolated=False)
    manifest = tmp_path / "net.ncnn.json"
    data = json.loads(manifest.read_text())
    data["outputs"][0]["blob"] = "other"
    manifest.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="that of another net: there is no blob 'other'"):
        Net(tmp_path / "net")
    (tmp_path / "net.ncnn.bin").unlink()
    with pytest.raises(UsageError, match="there is no file"):
        Net(tmp_path / "net")
    with pytest.raises(UsageError, match="there is no mode 'int8'"):
        Net(tmp_path / "net", mode="int8")


PICKS = "(float[1,3,8,8] x) => (int64[4,m] y) {{ f = Conv<pads = [{0},{0},{0},{0}]>(x, w) y = NonZero(f) }}"


def test_a_mixture_of_two_nets_is_named(tmp_path: Path) -> None:
    """As SIGKILL between two renames leaves it, or a copy of some of the files."""
    model = tmp_path / "net.onnx"
    for name, pads in (("other", 1), ("net", 0)):
        weights: Any = np.random.default_rng(pads).standard_normal((2, 3, 1 + 2 * pads, 3)).astype(np.float32)
        model.write_bytes(serialized(PICKS.format(pads), w=weights))
        lower(model).save(tmp_path / name)
    for ending in ("param", "bin", "tail.onnx"):
        path = tmp_path / f"net.ncnn.{ending}"
        before = path.read_bytes()
        path.write_bytes((tmp_path / f"other.ncnn.{ending}").read_bytes())
        problem = f"{path.name} and its manifest are of two nets"
        with pytest.raises(UsageError, match=f"{path.name} (and its manifest|is not the tail of this net)"):
            Net(tmp_path / "net", isolated=False)
        assert problem in run(tmp_path, "example", "net").err
        assert problem in inspect(tmp_path / "net.ncnn.param").advice
        if ending == "bin":
            report = verify(model, tmp_path / "net.ncnn.param")
            assert problem in report.notes[0]
            assert not report.ok
        path.write_bytes(before)
    assert not inspect(tmp_path / "net.ncnn.param").advice
    Net(tmp_path / "net", isolated=False).close()


@pytest.mark.parametrize("place", ["inputs", "outputs"])
def test_a_manifest_whose_tail_has_other_names(place: str, tmp_path: Path) -> None:
    weights: Any = np.ones((2, 3, 1, 1), np.float32)
    lower(parsed(PICKS.format(0), w=weights)).save(tmp_path / "net")
    path = tmp_path / "net.ncnn.json"
    data = json.loads(path.read_text())
    data["tail"][place] = ["other"] if place == "inputs" else [{**data["tail"][place][0], "name": "other"}]
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=r"and the manifest differ about '(other|f)'"):
        Net(tmp_path / "net", isolated=False)


def test_a_crash_is_an_error_here(tmp_path: Path) -> None:
    write_net(tmp_path, *CRASH)
    with Net(tmp_path / "net") as net:
        with pytest.raises(RunError, match="crashed"):
            net.run({"x": np.ones((2, 3), np.float32)}, ["y", "z"])
        assert net.run({"x": np.ones((2, 3), np.float32)}, ["y"])["y"].tolist() == [[1] * 3] * 2
    assert issubclass(CrashError, RunError)
