"""The entry point of the command and of ``python -m onnx2ncnn_opt``."""

import atexit
import gc
import os
import sys
from typing import NoReturn

from onnx2ncnn_opt.errors import Stop
from onnx2ncnn_opt.onnx.read.deferred import defer_imports

_COLLECT_AFTER = 500_000  # objects


def prepare() -> None:
    """Prepare a new process before it imports anything large."""
    # Most objects live as long as the process, and the garbage collector takes a tenth of the time.
    gc.set_threshold(_COLLECT_AFTER)
    defer_imports()


def command() -> NoReturn:
    """Run a command line, and end the process at once: teardown would take 10 % of a small conversion."""
    prepare()
    from onnx2ncnn_opt.cli.main import interrupted, main  # imports click

    def end_on_signal(unraisable: "sys.UnraisableHookArgs") -> None:
        """End the process on a signal during a destructor: Python ignores the exception there."""
        error = unraisable.exc_value
        if isinstance(error, KeyboardInterrupt):
            _end(interrupted())
        if isinstance(error, Stop):
            _end(int(error.code or 0))
        sys.__unraisablehook__(unraisable)

    sys.unraisablehook = end_on_signal
    _end(main())


def _end(code: int) -> NoReturn:
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    command()
