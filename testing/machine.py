"""What tests marked `needs("Vulkan")` need and a machine may lack; tests/conftest.py leaves them out there."""

import platform
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from onnx2ncnn_opt.errors import RunError, UsageError
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import LOCAL
from testing.browser import find_browser
from testing.handmade import RELU, write_net
from testing.programs import find_headers
from testing.tails import CLANG, COMPILER


def is_arm(worker: NcnnWorker) -> bool:
    """Return True if a worker runs on ARM's 64-bit code."""
    return worker.start().greeting["machine"] in ("aarch64", "arm64")


@cache
def lack(name: str) -> str:
    """Return the reason why this machine lacks it; empty if it does not."""
    return LACKS[name]()


def _vulkan() -> str:
    """Run a net in each mode, because some drivers abort in fp16."""
    with TemporaryDirectory() as folder, NcnnWorker(LOCAL._replace(vulkan=True)) as worker:
        net = write_net(Path(folder), *RELU)
        for mode in worker.target.modes:
            try:
                NcnnRunner(*net, mode=mode, worker=worker).run({"x": np.ones((2, 3), np.float32)})
            except UsageError:
                return "no driver"
            except RunError as error:
                return f"{mode}: {' '.join(str(error).split())[:400]}"
    return ""


def _emulator() -> str:
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"emulators run this Python, which is for {platform.machine()}"
    return "" if shutil.which("qemu-x86_64-static") else "no qemu-x86_64-static"


LACKS: Mapping[str, Callable[[], str]] = {
    "Vulkan": _vulkan,
    "C++": lambda: "" if COMPILER else "no compiler",
    "clang": lambda: "" if CLANG else "no clang++",
    "ncnn's headers": lambda: "" if find_headers() else "not installed, and NCNN_INCLUDE names no folder",
    "browser": lambda: "" if find_browser() else "no Chromium",
    "ssh": lambda: "" if shutil.which("sshd") and shutil.which("ssh") else "no sshd",
    "other x86 CPUs": _emulator,
}
