"""`check` and `example`."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from testing.command import refused, run, run_well


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
        "Error: ncnn-check.toml: cannot be read: No such file or directory; it needs a line such as models = "
        '["*.onnx"] (docs/ci.md)\n',
    )
    (tmp_path / "ncnn-check.toml").write_text('models = ["a.onnx"]\n')
    assert "a shard is i/n" in run(tmp_path, "check", "--shard", "2").err
    assert "there is no folder" in run(tmp_path, "check", "--junit", "no/one/out.xml").err


def test_the_printed_program_runs(small: Path) -> None:
    ended = run_well(small, "convert", "model.onnx", "--no-verify", "-o", "my net")
    last = ended.out.splitlines()[-1]
    assert last == "next: onnx2ncnn-opt example 'my net'  # a program that runs the net"
    ended = run_well(small, "example", "my net", "--python")
    done = subprocess.run([sys.executable, "-c", ended.out], cwd=small, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["y", "z"]
    ended = run(small, "example", "my net", "--shape", "x:1,3,8,8")
    assert '#include "net.h"' in ended.out
    assert run(small, "example", "my net", "--cpp").out == ended.out


def test_wrong_usage_of_example(tmp_path: Path) -> None:
    assert "there is no net at none: neither none.ncnn.param nor none.param is a file" in refused(
        tmp_path, "example", "none"
    )
    for suffix in ("param", "bin"):
        (tmp_path / f"net.{suffix}").write_bytes(b"")
    ended = run(tmp_path, "example", "net")
    assert ended.code == 2
    assert "net.param has no manifest beside it" in ended.err
