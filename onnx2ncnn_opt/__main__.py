"""The command, and ``python -m onnx2ncnn_opt``: a process of its own."""

import atexit
import os
from typing import NoReturn

from onnx2ncnn_opt.deferred import defer_imports


def command() -> NoReturn:
    """Run a command line, and end the process at once: to take all apart first would be a tenth of a small model."""
    defer_imports()
    from onnx2ncnn_opt.cli.main import main  # which imports click

    code = main()
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    command()
