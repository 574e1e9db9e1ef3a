"""Compare the lines of Python in each room with the budget in `fixtures/line_budget.tsv`.

    python -m scripts.line_budget            exit with 1 if a room has more lines than its budget
    python -m scripts.line_budget --write    make the lines of today the budget

A commit that raises a room says so in its message, in a line for each room:

    Budget: onnx2ncnn_opt/api +12, a second device

Without a git history, as in a tarball, commits are not compared.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "fixtures" / "line_budget.tsv"
PACKAGE = "onnx2ncnn_opt"


def lines_of_rooms() -> dict[str, int]:
    """Return the lines of each room: a folder of the package, its files beside them, tests, testing and scripts."""
    found: Counter[str] = Counter()
    for room in (PACKAGE, "scripts", "testing", "tests"):
        for path in (ROOT / room).rglob("*.py"):
            below = path.relative_to(ROOT).parts[1:-1]
            name = f"{room}/{below[0]}" if room == PACKAGE and below else room
            found[name] += path.read_bytes().count(b"\n")
    return dict(sorted(found.items()))


def budget_of(table: str) -> dict[str, int]:
    """Return the lines of each room, from the text of the table."""
    return {room: int(lines) for room, lines in (row.split("\t") for row in table.splitlines()[1:])}


def unnamed(before: str, after: str, message: str) -> list[str]:
    """Return the lines that the message of a commit lacks; `before` and `after` are the table's texts."""
    old = budget_of(before)
    raised = {room: lines - old.get(room, 0) for room, lines in budget_of(after).items()}
    lines = [f"Budget: {room} +{more}, " for room, more in raised.items() if more > 0]
    return [line for line in lines if not re.search(rf"^{re.escape(line)}\S", message, re.MULTILINE)]


def last_commit() -> tuple[str, ...] | None:
    """Return the table before and after the last commit, and its message; None without a history."""
    name = TABLE.relative_to(ROOT).as_posix()
    commands = (("show", f"HEAD~1:{name}"), ("show", f"HEAD:{name}"), ("log", "-1", "--format=%B"))
    try:
        return tuple(
            subprocess.check_output(["git", *words], cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
            for words in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def main() -> int:
    """Compare or write; return the exit code."""
    lines = lines_of_rooms()
    if "--write" in sys.argv[1:]:
        TABLE.write_text("room\tlines\n" + "".join(f"{room}\t{count}\n" for room, count in lines.items()))
        return 0
    budget = budget_of(TABLE.read_text())
    over = {room: count for room, count in lines.items() if count > budget.get(room, 0)}
    for room, count in over.items():
        print(f"{room} has {count} lines, its budget is {budget.get(room, 0)} ({TABLE.relative_to(ROOT)})")
    commit = last_commit()
    missing = unnamed(*commit) if commit else []
    for line in missing:
        print(f"the last commit raises a room, so its message needs the line '{line}...' with the reason")
    return 1 if over or missing else 0


if __name__ == "__main__":
    sys.exit(main())
