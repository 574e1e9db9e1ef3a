"""NonMaxSuppression of which boxes, scores and classes are used, and no indices: DetectionOutput selects alike."""

from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, GemmC
from onnx2ncnn_opt.ir.detections import ALL, OF_BOXES
from onnx2ncnn_opt.ir.dim import symbol
from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.view import View
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary
from onnx2ncnn_opt.onnx.lower.functional.cast import FLT_MIN
from onnx2ncnn_opt.onnx.lower.functional.crop import crop
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.read.structure import OWN, SELECTION
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Ints, Tensor

_COLUMNS = 2, 3, 4, 5, 1, 0  # of ncnn's rows: label (from 1), score, x1, y1, x2, y2


@onnx_op(SELECTION, domain=OWN, jumps=True)
def select_boxes(im: ImportContext, boxes: Tensor, scores: Tensor, most: Ints, iou: Array, conf: Array) -> Tensor:
    """DetectionOutput, and a Gemm that puts its columns in order; without boxes the Gemm fails, and the Mat is empty.

    A box competes in its best class, if it has an area: ncnn divides 0 by 0 for two without. Prior and location are the
    boxes themselves: with variances of 0, ncnn takes the prior as it is.
    """
    scores = im.wrap(im.mat(scores, [[1], [2]]), scores.shape, [[1], [2]])
    low, high = (im.tensor(crop(im, boxes, 2, at, at + 2)) for at in (0, 2))
    shorter = reduce(im, binary(im, BinaryOp.SUB, high, low), "ReduceMin", (2,), 1)
    has_area = im.unary(shorter, "Threshold", threshold=0.0)
    is_flat = im.tensor(im.apply(has_area, BinaryOp.RSUB, 1.0)).transpose((0, 2, 1))
    bound = binary(im, BinaryOp.ADD, reduce(im, scores, "ReduceMax", (1,), 1), is_flat)
    is_best = im.unary(binary(im, BinaryOp.SUB, scores, bound), "Threshold", threshold=-FLT_MIN)
    by_class = im.mat(binary(im, BinaryOp.MUL, scores, is_best), [[1], [2]])
    rows, with_background = im.mat(boxes, [[1], [2]]), im.layer("Padding", by_class, top=1, value=-1.0)
    params: dict[str, Any] = {"nms_threshold": float(iou[0]), "confidence_threshold": float(conf[0]), **OF_BOXES}
    params |= {"nms_top_k": ALL, "keep_top_k": most[0]}
    found = im.layer("DetectionOutput", rows, with_background, rows, **params)
    weights = {"B_data": np.eye(6)[:, _COLUMNS], "C_data": np.array([0, 0, 0, 0, 0, -1])}
    params = {"constantB": 1, "constantN": 6, "constantK": 6, "constantC": 1, "constant_broadcast_type_C": GemmC.N}
    # fp16 would round pixels and classes; boxes have 32 bits, and only a CPU takes an empty Mat.
    ordered = im.layer("Gemm", found, weights=weights, featmask=FP32 | Feature.NO_BF16_STORAGE, **params)
    return Tensor(ordered, View.of((symbol("?"), 6), [[0], [1]]), np.dtype(np.float32))
