"""pytest as a user has it, on a list of models."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from testing.projects import MODEL, write_project, write_right_net

COMMAND = (
    sys.executable,
    *["-m", "pytest", "-p", "onnx2ncnn_opt.cli.pytest_plugin", "-p", "xdist", "-p", "no:cacheprovider"],
)


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    # The plugins are named: which ones an environment would load by itself is not known here.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*COMMAND, *args], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_models_are_tests(tmp_path: Path) -> None:
    write_project(tmp_path, 'net = "nets/{stem}.param"\n', right=MODEL, wrong=MODEL, none=MODEL)
    for name in ("right", "wrong"):
        write_right_net(tmp_path / "nets", name, tmp_path / "models" / f"{name}.onnx")
    weights = bytearray((tmp_path / "nets" / "wrong.bin").read_bytes())
    weights[10] ^= 0x7F
    (tmp_path / "nets" / "wrong.bin").write_bytes(weights)
    done = run(tmp_path, "ncnn-check.toml", "-n", "1", "-q", "--junitxml=out.xml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 1 passed" in done.stdout
    assert "Traceback" not in done.stdout
    assert "conversion: there is no net: no file none.param was written" in done.stdout
    cases = {case.get("name"): case for case in ElementTree.parse(tmp_path / "out.xml").iter("testcase")}
    assert set(cases) == {"models/right", "models/wrong", "models/none"}
    assert "accuracy fp32" in (cases["models/wrong"].findtext("failure") or "")
    measured = {p.get("name"): p.get("value") for p in cases["models/right"].iter("property")}
    assert measured["layers"] == "3"


def test_collection(tmp_path: Path) -> None:
    """Files that are named; parts of them; and what is wrong with the file, in one line."""
    file = write_project(tmp_path, "", **dict.fromkeys("abc", MODEL))
    assert "no tests ran" in run(tmp_path, ".", "-q").stdout
    part = run(tmp_path, file.name, "--collect-only", "-q", "--ncnn-shard", "2/2", "--ncnn-modes", "fp16").stdout
    assert part.splitlines()[0] == "ncnn-check.toml::models/b"
    wrong = run(tmp_path, file.name, "--collect-only", "-q", "--ncnn-modes", "int8")
    assert wrong.returncode == 2
    assert "there is no mode 'int8'" in wrong.stdout
    assert "Traceback" not in wrong.stdout
