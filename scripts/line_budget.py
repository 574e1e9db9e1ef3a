"""Compare the lines of Python in each room with the budget in `fixtures/line_budget.tsv`.

    python -m scripts.line_budget            exit with 1 if a room has more lines than its budget
    python -m scripts.line_budget --write    make the lines of today the budget

An issue that adds a capability may raise a budget, and says by how much; a cleanup lowers it.
"""

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


def main() -> int:
    """Compare or write; return the exit code."""
    lines = lines_of_rooms()
    if "--write" in sys.argv[1:]:
        TABLE.write_text("room\tlines\n" + "".join(f"{room}\t{count}\n" for room, count in lines.items()))
        return 0
    rows = (row.split("\t") for row in TABLE.read_text().splitlines()[1:])
    budget = {room: int(count) for room, count in rows}
    over = {room: count for room, count in lines.items() if count > budget.get(room, 0)}
    for room, count in over.items():
        print(f"{room} has {count} lines, its budget is {budget.get(room, 0)} ({TABLE.relative_to(ROOT)})")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
