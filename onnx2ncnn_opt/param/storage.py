"""Storing weights in 16 bits, if ncnn can read them and they lose little."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.releases import NEWEST
from onnx2ncnn_opt.ir.weight import Array, Encoding, Weight
from onnx2ncnn_opt.param.binary import Block, is_quantised, weight_blocks

# Half a unit in the last place, relative to a normal number: 10 and 7 bits after the point.
ROUNDING: Mapping[Encoding, float] = {Encoding.FP16: 2.0**-11, Encoding.BF16: 2.0**-8}
_LARGEST: Mapping[Encoding, float] = {Encoding.FP16: 65504.0, Encoding.BF16: 2.0**128 - 2.0**120}
# Rounding normal numbers changes a row by at most ROUNDING times its norm. A row that changes by more than twice that
# consists of subnormal numbers of the format.
_LIMIT = 2.0
_SINCE: Mapping[Encoding, int] = {Encoding.BF16: 20261020}  # older releases read a table after this tag


def encoding_of(storage: str | None, release: int = NEWEST) -> Encoding | None:
    """Return the encoding called "fp16" or "bf16"; UsageError for another name, or if the ncnn release lacks it."""
    if storage is None:
        return None
    encoding = next((encoding for encoding in ROUNDING if encoding.value == storage), None)
    if encoding is None:
        raise UsageError(f"weights cannot be stored as {storage}; there are {', '.join(e.value for e in ROUNDING)}")
    if release < _SINCE.get(encoding, 0):
        raise UsageError(f"weights in {storage} need ncnn {_SINCE[encoding]} or newer, not {release}")
    return encoding


class _Change(NamedTuple):
    layer: Layer
    name: str
    full: Weight
    short: Weight


@dataclass(frozen=True)
class Storage:
    """The weights to store in 16 bits, and texts about those that have to keep 32, with the reasons.

    `is_own` is True if passes computed these weights from 16-bit weights of the net that was read.
    """

    encoding: Encoding
    changes: tuple[_Change, ...]
    kept: tuple[str, ...]
    is_own: bool = False

    @property
    def count(self) -> int:
        """The number of weights stored in 16 bits."""
        return len(self.changes)

    @property
    def depth(self) -> int:
        """The number of layers that compute with rounded weights."""
        return len({change.layer for change in self.changes})

    @contextmanager
    def reverted(self) -> Iterator[None]:
        """Give the graph its 32-bit weights until the block ends."""
        self.apply(short=False)
        try:
            yield
        finally:
            self.apply()

    def apply(self, *, short: bool = True) -> None:
        """Give the graph its 16-bit weights, or its 32-bit weights again."""
        for change in self.changes:
            change.layer.weights[change.name] = change.short if short else change.full
            if change.layer.type == "MemoryData":
                if short:
                    change.layer.params["load_type"] = 0
                elif change.full.encoding is Encoding.FP32:
                    del change.layer.params["load_type"]


def own_storage(graph: Graph) -> Storage | None:
    """Plan 16 bits again for weights that passes have computed from 16-bit weights; None if there are none.

    If both encodings occur, the plan has the more frequent one, and the other weights keep 32 bits.
    """
    new = [item for item in _candidates(graph) if item[2].short]
    for encoding, _ in Counter(weight.short for *_, weight in new if weight.short).most_common(1):
        return _plan((item for item in new if item[2].short is encoding), encoding, is_own=True)
    return None


def plan_storage(graph: Graph, encoding: Encoding) -> Storage:
    """Plan which weights to store as FP16 or BF16; the graph stays as it is until the plan is applied.

    The plan covers float32 weights with a tag in the file, and those of MemoryData (by `load_type`); int8 layers and
    compressed weights stay unchanged. `kept` lists the weights that stay in 32 bits: a number overflows
    or is not finite, or all numbers of a row (the weights of one of `num_output` outputs) are too small for the format.
    """
    return _plan(_candidates(graph), encoding)


def _plan(candidates: Iterable[tuple[Layer, Block, Weight]], encoding: Encoding, *, is_own: bool = False) -> Storage:
    changes, kept = [], []
    for layer, block, weight in candidates:
        short, reason = _shortened(weight.array, encoding, _rows(layer, block))
        if reason:
            kept.append(f"{layer.type} '{layer.name}', {block.name}: {reason}")
        else:
            changes.append(_Change(layer, block.name, weight, Weight(short, encoding)))
    return Storage(encoding, tuple(changes), tuple(kept), is_own)


def _candidates(graph: Graph) -> Iterator[tuple[Layer, Block, Weight]]:
    for layer in graph:
        if is_quantised(layer):
            continue
        for block in weight_blocks(layer):
            weight = layer.weights.stored(block.name)
            is_constant = layer.type == "MemoryData" and not _is_integer(weight)
            if (block.tagged or is_constant) and weight.encoding in (Encoding.FP32, Encoding.FP32_FLAGGED):
                yield layer, block, weight


def _is_integer(weight: Weight) -> bool:
    """Return True if a constant's 32 bits are integers, such as indexes: as floats these are subnormal."""
    if weight.data.dtype == np.int32 or weight.data.dtype.itemsize != 4:
        return weight.data.dtype == np.int32
    bits = weight.data.view(np.uint32)
    return bool(((bits >> 23 & 0xFF == 0) & (bits << 1 != 0)).any())  # subnormal


def _rows(layer: Layer, block: Block) -> int:
    count = layer.get("num_output", 1)
    return count if count > 0 and block.count % count == 0 else 1


def rounded(array: Array, encoding: Encoding) -> Array:
    """Return float32 numbers after a round trip through the encoding."""
    values = np.ascontiguousarray(array, np.float32)
    with np.errstate(over="ignore"):
        return Weight(_encoded(values.reshape(-1), encoding), encoding).array.reshape(values.shape)


def _shortened(array: Array, encoding: Encoding, rows: int) -> tuple[Array, str]:
    """Return the 16-bit numbers and an empty string, or the numbers as they are and the reason."""
    values = array.astype(np.float32, copy=False).reshape(-1)
    if not np.isfinite(values).all():
        return values, "it is not finite everywhere"
    with np.errstate(over="ignore"):
        short = _encoded(values, encoding)
        back = Weight(short, encoding).array
    if not np.isfinite(back).all():
        largest = float(np.abs(values).max())
        return values, f"{largest:g} is beyond the largest number of {encoding.value}, {_LARGEST[encoding]:g}"
    if not (values[:1] % 1).any() and (back != values).any() and not (values % 1).any():
        return values, f"it holds integers, such as indices, that {encoding.value} would round"
    parts, stored = values.reshape(rows, -1), back.reshape(rows, -1)
    lost = np.linalg.norm(stored.astype(np.float64) - parts, axis=1)
    allowed = _LIMIT * ROUNDING[encoding] * np.linalg.norm(parts.astype(np.float64), axis=1)
    if (lost > allowed).any():
        row = int(np.argmax(lost - allowed))
        where = f"row {row}" if rows > 1 else "it"
        largest = float(np.abs(parts[row]).max())
        return values, f"{where} has no number above {largest:g}, too small for {encoding.value}"
    return short, ""


def _encoded(values: Array, encoding: Encoding) -> Array:
    if encoding is Encoding.FP16:
        return values.astype(np.float16)
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)
