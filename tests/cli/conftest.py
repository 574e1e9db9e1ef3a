import shutil
from pathlib import Path

import pytest

from testing.command import SMALL, run
from testing.models import write_model


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with the model SMALL."""
    write_model(tmp_path, SMALL)
    return tmp_path


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    write_model(folder, SMALL)
    assert run(folder, "convert", "model.onnx", "--no-verify").code == 0
    return folder


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    """A folder with the model SMALL and its net."""
    return shutil.copytree(converted, tmp_path, dirs_exist_ok=True)
