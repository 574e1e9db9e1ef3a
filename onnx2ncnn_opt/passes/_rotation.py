"""Rotations of pairs of elements, found in a trace of them."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup, Reorder
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._trace import Numbers, Sizes, Term, trace
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
        sides = [[Term(*(v.reshape(shape).take(i, pair) for v in term)) for term in terms] for i in (0, 1)]
        for a, b in product(*((side, side[::-1]) for side in sides)):
            if _is_rotated(a, b):
                elements = np.stack((a[0].elements, b[0].elements), pair)
                cos, sin = a[0].factors, -a[1].factors
                return _arranged(elements, cos, sin, interleaved, (sizes.shape(source), result), sizes)
    return None


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


def _is_rotated(a: Sequence[Term], b: Sequence[Term]) -> bool:
    """Return True if a is x * cos - y * sin, and b is y * cos + x * sin."""
    (x, cos), (y, minus_sin) = a
    (y2, cos2), (x2, sin) = b
    pairs = ((x, x2), (y, y2), (cos, cos2), (minus_sin, -sin))
    return all(np.array_equal(left, right) for left, right in pairs)


def _arranged(
    elements: Array, cos: Array, sin: Array, interleaved: bool, ends: Sequence[tuple[int, ...]], sizes: Sizes
) -> Rotation:
    """Return the rotation with its rows after the heads, the axes along which the tables are constant.

    `ends` are the shapes of the source and of the result.
    """
    source, result = ends
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
    before = needed(sizes.steps(shortest(source, (*collected, Regroup(shape)))), scattered)
    lead_out = (*(lead[a] for a in order), width)
    back = inverse((*lead, width), (Reorder((*order, len(lead))),)) if order != tuple(range(len(lead))) else ()
    after = needed(sizes.steps(shortest(shape, (Regroup(lead_out), *back, Regroup(result)))), scattered)
    return Rotation(tables[0], tables[1], interleaved, sizes.sizes(shape), before, after)
