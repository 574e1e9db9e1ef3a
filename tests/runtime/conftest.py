import subprocess

import pytest

from onnx2ncnn_opt.runtime import child


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are started here as for a user, not forked."""
    monkeypatch.setattr(child, "Popen", subprocess.Popen)
