"""Reading and writing .bin weights: the blocks of all layers in a row, each padded to a multiple of 4 bytes.

A block is raw float32, raw bytes (block-quantised weights), or data after a 4-byte tag that names its encoding. The
layer table says the kind and length of each block; the file itself has no structure.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from onnx2ncnn_opt.errors import BinError, GraphError
from onnx2ncnn_opt.ir.graph import Graph, Layer, check_weight_names
from onnx2ncnn_opt.ir.weight import Array, Encoding, Weight
from onnx2ncnn_opt.progress import Count
from onnx2ncnn_opt.system import WINDOWS

_TAGS: Mapping[int, Encoding] = {
    0x00000000: Encoding.FP32,
    0x0002C056: Encoding.FP32_FLAGGED,
    0x01306B47: Encoding.FP16,
    0x01348B83: Encoding.BF16,
    0x000D4B38: Encoding.INT8,
}
_TAG_OF: Mapping[Encoding, int] = {encoding: tag for tag, encoding in _TAGS.items()}
_DTYPES: Mapping[Encoding, np.dtype[Any]] = {
    Encoding.FP32: np.dtype("<f4"),
    Encoding.FP32_FLAGGED: np.dtype("<f4"),
    Encoding.FP16: np.dtype("<f2"),
    Encoding.BF16: np.dtype("<u2"),
    Encoding.INT8: np.dtype("i1"),
    Encoding.TABLE: np.dtype("u1"),
    Encoding.BYTES: np.dtype("u1"),
}
_TABLE_SIZE = 256
_CHUNK = 1 << 24  # elements converted at a time while writing

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Block:
    """A weight in the .bin: its number of elements (of bytes if `packed`), and whether a tag precedes it."""

    name: str
    count: int
    tagged: bool
    packed: bool


def weight_blocks(layer: Layer) -> list[Block]:
    """Return the weights of a layer in the order of the file; none for an undeclared custom layer.

    Raises GraphError for a weight without elements, which ncnn refuses to load.
    """
    if layer.spec is None:
        return []
    blocks = [
        Block(weight.name, weight.count(layer), weight.is_tagged(layer), weight.packed)
        for weight in layer.spec.weights
        if weight.present(layer)
    ]
    for block in blocks:
        if block.count <= 0:
            raise GraphError(f"{layer.type} '{layer.name}': its parameters give {block.name} {block.count} elements")
    return blocks


def open_bin(path: str | os.PathLike[str]) -> Bytes:
    """Map a file into memory and return its bytes; BinError if it cannot be opened.

    On Windows it is read instead: a mapped file cannot be replaced there, and `optimize` may replace its source.
    """
    try:
        if WINDOWS:
            return np.fromfile(path, np.uint8)
        return np.asarray(np.memmap(path, np.uint8, mode="r")) if os.path.getsize(path) else np.empty(0, np.uint8)
    except OSError as error:
        raise BinError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error


def load_weights(graph: Graph, data: Bytes, *, file: str = "<bin>") -> int:
    """Give every layer of a graph its weights, as views into `data`; returns the number of bytes left over.

    Bytes after the last weight are no error: ncnn ignores them, and nets whose last layers were cut off by hand have
    them. But in a net with a custom layer they mean that its weights were skipped, and all later weights are wrong.
    Raises BinError with the byte offset and the layer.
    """
    reader = _WeightReader(data, file)
    custom: Layer | None = None
    for layer in graph:
        if layer.spec is None:
            custom = custom or layer
        try:
            for block in weight_blocks(layer):
                layer.weights[block.name] = reader.block(layer, block)
        except GraphError as error:
            raise BinError(f"{file}: at byte {reader.offset}: {error}") from None
        except BinError as error:
            raise BinError(f"{error}{_custom_hint(custom)}") from None
    rest = len(data) - reader.offset
    if rest and custom:
        raise BinError(f"{file}: {rest} bytes are left over after the last weight{_custom_hint(custom)}")
    return rest


def _custom_hint(first: Layer | None) -> str:
    if first is None:
        return ""
    return (
        f"; the custom layer '{first.name}' ({first.type}) may have weights: say how many elements each has, "
        f"like --custom {first.type}:p6@tagged,p0 (see docs/plugins.md)"
    )


@dataclass
class _WeightReader:
    """Reads one block after the other from a file's bytes."""

    data: Bytes
    file: str
    offset: int = 0

    def block(self, layer: Layer, block: Block) -> Weight:
        where = f"{self.file}: at byte {self.offset}: {layer.type} '{layer.name}', {block.name}"
        encoding, tag, table = Encoding.BYTES if block.packed else Encoding.FP32, 1, None
        if block.tagged:
            tag = int(self._take(4, where).view("<u4")[0])
            encoding = _TAGS.get(tag, Encoding.TABLE)
            if encoding is Encoding.INT8 and not _reads_int8(layer):
                raise BinError(f"{where} is int8, but the layer's parameters do not say so, which would crash ncnn")
        if encoding is Encoding.TABLE:
            table = self._take(4 * _TABLE_SIZE, where).view("<f4")
        dtype = _DTYPES[encoding]
        size = block.count * dtype.itemsize
        data = self._take(size + -size % 4, where)[:size].view(dtype)
        return Weight(data, encoding, table, tag if encoding is Encoding.TABLE else 1)

    def _take(self, size: int, where: str) -> Bytes:
        remaining = len(self.data) - self.offset
        if size > remaining:
            raise BinError(f"{where} needs {size} bytes, but the file ends after {remaining}")
        self.offset += size
        return self.data[self.offset - size : self.offset]


