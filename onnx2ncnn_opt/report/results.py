"""The results of verification, `inspect`, `diff` and `bisect` as lines and tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.report.console import Block, Table
from onnx2ncnn_opt.report.words import change_rows, file_size, layer_text

_MAX_INPUTS = 4  # with their shapes in a line


def shapes_lines(shapes: Sequence[Mapping[str, tuple[int, ...]]], *, others_refused: bool = True) -> list[str]:
    """Return a line with the shapes of dynamic inputs at which the net ran, if it has any.

    With `others_refused` a single run means that ONNX Runtime refused other sizes; a wrong net also runs only once.
    """
    if not any(shapes):
        return []
    names = list(shapes[0])
    if len(names) == 1:
        text = f"{names[0]} {' and '.join(str(list(run[names[0]])) for run in shapes)}"
    else:
        shown = names[:_MAX_INPUTS]
        runs = (", ".join(f"{name} {list(run[name])}" for name in shown) for run in shapes)
        rest = len(names) - len(shown)
        more = f"; and {rest} more input{'s' if rest > 1 else ''}" if rest else ""
        text = "; ".join(runs) + more
    alone = " (ONNX Runtime refused all other sizes that were tried)" if len(shapes) == 1 and others_refused else ""
    return [f"verified with: {text}{alone}"]


def output_table(rows: Sequence[OutputReport], label: str = "output", *, verbose: bool = True) -> Table:
    """Return the outputs as a table: the rule of each and its error; if `verbose` also the allowed one and the inputs.

    It has a column for modes if there are others than fp32.
    """
    modes = any(row.mode != "fp32" for row in rows)
    columns: list[tuple[str, Callable[[OutputReport], str]]] = [("output", lambda row: row.name)]
    columns += [("mode", lambda row: row.mode)] if modes else []
    columns += [("result", lambda row: row.status)]
    first = len(columns)
    columns += [("rule", lambda row: row.rule or "-")]
    columns += [("max error", lambda row: _number(row.max_abs))] if verbose else []
    columns += [("relative error", lambda row: _number(row.max_rel))]
    columns += [("allowed", lambda row: _number(row.allowed))] if verbose else []
    if has_inputs := verbose and any(row.inputs for row in rows):
        columns += [("at", lambda row: row.inputs or "-")]
    named = tuple(range(first, len(columns)))
    columns += [("", lambda row: row.message.removeprefix(f"at {row.inputs}: " if has_inputs else ""))]
    table = tuple(tuple(text(row) for _, text in columns) for row in rows)
    return Table(tuple(title for title, _ in columns), table, label=label, named=named)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def inspection_blocks(fields: Mapping[str, Any], refused: Sequence[str]) -> list[Block]:
    """Return the fields of an inspection as lines; `refused` are lines about nodes that ncnn cannot compute."""
    origin = "ncnn net" if fields["format"] == "param" else f"opset {fields['opset']}, {fields['producer']}"
    blocks: list[Block] = [f"file: {fields['file']} ({origin})"]
    blocks += [_binding("input", entry) for entry in fields["inputs"]]
    blocks += [_binding("output", entry) for entry in fields["outputs"]]
    if fields["dynamic"]:
        blocks.append(f"dynamic: {', '.join(fields['dynamic'])} (bind with --shape)")
    what = "layer" if fields["format"] == "param" else "operator"
    rows = tuple((name, str(count)) for name, count in fields["operators"].items())
    blocks.append(Table((what, "count"), rows, what))
    weights = "not known, without its .bin" if fields["weights"] is None else file_size(fields["weights"])
    blocks.append(f"parameters: {fields['parameters']:,}")
    blocks.append(f"weights: {weights}")
    hints = [f"hint: {line}" for line in fields["advice"].splitlines()]
    if refused:
        return [*blocks, *(f"refused: {line}" for line in refused), *hints]
    depends = "depends on sizes that are not known (see --shape)"
    tail = f", then a tail of {', '.join(fields['tail'])}" if fields["tail"] else ""
    blocks.append(f"layers: {fields['layers']} in ncnn{tail}")
    blocks.append(f"multiply-adds: {depends if fields['macs'] is None else format(fields['macs'], ',')}")
    memory = depends if fields["peak_memory"] is None else file_size(fields["peak_memory"])
    blocks.append(f"peak memory of blobs: {memory}")
    blocks.append(f"ncnn: {fields['least_ncnn']} or newer runs it")
    return [*blocks, *hints]


def _binding(kind: str, entry: Mapping[str, Any]) -> str:
    dtype, shape = entry["dtype"] or "", entry["shape"]
    text = f"{dtype} of unknown shape".lstrip() if shape is None else f"{dtype}[{', '.join(map(str, shape))}]"
    return f"{kind}: {entry['name']} {text}"


def difference_blocks(fields: Mapping[str, Any], *, equal: bool) -> list[Block]:
    """Return the fields of a NetDiff as lines and a table."""
    before, after = fields["layers"]
    blocks: list[Block] = [f"nets: {fields['a']} ({before} layers), {fields['b']} ({after} layers)"]
    blocks += [f"gone: {layer_text(ref)}" for ref in fields["gone"]]
    blocks += [f"added: {layer_text(ref)}" for ref in fields["added"]]
    rows = tuple(row for change in fields["changed"] for row in change_rows(change))
    if rows:
        blocks.append(Table(("layer", "what", "before", "after", "difference"), rows, "changed"))
    blocks += [f"renamed: {r['kind']} {r['before']} is {r['after']}" for r in fields["renamed"]]
    if equal:
        return [*blocks, "equal: names aside, both nets are the same"]
    counts = (("gone", fields["gone"]), ("added", fields["added"]), ("changed", fields["changed"]))
    return [*blocks, f"different: {', '.join(f'{len(layers)} layers {what}' for what, layers in counts)}"]


def located_blocks(fields: Mapping[str, Any]) -> list[Block]:
    """Return the fields of a `Located` as lines."""
    layer = fields["layer"]
    blocks: list[Block] = [f"first wrong layer: {layer_text(layer)}, its output '{fields['blob']}' in {fields['mode']}"]
    blocks.append(f"reason: {fields['message']}")
    if fields["value"]:
        blocks.append(f"value of the model: {fields['value']}")
    if fields["origin"]:
        blocks.append(f"made from: {', '.join(fields['origin'])}")
    rows = tuple(
        (read["blob"], read["status"], str(list(read["shape"])), layer_text(read["layer"])) for read in fields["inputs"]
    )
    if rows:
        blocks.append(Table(("input", "", "shape", "from"), rows, "input"))
    if list(fields["suspects"]) != [layer]:
        blocks.append(f"to blame is one of: {', '.join(map(layer_text, fields['suspects']))}")
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
