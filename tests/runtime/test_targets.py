"""Nets in other Pythons: what reaches them, what comes back, and every way in which that may fail."""

import ast
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.errors import CrashError, RunError, UsageError
from onnx2ncnn_opt.runtime import base, child, targets
from onnx2ncnn_opt.runtime._worker import GREETING
from onnx2ncnn_opt.runtime.base import Failure
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import MODES, find_target
from testing import present
from testing.handmade import CRASH, ENDLESS, RELU, raw, write_net

X = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)


def script(folder: Path, *lines: str, name: str = "there") -> str:
    """A command; `$PYTHON` in its lines is this Python."""
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", f"PYTHON={shlex.quote(sys.executable)}", *lines, ""]))
    path.chmod(0o755)
    return shlex.quote(str(path))


def soon(condition: Callable[[], bool]) -> bool:
    """Return True once the program there has cleaned up, which it does by itself in a moment."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def is_empty(folder: Path) -> bool:
    return soon(lambda: not list(folder.iterdir()))


@pytest.fixture
def board(tmp_path: Path) -> Iterator[NcnnWorker]:
    # As ssh and adb do: arguments are joined and given to a shell, which says hello first, on both streams; and the
    # folder of its temporary files is its own.
    (tmp_path / "tmp").mkdir()
    command = script(
        tmp_path, "echo Welcome", "echo motd >&2", f'export TMPDIR={tmp_path / "tmp"}; exec sh -c "$PYTHON $*"'
    )
    with NcnnWorker(find_target(command)) as worker:
        yield worker


def test_nets_go_over_the_pipe_once_and_results_come_back(tmp_path: Path, board: NcnnWorker) -> None:
    lines = ("Input in 0 1 x", "MemoryData m 0 1 c 0=3", "BinaryOp add 2 1 x c y")
    paths = write_net(tmp_path, *lines, weights=raw([1, 2, 3]))
    for mode in MODES:
        [y] = NcnnRunner(*paths, mode=mode, worker=board).run({"x": X}).values()
        np.testing.assert_array_equal(y, X + np.array([1, 2, 3], np.float32))
    [folder] = (tmp_path / "tmp").iterdir()
    assert len(list(folder.iterdir())) == 2  # one .param, one .bin
    board.close()
    assert is_empty(tmp_path / "tmp")


def test_a_remote_crash_differs_from_a_lost_connection(tmp_path: Path, board: NcnnWorker) -> None:
    runner = NcnnRunner(*write_net(tmp_path, *CRASH), worker=board)
    results = runner.extract({"x": X}, ["y", "z"])
    np.testing.assert_array_equal(results["y"], np.maximum(X, 0))
    assert isinstance(results["z"], Failure)
    assert results["z"].reason.startswith("ncnn crashed with SIGSEGV on ")
    assert is_empty(tmp_path / "tmp")
    process = board.start().process

    def lose() -> None:
        with board.session(runner) as lost:
            os.killpg(process.pid, signal.SIGKILL)  # nothing of it can say a word
            lost.receive()

    with pytest.raises(CrashError, match=r"no word of the worker \(a lost connection\?\)"):
        lose()


def test_a_remote_net_that_does_not_end_is_stopped_and_cleaned_up(tmp_path: Path, board: NcnnWorker) -> None:
    runner = NcnnRunner(*write_net(tmp_path, *ENDLESS), timeout=1, worker=board)
    results = runner.extract({"x": X}, ["z"])
    assert isinstance(results["z"], Failure)
    assert "did not finish within 1 s" in results["z"].reason
    assert is_empty(tmp_path / "tmp")


def test_a_remote_worker_ends_with_its_caller(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = script(tmp_path, f"echo $$ > {pid}", 'exec "$PYTHON" "$@"')
    paths = write_net(tmp_path, *ENDLESS)
    code = (
        "import os, sys, threading; import numpy as np; from pathlib import Path\n"
        "from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker\n"
        "from onnx2ncnn_opt.runtime.targets import find_target\n"
        "worker = NcnnWorker(find_target(sys.argv[1])); worker.start()\n"
        "threading.Timer(0.5, os._exit, [9]).start()\n"  # as if it was killed
        "NcnnRunner(Path(sys.argv[2]), Path(sys.argv[3]), worker=worker).extract({'x': np.ones((2, 3))}, ['z'])\n"
    )
    assert subprocess.run([sys.executable, "-c", code, command, *map(str, paths)]).returncode == 9
    assert soon(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists())


FORKING = """
import os
from pathlib import Path
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.runtime.ort import SHARED
workers = SHARED, NcnnWorker()
for worker in workers:
    worker.warm_up()
