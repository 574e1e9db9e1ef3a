"""The operator Where: a choice between two numbers that is right for any value of the other one.

A product with 0 is 0 only for ordinary numbers; the results of min and max of NaN depend on the machine. So there are
three ways, and the first safe one is taken (docs/special-values.md):

- Arithmetic, where both sides are ordinary numbers (ir/ranges.py): each times 1 where it is chosen, else 0.
- A function that leaves its domain is computed anew, of operands that are harmless where it is not chosen:
  ``where(x > 0, log(x), 0)`` is the logarithm of x where x > 0, and of 1 elsewhere.
- GridSample, which copies any numbers: the mask says from which of both sides, stored one after the other.
"""

import itertools
import math
from typing import TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction, UnaryOp
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, axis_index, known, product
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.ranges import Range, of_numbers, through
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, broadcast_shape, number, spread
from onnx2ncnn_opt.onnx.lower.functional.cast import as_float, float_value
from onnx2ncnn_opt.onnx.lower.functional.gather import middles, pixels
from onnx2ncnn_opt.onnx.lower.functional.logic import negative, rest
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduction
from onnx2ncnn_opt.onnx.value import Constant, SymbolicTensor, Tensor, Value, held_as_float, is_float

Mask: TypeAlias = Tensor | Constant  # 1 where a side is chosen, 0 elsewhere
_LARGEST_HALF = float(np.finfo(np.float16).max)
_LOWEST = -1e30  # no score comes near; added to one, it swallows it
_PLANE = ((), (), (0,), (1,))
_LARGEST_SIDE, _LARGEST_HALF_SIDE = 2**20, 1024  # pixels whose coordinates float32 and fp16 tell apart
_HARMLESS = (0.0, 1.0, 0.5)  # one of these is in the domain of every function
_DEEPEST = 16  # functions of functions
_STRAIGHT = 16.0  # from here on, x and Softplus(x) are the same in float32
_MASKED_AS_A_WHOLE = -30000.0


def where(im: ImportContext, condition: Value, a: Value, b: Value) -> Value:
    """Products with 1 and 0 of ordinary numbers; functions of operands in their domain; else GridSample."""
    shape = broadcast_shape(im, condition.shape, a.shape, b.shape)
    if isinstance(condition, Constant) and (condition.array.all() or not condition.array.any()):
        return spread(im, a if condition.array.all() else b, shape)
    chosen = im.tensor(spread(im, _where(im, condition, float_value(im, a), float_value(im, b)), shape))
    return chosen if is_float(a.dtype) else Tensor(chosen.blob, chosen.view, held_as_float(a.dtype))


def _where(im: ImportContext, condition: Value, a: Value, b: Value) -> Value:
    first: Mask
    if isinstance(condition, Constant):
        first = Constant(condition.array.astype(np.float32))
    else:
        first = as_float(im, condition)
        whole = _activation(im, first, a, b) or _without_nan(im, first, a, b)
        if whole is not None:
            return whole
    if isinstance(a, Constant) and isinstance(b, Constant):
        return _of_constants(im, first, a, b)
    if isinstance(a, Constant):
        a, b, first = b, a, _rest(im, first)
    left = _harmless(im, a, first)
    if isinstance(b, Constant):
        if left is None and b.scalar is not None and abs(b.scalar) > _LARGEST_HALF:
            # limit_mask_fill finds the number where it is added.
            return _or_constant(im, first, _moved(im, first, a, number(0)), b)
        return _moved(im, first, a, b) if left is None else _or_constant(im, first, left[0], b)
    if left is not None:
        second = _rest(im, first)
        right = _harmless(im, b, second)
        if right is not None:
            a, b = binary(im, BinaryOp.MUL, left[0], first), binary(im, BinaryOp.MUL, right[0], second)
            return binary(im, BinaryOp.ADD, a, b)
    return _moved(im, first, a, b)


def _rest(im: ImportContext, mask: Mask) -> Mask:
    """1 - mask; the mask that it was made of, where it is one already."""
    if isinstance(mask, Constant):
        return Constant(1 - mask.array)
    layer = mask.blob.producer
    if layer is not None and layer.computes(BinaryOp.RSUB, scalar=True) and layer["b"] == 1:
        return Tensor(layer.input, mask.view, mask.dtype)
    return rest(im, mask)


def _of_constants(im: ImportContext, first: Mask, a: Constant, b: Constant) -> Value:
    """Choose between two constants: by products with the mask, or sums with its logarithm."""
    for x, other, swapped in ((a, b, False), (b, a, True)):
        if x.scalar == 0 and other.scalar is not None and abs(other.scalar) > _LARGEST_HALF:
            return _beyond_half(im, _rest(im, first) if swapped else first, other)
    if any(not (np.abs(x.array) <= _LARGEST_HALF).all() for x in (a, b)):
        return _moved(im, first, a, b)
    if b.scalar == 0:
        return binary(im, BinaryOp.MUL, first, a)
    beside = binary(im, BinaryOp.MUL, _rest(im, first), b)
    return beside if a.scalar == 0 else binary(im, BinaryOp.ADD, binary(im, BinaryOp.MUL, first, a), beside)


