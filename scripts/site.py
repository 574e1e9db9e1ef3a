"""Build the site of docs/ with Zensical, and fail on a dead link.

python -m scripts.site FOLDER   write the site to this folder

The pages read well in the repository, too: their links to files outside docs/ are relative. The site gets a copy in
which these lead to the repository.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "https://github.com/onnx2ncnn-opt/onnx2ncnn-opt/blob/main/"


def outside(page: Path, text: str) -> str:
    """Return the text of a page of docs/ whose links to files outside docs/ lead to the repository."""

    def absolute(match: re.Match[str]) -> str:
        target = os.path.normpath(page.parent / match[1])
        return match[0] if target.startswith("docs") else f"]({SOURCE}{target}{match[2] or ''})"

    return re.sub(r"\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)", absolute, text)


def main(args: Sequence[str]) -> int:
    """Build the site; return Zensical's exit code."""
    if len(args) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copy(ROOT / "zensical.toml", copy)
        shutil.copytree(ROOT / "docs", copy / "docs")
        for path in sorted((copy / "docs").rglob("*.md")):
            path.write_text(outside(path.relative_to(copy), path.read_text(encoding="utf-8")), encoding="utf-8")
        command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
        done = subprocess.run(command, cwd=copy, env={**os.environ, "NO_COLOR": "1"}, check=False)
        if done.returncode == 0:
            shutil.copytree(copy / "site", args[0], dirs_exist_ok=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
