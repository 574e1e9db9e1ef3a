"""An aarch64 Python with numpy and ncnn, run by qemu, for ``--on qemu-aarch64``.

    python -m onnx2ncnn_opt.runtime.qemu_aarch64 [FOLDER]

The command downloads Debian's packages and unpacks them into FOLDER (by default the cache folder that ``--on`` uses).
It installs nothing and needs no root. It needs apt-get, dpkg-deb and pip, half a minute and 300 MB. If ncnn is
installed in this Python, the aarch64 Python gets the same version. FOLDER/python takes the arguments of python3. It has
the arithmetic of a phone's CPU (NEON, fp16), at about a tenth of this machine's speed.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from onnx2ncnn_opt.errors import Error, UsageError
from onnx2ncnn_opt.runtime.targets import qemu_folder
from onnx2ncnn_opt.system import temporary_folder

_ARM_PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6", "libgomp1")
_EMULATOR = "qemu-aarch64-static"
_TOOLS = ("apt-get", "dpkg-deb")
# Platform tags of wheels, for newer and older C libraries.
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


def prepare(folder: Path) -> Path:
    """Fill the folder and return its command. Raises UsageError if a tool is missing or the command does not work."""
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            raise UsageError(
                f"{tool} is missing: this works on Debian and Ubuntu; see docs/devices.md for other systems"
            )
    root, site = folder / "root", folder / "site"
    for path in (root, site):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    with temporary_folder() as scratch:
        _unpack("arm64", _ARM_PACKAGES, root, Path(scratch) / "arm64")
        emulator = shutil.which(_EMULATOR)
        if emulator is None:
            _unpack("", ("qemu-user-static",), folder / "qemu", Path(scratch) / "native")
            emulator = os.fspath(folder / "qemu" / "usr" / "bin" / _EMULATOR)
        pythons = sorted((root / "usr" / "bin").glob("python3.*[0-9]"))
        if not pythons:
            raise UsageError(f"{root / 'usr' / 'bin'}: Debian's python3-minimal contains no python3.x")
        _install_wheels(pythons[0].name.removeprefix("python"), site)
    command = [emulator, "-L", os.fspath(root), "-E", f"PYTHONHOME={root / 'usr'}", "-E", f"PYTHONPATH={site}"]
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\nexec {shlex.join(command)} {shlex.quote(os.fspath(pythons[0]))} "$@"\n', encoding="utf-8"
    )
    script.chmod(0o755)
    text = _run([os.fspath(script), "-c", "import platform, numpy, ncnn; print(platform.machine(), ncnn.__version__)"])
    if text.split()[:1] != ["aarch64"]:
        raise UsageError(f"{script} does not run as an aarch64 Python; it printed: {text}")
    return script


def _unpack(architecture: str, packages: Sequence[str], into: Path, scratch: Path) -> None:
    """Download packages with their dependencies and unpack them; apt-get keeps its lists in `scratch`."""
    for name in ("lists/partial", "archives/partial"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()  # the list of installed packages is empty, so apt-get downloads all of them
    options = [
        *("-o", f"Dir::State={scratch}", "-o", f"Dir::State::Lists={scratch / 'lists'}"),
        *("-o", f"Dir::State::status={scratch / 'status'}", "-o", f"Dir::Cache={scratch}"),
        *("-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=", "-o", "APT::Install-Recommends=0"),
    ]
    if architecture:
        options += ["-o", f"APT::Architecture={architecture}", "-o", f"APT::Architectures::={architecture}"]
    _run(["apt-get", "-q", *options, "update"])
    if architecture:
        _run(["apt-get", "-q", "-y", *options, "--download-only", "install", *packages])
    else:  # a static program has no dependencies
        _run(["apt-get", "-q", *options, "download", *packages], scratch / "archives")
    archives = sorted((scratch / "archives").glob("*.deb"))
    if not archives:
        raise UsageError(f"apt-get has downloaded none of {', '.join(packages)}")
    into.mkdir(parents=True, exist_ok=True)
    for archive in archives:
        _run(["dpkg-deb", "-x", os.fspath(archive), os.fspath(into)])


def _install_wheels(python: str, site: Path) -> None:
    """Install numpy and ncnn for an aarch64 Python of this version."""
    try:
        ncnn = f"ncnn=={version('ncnn')}"
    except PackageNotFoundError:
        ncnn = "ncnn"
    platforms = [word for platform in _PLATFORMS for word in ("--platform", f"{platform}_aarch64")]
    target = ["--target", os.fspath(site), "--only-binary=:all:", "--no-deps", "--implementation", "cp"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    _run([*pip, *target, "--python-version", python, *platforms, "numpy", ncnn])


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a command and return its output. Raises UsageError with the error output if it fails."""
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise UsageError(f"`{shlex.join(command)}` cannot be run: {error}") from error
    if ended.returncode:
        printed = re.sub(r"\s*\n\s*", "; ", (ended.stderr or ended.stdout).strip())
        raise UsageError(f"`{shlex.join(command)}` ended with exit code {ended.returncode}: {printed[-1000:]}")
    return ended.stdout


def main() -> int:
    """Prepare the folder of the command line, by default the cache folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else qemu_folder()
    try:
        print(prepare(folder.absolute()))
    except Error as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
