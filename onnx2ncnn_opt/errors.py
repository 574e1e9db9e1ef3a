"""Every error this package raises on purpose. The command line prints it as one message, and exits with its code."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike

_MOST_LINES, _LONGEST_LINE, _KEPT_END = 200, 500, 100


class Error(Exception):
    """The base of the tree; `exit_code` is the command line's. Its text has a limited length, for any file.

    `advice` is the part of the text that a command makes needless which is known to work.
    """

    exit_code = 1
    advice = ""

    def __str__(self) -> str:
        return bounded(super().__str__())


class Stop(SystemExit):
    """The request to stop the process; it is no failure of the running code."""


def bounded(text: str) -> str:
    """Return a message of readable length: the ends of long lines, and a limited number of lines."""
    begin = _LONGEST_LINE - _KEPT_END
    lines = [
        line if len(line) <= _LONGEST_LINE else f"{line[:begin]} ... {line[-_KEPT_END:]}"
        for line in text.split("\n", _MOST_LINES)[:_MOST_LINES]
    ]
    more = text.count("\n") + 1 - len(lines)
    return "\n".join([*lines, f"... and {more} more lines"] if more else lines)


class UsageError(Error):
    """An option, name or shape that the caller gave makes no sense here."""

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
    """Nodes that have no exact ncnn form; `nodes` lists every one of them, `advice` says how to go on without them.

    `cuts` are values to try as outputs in their place: those before all nodes, or of the first net of two. The `plan`
    of two nets ends the advice. The message has one line for all nodes that are refused for one reason.
    """

    def __init__(self, nodes: Sequence[Unsupported], advice: str = "", *cuts: Sequence[str], plan: str = "") -> None:
        self.nodes, self.plan, self.cuts = tuple(nodes), plan, tuple(filter(None, map(tuple, cuts)))
        self.advice = advice = f"{advice}\n{plan}" if plan else advice
        count = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
        lines = [f"cannot express {count} in ncnn:", *(f"  {line}" for line in lines_by_reason(nodes))]
        super().__init__("\n".join([*lines, advice] if advice else lines))


_MOST_NAMED = 3  # nodes of one reason


def lines_by_reason(nodes: Sequence[Unsupported]) -> list[str]:
    """Return a line for each reason; reasons that differ in names, numbers and shapes share one."""
    groups: dict[tuple[str, str], list[Unsupported]] = {}
    for node in nodes:
        groups.setdefault((re.sub(_DETAILS, "", node.reason), node.hint), []).append(node)
    return [str(group[0]) if len(group) == 1 else _together(group) for group in groups.values()]


def _together(nodes: Sequence[Unsupported]) -> str:
    named = [f"{node.operator} '{node.node}'" for node in nodes[:_MOST_NAMED]]
    rest = f" and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
    alike = "" if len({node.reason for node in nodes}) == 1 else " (the first; the others alike)"
    text = f"{len(nodes)} nodes, {', '.join(named)}{rest}: {nodes[0].reason}{alike}"
    return f"{text}; {nodes[0].hint}" if nodes[0].hint else text


_DETAILS = r"\[[^\]]*\]|'[^']*'|-?\d+(\.\d+)?"


def check_options(**options: object) -> None:
    """Raise UsageError for an option from Python whose type is not the one in `_OPTIONS`: a str is not a list."""
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


def check_option(kind: str, name: str, value: object) -> None:
    """Raise UsageError for a value that is not of this kind, by the name of the option or of a part of it."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind in ("list", "names"):
        if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
            raise UsageError(f"{name} has to be a list, not {value!r:.80}; did you mean [{value!r:.80}]?")
        for item in value if kind == "names" else ():
            if not isinstance(item, str):
                raise UsageError(f"{name} has to be a list of names, and {item!r:.80} is not a name")
    elif kind == "table":
        if not isinstance(value, Mapping):
            raise UsageError(f"{name} has to be a dict by the names of inputs, not {value!r:.80}")
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{name} has to be a dict by names, and {key!r:.80} is not a name")
    elif kind == "seconds" and not (is_number and value > 0):  # type: ignore[operator]
        raise UsageError(f"{name} has to be a number of seconds above 0, not {value!r:.80}")
    elif kind == "count" and not (is_number and isinstance(value, int) and value >= 0):
        raise UsageError(f"{name} has to be a whole number of 0 or more, not {value!r:.80}")
    elif kind == "path" and not isinstance(value, (str, PathLike)):
        raise UsageError(f"{name} has to be a path, not {value!r:.80}")


class ParamError(ConversionError):
    """A .param file that ncnn would refuse or misread; the message has its line."""


class BinError(ConversionError):
    """A .bin file that does not hold the weights that its .param needs; the message has the layer and the byte."""


class GraphError(ConversionError):
    """A graph that breaks one of its own rules (see `Graph.check`)."""


class PluginError(ConversionError):
    """An error of another package's code, or of a pass: an exception, or an invalid result."""


@contextmanager
def plugged(what: str, *passing: type[BaseException]) -> Iterator[None]:
    """Run code of another package; its exceptions become a PluginError that names it, except those of `passing`."""
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
    """Return the interrupt behind an error: Python 3.11 turns one into a RuntimeError while it creates a class."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt | Stop):
        cause = cause.__cause__
    return cause


class VerificationError(Error):
    """ncnn's result differs from the reference, or ncnn could not run the net."""

    exit_code = 3


class UnprovenError(VerificationError):
    """No output differs, but inputs prove nothing about some: the caller has to give others."""

    exit_code = 2


class RunError(VerificationError):
    """A runtime that could not load or run a net."""


class CrashError(RunError):
    """A runtime that died on a net, or had to be stopped."""
