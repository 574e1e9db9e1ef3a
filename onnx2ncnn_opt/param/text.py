"""Reading and writing .param text.

What ncnn 1.0.20261020 makes of a file is what reading preserves. Two things that ncnn does silently are refused,
because nobody can have meant them: lines behind the last layer that the header counts, and integers mixed with floats
in one array (their bits would be read as the other kind). A blob count that is too large is harmless and accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnx2ncnn_opt.errors import GraphError, ParamError
from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer, check_blob_counts
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.spec import FEATMASK_ID, MAX_PARAM_ID, SHAPE_HINTS_ID, Kind, Param
from onnx2ncnn_opt.param.names import MAX_NAME_BYTES, clean_name
from onnx2ncnn_opt.param.splits import Line, Listing, list_layers
from onnx2ncnn_opt.param.values import BLANKS, Value, as_kind, excerpt, format_value, read_values

MAGIC = 7767517
MAX_LAYERS = 1_000_000  # ncnn's own limit, for layers and for blobs
_HEADER = re.compile(rb"\s*([^\s]+)\s+([^\s]+)\s+([^\s]+)")


@dataclass(frozen=True)
class DroppedSplit:
    """A Split layer of a file that the written net will not need any more."""

    layer: str
    reason: str


@dataclass(frozen=True)
class ParsedNet:
    """What a .param file says: the graph, still without weights, and the Splits that reading did away with."""

    graph: Graph
    dropped_splits: tuple[DroppedSplit, ...]


@dataclass(frozen=True)
class _Entry:
    """One line of the file, read but not connected."""

    line: int
    type: str
    name: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    values: Mapping[int, Value]


def parse_param(text: str | bytes, *, file: str = "<param>") -> ParsedNet:
    """Read .param text; weights are a matter of the .bin.

    The net's outputs are the blobs that no layer consumes. Split layers go: their tops become the bottom itself, which
    takes over the name of a top that is an output. Where one name is not enough (the bottom is a net input, or several
    tops are outputs) one Split stays, whose tops are those outputs. A blob with several consumers, which ncnn would
    compute wrongly, is read as what was meant.

    A parameter whose text is of the wrong kind is what ncnn makes of it: its default (``0=2.0`` for an integer), so it
    is left out; integers for a float are converted. Raises ParamError, naming file and line.
    """
    entries = _entries(text.encode(errors="surrogatepass") if isinstance(text, str) else text, file)
    return _connect(entries, file)


def _entries(data: bytes, file: str) -> list[_Entry]:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ParamError(f"{file}:{line}: not a text file: byte {error.start} is not UTF-8") from None
    if (nul := data.find(0)) >= 0:
        raise ParamError(f"{file}:{data.count(10, 0, nul) + 1}: not a text file: byte {nul} is zero")
    header = _HEADER.match(data)
    numbers = [_header_number(token) for token in header.groups()] if header else []
    if not header or numbers[0] != MAGIC:
        raise ParamError(f"{file}:1: not an ncnn .param file: it does not start with {MAGIC} and two counts")
    at = data.count(b"\n", 0, header.end()) + 1
    layer_count, blob_count = numbers[1:]
    if (
        layer_count is None
        or blob_count is None
        or not (0 < layer_count <= MAX_LAYERS and 0 < blob_count <= MAX_LAYERS)
    ):
        counts = " ".join(token.decode() for token in header.groups()[1:])
        raise ParamError(f"{file}:{at}: the header's counts '{counts[:80]}' are no numbers from 1 to {MAX_LAYERS}")
    rest = data[header.end() :].decode().replace("\r\n", "\n").replace("\r", "\n")
    entries = [_entry(line, number, file) for number, line in enumerate(rest.split("\n"), at) if line.strip(BLANKS)]
    if len(entries) != layer_count:
        raise ParamError(f"{file}:{at}: the header says {layer_count} layers, but {len(entries)} follow")
    tops = sum(len(entry.tops) for entry in entries)
    if tops > blob_count:
        raise ParamError(f"{file}:{at}: the header says {blob_count} blobs, but the layers have {tops}")
    return entries


def _header_number(token: bytes) -> int | None:
    return int(token) if len(token) < 16 and re.fullmatch(rb"[+-]?[0-9]+", token) else None


def _entry(line: str, number: int, file: str) -> _Entry:
    where = f"{file}:{number}"
    words = re.split(rf"[{BLANKS}]+", line.strip(BLANKS), maxsplit=4)
    if len(words) < 4:
        raise ParamError(f"{where}: a layer needs type, name and two blob counts, found '{excerpt(line)}'")
    type, name, *counts = words[:4]
    if not all(re.fullmatch(r"[+-]?[0-9]{1,7}", count, re.ASCII) and int(count) >= 0 for count in counts):
        raise ParamError(f"{where}: layer '{excerpt(name)}' has the blob counts '{excerpt(' '.join(counts))}'")
    bottom_count, top_count = map(int, counts)
    blob_count = bottom_count + top_count
    rest = words[4:]
    if rest and blob_count:
        rest = re.split(rf"[{BLANKS}]+", rest[0], maxsplit=blob_count)
    blobs, tail = rest[:blob_count], "".join(rest[blob_count:])
    if len(blobs) < blob_count:
        raise ParamError(f"{where}: layer '{excerpt(name)}' should name {blob_count} blobs, but the line ends early")
    for word in (type, name, *blobs):
        if len(word.encode()) > MAX_NAME_BYTES:
            raise ParamError(f"{where}: the name '{excerpt(word)}' is longer than {MAX_NAME_BYTES} bytes")
    where = f"{where}: layer '{name}'"
    return _Entry(
        number, type, name, tuple(blobs[:bottom_count]), tuple(blobs[bottom_count:]), read_values(tail, where)
    )


def _connect(entries: Sequence[_Entry], file: str) -> ParsedNet:
    """The graph of the lines, Splits resolved."""
    consumed = {name for entry in entries for name in entry.bottoms}
    root = _roots(entries, file)
    splits: dict[str, list[_Entry]] = {}
    aliases: dict[str, list[str]] = {}
    for entry in entries:
        if entry.type == "Split":
            splits.setdefault(root[entry.tops[0]], []).append(entry)
            aliases.setdefault(root[entry.tops[0]], []).extend(top for top in entry.tops if top not in consumed)
    graph = Graph()
    blobs: dict[str, Blob] = {}  # by root
    public: dict[str, Blob] = {}
    for entry in entries:
        if entry.type == "Split":
            bottom = root[entry.bottoms[0]]
            if entry is splits[bottom][0] and aliases[bottom]:
                tops = [Blob(name, blobs[bottom].shape) for name in aliases[bottom]]
                public.update((blob.name, blob) for blob in tops)
                graph.add(Layer("Split", entry.name, [blobs[bottom]], tops))
            continue
        tops = [Blob(name) for name in entry.tops]
        for blob in tops:
            blobs[blob.name] = blob
            names = aliases.get(blob.name, [])
            if names and entry.type != "Input":
                blob.name = names.pop(0)
            public[blob.name] = blob
        graph.add(_layer(entry, [blobs[root[name]] for name in entry.bottoms], tops, file))
    graph.outputs = [public[name] for entry in entries for name in entry.tops if name not in consumed]
    return ParsedNet(graph, tuple(_dropped(splits, blobs)))


def _roots(entries: Sequence[_Entry], file: str) -> dict[str, str]:
    """For every blob name the blob that it is when Splits are seen through; blob names are checked on the way."""
    root: dict[str, str] = {}
    lines: dict[str, int] = {}
    later = {name: entry.line for entry in reversed(entries) for name in entry.tops}
    for entry in entries:
        where = f"{file}:{entry.line}: layer '{entry.name}'"
        for name in entry.bottoms:
            if name not in root:
                hint = f"only line {later[name]} produces it" if name in later else "no layer produces it"
                raise ParamError(f"{where} reads the blob '{name}', but {hint}")
        if entry.type == "Split" and (len(entry.bottoms) != 1 or not entry.tops):
            raise ParamError(f"{where} is a Split of {len(entry.bottoms)} blobs into {len(entry.tops)}")
        for name in entry.tops:
            if name in lines:
                raise ParamError(f"{where} produces the blob '{name}', which line {lines[name]} already does")
            lines[name] = entry.line
            root[name] = root[entry.bottoms[0]] if entry.type == "Split" else name
    return root


def _dropped(splits: Mapping[str, Sequence[_Entry]], blobs: Mapping[str, Blob]) -> Iterator[DroppedSplit]:
    """The Splits that a written net can do without: that of a blob with one use, and all but one of any other blob."""
    for name, entries in splits.items():
        blob = blobs[name]
        needed = len(blob.users) + blob.is_output > 1 or any(user.type == "Split" for user in blob.users)
        forks = sorted(entries, key=lambda entry: len(entry.tops) == 1)
        for entry in forks[1:] if needed else forks:
            if not needed or len(entry.tops) == 1:
                yield DroppedSplit(entry.name, "nothing needs a copy: there is only one use behind it")
            else:
                yield DroppedSplit(entry.name, f"joined with '{forks[0].name}', which splits the same blob")


def _layer(entry: _Entry, inputs: Sequence[Blob], outputs: Sequence[Blob], file: str) -> Layer:
    where = f"{file}:{entry.line}"
    spec = LAYERS.get(entry.type)
    params: dict[str | int, Any] = {}
    for id, value in entry.values.items():
        param = spec.by_id.get(id) if spec else None
        if param is None:
            params[id] = value
        elif (understood := as_kind(param.kind, value)) is not None:
            params[param.name] = understood
    layer = Layer(entry.type, entry.name, inputs, outputs, params)
    try:
        check_blob_counts(layer)
    except GraphError as error:
        raise ParamError(f"{where}: {error}") from None
    if not isinstance(entry.values.get(FEATMASK_ID, 0), int):
        raise ParamError(f"{where}: layer '{entry.name}': the feature mask (31) must be an integer")
    if SHAPE_HINTS_ID in entry.values:
        hints = as_kind("int[]", entry.values[SHAPE_HINTS_ID])
        if not isinstance(hints, tuple) or len(hints) not in (0, 4 * len(outputs), 5 * len(outputs)):
            raise ParamError(f"{where}: layer '{entry.name}': shape hints (30) are 4 or 5 integers for each output")
        size = len(hints) // max(len(outputs), 1)
        for i, blob in enumerate(outputs if size else ()):
            dims, w, h, *d, c = hints[i * size : (i + 1) * size]
            blob.shape = _shape(dims, w, h, d[0] if d else 0, c)
    elif layer.type in ("Input", "MemoryData"):
        w, h, d, c = (layer[name] for name in "whdc")
        for blob in outputs:
            blob.shape = _shape(4 if d else 3 if c else 2 if h else 1, w, h, d, c)
    return layer


def _shape(dims: Any, w: Any, h: Any, d: Any, c: Any) -> Shape | None:
    """The numpy shape of a Mat, None where the sizes make none."""
    shape = {1: (w,), 2: (h, w), 3: (c, h, w), 4: (c, d, h, w)}.get(dims)
    return shape if shape and all(size > 0 for size in shape) else None


def format_param(graph: Graph) -> str:
    """The .param text of a graph, Splits inserted; raises GraphError for a value that the format cannot hold.

    What is written means the same to every ncnn since 2026: arrays old style, strings quoted, floats always with a
    point or an exponent and at most 15 characters, in the shortest form that reads back to the same float32.
    """
    return format_listing(list_layers(graph))


def format_listing(listing: Listing) -> str:
    """The .param text of layers that are listed already (see `list_layers`)."""
    blob_count = sum(len(line.tops) for line in listing.lines)
    return "".join((f"{MAGIC}\n{len(listing.lines)} {blob_count}\n", *map(_format_line, listing.lines)))


def _format_line(line: Line) -> str:
    if clean_name(line.type) != line.type:
        raise GraphError(f"layer '{line.name}': '{line.type}' cannot be a layer type in a .param file")
    counts = f"{len(line.bottoms)} {len(line.tops)}"
    params = _format_params(line.layer) if line.layer else ()
    return " ".join((f"{line.type:<16}", f"{line.name:<24}", counts, *line.bottoms, *line.tops, *params)) + "\n"


def _format_params(layer: Layer) -> Iterator[str]:
    known: Mapping[str, Param] = layer.spec.by_name if layer.spec else {}
    values: dict[int, tuple[Kind | None, str | int, Any]] = {}
    for name, value in layer.params.items():
        if isinstance(name, str) and name not in known:
            raise GraphError(f"{layer.type} '{layer.name}' has no parameter {name}")
        id, kind = (known[name].id, known[name].kind) if isinstance(name, str) else (name, None)
        if not 0 <= id <= MAX_PARAM_ID:
            raise GraphError(f"{layer.type} '{layer.name}': there is no parameter id {id}")
        values[id] = kind, name, _current_hints(layer, value) if id == SHAPE_HINTS_ID else value
    for id, (kind, name, value) in sorted(values.items()):
        try:
            yield format_value(id, kind, value)
        except ValueError as error:
            raise GraphError(f"{layer.type} '{layer.name}': {name}={value!r}: {error}") from None


def _current_hints(layer: Layer, hints: Sequence[int]) -> Sequence[int]:
    """Shape hints after whatever happened to the layer: from its blobs where their shapes are known."""
    shapes = [blob.shape for blob in layer.outputs]
    if all(shape and all(isinstance(size, int) for size in shape) for shape in shapes):
        known = [shape for shape in shapes if shape]
        five = len(hints) == 5 * len(known) or any(len(shape) == 4 for shape in known)
        return [number for shape in known for number in _hint(shape, five=five)]
    return hints if len(hints) in (4 * len(shapes), 5 * len(shapes)) else ()


def _hint(shape: Sequence[Any], *, five: bool) -> tuple[int, ...]:
    """The hint for one blob: ``dims,w,h,c``, or ``dims,w,h,d,c``."""
    c, d, h, w = {1: (1, 1, 1, *shape), 2: (1, 1, *shape), 3: (shape[0], 1, *shape[1:]), 4: tuple(shape)}[len(shape)]
    return (len(shape), w, h, d, c) if five else (len(shape), w, h, c)
