"""Places to run ncnn: this machine's CPU, its GPU, an emulated phone's CPU, or any Python that a command starts."""

import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from onnx2ncnn_opt.errors import UsageError, check_options
from onnx2ncnn_opt.runtime import base
from onnx2ncnn_opt.system import split_command

# The number formats of storage and arithmetic. Each mode sets every option, because defaults differ between releases,
# and ncnn's default is fp16 on devices that have it.
MODES: Mapping[str, Mapping[str, bool]] = {
    mode: {
        **dict.fromkeys(("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic"), mode == "fp16"),
        **dict.fromkeys(("use_bf16_packed", "use_bf16_storage"), mode == "bf16"),
    }
    for mode in ("fp32", "fp16", "bf16")
}

QEMU_VARIABLE = "ONNX2NCNN_OPT_QEMU_AARCH64"
_FORMS = "vulkan, qemu-aarch64, qemu-x86_64[:CPU], ssh:user@host, or a command that starts Python"
_MACHINES = {"x86_64": "x86-64", "AMD64": "x86-64", "arm64": "aarch64"}


class Target(NamedTuple):
    """A Python with numpy and ncnn, and the command that starts it."""

    command: tuple[str, ...]
    note: str = ""  # follows the machine in reports
    vulkan: bool = False
    shares_files: bool = True  # it can read the files of this machine; otherwise they are sent
    is_remote: bool = False  # the command only connects to it, and may lose the connection
    patience: float = 1.0  # a factor for time limits

    @property
    def is_local(self) -> bool:
        """True if it is the Python of this process."""
        return self.command == _THIS_PYTHON

    @property
    def modes(self) -> tuple[str, ...]:
        """The default modes of verification: fp32, and on a device fp16, ncnn's default there."""
        return ("fp32",) if self == LOCAL else ("fp32", "fp16")

    def require(self) -> None:
        """Raise UsageError if ncnn is missing on this machine; other targets are not checked."""
        if self.is_local:
            base.require("ncnn")

    def described(self, greeting: Mapping[str, str], modes: Sequence[str]) -> str:
        """Describe the machine of a worker's greeting and the modes for users."""
        machine = "Vulkan" if self.vulkan else _MACHINES.get(greeting["machine"], greeting["machine"])
        note = greeting.get("gpu", self.note)
        modes = [greeting.get(mode, mode) for mode in modes]
        return f"{machine} {', '.join(modes)}{f' ({note})' if note else ''}"


_THIS_PYTHON = (sys.executable,)
LOCAL = Target(_THIS_PYTHON)


def find_target(on: str | None) -> Target:
    """Return the target of ``--on``, this machine's CPU for None; UsageError for an unknown form."""
    if on is None:
        return LOCAL
    if not isinstance(on, str):
        raise UsageError(f"on has to be {_FORMS}, not {on!r:.80}")
    if on == "vulkan":
        return Target(_THIS_PYTHON, vulkan=True)
    if on == "qemu-aarch64":
        return Target((_qemu_python(),), note="qemu", is_remote=True, patience=10.0)
    if on.partition(":")[0] == "qemu-x86_64":
        cpu = on.removeprefix("qemu-x86_64").removeprefix(":") or "Haswell"
        return Target(_qemu_x86_64(cpu), note=f"qemu {cpu}", is_remote=True, patience=10.0)
    if on.startswith("ssh:"):
        host = on.removeprefix("ssh:")
        if not host or host.startswith("-") or any(character.isspace() for character in host):
            raise UsageError(f"--on ssh: takes user@host, not '{host}'")
        # Nobody can type a password. ssh notices a lost connection within a minute.
        alive = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=20")
        return Target(("ssh", "-T", *alive, "--", host, "python3"), note=host, shares_files=False, is_remote=True)
    try:
        command = split_command(on)
    except ValueError as error:
        raise UsageError(f"--on '{on}' is not a command: {error}") from error
    if not command:
        raise UsageError(f"--on takes {_FORMS}")
    return Target(command, note=on, shares_files=False, is_remote=True)


def check_modes(modes: Sequence[str]) -> tuple[str, ...]:
    """Return the modes without duplicates; UsageError for an unknown mode."""
    check_options(modes=modes)
    for mode in modes:
        if not isinstance(mode, str) or mode not in MODES:
            raise UsageError(f"there is no mode '{mode}'; modes are {', '.join(MODES)}")
    return tuple(dict.fromkeys(modes))


def qemu_folder() -> Path:
    """Return the default folder of the emulated Python."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "onnx2ncnn-opt" / "qemu-aarch64"


def _qemu_x86_64(cpu: str) -> tuple[str, ...]:
    """Return the command that runs this Python on another x86 CPU: ncnn has different code for each."""
    if _MACHINES.get(platform.machine(), platform.machine()) != "x86-64":
        raise UsageError(f"--on qemu-x86_64 runs this Python, which is for {platform.machine()}; take ssh:user@host")
    emulator = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
    if emulator is None:
        raise UsageError("there is no qemu-x86_64-static; on Debian and Ubuntu: apt-get install qemu-user-static")
    # The variable may name OpenBLAS kernels for this machine's CPU that the emulated CPU cannot run.
    return (emulator, "-U", "OPENBLAS_CORETYPE", "-cpu", cpu, sys.executable)


def _qemu_python() -> str:
    path = os.environ.get(QEMU_VARIABLE)
    python = Path(path) if path else qemu_folder() / "python"
    if not os.access(python, os.X_OK) or python.is_dir():
        raise UsageError(
            f"there is no aarch64 Python at {python}; `python -m onnx2ncnn_opt.runtime.qemu_aarch64` prepares one on "
            f"Debian and Ubuntu in a minute, and {QEMU_VARIABLE} names another"
        )
    return os.fspath(python)