def is_quantised(layer: Layer) -> bool:
    """Return True if a layer's parameters say that its weights are integers."""
    return any(layer.get(name) for name in ("int8_scale_term", "quantize_term"))


def _reads_int8(layer: Layer) -> bool:
    return layer.type == "MemoryData" or is_quantised(layer)


def write_weights(layers: Iterable[Layer], stream: BinaryIO) -> None:
    """Write the weights of layers; GraphError if a weight does not fit its layer or has an encoding that it lacks."""
    layers = list(layers)
    stored = (weight for layer in layers for _, weight in layer.weights.stored_items())
    count = Count("writing weights", "MB", sum(weight.data.nbytes for weight in stored) / 1e6)
    for layer in layers:
        blocks = weight_blocks(layer)
        check_weight_names(layer, [block.name for block in blocks])
        for block in blocks:
            weight = layer.weights.stored(block.name)
            if problem := _misfit(weight, block, layer):
                raise GraphError(f"{layer.type} '{layer.name}': {block.name} {problem}")
            for part in _parts(weight, block):
                stream.write(part)
                count.add(len(part) / 1e6)


def _misfit(weight: Weight, block: Block, layer: Layer) -> str | None:
    """Return why a weight cannot be written to this block; None if it can."""
    encoding, dtype = weight.encoding, weight.data.dtype
    if weight.data.size != block.count:
        return f"has {weight.data.size} elements, the parameters say {block.count}"
    if not block.tagged and encoding is not (Encoding.BYTES if block.packed else Encoding.FP32):
        return f"cannot be stored as {encoding.value}"
    if block.tagged and encoding is Encoding.BYTES:
        return "cannot be stored as bare bytes"
    if encoding is Encoding.INT8 and not _reads_int8(layer):
        return "is int8, but the layer's parameters do not say so"
    if dtype.itemsize != _DTYPES[encoding].itemsize or (dtype == np.float64):
        return f"is stored as {encoding.value}, but has the dtype {dtype}"
    if encoding is Encoding.TABLE and (weight.table is None or weight.table.shape != (_TABLE_SIZE,)):
        return f"needs a table of {_TABLE_SIZE} values"
    if encoding is Encoding.TABLE and (weight.tag in _TAGS or not 0 < weight.tag < 1 << 32):
        return f"has a table, whose tag cannot be {weight.tag:#x}"
    return None


def _parts(weight: Weight, block: Block) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a block: tag, table, data in chunks, padding."""
    if block.tagged:
        tag = weight.tag if weight.encoding is Encoding.TABLE else _TAG_OF[weight.encoding]
        yield tag.to_bytes(4, "little")
    if weight.table is not None:
        yield weight.table.astype("<f4").tobytes()
    flat: Array = weight.data.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK].astype(flat.dtype.newbyteorder("<"), copy=False)
        yield np.ascontiguousarray(chunk).view(np.uint8).data
    yield bytes(-flat.size * flat.dtype.itemsize % 4)