def _or_constant(im: ImportContext, first: Mask, x: Value, other: Constant) -> Value:
    """Return an ordinary x where `first` is 1, a constant elsewhere."""
    if isinstance(first, Constant):
        chosen = binary(im, BinaryOp.MUL, x, first)
        added = np.where(first.array != 0, np.float32(0), other.array.astype(np.float32))
        return binary(im, BinaryOp.ADD, chosen, Constant(added)) if added.any() else chosen
    if other.scalar is not None and other.scalar <= _LOWEST:
        return binary(im, BinaryOp.ADD, x, _beyond_half(im, first, other))
    chosen = binary(im, BinaryOp.MUL, x, first)
    if not other.array.any():
        return chosen
    if (np.abs(other.array) <= _LARGEST_HALF).all():
        return binary(im, BinaryOp.ADD, chosen, binary(im, BinaryOp.MUL, _rest(im, first), other))
    if other.scalar is not None and not math.isnan(other.scalar):
        return binary(im, BinaryOp.ADD, chosen, _beyond_half(im, first, other))
    return binary(im, BinaryOp.ADD, chosen, _moved(im, first, Constant(np.zeros((), np.float32)), other))


def _beyond_half(im: ImportContext, mask: Mask, x: Constant) -> Value:
    """Return 0 where the mask is 1, else a number beyond fp16: the mask's bounded logarithm, as inf * 0 is NaN."""
    assert x.scalar is not None
    wall = im.unary(mask, "Log")
    wall = wall if x.scalar < 0 else negative(im, wall)
    return wall if math.isinf(x.scalar) else binary(im, BinaryOp.MAX if x.scalar < 0 else BinaryOp.MIN, wall, x)


def _harmless(im: ImportContext, x: Value, chosen: Mask, depth: int = _DEEPEST) -> tuple[Value, Range] | None:
    """Return x where it is chosen, ordinary numbers elsewhere, and their range; None if no way to do so is known."""
    here = im.range_of(x)
    if here.is_finite:
        return x, here
    if not isinstance(x, Tensor) or not depth:
        return None
    layer, operands = x.blob.producer, im.operands_of(x)
    if layer is None or operands is None:
        return None
    parts = [_harmless(im, each, chosen, depth - 1) for each in operands]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    # The operands to replace, the cheapest first: none, the second (a divisor), the first, both.
    some = [(1,), (0,), (0, 1)] if len(found) == 2 else [(0,)]
    for which, harmless in [((), 0.0), *itertools.product(some, _HARMLESS)]:
        point = of_numbers(np.array([harmless], np.float32))
        result = through(layer, [point if i in which else known for i, (_, known) in enumerate(found)])
        if result.is_finite:
            safe = [
                _or_constant(im, chosen, each, number(harmless)) if i in which else each
                for i, (each, _) in enumerate(found)
            ]
            if len(safe) == 2:
                return binary(im, layer["op_type"], *safe), result
            return im.unary(safe[0], layer.type, **{str(name): n for name, n in layer.params.items()}), result
    return None


def _activation(im: ImportContext, mask: Tensor, a: Value, b: Value) -> Tensor | None:
    """Return the activation for ``where(a > t, a, f(a))``; None if ncnn has none."""
    compared = mask.blob.producer
    if compared is None or compared.type != "Threshold" or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    x, limit, other = a.blob, float(compared["threshold"]), b.blob.producer
    if other is None or compared.input is not x or a.view != b.view or a.view != mask.view:
        return None
    if limit >= _STRAIGHT and other.computes(BinaryOp.MAX, scalar=False):
        softplus = next((blob.producer for blob in other.inputs if blob is not x), None)
        return b if x in other.inputs and softplus is not None and softplus.type == "Softplus" else None
    if abs(limit) > np.finfo(np.float32).tiny:
        return None
    factor, inner = (float(other["b"]), other.input) if other.computes(BinaryOp.MUL, scalar=True) else (1.0, b.blob)
    if inner is x:
        return im.unary(a, "ReLU", slope=factor)
    return im.unary(a, "ELU", alpha=factor) if _is_expm1(inner, x) else None


def _is_expm1(blob: Blob, x: Blob) -> bool:
    layer = blob.producer
    if layer is None:
        return False
    if layer.computes(UnaryOp.EXPM1):
        return layer.input is x
    if layer.type != "BinaryOp" or not layer["with_scalar"]:
        return False
    less = {BinaryOp.ADD: -1.0, BinaryOp.SUB: 1.0}.get(layer["op_type"])
    exp = layer.input.producer
    return less == layer["b"] and exp is not None and exp.computes(UnaryOp.EXP) and exp.input is x


