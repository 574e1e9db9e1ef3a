from __future__ import annotations

from importlib.metadata import version

import pytest

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.runtime import base


def test_what_is_there_is_enough() -> None:
    base.require("ncnn")
    base.require("onnxruntime")


def test_what_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    major, *rest = version("ncnn").split(".")
    newer = ".".join([major, *rest[:-1], str(int(rest[-1]) + 1)])
    monkeypatch.setitem(base.OLDEST, "ncnn", newer)
    with pytest.raises(UsageError, match=f"which is {version('ncnn')}, but has to be {newer} or newer"):
        base.require("ncnn")
    monkeypatch.setitem(base.OLDEST, "ncnn", version("ncnn"))
    base.require("ncnn")
