"""Sequences, which TorchScript writes for lists of tensors. Their length is known, so they fold away."""

import numpy as np
import onnx_ir

from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.concat import concat, stacked, unstacked
from onnx2ncnn_opt.onnx.lower.functional.crop import split as parts_of
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Item, TensorSequence, Value


@onnx_op("SequenceConstruct", since=11, integers=True)
def sequence_construct(im: ImportContext, *xs: Value) -> TensorSequence:
    """Nothing: the list is known."""
    return TensorSequence(xs)


@onnx_op("SequenceEmpty", since=11)
def sequence_empty(im: ImportContext, *, dtype: int | None = None) -> TensorSequence:
    """Nothing: the list is known."""
    return TensorSequence(())


@onnx_op("SequenceInsert", since=11, integers=True)
def sequence_insert(
    im: ImportContext, sequence: TensorSequence, x: Value, position: Ints | None = None
) -> TensorSequence:
    """Nothing: the list is known."""
    items = sequence.items
    at = _position(im, position or (len(items),), len(items), beyond=1)
    return TensorSequence((*items[:at], x, *items[at:]))


@onnx_op("SequenceErase", since=11)
def sequence_erase(im: ImportContext, sequence: TensorSequence, position: Ints | None = None) -> TensorSequence:
    """Nothing: the list is known."""
    at = _position(im, position or (-1,), len(sequence.items))
    return TensorSequence((*sequence.items[:at], *sequence.items[at + 1 :]))


@onnx_op("SequenceAt", since=11)
def sequence_at(im: ImportContext, sequence: TensorSequence, position: Ints) -> Value:
    """Return the tensor at a known index."""
    return sequence.items[_position(im, position, len(sequence.items))]


@onnx_op("SequenceLength", since=11)
def sequence_length(im: ImportContext, sequence: TensorSequence) -> Constant:
    """Return a constant."""
    return Constant(np.array(len(sequence.items), np.int64))


def _position(im: ImportContext, position: Ints, length: int, beyond: int = 0) -> int:
    (at,) = position
    if not -length <= at < length + beyond:
        raise im.invalid(f"position {at} of a sequence of {length}")
    return at + length if at < 0 else at


@onnx_op("ConcatFromSequence", since=11)
def concat_from_sequence(im: ImportContext, sequence: TensorSequence, *, axis: int, new_axis: int = 0) -> Value:
    """Concat."""
    if not sequence.items:
        raise im.refuse("the sequence is empty, and ncnn has no empty tensors", "remove the node")
    return stacked(im, sequence.items, axis) if new_axis else concat(im, *sequence.items, axis=axis)


@onnx_op("SplitToSequence", since=11, integers=True)
def split_to_sequence(
    im: ImportContext, x: Value, split: Constant | None = None, *, axis: int = 0, keepdims: int = 1
) -> TensorSequence:
    """Slice."""
    axis = im.axis(axis, x.rank)
    (size,) = im.fixed((x.shape[axis],), f"axis {axis} is dynamic")
    sizes = (1,) if split is None else tuple(map(int, split.array.reshape(-1)))
    is_chunk = split is None or split.rank == 0
    if is_chunk and sizes == (1,) and not keepdims:  # torch's unbind; the specification ignores keepdims with a split
        return TensorSequence(unstacked(im, x, axis))
    if is_chunk and sizes[0] > 0:
        sizes = tuple(min(sizes[0], size - start) for start in range(0, size, sizes[0]))
    return TensorSequence(parts_of(im, x, axis, sizes))


@onnx_op("SequenceMap", since=17, integers=True)
def sequence_map(
    im: ImportContext, sequence: TensorSequence, *others: Item, body: onnx_ir.Graph
) -> tuple[TensorSequence, ...]:
    """Run the body for each tensor."""
    if any(isinstance(other, TensorSequence) and len(other.items) != len(sequence.items) for other in others):
        raise im.invalid("its sequences have different lengths")
    rows = []
    for i, first in enumerate(sequence.items):
        further = (other.items[i] if isinstance(other, TensorSequence) else other for other in others)
        rows.append(im.inlined(body, first, *further, iterations=len(sequence.items)))
    columns = zip(*rows, strict=True) if rows else ((),) * len(body.outputs)
    return tuple(TensorSequence(tuple(column)) for column in columns)


@onnx_op("Optional", since=15, integers=True, axes="each")
def optional(im: ImportContext, x: Item | None = None, *, type: onnx_ir.TypeAndShape | None = None) -> Item:
    """Nothing; an empty optional is refused."""
    if x is None:
        raise im.refuse("it is empty", "remove the node")
    return x


@onnx_op("OptionalHasElement", since=15, integers=True)
def optional_has_element(im: ImportContext, x: Item | None = None) -> Constant:
    """Return a constant."""
    return Constant(np.array(x is not None))


@onnx_op("OptionalGetElement", since=15, integers=True, axes="each")
def optional_get_element(im: ImportContext, x: Item) -> Item:
    """Nothing."""
    return x
