"""The operator Where: a choice between two sides that is right even if the other side is infinite or NaN.

A product with 0 is 0 only for finite numbers; the results of min and max of NaN depend on the machine. So there are
three methods, and the first safe one is used (docs/special-values.md):

- Arithmetic if both sides are finite (ir/ranges.py): multiply each side by 1 where it is chosen, by 0 elsewhere.
- If a side is a function that leaves its domain, recompute it with operands that are safe where it is not chosen:
  ``where(x > 0, log(x), 0)`` is the logarithm of x where x > 0, and of 1 elsewhere.
- GridSample, which copies any number: the mask selects one of both sides, which are concatenated.
"""

import itertools
import math
from typing import TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction, UnaryOp
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, known, product
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.half import COMPUTED_SIDE
from onnx2ncnn_opt.ir.ranges import Range, of_numbers, through
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, broadcast_shape, number, spread
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MIN, as_float, float_value
from onnx2ncnn_opt.onnx.lower.functional.gather import dynamic_centres, pixel_centres, pixels
from onnx2ncnn_opt.onnx.lower.functional.logic import below, one_minus
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduction
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value, held_as_float, is_float

Mask: TypeAlias = Tensor | Constant  # 1 where a side is chosen, 0 elsewhere
_LARGEST_HALF = float(np.finfo(np.float16).max)
_ABSORBED = 2.0**-26  # of a number: what a sum with it loses in float32
_PLANE = ((), (), (0,), (1,))
_LARGEST_SIDE = 2**20  # pixels whose coordinates float32 distinguishes
_SAFE_OPERANDS = (0.0, 1.0, 0.5)  # one of these is in the domain of every function
_DEEPEST = 16  # nested functions
_SOFTPLUS_IS_X = 16.0  # from here on, x and Softplus(x) are equal in float32
_MASKED_SCORE = -30000.0  # a row of smaller scores is masked completely


def where(im: ImportContext, condition: Value, a: Value, b: Value) -> Value:
    """Products with 1 and 0 of finite numbers; functions of operands in their domain; else GridSample."""
    shape = broadcast_shape(im, condition.shape, a.shape, b.shape)
    if isinstance(condition, Constant) and (condition.array.all() or not condition.array.any()):
        return spread(im, a if condition.array.all() else b, shape)
    chosen = im.tensor(spread(im, _where(im, condition, float_value(im, a), float_value(im, b)), shape))
    return chosen if is_float(a.dtype) else chosen.of_type(held_as_float(a.dtype))


def _where(im: ImportContext, condition: Value, a: Value, b: Value) -> Value:
    mask: Mask
    if isinstance(condition, Constant):
        mask = Constant(condition.array.astype(np.float32))
    else:
        mask = as_float(im, condition)
        whole = _activation(im, mask, a, b) or _bounded(im, mask, a, b) or _without_nan(im, mask, a, b)
        if whole is not None:
            return whole
    if isinstance(a, Constant) and isinstance(b, Constant):
        return _of_constants(im, mask, a, b)
    if isinstance(a, Constant):
        a, b, mask = b, a, _complement(im, mask)
    if isinstance(b, Constant):
        return _tensor_or_constant(im, mask, number(0) if _chooses_zeros(mask, a) else a, b)
    left = _finite_elsewhere(im, a, mask)
    if left is not None:
        second = _complement(im, mask)
        right = _finite_elsewhere(im, b, second)
        if right is not None:
            a, b = binary(im, BinaryOp.MUL, left[0], mask), binary(im, BinaryOp.MUL, right[0], second)
            return binary(im, BinaryOp.ADD, a, b)
    return _copied(im, mask, a, b)


def _complement(im: ImportContext, mask: Mask) -> Mask:
    """Return 1 - mask; if the mask is already 1 - x, return x."""
    if isinstance(mask, Constant):
        return Constant(1 - mask.array)
    return _rest_of_one(mask) or one_minus(im, mask)


def _rest_of_one(mask: Tensor) -> Tensor | None:
    """Return x if the mask is 1 - x."""
    layer = mask.blob.computed_by(BinaryOp.RSUB, scalar=True)
    return Tensor(layer.input, mask.view, mask.dtype) if layer is not None and layer["b"] == 1 else None


