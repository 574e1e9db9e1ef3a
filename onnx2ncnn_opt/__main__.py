"""The command, and ``python -m onnx2ncnn_opt``: a process of its own."""

import atexit
import gc
import os
import sys
from typing import NoReturn

from onnx2ncnn_opt.deferred import defer_imports
from onnx2ncnn_opt.errors import Stop

_COLLECT_AFTER = 500_000  # objects


def prepare() -> None:
    """Prepare a new process before it imports anything large."""
    # Most objects live as long as the process: looking for garbage takes a tenth of the time.
    gc.set_threshold(_COLLECT_AFTER)
    defer_imports()


def command() -> NoReturn:
    """Run a command line, and end the process at once: teardown would take 10 % of a small conversion."""
    prepare()
    from onnx2ncnn_opt.cli.main import interrupted, main  # which imports click

    def ignored(unraisable: "sys.UnraisableHookArgs") -> None:
        """Let a signal that comes in a destructor end the process, although Python drops exceptions there."""
        error = unraisable.exc_value
        if isinstance(error, KeyboardInterrupt):
            _end(interrupted())
        if isinstance(error, Stop):
            _end(int(error.code or 0))
        sys.__unraisablehook__(unraisable)

    sys.unraisablehook = ignored
    _end(main())


def _end(code: int) -> NoReturn:
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    command()
