"""Programs that `example` prints: run in Python, compiled as C++."""

import os
import subprocess
import sys
from pathlib import Path

from testing.tails import COMPILER

WARNINGS = ("-std=c++11", "-Wall", "-Wextra", "-Werror")
INTERFACE = Path(__file__).parents[1] / "tests" / "report" / "interface"


def output_of(program: Path) -> str:
    """Return what a Python program prints; it has to end without an error."""
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def compile_against(folder: Path | None, program: Path, *, compiler: str | None = COMPILER) -> None:
    """Compile a C++ program against ncnn's headers in a folder."""
    assert compiler
    command = [compiler, *WARNINGS, "-fsyntax-only", "-isystem", str(folder), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def find_headers() -> Path | None:
    """Return the folder of ncnn's headers, if they are installed."""
    given = os.environ.get("NCNN_INCLUDE")
    places = [given] if given else ["/usr/include/ncnn", "/usr/local/include/ncnn"]
    return next((Path(place) for place in places if (Path(place) / "net.h").is_file()), None)
