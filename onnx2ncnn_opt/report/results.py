"""The results of `inspect`, `diff` and `bisect` as lines and tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from onnx2ncnn_opt.report.console import Block, Table
from onnx2ncnn_opt.report.words import change_rows, file_size, layer_text


def inspection_blocks(found: Mapping[str, Any], refused: Sequence[str]) -> list[Block]:
    """Return the fields of an inspection as lines; `refused` are the lines of the nodes that ncnn cannot compute."""
    blocks: list[Block] = [f"file: {found['file']} ({_origin(found)})"]
    blocks += [_binding("input", entry) for entry in found["inputs"]]
    blocks += [_binding("output", entry) for entry in found["outputs"]]
    if found["dynamic"]:
        blocks.append(f"dynamic: {', '.join(found['dynamic'])} (bind with --shape)")
    what = "layer" if found["format"] == "param" else "operator"
    rows = tuple((name, str(count)) for name, count in found["operators"].items())
    blocks.append(Table((what, "count"), rows, what))
    weights = "not known, without its .bin" if found["weights"] is None else file_size(found["weights"])
    blocks.append(f"parameters: {found['parameters']:,}")
    blocks.append(f"weights: {weights}")
    if refused:
        hint = [f"hint: {found['advice']}"] if found["advice"] else []
        return [*blocks, *(f"refused: {line}" for line in refused), *hint]
    depends = "depends on sizes that are not known (see --shape)"
    tail = f", then a tail of {', '.join(found['tail'])}" if found["tail"] else ""
    blocks.append(f"layers: {found['layers']} in ncnn{tail}")
    blocks.append(f"multiply-adds: {depends if found['macs'] is None else format(found['macs'], ',')}")
    memory = depends if found["peak_memory"] is None else file_size(found["peak_memory"])
    blocks.append(f"peak memory of blobs: {memory}")
    blocks.append(f"ncnn: {found['least_ncnn']} or newer runs it")
    return blocks


def _origin(found: Mapping[str, Any]) -> str:
    return "ncnn net" if found["format"] == "param" else f"opset {found['opset']}, {found['producer']}"


def _binding(kind: str, entry: Mapping[str, Any]) -> str:
    shape = "of unknown shape" if entry["shape"] is None else f"[{', '.join(map(str, entry['shape']))}]"
    return f"{kind}: {entry['name']} {entry['dtype'] or ''}{shape}"


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
