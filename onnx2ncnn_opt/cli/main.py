"""The group of commands, and the exit codes for errors and interrupts."""

import errno
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

import click

from onnx2ncnn_opt.cli.output import Output, message_of
from onnx2ncnn_opt.cli.watchdog import signal_seen, watch
from onnx2ncnn_opt.errors import Error, Stop, interruption
from onnx2ncnn_opt.onnx.read.deferred import defer_imports
from onnx2ncnn_opt.report.console import printable
from onnx2ncnn_opt.version import __version__

PROGRAM = "onnx2ncnn-opt"
_COMMANDS = (
    *("bisect", "check", "convert", "diff", "example", "inspect"),
    *("mixed", "ops", "optimize", "passes", "quantize", "report", "verify"),
)
_READER_GONE = 128 + 13  # the exit code after SIGPIPE, which Windows lacks
_COMPLETE = "_ONNX2NCNN_OPT_COMPLETE"  # the variable that click's completion scripts set


class _Commands(click.Group):
    """The commands, each in a file that is imported at the first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # For an unknown command, import all: click suggests similar names.
        for name in [cmd_name] if cmd_name in _COMMANDS else _COMMANDS:
            if name not in self.commands:
                self.add_command(getattr(import_module(f"onnx2ncnn_opt.cli.{name}"), name))
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def cli() -> None:
    """Convert ONNX models exported from PyTorch to optimised ncnn nets, and prove that they compute the same.

    \b
    Exit codes: 0 done, 1 cannot convert, 2 wrong usage, 3 verification failed.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code; only a bug of this package gives a traceback."""
    _prepare_process()
    defer_imports()
    output = Output()
    if _COMPLETE in os.environ:
        cli.main(prog_name=PROGRAM, complete_var=_COMPLETE)  # print completions for a shell, and end the process
    ended: BaseException | None = None
    try:
        code, ended = _run(list(sys.argv[1:] if args is None else args), output)
        output.end(code, ended)
        sys.stdout.flush()
    except OSError as error:
        # A failed write must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno in (errno.EPIPE, errno.EINVAL):  # the reader has closed the pipe (EINVAL on Windows)
            return _READER_GONE
        return 1 if isinstance(ended, OSError) else _fail(message_of(error), 1)
    return code


def _run(args: list[str], output: Output) -> tuple[int, BaseException | None]:
    """Run a command line; print the error that ends it, and return the exit code and the error."""
    output.arguments = args
    if "--json" in args[1:] and args[0] in _COMMANDS:  # for errors of the command line, too
        output.command, output.as_json = args[0], True
    try:
        with _interrupts(), cli.make_context(PROGRAM, args, obj=output) as context:
            cli.invoke(context)
    except click.exceptions.Exit as end:
        if not output.fields:  # --help
            output.command = None
        return end.exit_code, None
    except click.ClickException as error:
        error.show()
        return error.exit_code, error
    except Error as error:
        return _fail(str(error), error.exit_code), error
    except BrokenPipeError:
        raise
    except (OSError, MemoryError) as error:
        return _fail(message_of(error), 1), error
    except KeyboardInterrupt as error:
        return interrupted(), error
    return 0, None


@contextmanager
def _interrupts() -> Iterator[None]:
    """Raise the interrupt that caused another error (see `interruption`)."""
    try:
        yield
    except (RuntimeError, Error) as error:
        cause = interruption(error)
        if cause is None:
            raise
        raise cause from None


def _prepare_process() -> None:
    # There are few matrix products, and OpenBLAS's threads would spin for a tenth of a second in each process.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for ``>&-``; open until the end
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # the locale's encoding may not have all characters
    # A signal must not leave partial files or child processes behind.
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    watch(frozenset(numbers))
    for number in numbers:
        signal.signal(number, _stop)


def _stop(number: int, frame: object) -> None:
    signal_seen()
    raise Stop(128 + number)


def interrupted() -> int:
    """Print the interruption, and return the exit code."""
    return _fail("interrupted", 128 + signal.SIGINT)


def _fail(message: str, code: int) -> int:
    click.echo(f"Error: {printable(message)}", err=True)
    return code
