from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from testing.command import refused, run, run_well


def test_convert_names_it_and_what_it_prints_runs(small: Path) -> None:
    ended = run_well(small, "convert", "model.onnx", "--no-verify", "-o", "my net")
    last = ended.out.splitlines()[-1]
    assert last == "run: onnx2ncnn-opt example 'my net' prints a program that runs the net"
    ended = run_well(small, "example", "my net", "--python")
    done = subprocess.run([sys.executable, "-c", ended.out], cwd=small, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["y", "z"]
    ended = run(small, "example", "my net", "--shape", "x:1,3,8,8")
    assert '#include "net.h"' in ended.out
    assert run(small, "example", "my net", "--cpp").out == ended.out


def test_what_makes_no_sense(tmp_path: Path) -> None:
    assert "there is no net at none: neither none.ncnn.param nor none.param is a file" in refused(
        tmp_path, "example", "none"
    )
    for suffix in ("param", "bin"):
        (tmp_path / f"net.{suffix}").write_bytes(b"")
    ended = run(tmp_path, "example", "net")
    assert ended.code == 2
    assert "net.param has no manifest beside it" in ended.err
