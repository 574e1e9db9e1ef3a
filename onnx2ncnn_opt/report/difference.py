"""What `diff` found, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from onnx2ncnn_opt.report.console import Block, Table

_HASH = 12  # digits of a hash that people compare


def difference_blocks(found: Mapping[str, Any], *, equal: bool) -> list[Block]:
    """The fields of a NetDiff as lines and a table."""
    before, after = found["layers"]
    blocks: list[Block] = [f"nets: {found['a']} ({before} layers), {found['b']} ({after} layers)"]
    blocks += [f"gone: {_layer(ref)}" for ref in found["gone"]]
    blocks += [f"added: {_layer(ref)}" for ref in found["added"]]
    rows = tuple(row for change in found["changed"] for row in _rows(change))
    if rows:
        blocks.append(Table(("layer", "what", "before", "after", "difference"), rows, "changed"))
    blocks += [f"renamed: {r['kind']} {r['before']} is {r['after']}" for r in found["renamed"]]
    if equal:
        return [*blocks, "equal: names aside, both nets are the same"]
    counts = (("gone", found["gone"]), ("added", found["added"]), ("changed", found["changed"]))
    return [*blocks, f"different: {', '.join(f'{len(layers)} layers {what}' for what, layers in counts)}"]


def _layer(ref: Mapping[str, str] | None) -> str:
    return f"{ref['type']} '{ref['name']}'" if ref else "nothing"


def _rows(change: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    old, new = change["before"], change["after"]
    layer = _layer(old) if old["name"] == new["name"] else f"{_layer(old)} ('{new['name']}')"
    for param in change["params"]:
        yield layer, param["name"], _value(param["before"]), _value(param["after"]), ""
    for weight in change["weights"]:
        yield layer, weight["name"], _weight(weight["before"]), _weight(weight["after"]), _distance(weight)
    for read in change["inputs"]:
        sides = (f"{_layer(read[side])}{_output(read[f'{side}_output'])}" for side in ("before", "after"))
        yield layer, f"input {read['index']}", *sides, ""
    for output in change["outputs"]:
        sides = ("inside" if output[side] is None else f"output {output[side]}" for side in ("before", "after"))
        yield layer, f"output {output['index']}", *sides, ""


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return (
        ",".join(map(_value, value))
        if isinstance(value, (tuple, list))
        else f"{value:.9g}"
        if isinstance(value, float)
        else str(value)
    )


def _weight(weight: Mapping[str, Any] | None) -> str:
    return f"{weight['elements']} {weight['encoding']} {weight['sha256'][:_HASH]}" if weight else "none"


def _distance(weight: Mapping[str, Any]) -> str:
    parts = []
    if weight["max_abs"] is not None:
        parts.append(f"up to {weight['max_abs']:.3g} of {weight['largest']:.3g}")
    if weight["not_finite"]:
        parts.append(f"{weight['not_finite']} not finite on one side")
    return ", ".join(parts)


def _output(index: int) -> str:
    return f" output {index}" if index else ""