def _without_nan(im: ImportContext, mask: Tensor, a: Value, b: Value) -> Tensor | None:
    """x itself for ``where(isnan(x), n, x)`` where x is never NaN; for 0 a Softmax that is 0 in rows of -infinity."""
    blob = _checked_for_nan(mask)
    if blob is None or not isinstance(b, Tensor) or b.blob is not blob or b.view != mask.view:
        return None
    if not im.range_of(b).may_be_nan:
        return b
    softmax = blob.producer
    if softmax is None or softmax.type != "Softmax" or not isinstance(a, Constant) or a.scalar != 0:
        return None
    scores, axis = softmax.input, softmax["axis"]
    chances = im.layer("Softmax", im.layer("Clip", scores, min=_MASKED_AS_A_WHOLE), axis=axis, fixbug0=1)
    open_rows = im.layer("Threshold", reduction(im, scores, [axis], Reduction.MAX), threshold=_MASKED_AS_A_WHOLE)
    return im.like(b, im.layer("BinaryOp", chances, open_rows, op_type=BinaryOp.MUL))


def _checked_for_nan(mask: Tensor) -> Blob | None:
    """Return the blob whose NaN elements a mask marks; see IsNaN."""
    rest_of_one = mask.blob.producer
    if rest_of_one is None or not rest_of_one.computes(BinaryOp.RSUB, scalar=True) or rest_of_one["b"] != 1:
        return None
    number = rest_of_one.input.producer
    if number is None or number.type != "Threshold" or number["threshold"] >= 0:
        return None
    size = number.input.producer
    return size.input if size is not None and size.computes(UnaryOp.ABS) else None


def _moved(im: ImportContext, first: Mask, a: Value, b: Value) -> Value:
    """Copy a where `first` is 1, and b elsewhere, as pixels of one image; any numbers, NaN included."""
    shape = broadcast_shape(im, first.shape, a.shape, b.shape)
    sides = _sides(shape)
    for size in sides:
        if isinstance(size, int) and size > _LARGEST_SIDE:
            reason = f"a choice among {size} numbers in a row, whose indices float32 cannot tell apart"
            raise im.refuse(reason, "choose among fewer numbers")
    halves = [_plane(im, x, shape, sides) for x in (a, b)]
    blob = pixels(im, im.layer("Concat", *halves, axis=1), _grid(im, first, shape, sides))
    return im.reshape(im.wrap(blob, sides, _PLANE), shape)


def _sides(shape: Shape) -> tuple[Dim, Dim]:
    """Rows and columns: the last axis and all others, or others of that product whose coordinates fp16 resolves."""
    rows, columns = product(shape[:-1]), shape[-1] if shape else 1
    if isinstance(rows, int) and isinstance(columns, int) and max(rows, columns) > _LARGEST_HALF_SIDE:
        for size in range(_LARGEST_HALF_SIDE, 0, -1):
            if rows * columns % size == 0 and rows * columns // size <= _LARGEST_HALF_SIDE:
                return rows * columns // size, size
    return rows, columns


def _plane(im: ImportContext, x: Value, shape: Shape, sides: Shape) -> Blob:
    """Return the operand broadcast, in rows and columns, as a Mat of four dims."""
    return im.mat(im.reshape(spread(im, x, shape), sides), _PLANE)


def _grid(im: ImportContext, first: Mask, shape: Shape, sides: tuple[Dim, Dim]) -> Blob:
    """Return each number's place: its column, its row, and one of two sides, from -1 to 1 between the outer borders."""
    rows, columns = sides
    if isinstance(rows, int) and isinstance(columns, int):
        along = np.broadcast_to(middles(columns), (1, rows, columns))
        down = np.broadcast_to(middles(rows)[:, np.newaxis], (1, rows, columns))
        if isinstance(first, Constant):
            side = 0.5 - np.broadcast_to(first.array, known(shape)).reshape(1, rows, columns)
            return im.memory(np.stack([along, down, side]).astype(np.float32))
        fixed = [im.memory(np.stack([along, down]).astype(np.float32))]
    else:
        fixed = [_running(im, size, axis, sides) for axis, size in ((1, columns), (0, rows))]
    side_ = im.layer("BinaryOp", _plane(im, first, shape, sides), op_type=BinaryOp.RSUB, with_scalar=1, b=0.5)
    return im.layer("Concat", *fixed, side_, axis=0)


def _running(im: ImportContext, size: Dim, axis: int, shape: Shape) -> Blob:
    """Return the middles of pixels along one of two axes, if a size is dynamic."""
    if isinstance(size, Sym):
        cells = np.array([[axis_index(1 - axis)]], dtype=object)
    else:
        cells = np.arange(size).reshape((-1, 1) if axis == 0 else (1, -1)).astype(object)
    float32 = np.dtype(np.float32)
    middle = binary(im, BinaryOp.ADD, im.tensor(SymbolicTensor(cells, shape, float32)), number(0.5))
    whole = im.tensor(SymbolicTensor(np.array(size, dtype=object), (), float32))
    share = binary(im, BinaryOp.MUL, binary(im, BinaryOp.DIV, middle, whole), number(2))
    return im.mat(binary(im, BinaryOp.SUB, share, number(1)), _PLANE)
