"""The exported models of fixtures/models, with their weights."""

from collections.abc import Collection, Sequence
from pathlib import Path

import onnx
import pytest
from _pytest.mark.structures import ParameterSet

from testing.skeletons import refill

ROOT = Path(__file__).resolve().parent.parent
MODELS = sorted((ROOT / "fixtures" / "models").glob("*.onnx"))
SKELETONS = [path for path in MODELS if b'{"fill"' in path.read_bytes()]


SMALL = [path for path in MODELS if path not in SKELETONS]


def one_of_each(paths: Sequence[Path]) -> list[Path]:
    """Return one exporter of each model, another one from model to model."""
    names = sorted({path.name.split(".")[0] for path in paths})
    forms = [[path for path in paths if path.name.startswith(f"{name}.")] for name in names]
    return [each[number % len(each)] for number, each in enumerate(forms)]


def sampled(paths: Sequence[Path], chosen: Collection[Path]) -> list[ParameterSet]:
    """Return all paths as parameters, of which those that are not chosen run with --thorough."""
    return [pytest.param(path, id=path.stem, marks=() if path in chosen else pytest.mark.thorough) for path in paths]


def refilled(path: Path) -> onnx.ModelProto:
    """Return a model of fixtures/models, its recipes replaced by weights."""
    model: onnx.ModelProto = refill(onnx.load(path))
    return model


def save_refilled(name: str, folder: Path) -> Path:
    """Write FOLDER/model.onnx, the model NAME.onnx of fixtures/models with weights; return its path."""
    onnx.save(refilled(ROOT / "fixtures" / "models" / f"{name}.onnx"), folder / "model.onnx")
    return folder / "model.onnx"
