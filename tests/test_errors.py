"""Messages of a length that can be read."""

from __future__ import annotations

from onnx2ncnn_opt.errors import ModelError


def test_long_lines_show_their_ends() -> None:
    text = str(ModelError(f"perm {list(range(100_000))} of a tensor of rank 3"))
    assert len(text) < 600
    assert text.startswith("perm [0, 1, 2, ")
    assert text.endswith("99999] of a tensor of rank 3")


def test_many_lines_are_counted() -> None:
    lines = str(ModelError("\n".join(f"node {i}" for i in range(5000)))).split("\n")
    assert len(lines) == 201
    assert lines[-1] == "... and 4800 more lines"


def test_what_is_short_stays() -> None:
    assert str(ModelError("a\nb")) == "a\nb"
