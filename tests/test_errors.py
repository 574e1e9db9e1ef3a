"""Messages of a length that can be read."""

from __future__ import annotations

from onnx2ncnn_opt.errors import ModelError, Unsupported, UnsupportedError


def test_long_lines_show_their_ends() -> None:
    text = str(ModelError(f"perm {list(range(100_000))} of a tensor of rank 3"))
    assert len(text) < 600
    assert text.startswith("perm [0, 1, 2, ")
    assert text.endswith("99999] of a tensor of rank 3")


def test_many_nodes_are_counted() -> None:
    nodes = [Unsupported(f"n{i}", "Det", f"no {i}") for i in range(5000)]
    error = UnsupportedError(nodes)
    assert len(error.nodes) == 5000
    lines = str(error).split("\n")
    assert len(lines) < 250
    assert "more lines" in lines[-1]


def test_what_is_short_stays() -> None:
    assert str(ModelError("a\nb")) == "a\nb"
