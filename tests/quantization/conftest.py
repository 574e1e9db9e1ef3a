import pytest

from onnx2ncnn_opt.quantization import quantize
from onnx2ncnn_opt.runtime import latency


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time nets for a moment: no test depends on what is measured."""
    monkeypatch.setattr(quantize, "_NET_SECONDS", 0.0)
    monkeypatch.setattr(latency, "_TURN_SECONDS", 0.01)
