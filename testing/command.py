"""The command line as a user has it, in a folder of its own; most of them as forks of one process."""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.runtime.targets import LOCAL
from testing.forks import CAN_FORK, run_command
from testing.models import write_model

COMMAND = (sys.executable, "-m", "onnx2ncnn_opt")
# This machine's CPU in fp32, as reports name it.
HERE = LOCAL.described({"machine": platform.machine()}, ["fp32"])


@dataclass(frozen=True)
class Ended:
    """The end of a command, and its output."""

    code: int
    out: str
    err: str

    def lines(self, label: str) -> list[list[str]]:
        """Return the words of the lines of stdout that start with a label."""
        return [line.split()[1:] for line in self.out.splitlines() if line.startswith(f"{label}:")]


def run(folder: Path, *args: str | Path, **environment: str) -> Ended:
    """Run ``onnx2ncnn-opt ARGS`` in a folder, and leave out its progress reports, which depend on the machine's load.

    The command must not crash, and must not print a traceback. It is a fork (testing/forks.py). With variables of an
    `environment` that Python reads at its start, it starts as a user's command does.
    """
    words = [*map(str, args)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if environment.keys() <= {"PYTHONPATH"} and CAN_FORK:
            code = run_command(folder, words, environment.get("PYTHONPATH", ""), out.fileno(), err.fileno())
        else:
            variables = {**os.environ, **environment}
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            code = subprocess.run(
                [*COMMAND, *words], cwd=folder, env=variables, **streams, timeout=600, check=False
            ).returncode
        out.seek(0), err.seek(0)
        printed, said = out.read().decode(), err.read().decode()
    assert "Traceback" not in said, said
    assert "\x1b" not in printed + said
    return Ended(code, printed, without_progress(said))


def run_well(folder: Path, *args: str | Path, **environment: str) -> Ended:
    """Run a command that has to succeed, without a word on stderr."""
    ended = run(folder, *args, **environment)
    assert (ended.code, ended.err) == (0, ""), ended
    return ended


def refused(folder: Path, *args: str | Path, code: int = 2, **environment: str) -> str:
    """Run a command that has to fail, to print nothing else and to write no files; return its error in one line."""
    before = names(folder)
    ended = run(folder, *args, **environment)
    assert (ended.code, ended.out, names(folder)) == (code, "", before)
    return " ".join(ended.err.split())


def install_plugin(folder: Path, code: str, **points: str) -> dict[str, Any]:
    """Put a package `my_plugin` into FOLDER/site, as pip does, with entry points by their groups.

    Return the environment of a command that finds it.
    """
    site = folder / "site"
    info = site / "my_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "my_plugin.py").write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    groups = [f"[onnx2ncnn_opt.{group}]\nmine = my_plugin:{name}\n" for group, name in points.items()]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return with_plugin(folder)


def with_plugin(folder: Path) -> dict[str, Any]:
    """Return the environment with FOLDER/site before what is on PYTHONPATH already."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))}


def without_progress(err: str) -> str:
    """Return a command's stderr without its progress reports, such as `converting: ... (20% in 2 s)`."""
    return re.sub(r"^.* \((\d+% in )?\d+ s\)\n", "", err, flags=re.MULTILINE)


def names(folder: Path) -> set[str]:
    """Return everything in a folder, hidden files too."""
    return {path.name for path in folder.iterdir()}


def shown_nets(page: Path) -> list[dict[str, Any]]:
    """Return what a report page shows."""
    found = re.search(r'type="application/json">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    data = json.loads(found[1])
    assert data["tool"].startswith("onnx2ncnn-opt ")
    return list(data["nets"])


def net_files(stem: str) -> set[str]:
    """Return the names of the files that `convert` writes."""
    return {f"{stem}.ncnn.{suffix}" for suffix in ("param", "bin", "json")}


# A ReLU that goes into the convolution, and a Swish that is none, because the Sigmoid is used elsewhere.
SMALL = (
    "(float[1, 3, 8, 8] x) => (float[1, 2, 8, 8] y, float[1, 2, 8, 8] z)"
    "<float[2, 3, 1, 1] w = {0.5, -0.25, 0.125, 0.3, 0.2, -0.7}>"
    "{ c = Conv(x, w) r = Relu(c) s = Sigmoid(r) y = Mul(r, s) z = Softmax<axis = 1>(s) }"
)
# ncnn's sine is not made for arguments of 1e10: a true difference, on inputs that show it.
SINE = "(float[1, 8] x) => (float[1, 8] y, float[1, 8] z) { y = Sin(x) z = Neg(x) }"
SINE_AT = [[1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10]]


def write_sine(folder: Path) -> None:
    """Write a model that ncnn computes wrong, and in.npz, inputs that show it."""
    write_model(folder, SINE)
    np.savez(folder / "in.npz", x=np.asarray(SINE_AT, np.float32))
