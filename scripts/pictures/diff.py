"""What `diff` prints about a net without and with the passes."""

import tempfile
from pathlib import Path

from onnx2ncnn_opt.api.lower import lower
from scripts.pictures.svg import picture, text
from testing.command import run
from testing.exports import ROOT

_MODEL = ROOT / "fixtures" / "models" / "superres.ts.onnx"
_COLOURS = {"gone": "bad", "added": "good"}


def draw() -> dict[str, str]:
    """Return the picture by its file's name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stem, optimize in (("before", False), ("after", True)):
            files = lower(_MODEL, optimize=optimize).save(folder / stem)
            files.param.rename(folder / f"{stem}.param")
            files.bin.rename(folder / f"{stem}.bin")
        lines = run(folder, "diff", "before.param", "after.param").out.splitlines()
    shapes: list[object] = [text(12, 22, "$ onnx2ncnn-opt diff before.param after.param", "code", weight=600)]
    for place, line in enumerate(lines):
        words = " ".join(line.split())
        style = _COLOURS.get(line.partition(":")[0], "")
        shapes.append(
            text(12, 44 + 18 * place, words if len(words) < 88 else f"{words[:86]}...", f"code {style}".strip())
        )
    return {"diff.svg": picture("The output of diff.", 640, 44 + 18 * len(lines), *shapes, size=12)}
