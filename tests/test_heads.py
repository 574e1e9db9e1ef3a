"""The exported detector ends in fixtures/heads: complete, small, and with detections in ONNX Runtime."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import pytest

from testing.exports import ROOT

HEADS = sorted((ROOT / "fixtures" / "heads").glob("*.onnx"))
SIZES = {"batch": 2, "height": 96, "width": 128}


def test_each_head_has_four_files_and_a_line() -> None:
    readme = (ROOT / "fixtures" / "heads" / "README.md").read_text()
    names = re.findall(r"^\| `(\w+)`", readme, re.MULTILINE)
    kinds = {
        name: sorted(re.sub(r"-n?hw", "-open", p.name[len(name) :]) for p in HEADS if _name(p) == name)
        for name in names
    }
    assert len(names) == 17
    assert all(found == ["-open.dyn.onnx", "-open.ts.onnx", ".dyn.onnx", ".ts.onnx"] for found in kinds.values()), kinds
    assert sum(path.stat().st_size for path in HEADS) < 2_050_000


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.name.removesuffix(".onnx"))
def test_finds_objects_with_different_scores(path: Path) -> None:
    assert not re.search(rb"/(home|root|work|tmp|usr|site-packages)/", path.read_bytes())
    onnx.checker.check_model(onnx.load(path))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {}
    for port in session.get_inputs():
        shape = [size if isinstance(size, int) else _size(axis) for axis, size in enumerate(port.shape)]
        feeds[port.name] = np.random.default_rng(0).standard_normal(shape, np.float32)
        if port.type == "tensor(int64)":
            feeds[port.name] = np.full(shape, 320)
    results = dict(zip((port.name for port in session.get_outputs()), session.run(None, feeds), strict=True))
    assert all(np.isfinite(array).all() for array in results.values())
    scores = results["scores"] if "scores" in results else results["output0"][..., 4]
    scores = scores[scores > 0]
    assert scores.size > 5
    assert len(np.unique(scores.round(3))) > 5


def _name(path: Path) -> str:
    return re.split(r"[-.]", path.name)[0]


def _size(axis: int) -> int:
    return tuple(SIZES.values())[axis if axis == 0 else axis - 1]
