"""Small models in place of those that users of the pages download or export."""

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx

from testing.exports import ROOT, refilled


def _skeleton(name: str) -> Callable[[Path], None]:
    return lambda path: onnx.save(refilled(ROOT / "fixtures" / "models" / f"{name}.onnx"), path)


EXPORTS = ("pip ", "yolo ", "optimum-cli ", "pnnx ", "python export.py")  # commands that make or download models
STAND_INS: Mapping[str, Callable[[Path], None]] = {
    "mobilenet_v3_small.onnx": _skeleton("mobilenet_v3_small.ts"),
}
