"""macOS and Windows, as far as Linux can act as them: see testing/systems.py."""

import ast
import ntpath
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt import system
from onnx2ncnn_opt.errors import CrashError, UsageError
from onnx2ncnn_opt.regression.config import read_config
from onnx2ncnn_opt.regression.processes import Processes
from onnx2ncnn_opt.runtime.base import Failure
from onnx2ncnn_opt.runtime.ending import describe_exit
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import find_target
from testing import systems
from testing.command import COMMAND, SINE, names, net_files, run, run_well, write_sine
from testing.handmade import CRASH, ENDLESS, RELU, write_net
from testing.models import parsed, write_model

ROOT = Path(__file__).resolve().parents[2]
X = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)


def test_python_3_10_reads_the_package() -> None:
    """There, a NamedTuple has no other base."""
    for path in (ROOT / "onnx2ncnn_opt").rglob("*.py"):
        classes = (node for node in ast.walk(ast.parse(path.read_bytes(), feature_version=(3, 10))))
        bases = [list(map(ast.unparse, node.bases)) for node in classes if isinstance(node, ast.ClassDef)]
        assert all(names == ["NamedTuple"] for names in bases if "NamedTuple" in names), path


def environment(name: str, folder: Path) -> dict[str, str]:
    """The variables that turn every Python that is started with them into one of another system."""
    (folder / "site").mkdir()
    (folder / "tmp").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(f"from testing.systems import {name}\n{name}()\n")
    (folder / "site" / "taskkill").write_text(systems.TASKKILL)
    (folder / "site" / "taskkill").chmod(0o755)
    paths = filter(None, [str(folder / "site"), str(ROOT), os.environ.get("PYTHONPATH")])
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(folder / "site"), os.environ["PATH"]]),
        "PYTHONWARNDEFAULTENCODING": "1",
        "TMPDIR": str(folder / "tmp"),
    }


