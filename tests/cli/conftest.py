from __future__ import annotations

from pathlib import Path

import pytest

from testing.command import SMALL, write_model


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with the model SMALL."""
    write_model(tmp_path, SMALL)
    return tmp_path
