"""Run what README.md and the pages for users say, in an empty folder.

python -m scripts.user_pages                    write into README.md what its command prints
python -m scripts.user_pages FOLDER [PAGE...]   the same for all pages, with the real models of a folder

In a block ```console each line with $ is a command, and its output follows; `...` stands for lines that are left out.
A block with title="NAME" is a file. What a user downloads or exports (testing/user_models.py) is a small model in the
tests. FOLDER has the real models, by these names: the pages have their output. README's model is in fixtures/.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from testing.command import Ended, run, without_progress
from testing.user_models import EXPORTS, STAND_INS

ROOT = Path(__file__).resolve().parent.parent
USER_PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("yolo", "classifier", "language-model", "any-param", "honest-converter")),
)
_BUSY = "note: the net ran on "  # not on all inputs, because the machine was busy
_FENCE = re.compile(r'^```(\w+)(?: title="([\w./-]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


Command = Callable[..., Ended]  # of a folder and words


class Step(NamedTuple):
    """A command of a page, the lines below it, the lines that it prints here, and its exit code."""

    command: str
    written: list[str]
    printed: list[str]
    code: int


def play(page: str, folder: Path, models: Path | None = None, command: Command = run) -> Iterator[Step]:
    """Run the commands of a page in a folder, in their order; `command` runs ours."""
    for language, title, body in _FENCE.findall(page):
        if title:
            path = folder / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body, encoding="utf-8")
        if language == "console":
            for text in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, *written = text.splitlines()
                yield Step(line, written, *_run(line, folder, models, command))


def _run(line: str, folder: Path, models: Path | None, command: Command) -> tuple[list[str], int]:
    """Run a line; return the lines that it prints, its errors last, and its exit code."""
    program, *words = shlex.split(line, comments=True)
    if line.startswith(EXPORTS):
        return [], 0
    for name in [word for word in words if word in STAND_INS]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if models and (models / name).exists():
            for file in (models / name).parent.glob(f"{path.stem}.*"):  # with the weights of a .param
                shutil.copy(file, path.parent)
        elif not path.exists():
            STAND_INS[name](path)
    if program == "onnx2ncnn-opt":
        ended = command(folder, *words)
        lines = [*ended.out.splitlines(), *ended.err.splitlines()]
        return [line for line in lines if not line.startswith(_BUSY)], ended.code
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # `python` is this one
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return [*done.stdout.splitlines(), *without_progress(done.stderr).splitlines()], done.returncode


def command_may_fail(command: str) -> bool:
    """Return True for a command whose exit code says that two nets differ."""
    return command.startswith("onnx2ncnn-opt diff ")


def chosen(written: Sequence[str], printed: Sequence[str]) -> list[str]:
    """Return the printed lines that belong on the page: all, or those with labels of lines around a `...`."""
    if "..." not in written:
        return [*printed]
    lines, rest = [], iter(printed)
    for line in written:
        label = line.partition(":")[0]
        found = line if line == "..." else next((each for each in rest if each.partition(":")[0] == label), line)
        lines.append(found)
    return lines


def masked(line: str, *, sizes: bool) -> str:
    """Return a line without errors, times and the CPU; with `sizes` also without the numbers that another model has."""
    line = re.sub(r"\(relative error .*; \S+ fp32", "(relative error #; # fp32", line)
    line = re.sub(r"off by up to \S+ of", "off by up to # of", line)
    line = re.sub(r"[\d.]+ (ms|s)\b", "# s", line)
    line = re.sub(r"\([\d.]+ (B|kB|MB)\)" if sizes else r"\(\d+ B\)", "(#)", line)
    line = re.sub(r" \(\d+ rewrites.*?\);?", "", line) if sizes else line
    return re.sub(r"-?\d[\d,]*(\.\d*)?(e[+-]?\d+)?( [kM]B)?", "#", line) if sizes else line


def compare(path: Path, folder: Path, command: Command = run) -> None:
    """Run a page, and check what it says: README's numbers are of the same model as here, those of others are not."""
    is_same = path.name == "README.md"
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (130 if is_same else 100)
    for step in play(text, folder, command=command):
        assert step.code == 0 or command_may_fail(step.command), step
        written, printed = (
            [masked(line, sizes=not is_same) for line in lines]
            for lines in (step.written, chosen(step.written, step.printed))
        )
        assert written == printed, f"{step.command}: python -m scripts.user_pages writes what it prints"


def main(args: Sequence[str]) -> int:
    """Write the output of commands into the pages; return the exit code."""
    if args and not Path(args[0]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    models = Path(args[0]) if args else None
    for name in args[1:] or USER_PAGES[: None if models else 1]:
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            for step in play(page, Path(folder), models):
                if step.code and not command_may_fail(step.command):
                    print(f"{name}: {step.command}: exit code {step.code}", *step.printed, sep="\n", file=sys.stderr)
                    return 1
                before = "\n".join([f"$ {step.command}", *step.written])
                after = "\n".join([f"$ {step.command}", *chosen(step.written, step.printed)])
                page = page.replace(f"{before}\n", f"{after}\n", 1)
        path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
