"""`eliminate_split`: the event names the Splits that go, and --skip keeps them."""

from pathlib import Path

from testing.handmade import write_net
from testing.optimized import apply_passes

LINES = (
    "Input data 0 1 data 0=4 1=3 2=2",
    "Split one 1 1 data a",
    "TanH t 1 1 a b",
    "Split two 1 1 b c",
    "Split fork 1 2 c d e",
    "BinaryOp y 2 1 d e out 0=2",
)


def test_the_events_name_the_splits(tmp_path: Path) -> None:
    result = apply_passes(*write_net(tmp_path, *LINES))
    assert [str(event) for event in result.applied] == [
        "eliminate_split: Split 'one' => nothing",
        "eliminate_split: Split 'two' => nothing",
    ]
    assert [layer.type for layer in result.graph] == ["Input", "TanH", "BinaryOp"]
    assert result.layers == (5, 3)
    assert result.verify().ok


def test_a_skipped_pass_leaves_them(tmp_path: Path) -> None:
    result = apply_passes(*write_net(tmp_path, *LINES), skip=["eliminate_split"])
    assert not result.applied
    assert result.verify().ok
    text = result.save(tmp_path / "out").param.read_text()
    assert [line.split()[:6] for line in text.splitlines() if line.startswith("Split")] == [
        ["Split", "one", "1", "1", "data", "a"],
        ["Split", "two", "1", "1", "b", "c"],
    ]
    again = apply_passes(tmp_path / "out.param", tmp_path / "out.bin", skip=["eliminate_split"])
    assert again.save(tmp_path / "again").param.read_text() == text
