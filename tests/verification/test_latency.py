"""Latency of two nets from times as a clock gives them, with those of a clock that stands still."""

from __future__ import annotations

from onnx2ncnn_opt.verification.latency import in_turns


def test_a_clock_that_stands_still() -> None:
    latency = in_turns(lambda seconds: [0.0, 2e-3, 3e-3], lambda seconds: [0.0, 1e-3], 0.0)
    assert (latency.net, latency.other, latency.ratio) == (2.0, 1.0, 2.0)
    never = in_turns(lambda seconds: [1e-3], lambda seconds: [0.0], 0.0)
    assert never.other > 0
