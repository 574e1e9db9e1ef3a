"""Small models in place of those that users of the pages download or export."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx

from onnx2ncnn_opt.api.lower import lower
from testing.exports import ROOT, refilled
from testing.models import parsed

EXPORTS = ("pip ", "yolo ", "optimum-cli ", "pnnx ", "python export.py")  # commands that make or download models


def _fixture(name: str) -> Callable[[Path], None]:
    return lambda path: onnx.save(refilled(ROOT / "fixtures" / f"{name}.onnx"), path)


def classifier(image: str = "image") -> onnx.ModelProto:
    """Return a classifier of pictures of 224x224; `image` is its input's name."""
    rng = np.random.default_rng(0)
    return parsed(
        f"(float[1, 3, 224, 224] {image}) => (float[1, 1000] scores) {{"
        f" c = Conv<strides = [16, 16]>({image}, w) m = Mul(c, s) r = Relu(m) p = GlobalAveragePool(r)"
        " f = Flatten(p) scores = Gemm<transB = 1>(f, v, b) }",
        w=rng.standard_normal((16, 3, 16, 16), np.float32) / 16,
        s=rng.uniform(0.5, 2, (16, 1, 1)).astype(np.float32),
        v=rng.standard_normal((1000, 16), np.float32),
        b=rng.standard_normal(1000, np.float32),
    )


def _yolo() -> onnx.ModelProto:
    """Return a model with the inputs, the outputs and the metadata of YOLO11n."""
    rng = np.random.default_rng(0)
    model = parsed(
        "(float[1, 3, 320, 320] images) => (float[1, 84, 2100] output0) {"
        " a = Conv<strides = [8, 8]>(images, w)"
        " b = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)"
        " c = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(b)"
        " ra = Reshape(a, shape) rb = Reshape(b, shape) rc = Reshape(c, shape) all = Concat<axis = 2>(ra, rb, rc)"
        " box, class = Split<axis = 1>(all, sizes) p = Sigmoid(box) pixels = Mul(p, side)"
        " low = Sub(class, five) scores = Sigmoid(low) output0 = Concat<axis = 1>(pixels, scores) }",
        w=rng.standard_normal((84, 3, 8, 8), np.float32) / 4,
        shape=np.array([1, 84, -1]),
        sizes=np.array([4, 80]),
        side=np.float32(320),
        five=np.float32(7),
    )
    names = {number: f"class {number}" for number in range(80)}
    entries = {"description": "YOLO", "stride": "32", "task": "detect", "batch": "1", "imgsz": "[320, 320]"}
    onnx.helper.set_model_props(model, {**entries, "names": str(names), "args": "{}"})
    return model


def _param(path: Path) -> None:
    """Write a net as pnnx writes one: its names, and no shapes."""
    files = lower(classifier(), optimize=False, blob_names="pnnx").save(path.with_suffix(""))
    text = files.param.read_text()
    path.write_text(re.sub(r"^(Input .* 0 1 in0).*", r"\1", text, flags=re.MULTILINE))
    files.bin.rename(path.with_suffix(".bin"))
    files.param.unlink()
    files.manifest.unlink()


def _photo(path: Path) -> None:
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)).save(path)


# The files that a command reads and that no other command of the page has written.
STAND_INS: Mapping[str, Callable[[Path], None]] = {
    "mobilenet.onnx": _fixture("models/mobilenet_v3_small.ts"),
    "classifier.onnx": lambda path: onnx.save(classifier(), path),
    "models/classifier.onnx": lambda path: onnx.save(classifier(), path),
    "yolo11n.onnx": lambda path: onnx.save(_yolo(), path),
    "qwen/model.onnx": _fixture("llm/qwen2.optimum"),
    "net.param": _param,
    "photo.jpg": _photo,
}
