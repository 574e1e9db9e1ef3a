"""Messages of a command on stderr while it works."""

import io
import math
import re
import time

import pytest

from onnx2ncnn_opt import progress
from onnx2ncnn_opt.progress import Count, counted
from onnx2ncnn_opt.report import console
from onnx2ncnn_opt.report.console import working


def test_long_work_is_reported_with_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_INTERVAL", 0)
    monkeypatch.setattr(console, "_SOON", 0.1)
    stream, start = io.StringIO(), time.monotonic()
    with working("converting", stream):
        for _ in counted(range(1000), "making layers", "nodes"):
            time.sleep(0.001)
    lines = stream.getvalue().splitlines()
    assert 2 <= len(lines) <= math.log2(10 * (time.monotonic() - start)) + 1  # after 0.1 s, 0.2 s, 0.4 s, ...
    pattern = r"converting: making layers: \d+ of 1,000 nodes, [\d,]+ a second \(\d+ s\)"
    assert all(re.fullmatch(pattern, line) for line in lines), lines
    told: list[str] = []
    with progress.listening(told.append):
        Count("pass p", "rewrites").add(3)  # of a number that nobody knows
    assert re.fullmatch(r"pass p: 3 rewrites, [\d,]+ a second", told[0])


def test_short_work_is_not_reported() -> None:
    stream = io.StringIO()
    with working("converting", stream):
        progress.announce("reading the model")
        Count("writing", "MB", 2).add(1)
    Count("writing", "MB", 2).add(2)  # nobody listens
    assert stream.getvalue() == ""
