"""The exported models of fixtures/models, with their weights."""

from pathlib import Path

import onnx

from testing.skeletons import refill

ROOT = Path(__file__).resolve().parent.parent
MODELS = sorted((ROOT / "fixtures" / "models").glob("*.onnx"))
SKELETONS = [path for path in MODELS if b'{"fill"' in path.read_bytes()]


def refilled(path: Path) -> onnx.ModelProto:
    """Return a model of fixtures/models, its recipes replaced by weights."""
    model: onnx.ModelProto = refill(onnx.load(path))
    return model


def save_refilled(name: str, folder: Path) -> Path:
    """Write FOLDER/model.onnx, the model NAME.onnx of fixtures/models with weights; return its path."""
    onnx.save(refilled(ROOT / "fixtures" / "models" / f"{name}.onnx"), folder / "model.onnx")
    return folder / "model.onnx"
