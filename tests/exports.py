"""The exported models of fixtures/models, with their weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import onnx

ROOT = Path(__file__).resolve().parent.parent
MODELS = sorted((ROOT / "fixtures" / "models").glob("*.onnx"))


def load_script(name: str) -> ModuleType:
    """A script of scripts/ as module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script("refill")


def refilled(path: Path) -> onnx.ModelProto:
    """A model of fixtures/models, its recipes replaced by weights."""
    model: onnx.ModelProto = SCRIPT.refill(onnx.load(path))
    return model
