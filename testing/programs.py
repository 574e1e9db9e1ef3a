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


def compiles(program: Path) -> None:
    """Compile a C++ program against ncnn's interface, and against ncnn's headers if they are installed."""
    headers = _headers()
    if COMPILER is None or headers is None:
        missing = "there is no g++" if COMPILER is None else "ncnn's headers are not installed (NCNN_INCLUDE has them)"
        print(f"\n{program} is not compiled against ncnn's own headers: {missing}\n", file=sys.__stderr__)
    if COMPILER is None:
        return
    for folder in filter(None, (INTERFACE, headers)):
        command: list[str | Path] = [COMPILER, *WARNINGS, "-fsyntax-only", "-isystem", folder, program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, ""), folder


def _headers() -> Path | None:
    """Return the folder of ncnn's headers, if they are installed."""
    given = os.environ.get("NCNN_INCLUDE")
    places = [given] if given else ["/usr/include/ncnn", "/usr/local/include/ncnn"]
    return next((Path(place) for place in places if (Path(place) / "net.h").is_file()), None)
