from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from testing.command import run


def test_a_first_check_a_baseline_and_a_failure(small: Path) -> None:
    (small / "ncnn-check.toml").write_text('models = ["*.onnx"]\nthresholds = { latency = inf, memory = inf }\n')
    recorded = run(small, "check", "--record")
    assert recorded.code == 0, recorded.err
    assert recorded.lines("recorded") == [["1", "of", "1", "models", "in", str(small / "ncnn-baseline")]]
    assert "model: recorded" in recorded.err
    again = run(small, "check", "--junit", "out.xml", "--markdown", "out.md")
    assert again.code == 0, again.err
    assert again.lines("passed") == [["1", "of", "1", "models"]]
    assert ElementTree.parse(small / "out.xml").getroot()[0].get("failures") == "0"
    assert "| model | ok |" in (small / "out.md").read_text()
    (small / "model.onnx").unlink()
    (small / "ncnn-check.toml").write_text('models = ["model.onnx"]\n')
    gone = run(small, "check")
    assert gone.code == 2
    assert gone.lines("failed")[0][:2] == ["model:", "model:"]


def test_wrong_usage(tmp_path: Path) -> None:
    ended = run(tmp_path, "check")
    assert (ended.code, ended.err) == (
        2,
        "Error: ncnn-check.toml: cannot be read: No such file or directory; docs/ci.md says what is in it\n",
    )
    (tmp_path / "ncnn-check.toml").write_text('models = ["a.onnx"]\nseed = 1\n')
    assert "there is no key 'seed'; did you mean 'seeds'?" in run(tmp_path, "check").err
    (tmp_path / "ncnn-check.toml").write_text('models = ["a.onnx"]\n')
    assert "a shard is i/n" in run(tmp_path, "check", "--shard", "2").err
    assert "there is no folder" in run(tmp_path, "check", "--junit", "none/out.xml").err