for worker in workers:
    process = worker.start().process.pid
    assert Path(f"/proc/{process}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes()
    print(process, flush=True)
os._exit(9)  # as if it was killed
"""


def test_the_workers_of_a_command_are_forks(tmp_path: Path) -> None:
    """They take no module from the current folder, and end with the command."""
    (tmp_path / "main.py").write_text(FORKING)
    (tmp_path / "ncnn.py").write_text("import a_module_that_nobody_has")
    command = [sys.executable, "-m", "main"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (9, "")
    processes = done.stdout.split()
    assert len(processes) == 2
    assert soon(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['exec "$PYTHON" -S "$@"'], r"No module named '\w+'; `python3 -m pip install -U numpy ncnn` there"),
        (["echo no such host >&2; exit 255"], r"exit code 255 .*lost connection.*no such host"),
        (["exec cat"], "sent an invalid reply"),
        (["exec yes"], r"sent an invalid reply: 'y\\n'"),
        (["exec true"], "exit code 0 and no word of the worker"),
    ],
)
def test_a_command_that_starts_no_worker(
    tmp_path: Path, lines: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(child, "_PATIENCE", 0.2)
    runner = NcnnRunner(*write_net(tmp_path, *RELU), worker=NcnnWorker(find_target(script(tmp_path, *lines))))
    with pytest.raises(UsageError, match=message):
        runner.run({"x": X})


NESTED = b"[" * 200_000 + b"\n"
GREETED = b'{"ncnn": "1.0.99999999", "machine": "x", "mark": "1"}\n'
SENT = GREETED + b"{}\n{}\n"  # it has both files
LOADED = SENT + b'{"inputs": ["x"], "outputs": ["y"]}\n{}\n'  # and was fed
REPLIES = {
    "no JSON": b"Welcome\n",
    "a number": b"7\n",
    "a list": b"[]\n",
    "nothing in it": b"{}\n",
    "nested": NESTED,
    "an endless line": b"",
    "an error that is a number": b'{"error": 1, "mark": "1"}\n',
    "an error without its mark": b'{"error": "no"}\n',
    "text that no terminal prints": b'{"error": "\\ud800", "mark": "1"}\n',
    "a long number": b"9" * 5000 + b"\n",
}
ARRAYS = {
    "an object": b'{"dtype": "|O", "shape": [1]}\n',
    "a type of numpy that is none": b'{"dtype": "((((", "shape": [1]}\n',
    "a shape that is a number": b'{"dtype": "<f4", "shape": 1}\n',
    "a size below 0": b'{"dtype": "<f4", "shape": [-1]}\n',
    "too many elements": b'{"dtype": "<f4", "shape": [1000000, 1000000]}\n',
    "an axis of 2**70": b'{"dtype": "<f4", "shape": [0, %d]}\n' % 2**70,
    "a hundred axes": b'{"dtype": "<f4", "shape": [%s1]}\n' % (b"1, " * 99),
}
HOSTILE = {
    **{f"its greeting is {title}": reply for title, reply in REPLIES.items()},
    "its greeting has no machine": b'{"ncnn": "1.0.99999999", "mark": "1"}\n',
    "its greeting has a number": b'{"ncnn": 1, "machine": "x", "mark": "1"}\n',
    **{f"its answer is {title}": SENT + reply for title, reply in REPLIES.items()},
    "its answer has names that are none": SENT + b'{"inputs": "x", "outputs": [7]}\n',
    **{f"its result is {title}": LOADED + reply for title, reply in {**REPLIES, **ARRAYS}.items()},
}


@pytest.mark.parametrize("title", list(HOSTILE))
def test_a_hostile_device_is_one_error_and_takes_no_memory(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_PATIENCE", 0.05)
    (tmp_path / "sent").write_bytes(GREETING + HOSTILE[title])
    goes_on = "tr '\\\\n' x < /dev/zero | tr '\\\\0' x" if "endless" in title else "sleep 60"
    command = script(tmp_path, f"cat {tmp_path / 'sent'}", f"({goes_on}) & cat > /dev/null; wait")
    tracemalloc.start()
    try:
        with NcnnWorker(find_target(command)) as worker:
            try:
                net = NcnnRunner(*write_net(tmp_path, *RELU), worker=worker, timeout=10)
                message = str(net.extract({"x": X}, ["y"])["y"])
            except (RunError, UsageError) as error:
                message = str(error)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "sent an invalid reply" in message
    assert len(message) < 2000
    assert message.isprintable()
    assert peak < 64 << 20


def test_a_device_that_cannot_tell_its_memory(tmp_path: Path) -> None:
    (tmp_path / "sent").write_bytes(GREETING + GREETED + b'{"error": "no", "mark": "2"}\n')
    with NcnnWorker(find_target(script(tmp_path, f"cat {tmp_path / 'sent'} -"))) as worker:
        assert worker.memory() is None


def test_a_device_with_a_wrong_report_of_its_end(tmp_path: Path) -> None:
    number = "9" * 5000
    command = script(tmp_path, f"printf '\\\\0crashed {number}\\\\0' >&2; exit 3")
    with pytest.raises(UsageError, match="exit code 3"), NcnnWorker(find_target(command)) as worker:
        worker.start()


def test_an_ncnn_that_is_too_old_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "ncnn.py").write_text("__version__ = '1.0.20240820'\n")
    command = script(tmp_path, f'PYTHONPATH={tmp_path / "site"} exec "$PYTHON" "$@"')
    runner = NcnnRunner(*write_net(tmp_path, *RELU), worker=NcnnWorker(find_target(command)))
    with pytest.raises(UsageError, match=r"its ncnn is 1\.0\.20240820, but has to be " + base.OLDEST["ncnn"]):
        runner.run({"x": X})


def test_a_worker_that_does_not_start_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx2ncnn_opt.runtime.ncnn._SECONDS_TO_START", 0.5)
    monkeypatch.setattr(child, "_PATIENCE", 0.2)
    runner = NcnnRunner(*write_net(tmp_path, *RELU), worker=NcnnWorker(find_target(script(tmp_path, "exec sleep 60"))))
    with pytest.raises(UsageError, match=r"did not finish within 0\.5 s"):
        runner.run({"x": X})


def test_modules_of_the_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "numpy", "ncnn", "resource"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('from the folder')")
    monkeypatch.chdir(tmp_path)
    with NcnnRunner(*write_net(tmp_path, *RELU)) as runner:
        assert "y" in runner.run({"x": X})


def test_files_that_cannot_be_read(tmp_path: Path, board: NcnnWorker) -> None:
    with pytest.raises(RunError, match=r"cannot read .*missing\.param"):
        NcnnRunner(tmp_path / "missing.param", tmp_path / "missing.bin", worker=board).run({"x": X})


def test_16_bits_are_used_only_in_their_modes(tmp_path: Path, worker: NcnnWorker) -> None:
    near = np.array([1 + 2.0**-9], np.float32)
    found = {
        mode: NcnnRunner(*write_net(tmp_path, *RELU), mode=mode, worker=worker).run({"x": near})["y"] for mode in MODES
    }
    assert found["fp32"] == near
    assert found["bf16"] == 1
    flags = {mode: {name for name, on in options.items() if on} for mode, options in MODES.items()}
    assert flags["fp32"] == set()
    assert len({frozenset(options) for options in MODES.values()}) == 1  # each mode sets every option
    assert not flags["fp16"] & flags["bf16"]


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("ssh:", "takes user@host"),
        ("ssh:-oProxyCommand=x", "takes user@host"),
        ("ssh:a b", "takes user@host"),
        ("'", "is not a command"),
        ("", "takes vulkan, qemu-aarch64"),
    ],
)
def test_invalid_targets(on: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_target(on)


def test_ssh_asks_for_no_password_and_takes_no_options_for_a_host() -> None:
    target = find_target("ssh:pi@board")
    assert target.command[0] == "ssh"
    assert target.command[-3:] == ("--", "pi@board", "python3")
    assert "BatchMode=yes" in target.command
    assert target.described({"machine": "aarch64"}, ["fp32", "fp16"]) == "aarch64 fp32, fp16 (pi@board)"
    old = {"machine": "aarch64", "fp16": "fp16 storage"}
    assert target.described(old, ["fp32", "fp16"]) == "aarch64 fp32, fp16 storage (pi@board)"


def ssh_hosts(folder: Path, port: int) -> list[str]:
    """An ssh in a folder that knows the host `here`, with this Python, `bare`, with one without packages, and `off`,
    where nothing listens; returns the options of the server of the first two."""
    pythons = {"here": sys.executable, "bare": f"{sys.executable} -S"}
    keys, hosts = [], ["Host off", "HostName 127.0.0.1", "Port 1"]
    for name in ("key", *pythons):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    for host, python in pythons.items():
        (folder / f"on_{host}").mkdir()
        script(folder / f"on_{host}", f'exec {python} "$@"', name="python3")
        command = f"PATH={folder}/on_{host}:$PATH; eval $SSH_ORIGINAL_COMMAND"
        keys.append(f'command="{command}" {(folder / f"{host}.pub").read_text()}')
        hosts += [f"Host {host}", "HostName 127.0.0.1", f"Port {port}", f"IdentityFile {folder / host}"]
        hosts += ["IdentitiesOnly yes", "StrictHostKeyChecking no", "UserKnownHostsFile /dev/null", "LogLevel ERROR"]
    (folder / "keys").write_text("".join(keys))
    (folder / "config").write_text("\n".join([*hosts, ""]))
    script(folder, f'exec {shutil.which("ssh")} -F {folder / "config"} "$@"', name="ssh")
    options = [f"ListenAddress=127.0.0.1:{port}", f"HostKey={folder / 'key'}", f"AuthorizedKeysFile={folder / 'keys'}"]
    return [f"-o{option}" for option in (*options, "StrictModes=no", "UsePAM=no", "PidFile=none")]


@pytest.mark.needs("ssh")
def test_nets_run_over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = present(shutil.which("sshd"))  # sshd demands its whole path
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options = ssh_hosts(tmp_path, free.getsockname()[1])
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # one of root does not start without
    with subprocess.Popen([server, "-D", "-e", "-f", "/dev/null", *options], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"listening" in process.stderr.readline()
        with NcnnWorker(find_target("ssh:here")) as worker:
            net = NcnnRunner(*write_net(tmp_path, *RELU), worker=worker)
            for _ in range(2):
                np.testing.assert_array_equal(net.run({"x": X})["y"], np.maximum(X, 0))
                assert worker.checked(["fp32"]).endswith(" fp32 (here)")
                threading.Timer(0.5, worker.start().process.kill).start()  # the connection
                with pytest.raises(RunError, match=r"no word of the worker \(a lost connection\?\)"):
                    NcnnRunner(*write_net(tmp_path, *ENDLESS, stem="endless"), worker=worker).run({"x": X})
        for host, message in (("bare", "No module named '.*'; `python3 -m pip install"), ("off", "Connection refused")):
            with pytest.raises(UsageError, match=message), NcnnWorker(find_target(f"ssh:{host}")) as worker:
                worker.start()
        process.kill()


def test_an_aarch64_python_is_missed_with_the_command_that_prepares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(targets.QEMU_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=r"python -m onnx2ncnn_opt\.runtime\.qemu_aarch64"):
        find_target("qemu-aarch64")
    monkeypatch.setenv(targets.QEMU_VARIABLE, sys.executable)
    assert find_target("qemu-aarch64").command == (sys.executable,)


def test_another_x86_cpu_runs_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(UsageError, match="apt-get install qemu-user-static"):
        find_target("qemu-x86_64")
    emulator = tmp_path / "qemu-x86_64-static"
    unset = 'unset "$2"; shift 2; test "$OPENBLAS_CORETYPE" && exit 132'
    emulator.write_text(
        f'#!/bin/sh\n{unset}\n[ $2 = Nehalem ] && shift 2 && exec "$@"\necho unable to find $2 >&2; exit 1\n'
    )
    emulator.chmod(0o755)
    assert find_target("qemu-x86_64").command[-3:] == ("-cpu", "Haswell", sys.executable)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    with NcnnWorker(find_target("qemu-x86_64:Nehalem")) as worker:
        assert worker.checked(["fp32"]).endswith(" fp32 (qemu Nehalem)")
    with pytest.raises(UsageError, match="unable to find none"), NcnnWorker(find_target("qemu-x86_64:none")) as worker:
        worker.start()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(UsageError, match="which is for aarch64"):
        find_target("qemu-x86_64")


def test_a_missing_driver_of_vulkan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(name, "/none")
    with NcnnWorker(find_target("vulkan")) as worker, pytest.raises(UsageError, match="mesa-vulkan-drivers"):
        worker.start()


@pytest.mark.needs("Vulkan")
def test_vulkan_runs(tmp_path: Path) -> None:
    with NcnnWorker(find_target("vulkan")) as worker:
        checked = worker.checked(["fp32"])
        [y] = NcnnRunner(*write_net(tmp_path, *RELU), worker=worker).run({"x": X}).values()
    np.testing.assert_array_equal(y, np.maximum(X, 0))
    assert checked.startswith("Vulkan fp32 (")


@pytest.mark.parametrize("name", ["_worker.py", "_ncnn_net.py", "_ncnn_worker.py"])
def test_workers_run_in_python_3_8(name: str) -> None:
    source = (Path(child.__file__).parent / name).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert any(node.module == "__future__" for node in imports)  # so that no annotation is evaluated
    assert not any((node.module or "").startswith("onnx2ncnn_opt") for node in imports)
