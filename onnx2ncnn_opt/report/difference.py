"""The result of `diff`, for people."""

from collections.abc import Mapping
from typing import Any

from onnx2ncnn_opt.report.console import Block, Table
from onnx2ncnn_opt.report.words import change_rows, layer_text


def difference_blocks(found: Mapping[str, Any], *, equal: bool) -> list[Block]:
    """Return the fields of a NetDiff as lines and a table."""
    before, after = found["layers"]
    blocks: list[Block] = [f"nets: {found['a']} ({before} layers), {found['b']} ({after} layers)"]
    blocks += [f"gone: {layer_text(ref)}" for ref in found["gone"]]
    blocks += [f"added: {layer_text(ref)}" for ref in found["added"]]
    rows = tuple(row for change in found["changed"] for row in change_rows(change))
    if rows:
        blocks.append(Table(("layer", "what", "before", "after", "difference"), rows, "changed"))
    blocks += [f"renamed: {r['kind']} {r['before']} is {r['after']}" for r in found["renamed"]]
    if equal:
        return [*blocks, "equal: names aside, both nets are the same"]
    counts = (("gone", found["gone"]), ("added", found["added"]), ("changed", found["changed"]))
    return [*blocks, f"different: {', '.join(f'{len(layers)} layers {what}' for what, layers in counts)}"]
