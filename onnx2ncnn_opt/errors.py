"""Every error that this package raises on purpose. The command line prints its message, and exits with its code."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

_MAX_LINES, _MAX_LINE_LENGTH, _KEPT_END = 200, 500, 100
_MAX_COMMAND_LENGTH = 2**17  # Linux takes no longer argument
WORKS, THEN = "this works: ", "then: "  # before a command, which is useless without its middle


class Error(Exception):
    """The base class of all errors; `exit_code` is the command line's. The text has a limited length for any file.

    `advice` is a part of the text. It is left out if a command that is known to work is printed instead.
    """

    exit_code = 1
    advice = ""

    def __str__(self) -> str:
        return bounded(super().__str__())


class Stop(SystemExit):
    """A request to stop the process, not a failure of the running code."""


def bounded(text: str) -> str:
    """Return a message of readable length: both ends of long lines except commands, and a limited number of lines."""
    begin = _MAX_LINE_LENGTH - _KEPT_END
    lines = [
        line
        if len(line) <= (_MAX_COMMAND_LENGTH if line.startswith((WORKS, THEN)) else _MAX_LINE_LENGTH)
        else f"{line[:begin]} ... {line[-_KEPT_END:]}"
        for line in text.split("\n", _MAX_LINES)[:_MAX_LINES]
    ]
    more = text.count("\n") + 1 - len(lines)
    return "\n".join([*lines, f"... and {more} more lines"] if more else lines)


class UsageError(Error):
    """An invalid option, name or shape from the caller."""

    exit_code = 2


class PatternError(UsageError):
    """A pattern that no layer can match, because of a wrong layer type or parameter."""


class ConversionError(Error):
    """The input cannot be turned into an ncnn net."""


class ModelError(ConversionError):
    """An ONNX model that is broken, unsafe to open, or larger than the limits."""


@dataclass(frozen=True)
class Unsupported:
    """One ONNX node that ncnn cannot express: its place, the reason, and a hint."""

    node: str
    operator: str
    reason: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.operator} '{self.node}': {self.reason}"
        return f"{text}; {self.hint}" if self.hint else text


class UnsupportedError(ConversionError):
    """Nodes that have no exact ncnn form; `nodes` lists all of them, `advice` says how to convert without them.

    `cuts` are values that a caller may try as outputs: the values before all nodes, or the outputs of the first of two
    nets. Then `second` has the inputs and outputs of the second one. Nodes with the same reason share one line of the
    message.
    """

    second: Sequence[Sequence[str]] = ()

    def __init__(self, nodes: Sequence[Unsupported], advice: str = "", *cuts: Sequence[str]) -> None:
        self.nodes, self.advice, self.cuts = tuple(nodes), advice, tuple(filter(None, map(tuple, cuts)))
        count = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
        lines = [f"cannot express {count} in ncnn:", *(f"  {line}" for line in lines_by_reason(nodes))]
        super().__init__("\n".join([*lines, advice] if advice else lines))


_MAX_NAMED = 3  # nodes of one reason


def lines_by_reason(nodes: Sequence[Unsupported]) -> list[str]:
    """Return a line for each reason; reasons that differ in names, numbers and shapes share one."""
    groups: dict[tuple[str, str], list[Unsupported]] = {}
    for node in nodes:
        groups.setdefault((re.sub(_DETAILS, "", node.reason), node.hint), []).append(node)
    return [str(group[0]) if len(group) == 1 else _together(group) for group in groups.values()]


def _together(nodes: Sequence[Unsupported]) -> str:
    named = [f"{node.operator} '{node.node}'" for node in nodes[:_MAX_NAMED]]
    rest = f" and {len(nodes) - _MAX_NAMED} more" if len(nodes) > _MAX_NAMED else ""
    alike = "" if len({node.reason for node in nodes}) == 1 else " (the first; the others alike)"
    text = f"{len(nodes)} nodes, {', '.join(named)}{rest}: {nodes[0].reason}{alike}"
    return f"{text}; {nodes[0].hint}" if nodes[0].hint else text


_DETAILS = r"\[[^\]]*\]|'[^']*'|-?\d+(\.\d+)?"


def check_options(**options: object) -> None:
    """Raise UsageError for an option from Python that has another type than in `_OPTIONS`, such as a str for a list."""
    for name, value in options.items():
        kind, is_optional = _OPTIONS[name]
        if not (is_optional and value is None):
            check_option(kind, name, value)


# The kind of each option (see `check_option`), and whether it may be None.
_OPTIONS: Mapping[str, tuple[str, bool]] = {
    **dict.fromkeys(("custom", "modes"), ("list", False)),
    **dict.fromkeys(("names", "only", "outputs", "skip", "start", "end"), ("names", False)),
    "bins": ("list", True),
    "inputs": ("table", False),
    **dict.fromkeys(("batch_axes", "feeds", "images", "shapes", "values"), ("table", True)),
    **dict.fromkeys(("seed", "jobs"), ("count", False)),
    **dict.fromkeys(("limit", "threads"), ("count", True)),
    **dict.fromkeys(("seconds", "timeout"), ("seconds", False)),
    **dict.fromkeys(("a", "b", "param", "path", "prefix"), ("path", False)),
    **dict.fromkeys(("bin", "manifest"), ("path", True)),
}


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes))


def _has_names(value: Any) -> bool:
    return all(isinstance(item, str) for item in value)


# The values of each kind, and their name in errors.
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "list": (_is_list, "a list"),
    "names": (lambda value: _is_list(value) and _has_names(value), "a list of names"),
    "table": (lambda value: isinstance(value, Mapping) and _has_names(value), "a dict by the names of inputs"),
    "seconds": (lambda value: type(value) in (int, float) and value > 0, "a number of seconds above 0"),
    "count": (lambda value: type(value) is int and value >= 0, "a whole number of 0 or more"),
    "path": (lambda value: isinstance(value, (str, PathLike)), "a path"),
}


def check_option(kind: str, name: str, value: object) -> None:
    """Raise UsageError for a value that is not of this kind; `name` is the option, or a part of it."""
    is_valid, what = _KINDS[kind]
    if not is_valid(value):
        is_text = isinstance(value, (str, bytes)) and kind in ("list", "names")
        hint = f"; did you mean [{value!r:.80}]?" if is_text else ""
        raise UsageError(f"{name} has to be {what}, not {value!r:.80}{hint}")


class ParamError(ConversionError):
    """A .param file that ncnn would refuse or misread; the message has the line's number."""


