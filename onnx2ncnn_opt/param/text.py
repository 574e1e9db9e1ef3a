"""Reading and writing .param text.

A file means the same as for ncnn 1.0.20261020. An array that mixes integers and floats is refused, because ncnn reads
the bits of one kind as the other. Layers beyond the header's count are reported and left out: ncnn does not read them,
and a net of its own benchmark has one. A blob count that is too large is harmless and accepted.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnx2ncnn_opt.errors import GraphError, ParamError
from onnx2ncnn_opt.ir.dim import is_fixed
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.spec import FEATMASK_ID, MAX_PARAM_ID, SHAPE_HINTS_ID, Kind, LayerSpec, Param
from onnx2ncnn_opt.param.connect import LayerLine, ParsedNet, connect
from onnx2ncnn_opt.param.names import MAX_NAME_BYTES, clean_name
from onnx2ncnn_opt.param.splits import Line, Listing, list_layers
from onnx2ncnn_opt.param.values import BLANKS, excerpt, format_value, read_values
from onnx2ncnn_opt.progress import counted

MAGIC = 7767517
MAX_LAYERS = 1_000_000  # ncnn's own limit, for layers and for blobs
_PARAM = re.compile(r"[+-]?[0-9]+=")
_HEADER = re.compile(rb"\s*([^\s]+)\s+([^\s]+)\s+([^\s]+)")


def parse_param(text: str | bytes, *, file: str = "<param>", types: Mapping[str, LayerSpec] = LAYERS) -> ParsedNet:
    """Parse .param text; the weights are in the .bin. `types` is the table of layers.

    The net's outputs are the blobs that no layer consumes. Split layers are removed: readers of a top read the bottom,
    and the bottom gets the name of a top that is an output. If the bottom is a net input, or several tops are outputs,
    one Split stays, with these outputs as tops. A blob may have several consumers without a Split, unlike in ncnn.

    A parameter of the wrong kind is left out, because ncnn reads it as its default (``0=2.0`` for an integer); integers
    for a float are converted. Raises ParamError, naming file and line.
    """
    entries, unread = _entries(text.encode(errors="surrogatepass") if isinstance(text, str) else text, file)
    return connect(entries, types)._replace(unread_layers=unread)


def _entries(data: bytes, file: str) -> tuple[list[LayerLine], int]:
    header = _HEADER.match(data)
    numbers = [_header_number(token) for token in header.groups()] if header else []
    if not header or numbers[0] != MAGIC:
        raise ParamError(f"{file}:1: not an ncnn .param file: it does not start with {MAGIC} and two counts")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ParamError(f"{file}:{line}: not a text file: byte {error.start} is not UTF-8") from None
    if (nul := data.find(0)) >= 0:
        raise ParamError(f"{file}:{data.count(10, 0, nul) + 1}: not a text file: byte {nul} is zero")
    at = data.count(b"\n", 0, header.end()) + 1
    layer_count, blob_count = numbers[1:]
    if not (0 < layer_count <= MAX_LAYERS and 0 < blob_count <= MAX_LAYERS):
        counts = " ".join(token.decode() for token in header.groups()[1:])
        raise ParamError(f"{file}:{at}: the header's counts '{counts[:80]}' are not numbers from 1 to {MAX_LAYERS}")
    rest = data[header.end() :].decode().replace("\r\n", "\n").replace("\r", "\n")
    lines = counted(rest.split("\n"), "reading the net", "lines")
    entries = [_entry(line, number, file) for number, line in enumerate(lines, at) if line.strip(BLANKS)]
    unread = len(entries) - layer_count
    if unread < 0:
        raise ParamError(f"{file}:{at}: the header says {layer_count} layers, but {len(entries)} follow")
    del entries[layer_count:]
    tops = sum(len(entry.tops) for entry in entries)
    if tops > blob_count:
        raise ParamError(f"{file}:{at}: the header says {blob_count} blobs, but the layers have {tops}")
    return entries, unread


def _header_number(token: bytes) -> int:
    """Return the number; 0, which no header contains, for another token."""
    return int(token) if len(token) < 16 and re.fullmatch(rb"[+-]?[0-9]+", token) else 0


def _entry(line: str, number: int, file: str) -> LayerLine:
    where = f"{file}:{number}"
    words = re.split(rf"[{BLANKS}]+", line.strip(BLANKS), maxsplit=4)
    if len(words) < 4 or _PARAM.match(words[0]):  # ncnn reads `0=1` as a parameter of the layer before
        raise ParamError(f"{where}: a layer needs type, name and two blob counts, found '{excerpt(line)}'")
    type, name, *counts = words[:4]
    if not all(re.fullmatch(r"[+-]?[0-9]{1,7}", count, re.ASCII) and int(count) >= 0 for count in counts):
        raise ParamError(f"{where}: layer '{excerpt(name)}' has the blob counts '{excerpt(' '.join(counts))}'")
    bottom_count, blob_count = int(counts[0]), sum(map(int, counts))
    rest = words[4:]
    if rest and blob_count:
        rest = re.split(rf"[{BLANKS}]+", rest[0], maxsplit=blob_count)
    blobs, tail = rest[:blob_count], "".join(rest[blob_count:])
    if len(blobs) < blob_count:
        raise ParamError(f"{where}: layer '{excerpt(name)}' should name {blob_count} blobs, but the line ends early")
    for word in (type, name, *blobs):
        if len(word.encode()) > MAX_NAME_BYTES:
            raise ParamError(f"{where}: the name '{excerpt(word)}' is longer than {MAX_NAME_BYTES} bytes")
    bottoms, tops = tuple(blobs[:bottom_count]), tuple(blobs[bottom_count:])
    return LayerLine(where, type, name, bottoms, tops, read_values(tail, f"{where}: layer '{name}'"))


def format_param(graph: Graph) -> str:
    """Return the .param text of a graph, Splits inserted; raises GraphError for a value that the format cannot hold.

    Every ncnn since 2026 reads the text alike: arrays in old style, strings in quotes, floats with a point or an
    exponent and at most 15 characters, in the shortest form that reads back to the same float32.
    """
    return format_listing(list_layers(graph))


def format_listing(listing: Listing) -> str:
    """Return the .param text of the lines of `list_layers`."""
    blob_count = sum(len(line.tops) for line in listing.lines)
    return "".join((f"{MAGIC}\n{len(listing.lines)} {blob_count}\n", *map(_format_line, listing.lines)))


def _format_line(line: Line) -> str:
    if clean_name(line.type) != line.type:
        raise GraphError(f"layer '{line.name}': '{line.type}' cannot be a layer type in a .param file")
    counts = f"{len(line.bottoms)} {len(line.tops)}"
    split = [f"{FEATMASK_ID}={line.featmask}"] if line.featmask else []
    params = _format_params(line.layer) if line.layer else split
    return " ".join((f"{line.type:<16}", f"{line.name:<24}", counts, *line.bottoms, *line.tops, *params)) + "\n"


def _format_params(layer: Layer) -> Iterator[str]:
    for id, name, kind, value in param_values(layer):
        try:
            yield format_value(id, kind, value)
        except ValueError as error:
            raise GraphError(f"{layer.type} '{layer.name}': {name}={value!r}: {error}") from None


def param_values(layer: Layer) -> list[tuple[int, str | int, Kind | None, Any]]:
    """Return the id, name, kind (None if the table lacks it) and value of each parameter of a layer, by id."""
    by_name: Mapping[str, Param] = layer.spec.by_name if layer.spec else {}
    values: dict[int, tuple[int, str | int, Kind | None, Any]] = {}
    for name, value in layer.params.items():
        if isinstance(name, str) and name not in by_name:
            raise GraphError(f"{layer.type} '{layer.name}' has no parameter {name}")
        id, kind = (by_name[name].id, by_name[name].kind) if isinstance(name, str) else (name, None)
        if not 0 <= id <= MAX_PARAM_ID:
            raise GraphError(f"{layer.type} '{layer.name}': there is no parameter id {id}")
        values[id] = id, name, kind, _current_hints(layer, value) if id == SHAPE_HINTS_ID else value
    return [values[id] for id in sorted(values)]


def _current_hints(layer: Layer, hints: Sequence[int]) -> Sequence[int]:
    """Return shape hints from the layer's outputs if their shapes are known, else the old hints."""
    count = len(layer.outputs)
    shapes = [blob.shape for blob in layer.outputs if blob.shape and is_fixed(blob.shape)]
    if len(shapes) == count:
        has_depth = len(hints) == 5 * count or any(len(shape) == 4 for shape in shapes)
        return [number for shape in shapes for number in _hint(shape, has_depth=has_depth)]
    return hints if len(hints) in (4 * count, 5 * count) else ()


def _hint(shape: Sequence[Any], *, has_depth: bool) -> tuple[int, ...]:
    """Return the hint for one blob: ``dims,w,h,c``, or ``dims,w,h,d,c``."""
    c, d, h, w = {1: (1, 1, 1, *shape), 2: (1, 1, *shape), 3: (shape[0], 1, *shape[1:]), 4: tuple(shape)}[len(shape)]
    return (len(shape), w, h, d, c) if has_depth else (len(shape), w, h, c)
