"""The report of `inspect`, for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from onnx2ncnn_opt.report.console import Block, Table
from onnx2ncnn_opt.report.words import file_size


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
    blocks.append(f"layers: {found['layers']} in ncnn")
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