class BinError(ConversionError):
    """A .bin file that does not hold the weights that its .param needs; the message has the layer and the byte."""


class GraphError(ConversionError):
    """A graph that breaks one of its own rules (see `Graph.check`)."""


class PluginError(ConversionError):
    """An error of another package's code, or of a pass: an exception, or an invalid result."""


@contextmanager
def plugged(what: str, *passing: type[BaseException]) -> Iterator[None]:
    """Convert exceptions of the block, which runs code of a plug-in, to PluginErrors; those in `passing` stay."""
    try:
        yield
    except (Exception, SystemExit) as error:  # plug-ins may raise anything
        if isinstance(error, (PluginError, *passing)) or interruption(error):
            raise
        reason = f"it calls sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"{error}"
        raise PluginError(f"{what} failed: {type(error).__name__}: {reason}") from error


class ShapeError(ConversionError):
    """A layer whose output shape is unknown, or that cannot take its inputs."""


def interruption(error: BaseException) -> BaseException | None:
    """Return the interrupt that caused an error: Python 3.11 makes one in a class statement a RuntimeError."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt | Stop):
        cause = cause.__cause__
    return cause


class VerificationError(Error):
    """ncnn's result differs from the reference, or ncnn could not run the net."""

    exit_code = 3


class UnprovenError(VerificationError):
    """No output differs, but the inputs prove nothing about some outputs: the caller has to give other inputs."""

    exit_code = 2


class RunError(VerificationError):
    """A runtime that could not load or run a net."""


class RefusalError(RunError):
    """ONNX Runtime refuses the model or its inputs, so there is nothing to compare a net with."""

    exit_code = 2


class CrashError(RunError):
    """A runtime that died on a net, or had to be stopped."""
