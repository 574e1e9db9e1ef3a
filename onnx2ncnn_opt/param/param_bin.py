"""Reading and writing .param.bin, the binary form of a .param: little-endian 32-bit numbers, and no names.

Layer types are numbers of ncnn's registry, blobs are indexes, and values are untyped bits. Programs call a blob by its
index. So the parser uses indexes as names, and the writer keeps an input's or output's name that is an index.
Parameters of custom layers have no known kind. The parser reads their bits as a float if it is between 1e-30 and 1e30
in size: integers up to 10**8 have other bits. The writer writes the same bits for both kinds.
"""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import GraphError, ParamError
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.layers import BY_INDEX, LAYERS
from onnx2ncnn_opt.ir.spec import FEATMASK_ID, MAX_PARAM_ID, Kind, LayerSpec
from onnx2ncnn_opt.param.connect import LayerLine, ParsedNet, connect
from onnx2ncnn_opt.param.splits import Line, Listing
from onnx2ncnn_opt.param.text import MAGIC, MAX_LAYERS, param_values
from onnx2ncnn_opt.param.values import MAX_STRING_BYTES, Value, kind_of, stored_float

_MAGIC = MAGIC.to_bytes(4, "little")
_END, _ARRAY, _STRING = -233, -23300, -23400
_CUSTOM_BIT = 256
_CUSTOM = re.compile(r"#([0-9]+)")
_MAX_BLOBS_OF_A_LAYER = 1 << 16

# Bits of a float of this size are 2**27 or more as an integer, larger than any integer parameter. -0 is outside.
_LEAST_FLOAT, _LARGEST_FLOAT = 1e-30, 1e30


def is_param_bin(data: bytes) -> bool:
    """Return True if a file's content is a binary .param; a text starts with digits or white space."""
    return data.startswith(_MAGIC)


def parse_param_bin(data: bytes, *, file: str = "<param.bin>", types: Mapping[str, LayerSpec] = LAYERS) -> ParsedNet:
    """Parse a .param.bin, as `parse_param` parses a text. Raises ParamError with the byte's offset.

    Layers may stand in any order. A custom layer's type is ``#`` and its number.
    """
    return connect(_ordered(list(_LayerReader(data, file, types).entries())), types)


