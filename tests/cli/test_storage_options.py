"""`convert` with weights in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.param.files import read_net
from testing.command import SMALL, refused, run, run_well
from testing.models import write_model


@pytest.mark.parametrize("kind", list(Encoding)[2:4])
def test_16_bits(small: Path, kind: Encoding) -> None:
    ended = run_well(small, "convert", "model.onnx", f"--{kind.value}")
    assert ended.lines("storage") == [["1", "weights", "as", f"{kind.value},", "0", "stay", "as", "they", "are"]]
    graph = read_net(small / "model.ncnn.param", small / "model.ncnn.bin").graph
    (layer,) = (layer for layer in graph if layer.type == "Convolution")
    assert layer.weights.stored("weight_data").encoding is kind


def test_a_weight_that_does_not_fit_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL.replace("0.5, -0.25", "70000, -0.25"))
    ended = run_well(tmp_path, "convert", "model.onnx", "--fp16")
    (line,) = ended.lines("not fp16")
    assert "70000 is beyond the largest number of fp16, 65504" in " ".join(line)


def test_old_releases_cannot_read_bf16(small: Path) -> None:
    assert "weights in bf16 need ncnn 20261020 or newer, not 20260526" in refused(
        small, "convert", "model.onnx", "--bf16", "--ncnn", "20260526"
    )


def test_a_net_of_16_bits_remains_one(tmp_path: Path) -> None:
    scaled = "(float[1, 4, 8, 8] x) => (float[1, 2, 8, 8] z) <float[2, 4, 1, 1] w = {1.5, 2, 3, 4, 5, 6, 7, 8}>"
    write_model(tmp_path, scaled + "{ y = Conv(x, w) t = Constant<value_float = 3.0>() z = Mul(y, t) }")
    assert run(tmp_path, "convert", "model.onnx", "--no-optimize", "--fp16").code == 0
    ended = run_well(tmp_path, "optimize", "model.ncnn.param", "model.ncnn.bin", "-o", "out")
    assert [" ".join(line) for line in ended.lines("storage")] == ["1 folded weights as fp16 again, 0 have 32 bits now"]
    assert ended.lines("weights") == []
    assert (tmp_path / "out.bin").stat().st_size == (tmp_path / "model.ncnn.bin").stat().st_size