@pytest.fixture(params=["macos", "windows"])
def workers(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Workers run on another system; returns its name."""
    for name, value in environment(request.param, tmp_path).items():
        monkeypatch.setenv(name, value)
    if request.param == "windows":
        monkeypatch.delattr(os, "killpg")
    return str(request.param)


@pytest.fixture
def windows(tmp_path: Path) -> dict[str, Any]:
    return environment("windows", tmp_path)


def left(folder: Path) -> set[str]:
    """The temporary folders that are still there."""
    return {name for name in names(folder / "tmp") if name.startswith("onnx2ncnn-opt-")}


def is_gone(process: int) -> bool:
    """True once a process has ended, which takes a moment."""
    end = time.monotonic() + 10
    while (alive := Path(f"/proc/{process}").exists()) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive


def test_workers_end_at_once_and_leave_nothing(tmp_path: Path, workers: str) -> None:
    for on in (None, sys.executable):  # which gets the files over the pipe
        with NcnnWorker(find_target(on)) as worker:
            [y] = NcnnRunner(*write_net(tmp_path, *RELU), worker=worker).run({"x": X}).values()
            np.testing.assert_array_equal(y, np.maximum(X, 0))
            assert len(left(tmp_path)) == (on is not None)
            start = time.monotonic()
        assert time.monotonic() - start < 1.5  # a process that does not end by itself is killed after 2 s
        assert left(tmp_path) == set()


def test_a_worker_that_dies_is_reported_at_once(tmp_path: Path, workers: str) -> None:
    with NcnnWorker() as worker:
        start = time.monotonic()
        result = NcnnRunner(*write_net(tmp_path, *CRASH), worker=worker).extract({"x": X}, ["y", "z"])["z"]
        assert isinstance(result, Failure)
        assert result.reason.startswith("ncnn crashed with SIGSEGV on ")
        assert time.monotonic() - start < 10


def test_a_worker_that_hangs_is_stopped(tmp_path: Path, workers: str) -> None:
    with NcnnWorker() as worker:
        runner = NcnnRunner(*write_net(tmp_path, *ENDLESS), timeout=0.5, worker=worker)
        process = worker.start().process
        assert "did not finish within 0.5 s" in str(runner.extract({"x": X}, ["z"])["z"])
        assert is_gone(process.pid)


CALLER = """
import os, sys, threading
from pathlib import Path
import numpy as np
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
worker = NcnnWorker()
print(worker.start().process.pid, flush=True)
threading.Timer(0.5, os._exit, [9]).start()  # as if it was killed
NcnnRunner(*map(Path, sys.argv[1:]), worker=worker).extract({'x': np.ones((2, 3))}, ['z'])
"""


def test_on_macos_a_worker_ends_with_its_caller(tmp_path: Path) -> None:
    paths = map(str, write_net(tmp_path, *ENDLESS))
    variables = {**os.environ, **environment("macos", tmp_path)}
    ended = subprocess.run([sys.executable, "-c", CALLER, *paths], env=variables, capture_output=True, text=True)
    assert ended.returncode == 9
    assert is_gone(int(ended.stdout))


def test_commands_on_windows(tmp_path: Path, windows: dict[str, Any]) -> None:
    write_model(tmp_path, SINE.replace("Sin(x)", "Relu(x)"))
    before = names(tmp_path)
    run_well(tmp_path, "convert", "model.onnx", "-o", "my net", **windows)
    assert names(tmp_path) == before | net_files("my net")
    net = ("my net.ncnn.param", "my net.ncnn.bin")
    run_well(tmp_path, "optimize", *net, "-o", "optimised", **windows)
    run_well(tmp_path, "report", "model.onnx", *net, "-o", "page.html", **windows)
    run_well(tmp_path, "inspect", net[0], **windows)
    (tmp_path / "ncnn-check.toml").write_text('models = ["*.onnx"]\nthresholds = { latency = inf, memory = inf }\n')
    assert run(tmp_path, "check", "--record", **windows).code == 0
    ended = run(tmp_path, "check", **windows)
    assert ended.lines("passed") == [["1", "of", "1", "models"]], ended.err
    assert left(tmp_path) == set()


OVER_ITSELF = """
import onnx2ncnn_opt
net = onnx2ncnn_opt.optimize("model.ncnn.param", prefix="model.ncnn")
print(net.report.ok, len(net.graph))
net.save("model.ncnn")
"""


def test_a_net_takes_its_own_place_on_windows(tmp_path: Path, windows: dict[str, Any]) -> None:
    """Its weights are in the old file while the new one is written."""
    weights = ", ".join(["0.5"] * 16)
    write_model(tmp_path, f"(float[2, 4] x) => (float[2, 4] y) <float[4, 4] w = {{{weights}}}> {{ y = MatMul(x, w) }}")
    run_well(tmp_path, "convert", "model.onnx", "--no-verify", "--no-optimize", **windows)
    command = [sys.executable, "-c", OVER_ITSELF]
    ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, **windows}, capture_output=True, text=True)
    assert (ended.stdout.split()[:1], ended.stderr) == (["True"], "")
    assert names(tmp_path) == {"model.onnx", "site", "tmp"} | net_files("model")


IN_USE = """
from onnx2ncnn_opt.system import temporary_folder
with temporary_folder() as folder:
    file = open(folder + "/a", "wb")
    open(folder + "/b", "wb").close()
"""


def test_a_file_in_use_stays_in_its_temporary_folder(tmp_path: Path, windows: dict[str, Any]) -> None:
    command = [sys.executable, "-c", IN_USE]
    ended = subprocess.run(command, env={**os.environ, **windows}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    (folder,) = left(tmp_path)
    assert names(tmp_path / "tmp" / folder) == {"a"}


def test_a_wrong_net_is_found_on_windows(tmp_path: Path, windows: dict[str, Any]) -> None:
    write_sine(tmp_path)
    run_well(tmp_path, "convert", "model.onnx", "--no-verify", **windows)
    net = ("model.ncnn.param", "model.ncnn.bin", "--inputs", "in.npz")
    ended = run(tmp_path, "bisect", "model.onnx", *net, "-o", "pair", **windows)
    assert (ended.code, ended.lines("first")) != (0, []), ended.err
    assert left(tmp_path) == set()


def test_a_program_is_a_file_in_utf_8(tmp_path: Path, windows: dict[str, Any]) -> None:
    model = parsed("(float[1, 8] x) => (float[1, 8] y) { y = Relu(x) }")
    model.graph.node[0].input[0] = model.graph.input[0].name = "größe"
    onnx.save(model, tmp_path / "model.onnx")
    run_well(tmp_path, "convert", "model.onnx", "--no-verify", **windows)
    ended = run_well(tmp_path, "example", "model", "-o", "main.cpp", **windows)
    assert ended.out == "wrote: main.cpp\n"
    printed = run_well(tmp_path, "example", "model", PYTHONIOENCODING="utf-8").out
    assert (tmp_path / "main.cpp").read_bytes() == printed.encode()
    assert "größe" in printed


def test_a_reader_that_closes_the_pipe_on_windows(windows: dict[str, Any]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as out:
        variables = {**os.environ, **windows}
        done = subprocess.run([*COMMAND, "ops"], stdout=out, stderr=subprocess.PIPE, timeout=60, env=variables)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_converter_is_ended_with_its_children(
    tmp_path: Path, windows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "killpg")
    monkeypatch.setenv("PATH", windows["PATH"])
    with Processes() as processes:
        ended = processes.run(["sh", "-c", "sleep 60 & echo $!; wait"], seconds=0.5)
    assert ended.how == "did not finish within 0.5 s"
    assert is_gone(int(ended.output))


def test_a_crash_of_windows_has_words() -> None:
    assert describe_exit(3221225477) == "crashed with an access violation (0xC0000005)"
    assert describe_exit(0xC0001234) == "crashed with an exception (0xC0001234)"
    assert describe_exit(1) == "ended with exit code 1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (r"C:\Python311\python.exe -X utf8", ("C:\\Python311\\python.exe", "-X", "utf8")),
        (r'"C:\Program Files\python.exe" {onnx}', (r"C:\Program Files\python.exe", "{onnx}")),
        ("python -c 'print(1) # 2'", ("python", "-c", "print(1) # 2")),
    ],
)
def test_backslashes_of_windows_separate_folders(
    text: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "WINDOWS", True)
    assert find_target(text).command == words
    (tmp_path / "ncnn-check.toml").write_text(f"models = ['a.onnx']\nconvert = '''{text}'''\n")
    assert read_config(tmp_path / "ncnn-check.toml").models[0].convert == words
    with pytest.raises(UsageError, match="is not a command: No closing quotation"):
        find_target('"C:\\')
    assert system.command_line("example", r"C:\my nets\a") == r'onnx2ncnn-opt example "C:\my nets\a"'


def test_a_model_on_another_drive_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ncnn-check.toml"
    file.write_text("models = ['/models/a.onnx']\n")
    monkeypatch.setattr(os.path, "relpath", lambda path, start: ntpath.relpath(f"D:{path}", f"C:{start}"))
    assert [model.name for model in read_config(file).models] == ["models/a"]


def test_a_crash_of_a_remote_python_of_windows_is_no_lost_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = NcnnWorker(find_target(sys.executable))
    process = worker.start().process
    process.kill()
    process.wait()
    monkeypatch.setattr(process, "wait", lambda *_: 0xC0000005)
    with pytest.raises(CrashError, match=r"crashed with an access violation \(0xC0000005\)"):
        NcnnRunner(*write_net(tmp_path, *RELU), worker=worker).run({"x": X})