@dataclass
class _LayerReader:
    data: bytes
    file: str
    types: Mapping[str, LayerSpec]
    offset: int = 0

    @property
    def where(self) -> str:
        return f"{self.file}: at byte {self.offset}"

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.offset:
            raise ParamError(f"{self.where}: the file ends where {count} more bytes are needed")
        self.offset += count
        return self.data[self.offset - count : self.offset]

    def number(self) -> int:
        return int.from_bytes(self.take(4), "little", signed=True)

    def count(self, most: int, what: str, least: int = 0) -> int:
        number = self.number()
        if not least <= number <= most:
            raise ParamError(f"{self.file}: at byte {self.offset - 4}: {number} cannot be {what}")
        return number

    def entries(self) -> Iterator[LayerLine]:
        if self.take(4) != _MAGIC:
            raise ParamError(f"{self.file}: not a .param.bin file: it does not start with {MAGIC}")
        layers = self.count(MAX_LAYERS, "a number of layers", 1)
        blobs = self.count(MAX_LAYERS, "a number of blobs", 1)
        for number in range(layers):
            yield self.entry(number, blobs)

    def entry(self, number: int, blobs: int) -> LayerLine:
        where = self.where
        index = self.count(_CUSTOM_BIT * 2 - 1, "a layer type")
        spec = BY_INDEX.get(index)
        if spec is None and not index & _CUSTOM_BIT:
            raise ParamError(f"{where}: there is no layer type {index}")
        type = spec.type if spec else f"#{index}"
        counts = [self.count(_MAX_BLOBS_OF_A_LAYER, "a number of blobs") for _ in range(2)]
        bottoms, tops = (tuple(str(self.count(blobs - 1, "a blob")) for _ in range(count)) for count in counts)
        return LayerLine(where, type, f"{type.lower()}_{number}", bottoms, tops, dict(self.values(type)))

    def values(self, type: str) -> Iterator[tuple[int, Value]]:
        while (key := self.number()) != _END:
            id, is_string, is_array = key, key <= _STRING, key <= _ARRAY
            if is_array:
                id = (_STRING if is_string else _ARRAY) - key
            if not 0 <= id <= MAX_PARAM_ID:
                raise ParamError(f"{self.file}: at byte {self.offset - 4}: there is no parameter id {key}")
            if is_string:
                size = self.count(MAX_STRING_BYTES, "the length of a string")
                content = self.take(size + -size % 4)[:size]
                try:
                    yield id, content.rstrip(b"\0").decode()
                except UnicodeDecodeError:
                    raise ParamError(f"{self.where}: the string before this is not UTF-8") from None
            elif is_array:
                count = self.count((len(self.data) - self.offset) // 4, "the length of an array")
                yield id, self.numbers(type, id, self.take(4 * count))
            else:
                yield id, self.numbers(type, id, self.take(4))[0]

    def numbers(self, type: str, id: int, data: bytes) -> tuple[Any, ...]:
        spec = self.types.get(type)
        param = spec.by_id.get(id) if spec else None
        integers, floats = np.frombuffer(data, "<i4"), np.frombuffer(data, "<f4")
        with np.errstate(invalid="ignore"):
            looks_float = ((np.abs(floats) > _LEAST_FLOAT) & (np.abs(floats) < _LARGEST_FLOAT)).any()
        is_float = param.kind in ("float", "float[]") if param else looks_float
        return tuple((floats if is_float else integers).tolist())


def _ordered(entries: Sequence[LayerLine]) -> list[LayerLine]:
    """Return the layers in topological order; in the file's order if that is topological."""
    producers = {top: number for number, entry in enumerate(entries) for top in entry.tops}
    order: dict[int, LayerLine] = {}
    visited: set[int] = set()  # layers that wait for their producers
    for first in range(len(entries)):
        stack = [first]
        while stack:
            number = stack[-1]
            needed = [producers[name] for name in entries[number].bottoms if name in producers]
            needed = [other for other in dict.fromkeys(needed) if other not in order]
            if not needed:
                order[number] = entries[stack.pop()]
            elif visited.isdisjoint((number, *needed)):
                visited.add(number)
                stack += needed[::-1]
            else:
                raise ParamError(f"{entries[number].where}: the layer needs its own output")
    return list(order.values())


def blob_indexes(listing: Listing) -> Mapping[str, int]:
    """Return the index of every blob in a .param.bin.

    A public name that is a number stays the blob's index; other blobs get the first free index.
    """
    tops = [top for line in listing.lines for top in line.tops]
    public = set(listing.names.values())
    fixed = {top: int(top) for top in tops if top in public and re.fullmatch(r"0|[1-9][0-9]{0,5}", top, re.ASCII)}
    taken = set(fixed.values())
    free = (index for index in range(len(tops) + len(taken)) if index not in taken)
    return {top: fixed[top] if top in fixed else next(free) for top in tops}


def format_param_bin(listing: Listing) -> bytes:
    """Return the .param.bin of listed layers; blobs become their indexes (`blob_indexes`).

    Raises GraphError for a value that the format cannot hold, and for a custom layer that was not read from a
    .param.bin: only the program that runs the net knows the number of its type.
    """
    indexes = blob_indexes(listing)
    header = struct.pack("<3i", MAGIC, len(listing.lines), max(indexes.values(), default=-1) + 1)
    return b"".join((header, *(_line(line, indexes) for line in listing.lines)))


def named_by_index(listing: Listing) -> Mapping[Blob, str]:
    """Return the names of inputs and outputs in the .param.bin: their indexes."""
    indexes = blob_indexes(listing)
    return {blob: str(indexes[name]) for blob, name in listing.names.items()}


def _line(line: Line, indexes: Mapping[str, int]) -> bytes:
    custom = _CUSTOM.fullmatch(line.type)
    index = int(custom[1]) if custom else LAYERS[line.type].index if line.type in LAYERS else None
    if index is None:
        raise GraphError(
            f"layer '{line.name}': a .param.bin has numbers for layer types, and that of the custom layer {line.type} "
            "is not known; write a text .param"
        )
    blobs = [indexes[name] for name in (*line.bottoms, *line.tops)]
    head = struct.pack(f"<{3 + len(blobs)}i", index, len(line.bottoms), len(line.tops), *blobs)
    if line.layer is None:
        mask = _int(FEATMASK_ID) + _int(line.featmask) if line.featmask else b""
        return head + mask + _int(_END)
    return b"".join((head, *(_value(line.layer, *value) for value in param_values(line.layer)), _int(_END)))


def _value(layer: Layer, id: int, name: str | int, kind: Kind | None, value: Any) -> bytes:
    try:
        if isinstance(value, str):
            content = value.encode()
            if len(content) > MAX_STRING_BYTES:
                raise ValueError(f"longer than {MAX_STRING_BYTES} bytes")
            return _int(_STRING - id) + _int(len(content)) + content + bytes(-len(content) % 4)
        is_array = isinstance(value, (Sequence, np.ndarray))
        elements = value if is_array else [value]
        if (kind or kind_of(value)) == ("float[]" if is_array else "float"):
            numbers = struct.pack(f"<{len(elements)}f", *map(stored_float, elements))
        else:
            numbers = struct.pack(f"<{len(elements)}i", *elements)
        return (_int(_ARRAY - id) + _int(len(value)) if is_array else _int(id)) + numbers
    except (ValueError, struct.error) as error:
        raise GraphError(f"{layer.type} '{layer.name}': {name}={value!r}: {error}") from None


def _int(value: int) -> bytes:
    return struct.pack("<i", value)