def _of_constants(im: ImportContext, mask: Mask, a: Constant, b: Constant) -> Value:
    """Choose between two constants by products with the mask, or by its logarithm for large ones."""
    for x, other, swapped in ((a, b, False), (b, a, True)):
        is_fill = other.scalar is not None and abs(other.scalar) > _LARGEST_HALF
        if is_fill and (np.abs(x.array) <= _LARGEST_HALF).all():
            return _or_constant(im, _complement(im, mask) if swapped else mask, x, other)
    if any(not (np.abs(x.array) <= _LARGEST_HALF).all() for x in (a, b)):
        return _copied(im, mask, a, b)
    if not b.array.any():
        return binary(im, BinaryOp.MUL, mask, a)
    second = binary(im, BinaryOp.MUL, _complement(im, mask), b)
    return second if not a.array.any() else binary(im, BinaryOp.ADD, binary(im, BinaryOp.MUL, mask, a), second)


def _chooses_zeros(mask: Mask, x: Value) -> bool:
    """Return True if a mask chooses only zeros of x, as ``where(x != 0, c, x)`` does in transformers."""
    if not isinstance(mask, Tensor) or not isinstance(x, Tensor) or x.view != mask.view:
        return False
    test = mask.blob.made_by("Threshold")
    negative = test.input.computed_by(UnaryOp.NEG) if test is not None and test["threshold"] == -FLT_MIN else None
    size = negative.input.computed_by(UnaryOp.ABS) if negative is not None else None
    return size is not None and size.input is x.blob


def _tensor_or_constant(im: ImportContext, mask: Mask, x: Tensor | Constant, other: Constant) -> Value:
    """Return x where `mask` is 1, a constant elsewhere; of scores plus a mask, choose between mask and constant."""
    is_sum = isinstance(x, Tensor) and x.blob.computed_by(BinaryOp.ADD, scalar=False)
    terms = im.operands_of(x) if isinstance(x, Tensor) and is_sum else None
    lowest = other.scalar if other.scalar is not None and other.scalar < 0 else math.nan
    for term, rest in itertools.permutations(terms or (), 2):
        if _absorbs(other, im.range_of(term)):
            return binary(im, BinaryOp.ADD, term, _tensor_or_constant(im, mask, rest, other))
        if im.range_of(term).is_finite and im.range_of(rest).within(lowest, 0):
            chosen = binary(im, BinaryOp.MUL, term, mask)
            return binary(im, BinaryOp.ADD, chosen, _or_constant(im, mask, rest, other))
    finite = _finite_elsewhere(im, x, mask)
    if finite is not None:
        return _or_constant(im, mask, finite[0], other, finite[1])
    if other.scalar is not None and abs(other.scalar) > _LARGEST_HALF:
        # The pass limit_mask_fill looks for the number in an addition.
        return binary(im, BinaryOp.ADD, _copied(im, mask, x, number(0)), _fill(im, mask, other))
    return _copied(im, mask, x, other)


def _or_constant(im: ImportContext, mask: Mask, x: Value, other: Constant, elsewhere: Range | None = None) -> Value:
    """Return x where `mask` is 1, a constant elsewhere; x is finite there, in the range `elsewhere`.

    A constant that absorbs x, as the lowest float32 absorbs scores, is added to x. But x may have such constants as
    well, as another mask, and two of them are -infinity: there the lower one is chosen, or x is 0 first.
    """
    if not other.array.any():
        return binary(im, BinaryOp.MUL, x, mask)
    if isinstance(x, Constant) and not x.array.any():
        return _fill(im, mask, other)
    if other.scalar is not None and other.scalar < 0 and im.range_of(x).within(other.scalar, 0):
        return binary(im, BinaryOp.MIN, x, _fill(im, mask, other))
    chosen = x if _absorbs(other, elsewhere or im.range_of(x)) else binary(im, BinaryOp.MUL, x, mask)
    return binary(im, BinaryOp.ADD, chosen, _fill(im, mask, other))


def _absorbs(number: Constant, x: Range) -> bool:
    """Return True if the sum of a number and x is the number in float32."""
    most = abs(number.scalar or 0.0) * _ABSORBED
    return x.within(-most, most)


def _fill(im: ImportContext, mask: Mask, x: Constant) -> Value:
    """Return 0 where the mask is 1, else a constant: beyond fp16 by the mask's clipped logarithm, as inf * 0 is NaN."""
    if isinstance(mask, Constant):
        return Constant(np.where(mask.array != 0, np.float32(0), x.array.astype(np.float32)))
    if (np.abs(x.array) <= _LARGEST_HALF).all():
        return binary(im, BinaryOp.MUL, _complement(im, mask), x)
    if x.scalar is None or math.isnan(x.scalar):
        return _copied(im, mask, number(0), x)
    other = _rest_of_one(mask)
    log = im.unary(other, "Log", scale=-1.0, shift=1.0) if other is not None else im.unary(mask, "Log")
    log = log if x.scalar < 0 else im.apply(log, UnaryOp.NEG)
    return log if math.isinf(x.scalar) else binary(im, BinaryOp.MAX if x.scalar < 0 else BinaryOp.MIN, log, x)


