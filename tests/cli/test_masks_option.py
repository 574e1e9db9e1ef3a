import json
import re
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.manifest import read_manifest
from testing import present
from testing.command import HERE, run_well
from testing.models import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """x * 300, squared, summed and rooted: the squares are too large for fp16; and a depthwise convolution."""
    graph = (
        "(float[1, 8, 12, 12] x) => (float[1, 1, 6, 6] y) <float k = {300}, int64[1] axes = {1}>"
        "{ [conv] c = Conv<group = 8, strides = [2, 2], pads = [1, 1, 1, 1]>(x, w) [mul] m = Mul(c, k) "
        "[sum] s = ReduceSumSquare<keepdims = 1>(m, axes) [root] y = Sqrt(s) }"
    )
    return write_model(tmp_path, graph, w=np.random.default_rng(0).standard_normal((8, 1, 3, 3)).astype(np.float32))


def masks_of(param: Path) -> list[str]:
    return [line for line in param.read_text().splitlines() if "31=" in line]


def test_convert_gives_masks_and_says_why(model: Path, tmp_path: Path) -> None:
    said = run_well(tmp_path, "convert", model, "-o", "net", "-v").out
    lines = [line for line in said.splitlines() if line.startswith("mask: ")]
    assert any("ConvolutionDepthWise 'conv': no fp16 arithmetic: ncnn's fp16 kernel" in line for line in lines)
    assert any("too large for fp16" in line and "largest value seen" in line for line in lines)
    assert "fp16 (estimated): off by up to" in said
    assert said.splitlines()[0].endswith(f"; {HERE}, fp16 estimated)")
    masked = masks_of(tmp_path / "net.ncnn.param")
    assert any(line.startswith("Dropout") for line in masked)
    named = read_manifest(tmp_path / "net.ncnn.json").masks
    assert len(named) == len(lines)
    written = json.loads((tmp_path / "net.ncnn.json").read_text())["masks"]
    assert {"mask", "largest", "layer", "reason", "device"} == set(written[0])
    assert {mask["layer"]: mask["device"] for mask in written}["conv"] == "arm"
    (price,) = [line for line in said.splitlines() if line.startswith("masks: ")]
    assert price == f"masks: {len(lines)} layers need more than fp16, 100% of the multiplications"


def test_optimize_keeps_them(model: Path, tmp_path: Path) -> None:
    run_well(tmp_path, "convert", model, "-o", "net")
    paths = [tmp_path / f"net.ncnn.{suffix}" for suffix in ("param", "bin")]
    said = run_well(tmp_path, "optimize", *paths, "-o", tmp_path / "again").out
    assert "mask:" not in said
    assert "fp16 (estimated): off by up to" in said
    assert (tmp_path / "again.param").read_text() == paths[0].read_text()


def test_optimize_gives_masks_to_other_nets(model: Path, tmp_path: Path) -> None:
    said = run_well(tmp_path, "convert", model, "-o", "net", "--no-masks").out
    assert "fp16 (estimated): NaN or infinity in an output" in said
    paths = [tmp_path / f"net.ncnn.{suffix}" for suffix in ("param", "bin")]
    assert masks_of(paths[0]) == []
    said = run_well(tmp_path, "optimize", *paths, "-o", tmp_path / "masked").out
    assert re.search(r"^masks: \d layers need more than fp16, \d+% of the multiplications; -v lists them$", said, re.M)
    assert len(masks_of(tmp_path / "masked.param")) > 3
    run_well(tmp_path, "optimize", *paths, "-o", tmp_path / "bare", "--no-masks")
    assert masks_of(tmp_path / "bare.param") == []


def test_masks_for_one_kind_of_device(model: Path, tmp_path: Path) -> None:
    for device, has_mask in (("arm", True), ("vulkan", False)):
        said = run_well(tmp_path, "convert", model, "-o", tmp_path / device, "--for", device, "-v").out
        assert ("mask: ConvolutionDepthWise 'conv'" in said) == has_mask
        assert "too large for fp16" in said
    with pytest.raises(UsageError, match="masks have to be True, False, 'arm' or 'vulkan', not 'gpu'"):
        lower(model, masks="gpu")  # type: ignore[call-overload]


def test_masks_that_the_graph_proves_need_no_run(model: Path, tmp_path: Path) -> None:
    said = run_well(tmp_path, "convert", model, "-o", "net", "--no-verify", "-v").out
    masks = [line.split(":")[1] for line in said.splitlines() if line.startswith("mask:")]
    assert masks == [" ConvolutionDepthWise 'conv'"]
    assert "estimated" not in said


def test_a_conversion_in_python_is_estimated(model: Path) -> None:
    conversion = lower(model)
    assert len(conversion.masks) == 1
    assert conversion.precision is None
    estimated = conversion.estimated()
    assert present(estimated.precision).ok
    assert len(estimated.masks) > 1
    bare = lower(model, masks=False)
    assert not bare.masks
    assert not present(bare.estimated(masks=False).precision).ok
