"""Rotations of pairs of elements, found in layers that only move, multiply and add.

Each element of the layers' result is traced to elements of a source and their factors. So every spelling of a rotation
gives the same terms.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, PadMode, UnaryOp
from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup, Reorder
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._linear import factor, times
from onnx2ncnn_opt.passes._views import Steps, inverse, moved, shortest, step_of, steps_to
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Refused, fixed_shape, needed, require

PRODUCT = op("BinaryOp", op_type=BinaryOp.MUL, with_scalar=0)
SUM = op("BinaryOp", op_type=frozenset({BinaryOp.ADD, BinaryOp.SUB}), with_scalar=0)
_NEGATION = op("UnaryOp", op_type=UnaryOp.NEG)
SCALING = times("x")
_WINDOW = ("pad_left", "pad_right", "pad_top", "pad_bottom", "global_pooling", "adaptive_pooling")
# A slice with steps: every n-th row and column.
_STRIDED = op(
    "Pooling",
    where=lambda pool: not any(pool[name] for name in _WINDOW),
    kernel_w=1,
    kernel_h=1,
    pad_mode=PadMode.VALID,
)
_PARTS = {"Concat": {"axis"}, "Slice": {"slices", "axis"}, "Crop": {"starts", "ends", "axes"}}

Numbers: TypeAlias = Callable[[Blob], Array]
"""Returns the numbers of a table, the operand of a product; it may raise Refused."""


class _Term(NamedTuple):
    """One addend of every element of a blob: the index of an element of the source, and its factor."""

    elements: Array
    factors: Array


class Rotation(NamedTuple):
    """RotaryEmbed's tables, the shape of its operand, and the views before and after it."""

    cos: Array
    sin: Array
    interleaved: bool
    shape: Shape
    before: Steps
    after: Steps


def can_trace(layer: Layer) -> bool:
    """Return True if a layer, except a `PRODUCT`, only moves, negates, scales or adds elements."""
    if layer.type in _PARTS:
        return layer.params.keys() <= _PARTS[layer.type]
    others = (SUM, _NEGATION, SCALING, _STRIDED)
    return step_of(layer) is not None or any(other.fits(layer) for other in others)


def find_rotation(source: Blob, layers: Sequence[Layer], numbers: Numbers) -> Rotation | None:
    """Return the rotation of `source` that layers compute, else None; refused if RotaryEmbed cannot compute it."""
    try:
        terms = _terms(source, layers, numbers)
    except Refused:
        return None
    result = fixed_shape(layers[-1].output)
    for lead, half, interleaved in _layouts(result) if len(terms) == 2 else ():
        shape, pair = ((*lead, half, 2), -1) if interleaved else ((*lead, 2, half), -2)
        sides = [[_Term(*(v.reshape(shape).take(i, pair) for v in term)) for term in terms] for i in (0, 1)]
        for a, b in product(*((side, side[::-1]) for side in sides)):
            if _is_rotated(a, b):
                elements = np.stack((a[0].elements, b[0].elements), pair)
                cos, sin = a[0].factors, -a[1].factors
                return _arranged(elements, cos, sin, interleaved, fixed_shape(source), result)
    return None


def _terms(source: Blob, layers: Sequence[Layer], numbers: Numbers) -> list[_Term]:
    """Return the terms, elements of `source`, that add up to each element of the last layer's result."""
    sizes = fixed_shape(source)
    elements = np.arange(prod(sizes), dtype=np.int32).reshape(sizes)
    terms = {source: [_Term(elements, np.ones(sizes, np.float32))]}
    for layer in layers:
        operands = [terms[blob] for blob in layer.inputs if blob in terms]
        tables = [numbers(blob) for blob in layer.inputs if blob not in terms]
        for blob in layer.outputs:
            terms[blob] = _of_layer(layer, blob, operands, tables)
            require(len(terms[blob]) <= 2, f"'{blob.name}' is made of more than two parts")
    return terms[layers[-1].output]