def _finite_elsewhere(im: ImportContext, x: Value, chosen: Mask, depth: int = _DEEPEST) -> tuple[Value, Range] | None:
    """Return x where it is chosen and finite numbers elsewhere, and their range; None if that is impossible."""
    own_range = im.range_of(x)
    if own_range.is_finite:
        return x, own_range
    if not isinstance(x, Tensor) or not depth:
        return None
    layer, operands = x.blob.producer, im.operands_of(x)
    if layer is None or operands is None:
        return None
    optional = [_finite_elsewhere(im, operand, chosen, depth - 1) for operand in operands]
    finite = [pair for pair in optional if pair is not None]
    if len(finite) < len(operands):
        return None
    # The operands to replace, the cheapest first: none, the second (a divisor), the first, both.
    subsets = [(1,), (0,), (0, 1)] if len(finite) == 2 else [(0,)]
    for replaced, value in [((), 0.0), *itertools.product(subsets, _SAFE_OPERANDS)]:
        point = of_numbers(np.array([value], np.float32))
        result = through(layer, [point if i in replaced else range_ for i, (_, range_) in enumerate(finite)])
        if result.is_finite:
            safe = [
                _or_constant(im, chosen, operand, number(value)) if i in replaced else operand
                for i, (operand, _) in enumerate(finite)
            ]
            if len(safe) == 2:
                return binary(im, layer["op_type"], *safe), result
            return im.unary(safe[0], layer.type, **{str(name): n for name, n in layer.params.items()}), result
    return None


def _activation(im: ImportContext, mask: Tensor, a: Value, b: Value) -> Tensor | None:
    """Return the activation for ``where(a > t, a, f(a))``; None if ncnn has none."""
    compared = mask.blob.made_by("Threshold")
    if compared is None or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    x, limit, other = a.blob, float(compared["threshold"]), b.blob.producer
    if other is None or compared.input is not x or a.view != b.view or a.view != mask.view:
        return None
    if limit >= _SOFTPLUS_IS_X and other.computes(BinaryOp.MAX, scalar=False):
        softplus = any(blob.made_by("Softplus") for blob in other.inputs if blob is not x)
        return b if x in other.inputs and softplus else None
    if abs(limit) > np.finfo(np.float32).tiny:
        return None
    factor, inner = (float(other["b"]), other.input) if other.computes(BinaryOp.MUL, scalar=True) else (1.0, b.blob)
    if inner is x:
        return im.unary(a, "ReLU", slope=factor)
    return im.unary(a, "ELU", alpha=factor) if _is_expm1(inner, x) else None


def _bounded(im: ImportContext, mask: Tensor, a: Value, b: Value) -> Tensor | None:
    """Simplify ``where(x > c, c, x)`` to the smaller of x and c, and ``where(x > c, x, c)`` to the larger."""
    x, bound = (b, a) if isinstance(a, Constant) else (a, b)
    compared = mask.blob.made_by("Threshold")
    if compared is None or not isinstance(x, Tensor) or x.view != mask.view:
        return None
    if not isinstance(bound, Constant) or bound.scalar is None or im.range_of(x).may_be_nan:
        return None
    negative = compared.input.computed_by(UnaryOp.NEG)
    is_less = negative is not None and negative.input is x.blob
    if not is_less and compared.input is not x.blob:
        return None
    limit = -bound.scalar if is_less else bound.scalar
    if compared["threshold"] not in (limit, below(limit)):
        return None
    return binary(im, BinaryOp.MIN if (bound is a) != is_less else BinaryOp.MAX, x, bound)


def _is_expm1(blob: Blob, x: Blob) -> bool:
    layer = blob.computed_by(BinaryOp.ADD, BinaryOp.SUB, scalar=True)
    exp = layer.input.computed_by(UnaryOp.EXP) if layer is not None else None
    if layer is None or exp is None or exp.input is not x:
        return False
    return bool(layer["b"] == (-1 if layer.computes(BinaryOp.ADD) else 1))


