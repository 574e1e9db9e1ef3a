"""Matrix products, and Einsum as a chain of products of two operands: transpose and reshape to matrices, then MatMul.

If an operand of Einsum has two axes of one name, the importer takes the diagonal first.
"""

import re
from collections.abc import Sequence

import numpy as np

from onnx2ncnn_opt.ir.dim import Dim, product
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.items import NodeView
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.crop import pick
from onnx2ncnn_opt.onnx.lower.functional.matmul import gemm, matmul
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Tensor, Value

# Letters of an equation, and numbers for the axes of an ellipsis (0 is the last).
_Axes = tuple[str, ...]


def _rows(node: NodeView) -> int:
    """Apply the rule of Gemm: items are rows of the first matrix."""
    node.only(0, 2)
    bias_axis = node.axis(2)
    items.require(node.axis(0) == (1 if node.number("transA", 0) else 0) and bias_axis in (0, None))
    if node.operand(2) is not None:
        items.require(node.shape(2)[-2:-1] in ((), (1,)) if bias_axis is None else len(node.shape(2)) == 2)
    return 0


onnx_op("Gemm", since=7, items=_rows, folds=True)(gemm)
onnx_op("MatMul", items=items.product_of(0, 1), folds=True)(matmul)


def _letters_kept(node: NodeView) -> int:
    """Apply the rule of Einsum: the items' axis has the same letter in all operands and in the result."""
    equation = node.text("equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    items.require(bool(arrow) and "." not in equation)
    items.require([*map(len, terms)] == [len(node.shape(i)) for i in range(len(node.operands))])
    axes = [node.axis(i) for i in range(len(terms))]
    letters = {term[axis] for term, axis in zip(terms, axes, strict=True) if axis is not None}
    items.require(len(letters) == 1)
    [letter] = letters
    counts = [term.count(letter) for term in (right, *terms)]
    items.require(counts == [1, *(at is not None for at in axes)])
    sizes = [node.shape(i)[at] for i, at in enumerate(axes) if at is not None]
    items.require(len(set(sizes)) == 1)
    node.is_batch = len(sizes) > 1
    return right.index(letter)


@onnx_op("Einsum", since=12, items=_letters_kept, folds=True)
def einsum(im: ImportContext, *xs: Value, equation: str) -> Value:
    """MatMul of regrouped operands, Reduction of axes that are in one operand only."""
    terms, result = _parse(im, equation.replace(" ", ""), xs)
    sizes: dict[str, Dim] = {}
    operands: list[tuple[Value, _Axes]] = []
    for x, axes in zip(xs, terms, strict=True):
        for axis, size in zip(axes, x.shape, strict=True):
            if size != 1 and sizes.setdefault(axis, size) != size:
                raise im.invalid(f"axis {axis} of '{equation}' is both {sizes[axis]} and {size}", [(size, sizes[axis])])
        operands.append(_without_ones(im, *_diagonal(im, x, axes)))
    value, axes = operands[0]
    for i, (other, axes_of_other) in enumerate(operands[1:], 1):
        needed = {*result, *(axis for _, later in operands[i + 1 :] for axis in later)}
        value, axes = _product(im, (value, axes), (other, axes_of_other), needed)
    value, axes = _summed(im, value, axes, set(result))
    kept = [axis for axis in result if axis in axes]
    value = value.transpose([axes.index(axis) for axis in kept])
    return im.reshape(value, tuple(sizes.get(axis, 1) for axis in result))


def _parse(im: ImportContext, equation: str, xs: Sequence[Value]) -> tuple[list[_Axes], _Axes]:
    """Return the axes of each operand and of the result."""
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(xs) or not all(re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", t) for t in (*terms, right)):
        raise im.invalid(f"equation '{equation}' for {len(xs)} operands")
    axes = []
    most = 0
    for term, x in zip(terms, xs, strict=True):
        more = x.rank - len(term.replace("...", ""))
        if more < 0 or (more and "..." not in term):
            raise im.invalid(f"'{term}' of equation '{equation}' for an operand of rank {x.rank}")
        most = max(most, more)
        axes.append(_letters(term, more))
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        right = "..." * bool(most) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    result = _letters(right, most)
    if len(set(result)) != len(result) or not set(result) <= {axis for term in axes for axis in term}:
        reason = f"the result '{right}' of equation '{equation}'"
        raise im.refuse(reason, "name axes of the operands in the result, each once")
    return axes, result


def _letters(term: str, more: int) -> _Axes:
    before, dots, after = term.partition("...")
    middle = [str(i) for i in reversed(range(more))] if dots else []
    return (*before, *middle, *after)


def _diagonal(im: ImportContext, x: Value, axes: _Axes) -> tuple[Value, _Axes]:
    """Replace two axes of one name by their diagonal: every (size + 1)th element of the merged axes."""
    twice = next((i for i, axis in enumerate(axes) if axis in axes[:i]), None)
    if twice is None:
        return x, axes
    first, size = axes.index(axes[twice]), x.shape[twice]
    if not isinstance(size, int) or x.shape[first] != size:
        raise im.invalid(f"the diagonal of sizes {x.shape[first]} and {size}")
    others = [i for i in range(len(axes)) if i not in (first, twice)]
    flat = im.reshape(x.transpose([*others, first, twice]), (*(x.shape[i] for i in others), size * size))
    picked = pick(im, im.tensor(flat), len(others), np.arange(size) * (size + 1))
    return _diagonal(im, picked, (*(axes[i] for i in others), axes[twice]))


def _without_ones(im: ImportContext, x: Value, axes: _Axes) -> tuple[Value, _Axes]:
    kept = [i for i, size in enumerate(x.shape) if size != 1]
    return im.reshape(x, tuple(x.shape[i] for i in kept)), tuple(axes[i] for i in kept)


def _summed(im: ImportContext, x: Value, axes: _Axes, needed: set[str]) -> tuple[Value, _Axes]:
    """Sum over the axes that are not needed later."""
    summed = tuple(i for i, axis in enumerate(axes) if axis not in needed)
    if not summed:
        return x, axes
    return reduce(im, im.tensor(x), "ReduceSum", summed, 0), tuple(axis for axis in axes if axis in needed)


def _product(
    im: ImportContext, left: tuple[Value, _Axes], right: tuple[Value, _Axes], needed: set[str]
) -> tuple[Tensor, _Axes]:
    """Multiply two operands, and sum over common axes that are not needed later."""
    a, axes_a = _summed(im, *left, needed | set(right[1]))
    b, axes_b = _summed(im, *right, needed | set(left[1]))
    batch = [axis for axis in axes_a if axis in axes_b and axis in needed]
    inner = [axis for axis in axes_a if axis in axes_b and axis not in needed]
    rows = [axis for axis in axes_a if axis not in axes_b]
    columns = [axis for axis in axes_b if axis not in axes_a]
    sizes = dict(zip((*axes_a, *axes_b), (*a.shape, *b.shape), strict=True))
    shared = tuple(sizes[axis] for axis in batch)
    height, depth, width = (product(sizes[axis] for axis in axes) for axes in (rows, inner, columns))
    a = a.transpose([axes_a.index(axis) for axis in (*batch, *rows, *inner)])
    b = b.transpose([axes_b.index(axis) for axis in (*batch, *inner, *columns)])
    a = im.reshape(a, (*shared, height, depth))
    b = im.reshape(b, (*shared, depth, width))
    axes = (*batch, *rows, *columns)
    return im.tensor(im.reshape(matmul(im, a, b), tuple(sizes[axis] for axis in axes))), axes
