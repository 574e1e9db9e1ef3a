"""The command, and ``python -m onnx2ncnn_opt``: a process of its own."""

import atexit
import gc
import os
from typing import NoReturn

from onnx2ncnn_opt.deferred import defer_imports

_COLLECT_AFTER = 500_000  # objects


def prepare() -> None:
    """What a process of its own does before it imports anything large."""
    # What is made lives as long as the process as a rule: looking for garbage in it takes a tenth of the time.
    gc.set_threshold(_COLLECT_AFTER)
    defer_imports()


def command() -> NoReturn:
    """Run a command line, and end the process at once: to take all apart first would be a tenth of a small model."""
    prepare()
    from onnx2ncnn_opt.cli.main import main  # which imports click

    code = main()
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    command()
