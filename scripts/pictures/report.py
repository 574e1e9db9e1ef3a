"""The report page of MobileNetV3, light and dark, as Chromium shows it."""

import base64
import io
import tempfile
from pathlib import Path

import onnx
from PIL import Image

from onnx2ncnn_opt import make_report
from testing.browser import browser, find_browser
from testing.exports import ROOT, refilled

_SIZE = (820, 980)


def draw() -> dict[str, bytes]:
    """Return the pictures by their file's names."""
    program = find_browser()
    if program is None:
        raise SystemExit("the report is drawn by Chromium, which is not installed")
    pictures = {}
    with tempfile.TemporaryDirectory() as folder, browser(program) as tab:
        model, page = Path(folder) / "mobilenet_v3_small.onnx", Path(folder) / "page.html"
        onnx.save(refilled(ROOT / "fixtures" / "models" / "mobilenet_v3_small.ts.onnx"), model)
        make_report(model).save(page)
        tab.size(*_SIZE)
        for scheme in ("light", "dark"):
            tab.scheme(scheme)
            tab.open(page)
            pictures[f"report-{scheme}.png"] = _small(tab.call("Page.captureScreenshot", format="png")["data"])
    return pictures


def _small(data: str) -> bytes:
    """Return a PNG of 64 colours."""
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    file = io.BytesIO()
    image.quantize(64, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()
