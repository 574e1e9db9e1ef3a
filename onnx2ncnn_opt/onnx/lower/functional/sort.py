"""Numbers that DetectionOutput sorts, as the scores of boxes that begin at 0, 1, 2, ..."""

from math import isqrt

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Interp, Padding
from onnx2ncnn_opt.ir.detections import LOWEST, SORT
from onnx2ncnn_opt.ir.dim import Dim
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.crop import crop
from onnx2ncnn_opt.onnx.lower.functional.gather import as_indices, fixed
from onnx2ncnn_opt.onnx.value import Tensor


def boxes_at(im: ImportContext, size: Dim, count: int) -> Blob:
    """Return boxes that begin at 0, 1, 2, ..., and `count` times the last one again; none is empty."""
    if isinstance(size, int):
        index = np.minimum(np.arange(size + count, dtype=np.float32), size - 1)
        return im.memory(np.stack([index, index, index + 1, index + 1], 1))
    [text], others = im.size_expressions([(4, size)])
    step = im.memory(np.array([[[1, 1, 2, 2]]], np.float32))
    steps = im.layer("Interp", step, *others, resize_type=Interp.NEAREST, size_expr=text)
    boxes = im.layer("BinaryOp", im.layer("CumulativeSum", steps, axis=1), op_type=BinaryOp.ADD, with_scalar=1, b=-1.0)
    return im.layer("Padding", boxes, bottom=count, type=Padding.REPLICATE)


def first_boxes(im: ImportContext, x: Tensor, boxes: Blob, count: int, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """Return the scores and the indices of the boxes that DetectionOutput sorts by their scores."""
    columns, shape = _sorted_boxes(im, x, boxes, count, by_row=by_row), (x.shape[0], count)
    numbers, indices = (im.tensor(im.reshape(crop(im, columns, 1, at, at + 1), shape)) for at in (1, 2))
    return numbers, as_indices(im, indices)


def sorted_row(im: ImportContext, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return all numbers of a row, the largest first, and their indices.

    ncnn compares each box with all of its class, so each of about sqrt(n) classes gets a part of the row:

        9 numbers -> 3 classes of 3 numbers -> rows of class (from 1), number, box -> index = 3 * (class - 1) + box
    """
    [size] = fixed(im, x.shape)
    width = isqrt(size - 1) + 1
    parts = -(-size // width)
    whole = im.layer("Padding", im.mat(x, [[0]]), right=parts * width - size, value=LOWEST)
    part = im.tensor(im.reshape(im.wrap(whole, (parts * width,), [[0]]), (parts, width)))
    rows = im.tensor(crop(im, _sorted_boxes(im, part, boxes_at(im, width, width), width, by_row=False), 0, 0, size))
    label, numbers, box = (im.tensor(im.reshape(crop(im, rows, 1, at, at + 1), (size,))) for at in range(3))
    start = im.apply(im.apply(label, BinaryOp.SUB, 1.0), BinaryOp.MUL, float(width))
    index = im.apply(binary(im, BinaryOp.ADD, start, box), BinaryOp.MIN, float(size - 1))
    return numbers, as_indices(im, index)


def _sorted_boxes(im: ImportContext, x: Tensor, boxes: Blob, count: int, *, by_row: bool) -> Tensor:
    """Return the rows of boxes that DetectionOutput sorts by their scores, `count` of each row of x.

    It omits NaN, so `count` lower numbers with the last index follow each row: there are always `count` boxes.
    """
    rows = x.shape[0]
    parts = rows if by_row and isinstance(rows, int) and rows > 1 else 0
    # A row of scores of the background, and then those of a class in each row.
    scores = im.layer("Padding", im.mat(x, [[0], *[()] * min(parts, 1), [1]]), top=1, right=count, value=LOWEST)
    split = im.layers("Slice", scores, outputs=parts, slices=(1,) * parts, axis=0) if parts else (scores,)
    found = [im.layer("DetectionOutput", boxes, each, boxes, nms_top_k=count, **SORT) for each in split]
    columns = im.layer("Concat", *found, axis=0) if parts else found[0]
    return im.wrap(columns, (rows * count, 6), [[0], [1]])
