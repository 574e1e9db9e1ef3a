"""Weights inside a model's file, mapped into memory instead of parsed.

protobuf copies a tensor's bytes when it parses a message, and again at each access. So large raw data is removed from
the message first. The message refers to it as external data, at a location that no file has.
"""

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

Bytes: TypeAlias = bytes | mmap.mmap

_LARGE = 4096  # bytes; smaller ones stay in the message
_DEEPEST = 100  # nested messages; protobuf's own limit
_VARINT, _LENGTH = 0, 2  # kinds of fields
_FIXED = {1: 8, 5: 4}  # bytes of the other kinds

# The fields of onnx.proto that lead to tensors, by message, and the tensor's own fields.
_Messages: TypeAlias = Mapping[str, Mapping[int, str]]
_MESSAGES: _Messages = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
}
_INITIALIZERS: _Messages = {"model": {7: "graph"}, "graph": {5: "tensor"}}
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14


class Malformed(Exception):
    """Raised if the bytes are not a message, or the reader here does not support it."""


class Embedded(NamedTuple):
    """A model's message without its large tensors, whose external data is at `location`, in the file's bytes."""

    message: Bytes
    data: Bytes
    location: str

    @classmethod
    def of(cls, data: Bytes) -> "Embedded":
        """Split the file's bytes; a message that cannot be read here stays as it is, for protobuf's error."""
        location = f"embedded:{os.urandom(16).hex()}"
        try:
            return cls(_without_tensors(data, 0, len(data), "model", location, _DEEPEST, _MESSAGES), data, location)
        except Malformed:
            return cls(data, data, location)


def without_weights(path: Path) -> bytes:
    """Return the message of a model's file without its large initializers, which become external data in that file.

    ONNX Runtime finds them with the file's folder. A link is in another folder, so its file is returned whole.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            if not path.is_symlink():
                return _without_tensors(data, 0, len(data), "model", path.name, _DEEPEST, _INITIALIZERS)
        except (Malformed, UnicodeEncodeError):  # protobuf gives the error, or takes no such name
            pass
        return bytes(data)


def _without_tensors(
    data: Bytes, start: int, end: int, kind: str, location: str, depth: int, messages: _Messages
) -> bytes:
    if depth == 0:
        raise Malformed
    if kind == "tensor":
        return _without_data(data, start, end, location)
    kept, copied = bytearray(), start
    for number, first, body, after in fields(data, start, end):
        inner = messages[kind].get(number) if after - body >= _LARGE else None
        if inner is not None:
            kept += data[copied:first]
            kept += _delimited(number, _without_tensors(data, body, after, inner, location, depth - 1, messages))
            copied = after
    return bytes(kept + data[copied:end])


def _without_data(data: Bytes, start: int, end: int, location: str) -> bytes:
    """Return a tensor with its raw data as external data; unchanged if it has none, several, or external data."""
    kept, raw = bytearray(), []
    for number, first, body, after in fields(data, start, end):
        if number == _EXTERNAL_DATA or (number == _DATA_LOCATION and data[body:after] != b"\0"):
            return bytes(data[start:end])
        if number == _RAW_DATA:
            raw.append((body, after - body))
        elif number != _DATA_LOCATION:
            kept += data[first:after]
    if len(raw) != 1:
        return bytes(data[start:end])
    [(offset, length)] = raw
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        kept += _delimited(_EXTERNAL_DATA, _delimited(1, key.encode()) + _delimited(2, f"{value}".encode()))
    return bytes(kept + _varint(_DATA_LOCATION << 3 | _VARINT) + b"\1")


def fields(data: Bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, start, start of the value and end of each field."""
    at = start
    while at < end:
        first = at
        tag, body = read_varint(data, at, end)
        kind = tag & 7
        if kind == _VARINT:
            _, at = read_varint(data, body, end)
        elif kind == _LENGTH:
            length, body = read_varint(data, body, end)
            at = body + length
        elif kind in _FIXED:
            at = body + _FIXED[kind]
        else:
            raise Malformed
        if at > end:
            raise Malformed
        yield tag >> 3, first, body, at


def read_varint(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number and the offset after it. Raises Malformed if it does not end before `end`."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise Malformed


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


def _delimited(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _LENGTH) + _varint(len(value)) + value
