"""The result of `bisect`, for people."""

from collections.abc import Mapping
from typing import Any

from onnx2ncnn_opt.report.console import Block, Table
from onnx2ncnn_opt.report.words import layer_text


def located_blocks(found: Mapping[str, Any]) -> list[Block]:
    """Return the fields of a `Located` as lines."""
    layer = found["layer"]
    blocks: list[Block] = [f"first wrong layer: {layer_text(layer)}, its output '{found['blob']}' in {found['mode']}"]
    blocks.append(f"reason: {found['message']}")
    if found["value"]:
        blocks.append(f"value of the model: {found['value']}")
    if found["origin"]:
        blocks.append(f"made from: {', '.join(found['origin'])}")
    rows = tuple(
        (read["blob"], read["status"], str(list(read["shape"])), layer_text(read["layer"])) for read in found["inputs"]
    )
    if rows:
        blocks.append(Table(("input", "", "shape", "from"), rows, "input"))
    if list(found["suspects"]) != [layer]:
        blocks.append(f"to blame is one of: {', '.join(map(layer_text, found['suspects']))}")
    return blocks


def pair_lines(pair: Mapping[str, Any] | None) -> list[str]:
    """Return the files of a minimal pair, and the command that shows its fault."""
    if pair is None:
        return ["pair: none was written, because no part of the net is wrong alone"]
    return [
        f"pair: {pair['model']} ({pair['nodes']} nodes) and {pair['param']} ({pair['layers']} layers) are as wrong",
        f"try: onnx2ncnn-opt verify {pair['model']} {pair['param']} {pair['bin']} --inputs {pair['inputs']}",
    ]


def pass_lines(rewrites: int, number: int | None, event: str) -> list[str]:
    """Return the result of `bisect --passes`."""
    if number is None:
        return [f"right: the net is right with all {rewrites} rewrites"]
    if number == 0:
        return ["wrong without rewrites: no pass is to blame; bisect the net of `convert --no-optimize --keep-failed`"]
    return [f"first wrong rewrite: number {number} of {rewrites}", f"rewrite: {event}"]