def _without_nan(im: ImportContext, mask: Tensor, a: Value, b: Value) -> Tensor | None:
    """Simplify ``where(isnan(x), n, x)``: to x if it is never NaN, to a Softmax with 0 for rows of -inf if n is 0."""
    blob = _checked_for_nan(mask)
    if blob is None or not isinstance(b, Tensor) or b.blob is not blob or b.view != mask.view:
        return None
    if not im.range_of(b).may_be_nan:
        return b
    softmax = blob.made_by("Softmax")
    if softmax is None or not isinstance(a, Constant) or a.scalar != 0:
        return None
    scores, axis = softmax.input, softmax["axis"]
    if not im.range_of(im.like(b, scores)).may_be_inf:  # with a finite fill, hidden rows are no NaN
        return b
    probabilities = im.layer("Softmax", im.layer("Clip", scores, min=_MASKED_SCORE), axis=axis, fixbug0=1)
    visible = im.layer("Threshold", reduction(im, scores, [axis], Reduction.MAX), threshold=_MASKED_SCORE)
    return im.like(b, im.layer("BinaryOp", probabilities, visible, op_type=BinaryOp.MUL))


def _checked_for_nan(mask: Tensor) -> Blob | None:
    """Return the blob whose NaN elements a mask marks, if it has the layers of IsNaN."""
    other = _rest_of_one(mask)
    number = other.blob.made_by("Threshold") if other is not None else None
    size = number.input.computed_by(UnaryOp.ABS) if number is not None and number["threshold"] < 0 else None
    return size.input if size is not None else None


def _copied(im: ImportContext, mask: Mask, a: Value, b: Value) -> Value:
    """Copy a where `mask` is 1, and b elsewhere, as pixels of one image; any number is possible, even NaN."""
    shape = broadcast_shape(im, mask.shape, a.shape, b.shape)
    sides = _sides(shape)
    for size in sides:
        if isinstance(size, int) and size > _LARGEST_SIDE:
            reason = f"a choice among {size} numbers in a row, whose indices float32 cannot tell apart"
            raise im.refuse(reason, "choose among fewer numbers")
    planes = [_plane(im, x, shape, sides) for x in (a, b)]
    blob = pixels(im, im.layer("Concat", *planes, axis=1), _grid(im, mask, shape, sides))
    return im.reshape(im.wrap(blob, sides, _PLANE), shape)


def _sides(shape: Shape) -> tuple[Dim, Dim]:
    """Return rows and columns: the last axis is the columns, unless fp16 needs another division of the elements."""
    rows, columns = product(shape[:-1]), shape[-1] if shape else 1
    if isinstance(rows, int) and isinstance(columns, int) and max(rows, columns) > COMPUTED_SIDE:
        for size in range(COMPUTED_SIDE, 0, -1):
            if rows * columns % size == 0 and rows * columns // size <= COMPUTED_SIDE:
                return rows * columns // size, size
    return rows, columns


def _plane(im: ImportContext, x: Value, shape: Shape, sides: Shape) -> Blob:
    """Return the operand broadcast to rows and columns, as a Mat of four dims."""
    return im.mat(im.reshape(spread(im, x, shape), sides), _PLANE)


def _grid(im: ImportContext, mask: Mask, shape: Shape, sides: tuple[Dim, Dim]) -> Blob:
    """Return the coordinates (column, row, side) of each result; -1 and 1 are the outer borders."""
    rows, columns = sides
    if isinstance(rows, int) and isinstance(columns, int):
        along = np.broadcast_to(pixel_centres(columns), (1, rows, columns))
        down = np.broadcast_to(pixel_centres(rows)[:, np.newaxis], (1, rows, columns))
        if isinstance(mask, Constant):
            side = 0.5 - np.broadcast_to(mask.array, known(shape)).reshape(1, rows, columns)
            return im.memory(np.stack([along, down, side]).astype(np.float32))
        fixed = [im.memory(np.stack([along, down]).astype(np.float32))]
    else:
        fixed = [_centres(im, size, axis, sides) for axis, size in ((1, columns), (0, rows))]
    side_ = im.layer("BinaryOp", _plane(im, mask, shape, sides), op_type=BinaryOp.RSUB, with_scalar=1, b=0.5)
    return im.layer("Concat", *fixed, side_, axis=0)


def _centres(im: ImportContext, size: Dim, axis: int, shape: Shape) -> Blob:
    """Return the centres of pixels along one of two axes if a size is dynamic."""
    row = dynamic_centres(im, size) if isinstance(size, Sym) else Constant(im.f32(pixel_centres(size)[np.newaxis]))
    return im.mat(spread(im, row if axis else row.transpose((1, 0)), shape), _PLANE)