def _of_layer(layer: Layer, blob: Blob, operands: list[list[_Term]], tables: list[Array]) -> list[_Term]:
    """Return the terms of an output of a layer, from those of its operands, and the table of a product."""
    first, *others = operands
    if SUM.fits(layer):
        require(layer.inputs[0].shape == layer.inputs[1].shape, f"'{layer.name}' broadcasts")
        return [*first, *(_times(others[0], -1.0) if layer["op_type"] == BinaryOp.SUB else others[0])]
    if _NEGATION.fits(layer):
        return _times(first, -1.0)
    if PRODUCT.fits(layer):
        return _times(first, _broadcastable(tables[0], fixed_shape(blob)))
    if SCALING.fits(layer):
        return _times(first, factor(layer))
    if layer.type == "Concat":
        require(all(len(terms) == len(first) for terms in others), f"'{layer.name}' joins sums and single elements")
        return [
            _Term(*(np.concatenate(arrays, layer["axis"]) for arrays in zip(*t, strict=True)))
            for t in zip(*operands, strict=True)
        ]
    return [_Term(*(_moved(layer, blob, values) for values in term)) for term in first]


def _times(terms: list[_Term], factors: Array | float) -> list[_Term]:
    with np.errstate(over="ignore"):
        scaled = [_Term(term.elements, (term.factors * factors).astype(np.float32)) for term in terms]
    require(all(term.factors.shape == term.elements.shape for term in scaled), "a factor broadcasts")
    require(all(np.isfinite(term.factors).all() for term in scaled), "a factor would overflow")
    return scaled


def _broadcastable(table: Array, sizes: tuple[int, ...]) -> Array:
    """Return a table aligned with the outermost axes of the other operand, as ncnn does."""
    require(table.ndim == len(sizes) or 1 < table.ndim < len(sizes), "a table may belong to several axes")
    return table.reshape(*table.shape, *(1,) * (len(sizes) - table.ndim))


def _moved(layer: Layer, blob: Blob, values: Array) -> Array:
    """Return the values of a layer's output `blob`, from those of its input."""
    if layer.type != "Pooling":
        return moved(layer, blob, values)
    require(values.ndim == 3, f"'{layer.name}' takes no image")
    return values[:, :: layer["stride_h"], :: layer["stride_w"]]


def _layouts(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, bool]]:
    """Yield possible layouts of pairs: the axes before, the pairs of a row, and whether neighbours are pairs."""
    *lead, width = shape
    if lead and lead[-1] == 2:
        yield (*lead[:-1],), width, False
    if lead and width == 2:
        yield (*lead[:-1],), lead[-1], True
    if width % 2 == 0:
        yield (*lead,), width // 2, False
        yield (*lead,), width // 2, True


def _is_rotated(a: Sequence[_Term], b: Sequence[_Term]) -> bool:
    """Return True if a is x * cos - y * sin, and b is y * cos + x * sin."""
    (x, cos), (y, minus_sin) = a
    (y2, cos2), (x2, sin) = b
    pairs = ((x, x2), (y, y2), (cos, cos2), (minus_sin, -sin))
    return all(np.array_equal(left, right) for left, right in pairs)


def _arranged(
    elements: Array, cos: Array, sin: Array, interleaved: bool, source: tuple[int, ...], result: tuple[int, ...]
) -> Rotation:
    """Return the rotation with its rows after the heads, the axes along which the tables are constant."""
    lead = cos.shape[:-1]
    varying = [a for a in range(len(lead)) if any((t != t.take([0], a)).any() for t in (cos, sin))]
    require(len(varying) <= 1, "the heads are rotated in different ways")
    rows = varying or [len(lead) - 1] if lead else []
    heads = [a for a in range(len(lead)) if a not in rows]
    order = (*heads, *rows)
    elements = elements.transpose(*order, len(lead), len(lead) + 1)
    count, length, width = prod(lead[a] for a in heads), prod(lead[a] for a in rows), 2 * cos.shape[-1]
    shape = (count, length, width)  # ncnn's Vulkan rotates packed rows of a 2-D blob with another row's angles
    tables = [t.transpose(*order, len(lead)).reshape(count, length, -1)[0] for t in (cos, sin)]
    collected = needed(steps_to(elements, source), "the rotated elements are not a view of a blob")
    scattered = "the rows cannot be stored one after the other"
    before = needed(shortest(source, (*collected, Regroup(shape))), scattered)
    lead_out = (*(lead[a] for a in order), width)
    back = inverse((*lead, width), (Reorder((*order, len(lead))),)) if order != tuple(range(len(lead))) else ()
    after = needed(shortest(shape, (Regroup(lead_out), *back, Regroup(result))), scattered)
    return Rotation(tables[0], tables[1], interleaved, shape, before, after)
