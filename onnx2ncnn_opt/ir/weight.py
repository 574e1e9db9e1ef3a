"""Weights as a .bin file stores them.

A weight keeps the encoding of its file, so reading and writing a net keeps every bit. It is expanded to float32 only
for computations.
"""

import enum
import hashlib
from collections import UserDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def one_of_equal_slices(array: Array, axes: Iterable[int]) -> Array:
    """Return an array with a size of 1 along those of the axes whose slices all have the same bits."""
    bits = np.ascontiguousarray(array).view(f"u{array.itemsize}")
    for axis in axes:
        first = bits.take([0], axis)
        if (bits.take([-1], axis) == first).all() and (bits == first).all():
            bits = first
    return bits.view(array.dtype)


class Encoding(enum.Enum):
    """The format of the stored numbers, with the dtype of `Weight.data`."""

    FP32 = "fp32"  # float32, or any 32-bit pattern (int32 constants) where ncnn reads raw data
    FP32_FLAGGED = "fp32-flagged"  # float32 after the tag 0x0002C056
    FP16 = "fp16"  # float16
    BF16 = "bf16"  # the upper 16 bits of a float32, as uint16
    INT8 = "int8"  # int8, stays int8 in the runtime
    TABLE = "table"  # uint8 indexes into 256 float32
    BYTES = "bytes"  # uint8, block-quantised weights


@dataclass(frozen=True, eq=False)
class Weight:
    """One weight block: `data` as stored, and for `Encoding.TABLE` its 256 float32 `table` values.

    `tag` is the number before a TABLE: any number that is not another encoding's tag. `short` is FP16 or BF16 if a pass
    computed the weight from weights of that encoding.
    """

    data: Array
    encoding: Encoding = Encoding.FP32
    table: Array | None = None
    tag: int = 1
    short: Encoding | None = None

    @property
    def array(self) -> Array:
        """The numbers: float32, or the stored integers of INT8 and BYTES."""
        if self.encoding is Encoding.FP16:
            return self.data.astype(np.float32)
        if self.encoding is Encoding.BF16:
            return (self.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if self.encoding is Encoding.TABLE:
            assert self.table is not None
            return np.asarray(self.table[self.data])
        return self.data

    @property
    def is_float(self) -> bool:
        """True if `array` holds the real values of the weight."""
        return self.encoding not in (Encoding.INT8, Encoding.BYTES) and self.data.dtype != np.int32


def digest(weight: Weight) -> str:
    """Return the SHA-256 of a weight as it is stored; equal weights are written as the same bytes."""
    sha256 = hashlib.sha256(f"{weight.encoding.value} {weight.tag} ".encode())
    for part in (weight.table, weight.data):
        if part is not None:
            sha256.update(np.ascontiguousarray(part).view(np.uint8).data)
    return sha256.hexdigest()


class Weights(UserDict[str, Any]):
    """The weights of a layer by ncnn's name: reading gives numbers, `stored` gives the block as it is in the file."""

    def __getitem__(self, name: str) -> Array:
        return self.stored(name).array

    def __setitem__(self, name: str, block: Array | Weight) -> None:
        if not isinstance(block, Weight):
            array = np.asarray(block)
            block = Weight(array if array.dtype in (np.float32, np.int32) else array.astype(np.float32))
        self.data[name] = block

    def stored(self, name: str) -> Weight:
        """Return the block as it is in the file; KeyError if the layer has none of that name."""
        block: Weight = self.data[name]
        return block

    def stored_items(self) -> Iterator[tuple[str, Weight]]:
        """Return names and blocks in the order of the file."""
        return iter(self.data.items())
