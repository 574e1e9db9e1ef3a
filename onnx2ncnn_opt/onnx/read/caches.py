"""Sizes of models that cache keys and values between runs: the batch is 1, and no size comes from an empty cache."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import onnx_ir

from onnx2ncnn_opt.ir.dim import Dim, Sym, symbol, total_length
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.onnx.read.binding import InputInfo, LengthInfo, TensorInfo
from onnx2ncnn_opt.onnx.read.given import parsed_size

_SEQUENCE = 2  # the axis of [batch, heads, sequence, width]
# Operators that concatenate past and new keys and values themselves.
_ATTENTION = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention"})

_VIEWS = frozenset({"Cast", "Reshape", "Squeeze", "Unsqueeze"})


class Lengths(NamedTuple):
    """The name of the past's length, and the sizes for past and new tokens together, and for new tokens."""

    past: str
    total: Sym
    new: Dim

    @property
    def inner(self) -> dict[str, Dim]:
        """The past's length as the net computes it: total minus new, because an unset cache has no shape."""
        return {self.past: total_length(self.past, self.new) - self.new}

    @property
    def outer(self) -> dict[str, Dim]:
        """The total in the model's names."""
        return {str(total_length(self.past, self.new)): self.total}


def is_past(value: onnx_ir.Value) -> bool:
    """Return True if an input is a cache: the model appends new keys or values along the sequence and outputs it."""
    rank = len(value.shape or ())
    return rank == _SEQUENCE + 2 and any(
        (node.op_type in _ATTENTION and value not in node.inputs[:3])  # inputs 0 to 2 are complete, as of an encoder
        or (
            node.op_type == "Concat"
            and node.inputs[0] is value
            and len(node.inputs) == 2
            and node.inputs[1] is not value
            and node.attributes.get_int("axis", 0) % rank == _SEQUENCE
            and node.outputs[0].is_graph_output()
        )
        for node in value.consumers()
    )


def bind_lengths(
    graph: onnx_ir.Graph, inputs: Sequence[InputInfo], outputs: Sequence[TensorInfo]
) -> tuple[tuple[InputInfo, ...], tuple[TensorInfo, ...], LengthInfo | None]:
    """Bind the batch of a model with caches to 1, and the mask's length to the number of past and new tokens.

    Return inputs and outputs; and for a model without such a mask an extra input of the net: a row as long as past and
    new tokens together, because the net cannot read the past's length from unset caches.
    """
    pasts = [info for value, info in _pairs(graph, inputs) if is_past(value)]
    lengths = {str(info.shape[_SEQUENCE]): info.shape[_SEQUENCE] for info in pasts}
    sizes: dict[str, Dim] = {str(info.shape[0]): 1 for info in pasts if isinstance(info.shape[0], Sym)}
    rows = [pair for pair in _pairs(graph, inputs) if len(pair[1].shape) == 2 and pair[1].dtype.is_integer()]
    sizes_of_rows = {str(info.shape[1]): info.shape[1] for _, info in rows}
    names = {str(info.shape[1]): info.name for value, info in rows if _is_index(value)}
    ids = {size: sizes_of_rows[size] for size in names}
    extra = None
    for name, past in lengths.items():
        candidates = {other: size for other, size in sizes_of_rows.items() if other not in (*ids, name)}
        totals = [other for other in candidates if _is_sum(other, past, sizes_of_rows)] or [
            other for other, size in candidates.items() if sum(size in info.shape for info in inputs) == 1
        ]
        new = [*ids.values()] or [size for other, size in sizes_of_rows.items() if other not in totals]
        if isinstance(past, Sym) and past == symbol(name) and len(new) == 1:
            if len(totals) == 1:
                sizes[totals[0]] = past + new[0]
            elif not totals and len(lengths) == len(ids) == 1:
                shape = (1, past + new[0])
                [(size, _)] = ids.items()
                name = NamePool(value.name or "" for value in (*graph.inputs, *graph.outputs)).take("all_tokens")
                extra = LengthInfo(name, onnx_ir.DataType.INT32, shape, names[size], pasts[0].name)
    return tuple(info.bound(sizes) for info in inputs), tuple(info.bound(sizes) for info in outputs), extra


def _pairs(graph: onnx_ir.Graph, inputs: Sequence[InputInfo]) -> Iterator[tuple[onnx_ir.Value, InputInfo]]:
    values = {value.name: value for value in graph.inputs}
    yield from ((values[info.name], info) for info in inputs)


def _is_index(value: onnx_ir.Value) -> bool:
    """Return True if a value is an index into a table, perhaps after a Cast or Reshape."""
    return any(
        node.op_type in ("Gather", "GatherBlockQuantized")
        if node.inputs[0] is not value
        else node.op_type in _VIEWS and _is_index(node.outputs[0])
        for node in value.consumers()
    )


def _is_sum(name: str, past: Dim, others: Mapping[str, Dim]) -> bool:
    """Return True if the exporter named a size as the sum of the past's length and another one."""
    total = parsed_size(name, {str(past): past, **{other: size for other, size in others.items() if other != name}})
    return isinstance(total, Sym) and str(past) in total.names()


def past_lengths(inputs: Sequence[InputInfo]) -> Lengths | None:
    """Return the lengths of a model whose mask covers past and new tokens; None for other models."""
    names = {str(info.shape[_SEQUENCE]) for info in inputs if len(info.shape) == _SEQUENCE + 2}
    for info in inputs:
        for total in info.shape[1:] if len(info.shape) == 2 else ():
            for past in sorted(names & (total.names() if isinstance(total, Sym) else set())):
                new = total - symbol(past)
                is_plain = (isinstance(new, int) and new > 0) or (new == symbol(str(new)) and str(new) != past)
                if isinstance(total, Sym) and is_plain:
                    return Lengths(past, total, new)
    return None
