"""Draw all pictures of docs/pictures again.

python -m scripts.pictures          from real runs; those of pages need Chromium
python -m scripts.pictures NAME...  only these modules of scripts/pictures, such as pipeline
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
NAMES = ("pipeline", "ladder", "fp16", "passes", "diff", "report")


def main(names: Sequence[str]) -> int:
    """Write the pictures; return the exit code."""
    if set(names) - set(NAMES):
        print(__doc__, file=sys.stderr)
        return 2
    for name in names or NAMES:
        for file, data in import_module(f"scripts.pictures.{name}").draw().items():
            path = FOLDER / file
            path.write_bytes(data if isinstance(data, bytes) else data.encode())
            print(f"{path.relative_to(FOLDER.parents[1])} ({path.stat().st_size} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
