"""Reader of a tail's ONNX file without onnx or protobuf: messages, tensors and attributes.

Every size is checked against the available bytes. Field numbers are from onnx.proto.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.onnx.read.embedded import Malformed, fields, read_varint

_TYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
}
# Fields of a tensor's numbers by type; 32-bit and smaller types share field 5.
_TYPED = {"float32": (4, "<f4"), "float64": (10, "<f8"), "int64": (7, ""), "uint32": (11, ""), "uint64": (11, "")}


class Message:
    """A message of protobuf: the values of its fields, by number."""

    def __init__(self, data: bytes) -> None:
        self._numbers: dict[int, list[int]] = {}
        self._bytes: dict[int, list[bytes]] = {}
        for number, first, body, end in fields(data, 0, len(data)):
            if data[first] & 7:
                self._bytes.setdefault(number, []).append(data[body:end])
            else:
                self._numbers.setdefault(number, []).append(read_varint(data, body, end)[0])

    def all_bytes(self, number: int) -> list[bytes]:
        """Return the values of a field that is not a number."""
        if number in self._numbers:
            raise Malformed
        return self._bytes.get(number, [])

    def messages(self, number: int) -> list["Message"]:
        """Return the messages in a field."""
        return [Message(value) for value in self.all_bytes(number)]

    def one(self, number: int) -> "Message":
        """Return the last message in a field, by default an empty one."""
        return Message(b"".join(self.all_bytes(number)[-1:]))

    def texts(self, number: int) -> tuple[str, ...]:
        """Return the strings in a field. Zero bytes are invalid, because `program` uses them in new names."""
        values = self.all_bytes(number)
        if b"\0" in b"".join(values):
            raise Malformed
        return tuple(map(bytes.decode, values))

    def text(self, number: int) -> str:
        """Return the last string in a field, by default ""."""
        return "".join(self.texts(number)[-1:])

    def ints(self, number: int) -> list[int]:
        """Return the numbers in a field, packed or not, as int64."""
        numbers = list(self._numbers.get(number, ()))
        for value in self._bytes.get(number, ()):
            if number in self._numbers:  # both forms in one field
                raise Malformed
            numbers += _varints(value)
        return [(value & (1 << 64) - 1) - (value >> 63 & 1) * (1 << 64) for value in numbers]

    def integer(self, number: int) -> int:
        """Return the last number in a field, by default 0."""
        return (self.ints(number) or [0])[-1]

    def floats(self, number: int, kind: str) -> NDArray[Any]:
        """Return the floats in a field."""
        data = b"".join(self.all_bytes(number))
        if len(data) % np.dtype(kind).itemsize:
            raise Malformed
        return np.frombuffer(data, kind)


def type_name(number: int) -> str:
    """Return numpy's name of an element type. Raises ValueError for types that tails lack."""
    if number not in _TYPES:
        raise ValueError(f"element type {number} is not known in a tail")
    return _TYPES[number]


def tensor(message: Message) -> NDArray[Any]:
    """Return a tensor. Raises ValueError if its data do not match its shape, or are outside of the file."""
    dtype, shape = np.dtype(type_name(message.integer(2))), message.ints(1)
    if message.all_bytes(13) or message.integer(14):
        raise ValueError("its data are outside of the file")
    count = math.prod(max(size, -1) for size in shape)
    field, kind = _TYPED.get(dtype.name, (5, ""))
    if message.all_bytes(9):
        [raw] = message.all_bytes(9)
        if len(raw) % dtype.itemsize:
            raise ValueError(f"it has {len(raw)} bytes of {dtype}")
        data: NDArray[Any] = np.frombuffer(raw, dtype.newbyteorder("<"))
    elif kind:
        data = message.floats(field, kind)
    else:
        numbers = np.array(message.ints(field), np.int64)
        data = numbers.astype(np.uint16).view(dtype) if dtype.kind == "f" else numbers
    if min(shape, default=0) < 0 or data.size != count or len(shape) > 8:
        raise ValueError(f"it has {data.size} elements for the shape {shape}")
    result = (data != 0 if dtype.kind == "b" and data.dtype != dtype else data).astype(dtype).reshape(shape)
    return (result.view(np.uint8) != 0) if dtype.kind == "b" else result


def attribute(message: Message) -> Any:
    """Return the value of an attribute. Raises ValueError for graphs and other kinds that tails lack."""
    kind = message.integer(20)
    if kind == 1:
        [value] = message.floats(2, "<f4")[-1:].tolist()
        return value
    if kind == 2:
        return message.integer(3)
    if kind == 3:
        return message.text(4)
    if kind == 4:
        return tensor(message.one(5))
    if kind == 6:
        return message.floats(7, "<f4").tolist()
    if kind == 7:
        return message.ints(8)
    raise ValueError("it is of a kind that no tail has")


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = read_varint(data, at, len(data))
        yield value
