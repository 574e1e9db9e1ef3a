"""Rotations of pairs of elements, found in a trace of them."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup, Reorder
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._trace import NO_ELEMENT, Numbers, Sizes, Term, trace
from onnx2ncnn_opt.passes._views import Steps, inverse, shortest, steps_to
from onnx2ncnn_opt.rewrite.rule import Refused, needed, require


class Rotation(NamedTuple):
    """RotaryEmbed's tables, the shape of its operand, and the views before and after it."""

    cos: Array
    sin: Array
    interleaved: bool
    shape: Shape
    before: Steps
    after: Steps


def find_rotation(source: Blob, layers: Sequence[Layer], sizes: Sizes, numbers: Numbers) -> Rotation | None:
    """Return the rotation of `source` that layers compute, else None; refused if RotaryEmbed cannot compute it."""
    try:
        terms = trace(source, layers[-1].output, layers, sizes, numbers)
    except Refused:
        return None
    result = sizes.shape(layers[-1].output)
    for lead, half, interleaved in _layouts(result) if len(terms) == 2 else ():
        shape, pair = ((*lead, half, 2), -1) if interleaved else ((*lead, 2, half), -2)
        a, b = ([Term(*(v.reshape(shape).take(i, pair) for v in term)) for term in terms] for i in (0, 1))
        rotated = _rotated(_completed(a, b), _completed(b, a))
        if rotated is not None:
            first, second, cos, sin = rotated
            elements = np.stack((first, second), pair)
            return _arranged(elements, cos, sin, interleaved, source, result, sizes)
    return None


def _completed(terms: Sequence[Term], others: Sequence[Term]) -> list[Term]:
    """Return the terms in the order of their elements; an element alone gets its partner times 0."""
    (first, factors), (second, others_factors) = terms
    second = np.where(second == NO_ELEMENT, others[0].elements, second)
    is_first = first < second
    low = Term(np.where(is_first, first, second), np.where(is_first, factors, others_factors))
    return [low, Term(np.where(is_first, second, first), np.where(is_first, others_factors, factors))]


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


def _rotated(a: Sequence[Term], b: Sequence[Term]) -> tuple[Array, Array, Array, Array] | None:
    """Return x, y, cos and sin if a is x * cos - y * sin, and b is y * cos + x * sin; None for other terms."""
    if not all(np.array_equal(left.elements, right.elements) for left, right in zip(a, b, strict=True)):
        return None
    for x, y in ((0, 1), (1, 0)):
        cos, sin = a[x].factors, b[x].factors
        if np.array_equal(cos, b[y].factors) and np.array_equal(sin, -a[y].factors):
            return a[x].elements, a[y].elements, cos, sin
    return None


def _arranged(
    elements: Array, cos: Array, sin: Array, interleaved: bool, blob: Blob, result: tuple[int, ...], sizes: Sizes
) -> Rotation:
    """Return the rotation with its rows after the heads, the axes along which the tables are constant.

    `blob` is the source, `result` the shape of the result.
    """
    source = sizes.shape(blob)
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
    before = needed(sizes.steps(blob, shortest(source, (*collected, Regroup(shape)))), scattered)
    lead_out = (*(lead[a] for a in order), width)
    back = inverse((*lead, width), (Reorder((*order, len(lead))),)) if order != tuple(range(len(lead))) else ()
    after = needed(sizes.steps(blob, shortest(shape, (Regroup(lead_out), *back, Regroup(result)))), scattered)
    return Rotation(tables[0], tables[1], interleaved, sizes.sizes(shape), before, after)
