"""Weights in 16 bits: which are stored so, which are not and why, and that ncnn reads them back."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.weight import Array, Encoding, Weight, digest
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.param.storage import plan_storage, rounded
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from testing.handmade import raw, tagged, write_net
from testing.optimized import apply_passes
from testing.param_text import write_filled


def values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def convolution(folder: Path, kernel: Array) -> tuple[Path, Path]:
    """A 1x1 convolution with 2 outputs and a bias."""
    size = kernel.size // 2
    lines = f"Input data 0 1 data 0=4 1=3 2={size}", f"Convolution c 1 1 data out 0=2 1=1 5=1 6={kernel.size}"
    return write_net(folder, *lines, weights=tagged(kernel) + raw(values(2)))


@pytest.mark.parametrize("storage", ["fp16", "bf16"])
def test_sizes_and_numbers(tmp_path: Path, storage: str) -> None:
    kernel = values(2, 33)
    result = apply_passes(*convolution(tmp_path, kernel), storage=storage)
    report = result.verify()
    assert report.ok
    assert [output.max_abs for output in report.folded] == [0.0]
    assert report.outputs[0].max_rel
    assert 0 < report.outputs[0].max_rel < 8 * (2**-11 if storage == "fp16" else 2**-8)
    files = result.save(tmp_path / "out")
    assert files.bin.stat().st_size == 4 + 66 * 2 + 8
    stored = read_net(files.param, files.bin).graph.layers[1].weights["weight_data"]
    dtype = np.float16 if storage == "fp16" else ml_dtypes.bfloat16
    assert np.array_equal(stored, kernel.astype(dtype).astype(np.float32).reshape(-1))


def test_a_stored_net_is_one_of_rounded_weights(tmp_path: Path, worker: NcnnWorker) -> None:
    kernel = values(2, 8)
    (tmp_path / "rounded").mkdir()
    short = apply_passes(*convolution(tmp_path, kernel), storage="fp16").save(tmp_path / "short")
    rounded = convolution(tmp_path / "rounded", kernel.astype(np.float16).astype(np.float32))
    feeds = {"data": values(8, 3, 4)}
    stored, plain = (
        NcnnRunner(*paths, exact=True, worker=worker).run(feeds)["out"] for paths in ((short.param, short.bin), rounded)
    )
    assert np.array_equal(stored, plain)


ROW = range(8, 16)


@pytest.mark.parametrize(
    ("storage", "spoilt", "message"),
    [
        ("fp16", {0: 65520.0}, "65520 is beyond the largest number of fp16, 65504"),
        ("fp16", {5: -1e6}, "1e+06 is beyond the largest number of fp16, 65504"),
        ("fp16", {3: np.inf}, "it is not finite everywhere"),
        ("bf16", {3: np.nan}, "it is not finite everywhere"),
        ("bf16", {3: 3.4e38}, "3.4e+38 is beyond the largest number of bf16, 3.38953e+38"),
        ("fp16", dict.fromkeys(ROW, 1e-8), "row 1 has no number above 1e-08, too small for fp16"),
        ("fp16", dict.fromkeys(ROW, 2e-7), "row 1 has no number above 2e-07, too small for fp16"),
        ("fp16", {i: 2040.0 + i for i in range(16)}, "it holds integers, such as indices, that fp16 would round"),
        ("fp16", {i: 2033.0 + i for i in range(16)}, ""),
        ("fp16", {0: 65519.0}, ""),  # rounds to the largest number
        ("fp16", {0: 1e-9, 9: 6e-8}, ""),  # lost, but nothing beside its neighbours
        ("fp16", dict.fromkeys(ROW, 0.0), ""),
        ("bf16", dict.fromkeys(ROW, 1e-30), ""),
        ("bf16", {3: 1e6}, ""),
    ],
)
def test_weights_that_16_bits_may_not_hold(
    tmp_path: Path, storage: str, spoilt: dict[int, float], message: str
) -> None:
    kernel = values(2, 8).reshape(-1)
    kernel[list(spoilt)] = list(spoilt.values())
    files = convolution(tmp_path, kernel)
    result = apply_passes(*files, storage=storage)
    assert result.storage
    assert [*result.storage.kept] == [f"Convolution 'c', weight_data: {message}"] * bool(message)
    if message:
        assert result.save(tmp_path / "out").bin.read_bytes() == files[1].read_bytes()
    else:
        assert result.storage.count == 1
        assert result.verify().ok


def test_only_weights_that_ncnn_reads_after_a_tag(tmp_path: Path) -> None:
    lines = (
        "Input data 0 1 data 0=6",
        "MemoryData table 0 1 table 0=6 1=1 2=1",
        "MemoryData indexes 0 1 indexes 0=3",
        "Embed e 1 1 indexes rows 0=6 1=5 2=1 3=30",
        "BinaryOp s 2 1 rows data a 0=0",
        "PReLU p 1 1 a b 0=3",
        "BinaryOp t 2 1 b table out 0=0",
    )
    table, rows, bias, slopes = values(6), values(30, seed=1), values(6, seed=2), values(3, seed=3)
    indexes = np.asarray([4, 0, 2], np.int32).tobytes()
    files = write_net(tmp_path, *lines, weights=raw(table) + indexes + tagged(rows) + raw(bias, slopes))
    result = apply_passes(*files, storage="fp16", skip=["fuse_binaryop_scale"])
    assert result.storage
    assert {change.layer.name for change in result.storage.changes} == {"table", "e"}
    assert result.verify().ok
    text = result.save(tmp_path / "out").param.read_text()
    assert next(line.split()[-1] for line in text.splitlines() if " table " in line) == "21=0"
    assert (tmp_path / "out.bin").read_bytes().count(indexes) == 1
    assert raw(bias, slopes) in (tmp_path / "out.bin").read_bytes()


def test_compressed_weights_are_unchanged(tmp_path: Path) -> None:
    kernel = values(2, 8)
    first = apply_passes(*convolution(tmp_path, kernel), storage="bf16").save(tmp_path / "first")
    again = apply_passes(first.param, first.bin, storage="fp16")
    assert again.storage
    assert again.storage.count == 0
    assert again.save(tmp_path / "again").bin.read_bytes() == first.bin.read_bytes()


def test_an_unknown_storage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be stored as int4; there are fp16, bf16"):
        apply_passes(*convolution(tmp_path, values(2, 8)), storage="int4")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(arrays.arrays(np.uint32, 16))
def test_bf16_is_rounded_to_nearest_and_nan_stays_nan(bits: Array) -> None:
    numbers = bits.view(np.float32)
    wide = bits.astype(np.uint64)
    nearest = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint32) << 16  # ties to even
    found = rounded(numbers, Encoding.BF16)
    assert np.array_equal(np.isnan(found), np.isnan(numbers))
    known = ~np.isnan(numbers)
    assert np.array_equal(found[known].view(np.uint32), nearest[known])


def test_rounding_never_loses_more_than_promised(tmp_path: Path) -> None:
    files = convolution(tmp_path, values(2, 4000) * np.float32(1e-3))
    graph = read_net(*files).graph
    for encoding in (Encoding.FP16, Encoding.BF16):
        plan = plan_storage(graph, encoding)
        (change,) = plan.changes
        error = np.abs(Weight(change.short.data, encoding).array - change.full.array)
        assert (
            error <= 2 * (2.0**-11 if encoding is Encoding.FP16 else 2.0**-8) * np.abs(change.full.array) + 3e-8
        ).all()


def stored_kinds(graph: Graph) -> dict[str, Encoding]:
    """The encodings of all weights."""
    found = ((layer, name, weight) for layer in graph for name, weight in layer.weights.stored_items())
    return {f"{layer.name}.{name}": weight.encoding for layer, name, weight in found}


CONVOLUTIONS = (
    "Input data 0 1 data 0=4 1=3 2=2",
    "Convolution a 1 1 data p 0=4 1=1 5=1 6=8",
    "BatchNorm n 1 1 p q 0=4",
    "AbsVal c 1 1 q t",
    "Convolution b 1 1 t r 0=2 1=1 5=1 6=8",
    "ReLU s 1 1 r out",
)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_folded_weights_are_stored_like_the_others(tmp_path: Path, kind: str) -> None:
    files = write_filled(tmp_path, *CONVOLUTIONS, given=f"a.weight_data {kind}\nb.weight_data {kind}")
    result = apply_passes(*files)
    assert [layer.type for layer in result.graph] == ["Input", "Convolution", "AbsVal", "Convolution"]
    assert {kind for name, kind in stored_kinds(result.graph).items() if "weight" in name} == {Encoding(kind)}
    untouched = read_net(*files).graph.layers[4].weights.stored("weight_data")
    assert digest(result.graph.layers[3].weights.stored("weight_data")) == digest(untouched)
    assert result.storage is not None
    assert (result.storage.count, result.storage.kept, result.storage.is_own) == (1, (), True)
    assert result.verify().ok
    saved = result.save(tmp_path / "out")
    assert saved.bin.stat().st_size == files[1].stat().st_size - 4 * 4 * 4  # the BatchNorm is gone
    again = apply_passes(saved.param, saved.bin)
    assert not again.applied
    assert again.storage is None


def test_folded_weights_that_16_bits_do_not_hold_are_named(tmp_path: Path) -> None:
    weights = "a.weight_data fp16\nb.weight_data fp16\nn.slope_data 1e-9"
    result = apply_passes(*write_filled(tmp_path, *CONVOLUTIONS, given=weights))
    assert stored_kinds(result.graph)["a.weight_data"] is Encoding.FP32
    assert result.storage is not None
    assert not result.storage.count
    assert "too small for fp16" in str(result.storage.kept[0])
    assert result.verify().ok


def test_weights_that_only_move_keep_every_bit(tmp_path: Path) -> None:
    lines = (
        "Input data 0 1 data 0=3 1=5 2=2",
        "Pooling g 1 1 data p 0=1 4=1",
        "Convolution c 1 1 p q 0=2 1=1 5=1 6=4",
        "Sigmoid s 1 1 q out",
    )
    files = write_filled(tmp_path, *lines, given="c.weight_data fp16")
    layer = apply_passes(*files).graph.layers[-1]
    assert layer.type == "InnerProduct"
    assert layer.weights.stored("weight_data").encoding is Encoding.FP16
    assert np.array_equal(layer.weights["weight_data"], read_net(*files).graph.layers[2].weights["weight_data"])


def test_a_net_of_32_bits_stays_one(tmp_path: Path) -> None:
    result = apply_passes(*write_filled(tmp_path, *CONVOLUTIONS))
    assert result.storage is None
    assert Encoding.FP16 not in stored_kinds(result.graph).values()


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("factor", [1, 3])
def test_weights_beside_those_of_16_bits_stay(tmp_path: Path, kind: str, factor: int) -> None:
    """A table whose layer gets another bias keeps its bits; weights that were not short before are not short after."""
    lines = (
        "Input data 0 1 data 0=4 1=3 2=2",
        "Split d 1 3 data d0 d1 d2",
        "Convolution a 1 1 d0 p 0=8 1=1 6=16",
        "BatchNorm n 1 1 p q 0=8",
        "BatchNorm m 1 1 d1 r 0=2",
        "Convolution b 1 1 r s 0=2 1=1 6=4",
        "Convolution c 1 1 d2 t 0=8 1=1 6=16",
        "BatchNorm o 1 1 t u 0=8",
    )
    before = f"m.slope_data {factor}\nm.mean_data 0\nm.var_data 1"
    weights = f"a.weight_data {kind}\nb.weight_data table\n{before}"
    result = apply_passes(*write_filled(tmp_path, *lines, given=weights))
    assert [event.pass_name for event in result.applied] == ["fuse_affine", "fuse_affine", "fuse_affine_before"]
    assert {name: kind for name, kind in stored_kinds(result.graph).items() if "weight" in name} == {
        "a.weight_data": Encoding(kind),
        "b.weight_data": Encoding.TABLE if factor == 1 else Encoding.FP32,
        "c.weight_data": Encoding.FP32,
    }
    assert result.verify().ok


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_constants_of_16_bits_stay(tmp_path: Path, kind: str) -> None:
    lines = (*CONVOLUTIONS[:3], "MemoryData c 0 1 c 0=3 1=4 21=0", "BinaryOp b 2 1 q c out 0=4")
    result = apply_passes(*write_filled(tmp_path, *lines, given=f"a.weight_data {kind}\nc.data {kind}"))
    assert {n: k for n, k in stored_kinds(result.graph).items() if "bias" not in n} == {
        "a.weight_data": Encoding(kind),
        "c.data": Encoding(kind),
    }
    assert result.verify().ok


def test_int8_weights_and_their_scales_are_unchanged(tmp_path: Path) -> None:
    lines = (
        "Input data 0 1 data 0=4 1=3 2=2",
        "Convolution a 1 1 data p 0=4 1=1 5=1 6=8 8=2",
        "BatchNorm n 1 1 p q 0=4",
        "Convolution b 1 1 q r 0=2 1=1 5=1 6=8",
        "BatchNorm m 1 1 r out 0=2",
    )
    result = apply_passes(*write_filled(tmp_path, *lines, given="a.weight_data int8\nb.weight_data fp16"))
    kinds = stored_kinds(result.graph)
    assert kinds["a.weight_data"] is Encoding.INT8
    assert kinds["b.weight_data"] is Encoding.FP16
    assert kinds["a.weight_data_int8_scales"] is kinds["b.bias_data"] is Encoding.FP32
    assert result.verify().ok
