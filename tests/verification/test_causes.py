"""Where errors come from: nets of a real model with weights in 16 bits, in other modes, and with a fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt import convert
from onnx2ncnn_opt.api.convert import Files
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.param.files import read_net, write_net
from onnx2ncnn_opt.verification.budget import Budget
from onnx2ncnn_opt.verification.verify import verify_net
from testing.exports import ROOT, refilled


def output(model: Path, files: Files, mode: str = "fp32") -> OutputReport:
    (found,) = verify_net(model, files.param, files.bin, modes=(mode,), explain=True).outputs
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(refilled(ROOT / "fixtures" / "models" / "residual.dyn.onnx"), path)
    return path


def test_rounding_and_16_bits(model: Path, tmp_path: Path) -> None:
    plain = output(model, convert(model).save(tmp_path / "plain"))
    assert (plain.status, plain.cause, plain.bits) == ("ok", "rounding", None)
    assert plain.rounding is not None
    assert 1e-8 < plain.rounding < 1e-5
    files = convert(model, storage="fp16").save(tmp_path / "short")
    short = output(model, files)
    assert (short.status, short.cause) == ("ok", "weights in fp16")
    assert short.max_rel is not None
    assert short.bits is not None
    assert short.max_rel / 4 < short.bits < short.max_rel * 4
    half = output(model, files, "bf16")
    assert (half.status, half.cause) == ("ok", "bf16")


def test_a_fault_is_not_taken_for_16_bits(model: Path, tmp_path: Path) -> None:
    files = convert(model, storage="fp16").save(tmp_path / "net")
    graph = read_net(files.param, files.bin).graph
    layer = [layer for layer in graph if layer.type == "Convolution"][2]
    layer.weights["weight_data"] = layer.weights["weight_data"] * np.float32(1.02)
    write_net(graph, files.param, files.bin)
    found = output(model, files)
    assert (found.status, found.cause) == ("mismatch", "conversion")


def test_causes() -> None:
    budget = Budget(rounding=1e-6, bits=1e-3, kind="fp16")
    assert budget.cause(0.0, "fp16", ok=True) == ""
    assert budget.cause(1e-5, "fp16", ok=True) == "rounding"
    assert budget.cause(3e-3, "fp16", ok=True) == "fp16"
    assert budget.cause(5e-3, "fp16", ok=True) == "fp16"
    assert budget.cause(5e-3, "fp16", ok=False) == "conversion"
    assert Budget(1e-6, None).cause(1e-4, "fp32", ok=True) == "kernels"
    assert Budget(None, float("inf"), "fp16").cause(None, "fp16", ok=False) == "fp16"
