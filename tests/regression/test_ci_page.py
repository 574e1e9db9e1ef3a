"""What docs/ci.md says is what a user gets: its lists of models, and the shell steps of its workflows."""

import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from onnx2ncnn_opt.cli.main import main
from onnx2ncnn_opt.regression.config import read_config
from onnx2ncnn_opt.regression.run import check
from scripts import user_pages
from testing.command import Ended, run
from testing.projects import MODEL, write_project, write_right_net

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_lists_of_models(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "exports").mkdir()
    for name in ("models/a.onnx", "exports/detector.onnx"):
        (tmp_path / name).touch()
    for text in blocks("toml"):
        (tmp_path / "ncnn-check.toml").write_text(text)
        config = read_config(tmp_path / "ncnn-check.toml")
        assert {model.name for model in config.models} >= {"models/a"}
    assert config.models[0].convert[-3:] == ("-", "{onnx}", "{out}")


def test_every_key_is_on_the_page() -> None:
    from onnx2ncnn_opt.regression import config

    section = PAGE.partition("| key | meaning |")[2].partition("\n\n")[0]
    keys = set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE))
    known = {key for key in config._FILE_KEYS if key not in ("model", "thresholds")}
    assert keys == known | {f"thresholds.{key}" for key in config._THRESHOLD_KEYS}


def shell(workflow: str) -> list[str]:
    """The shell of the steps of a GitHub workflow or action."""
    return [textwrap.dedent(text) for text in re.findall(r"^ +run: \|\n((?: {8,}.*\n)+)", workflow, re.MULTILINE)]


def steps() -> list[str]:
    """The shell of GitHub's steps, and of GitLab's, in order."""
    _, github, gitlab = blocks("yaml")
    found = shell(github)
    script = gitlab.partition("script:\n")[2].partition("  artifacts:")[0]
    return [*found, *(line.strip().removeprefix("- ") for line in script.splitlines())]


ACTION = (ROOT / "action.yml").read_text(encoding="utf-8")


def test_the_action_has_the_inputs_that_the_page_gives() -> None:
    example, *_ = blocks("yaml")
    inputs = set(re.findall(r"^  ([\w-]+):$", ACTION.partition("\ninputs:\n")[2].partition("\nruns:")[0], re.MULTILINE))
    given = set(re.findall(r"^ {10}([\w-]+):", example.partition("onnx2ncnn-opt/onnx2ncnn-opt@")[2], re.MULTILINE))
    rows = set(re.findall(r"^\| `([\w-]+)` \|", PAGE.partition("| input |")[2].partition("\n\n")[0], re.MULTILINE))
    assert given
    assert given <= inputs
    assert rows == inputs == set(re.findall(r"inputs\.([\w-]+)", ACTION))


def test_the_steps_of_the_workflows(tmp_path: Path, quick: None) -> None:
    """All of them but those that download."""
    install, emulator, github, install_too, gitlab = steps()
    install_action, emulator_too, action = shell(ACTION)
    assert install_action.startswith('python -m pip install "$GITHUB_ACTION_PATH[verify]"')
    assert emulator_too == emulator
    assert install.strip() == install_too == "python -m pip install -r requirements-ncnn.txt"
    assert emulator.strip() == "python -m onnx2ncnn_opt.runtime.qemu_aarch64"
    folder = tmp_path / "project"
    folder.mkdir()
    file = write_project(folder, 'net = "a.param"\nthresholds = { latency = inf, memory = inf }\n', a=MODEL)
    write_right_net(folder, "a", folder / "models" / "a.onnx")
    assert check(file, record=True).ok
    program = tmp_path / "bin" / "onnx2ncnn-opt"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m onnx2ncnn_opt "$@"\n')
    program.chmod(0o755)
    root = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(program.parent), os.environ["PATH"]]),
        "PYTHONPATH": root,
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "DEVICE": "",
        "SHARD": "1/2",
        "FILE": "ncnn-check.toml",
        "MODES": "",
        "KEEP": "failed-nets",
        "CI_NODE_INDEX": "1",
        "CI_NODE_TOTAL": "1",
    }
    for step in (action, github, gitlab):
        command = ["bash", "-e", "-o", "pipefail", "-c", step]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "passed: 1 of 1 models" in done.stdout
        assert ElementTree.parse(folder / "junit.xml").getroot()[0].get("tests") == "1"
        (folder / "junit.xml").unlink()
    assert "| models/a | ok |" in (tmp_path / "summary.md").read_text()


def test_the_page_for_people_who_keep_a_converter_honest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    """`check` runs in this process, where nets are judged quickly."""

    def command(folder: Path, *words: str) -> Ended:
        if words[0] != "check":
            return run(folder, *words)
        monkeypatch.chdir(folder)
        return Ended(main(words), *capsys.readouterr())

    user_pages.compare(ROOT / "docs" / "honest-converter.md", tmp_path, command)
