"""Text forms of records, for terminals and pages."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

_HASH_DIGITS = 12


def data_file(name: str) -> str:
    """Return the text of a file next to this one."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def cpp_piece(name: str, **words: object) -> list[str]:
    """Return the lines of a section of pieces.cpp.in, with words filled in."""
    section = data_file("pieces.cpp.in").partition(f"@@ {name}\n")[2].partition("@@")[0]
    return Template(section).substitute(words).splitlines()


def file_size(size: int) -> str:
    """Return a number of bytes with a unit, such as "1.5 MB"."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB"):
        if value >= 1000:
            value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if unit != "B" else f"{size} B"


def number_of(count: int, noun: str) -> str:
    """Return a number of things, such as "1 near miss" and "2 near misses"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def some_of(names: Sequence[str], *, every: bool) -> str:
    """Return `every` name, or the first name and the number of others."""
    shown = ", ".join(f"'{name}'" for name in (names if every else names[:1]))
    return shown if every or len(names) == 1 else f"{shown} and {len(names) - 1} more"


def json_value(value: Any, not_finite: Callable[[float], Any]) -> Any:
    """Return a value for JSON; `not_finite` replaces NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item, not_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item, not_finite) for item in value]
    return not_finite(value) if isinstance(value, float) and not math.isfinite(value) else value


def layer_text(ref: Mapping[str, str] | None) -> str:
    """Return the text of a LayerRef."""
    return f"{ref['type']} '{ref['name']}'" if ref else "nothing"


def change_rows(change: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each change in a LayerChange: the layer, the subject, before, after, and the difference."""
    old, new = change["before"], change["after"]
    layer = layer_text(old) if old["name"] == new["name"] else f"{layer_text(old)} ('{new['name']}')"
    for param in change["params"]:
        yield layer, param["name"], value_text(param["before"]), value_text(param["after"]), ""
    for weight in change["weights"]:
        yield layer, weight["name"], _weight(weight["before"]), _weight(weight["after"]), _distance(weight)
    for read in change["inputs"]:
        sides = (f"{layer_text(read[side])}{_output(read[f'{side}_output'])}" for side in ("before", "after"))
        yield layer, f"input {read['index']}", *sides, ""
    for output in change["outputs"]:
        sides = ("inside" if output[side] is None else f"output {output[side]}" for side in ("before", "after"))
        yield layer, f"output {output['index']}", *sides, ""


def value_text(value: Any) -> str:
    """Return the text of a parameter's value."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(value_text, value))
    if isinstance(value, float):
        return f"{value:.9g}"
    return "none" if value is None else str(value)


def _weight(weight: Mapping[str, Any] | None) -> str:
    return f"{weight['elements']} {weight['encoding']} {weight['sha256'][:_HASH_DIGITS]}" if weight else "none"


def _distance(weight: Mapping[str, Any]) -> str:
    parts = []
    if weight["max_abs"] is not None:
        parts.append(f"up to {weight['max_abs']:.3g} of {weight['largest']:.3g}")
    if weight["not_finite"]:
        parts.append(f"{weight['not_finite']} not finite on one side")
    return ", ".join(parts)


def _output(index: int) -> str:
    return f" output {index}" if index else ""
