"""Run one of README's commands in the shell of this system, as .github/workflows/readme.yml does.

python -m scripts.readme_command convert    convert and verify a model
python -m scripts.readme_command test       run the tests
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("convert", "test")
# PowerShell goes on after an error unless it is told to stop.
_STOP = "$ErrorActionPreference = 'Stop'; $PSNativeCommandUseErrorActionPreference = $true\n"
SHELLS = {"sh": ("bash", "-ec"), "powershell": ("pwsh", "-Command")}


def readme_command(language: str, name: str) -> list[str]:
    """Return the words that run a command of README in a shell."""
    page = ROOT / ("docs/systems.md" if language == "powershell" else "README.md")
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    text: str = dict(zip(NAMES, blocks, strict=True))[name]
    return [*SHELLS[language], _STOP + text if language == "powershell" else text]


def main(args: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    if len(args) != 1 or args[0] not in NAMES:
        print(__doc__, file=sys.stderr)
        return 2
    command = readme_command("powershell" if os.name == "nt" else "sh", args[0])
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
