"""Shape inference against the shapes that the real ncnn runtime computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import ShapeError
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, symbol
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.shapes import infer_shapes
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.runtime.base import Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from testing.handmade import write_net

Params = dict[str | int, Any]
# (parameters, input shapes, number of outputs)
Case = tuple[Params, list[tuple[int, ...]], int]


def case(*shapes: tuple[int, ...], outputs: int = 1, **params: Any) -> Case:
    return dict(params.items()), list(shapes), outputs


def conv(weights: int, *shapes: tuple[int, ...], **params: Any) -> Case:
    return case(*shapes, num_output=4, weight_data_size=weights, **params)


RANKS = [(6,), (4, 6), (2, 4, 6), (2, 3, 4, 6)]
EVERY_RANK = [case(shape) for shape in RANKS]
INNER_NORM = [
    *(case(shape, affine_size=shape[-1]) for shape in RANKS),
    *(case(shape, affine_size=24, affine=0) for shape in RANKS[2:]),
    case(RANKS[3], affine_size=72),
]
SAME = -233
LOWER = -234

CASES: dict[str, list[Case]] = {
    **dict.fromkeys(("AbsVal", "BNLL", "CELU", "Clip", "DeepCopy", "Dropout", "ELU", "Erf", "Exp"), EVERY_RANK),
    **dict.fromkeys(("GELU", "HardSigmoid", "HardSwish", "Log", "Mish", "MVN", "Power", "ReLU", "SELU"), EVERY_RANK),
    **dict.fromkeys(("Shrink", "Sigmoid", "Softplus", "Swish", "TanH", "Threshold", "UnaryOp", "Flatten"), EVERY_RANK),
    "Softmax": [case(shape, axis=axis, fixbug0=1) for shape in RANKS for axis in (-1, 0)],
    "CumulativeSum": [case(shape, axis=axis) for shape in RANKS for axis in (-1, 0)],
    "Convolution": [
        conv(4 * 3 * 9, (3, 8, 9), kernel_w=3),
        conv(4 * 3 * 9, (3, 8, 9), kernel_w=3, pad_left=1, stride_w=2, bias_term=1),
        conv(4 * 3 * 6, (3, 8, 9), kernel_w=3, kernel_h=2, pad_left=1, pad_right=2, pad_top=0, pad_bottom=3),
        conv(4 * 3 * 9, (3, 11, 9), kernel_w=3, dilation_w=2, dilation_h=3, stride_w=1, stride_h=2),
        *(conv(108, (3, 8, 9), kernel_w=3, stride_w=s, pad_left=mode) for s in (1, 2, 3) for mode in (SAME, LOWER)),
        conv(4 * 3, (3, 8, 9), kernel_w=1, stride_w=3, pad_left=SAME),
        conv(4 * 3 * 3, (3, 8, 9), kernel_w=3, kernel_h=1, stride_w=2, pad_left=SAME),
        conv(4 * 3 * 9, (3, 8, 9), kernel_w=3, pad_left=SAME, pad_top=0, pad_bottom=0),
        conv(4 * 3, (3,), kernel_w=1),
        case((3, 8, 9), (5, 3, 3, 2), kernel_w=3, dynamic_weight=1, pad_left=1),
        case((3, 8, 9), (5, 3, 3, 2), (5,), kernel_w=3, dynamic_weight=1, bias_term=1),
    ],
    "ConvolutionDepthWise": [
        conv(4 * 9, (4, 8, 9), kernel_w=3, group=4),
        conv(4 * 3 * 9, (6, 8, 9), kernel_w=3, group=2, pad_left=1, stride_w=2),
        case((6, 8, 9), (4, 3, 3, 3), kernel_w=3, dynamic_weight=1, group=2),
    ],
    "Convolution1D": [
        conv(4 * 3 * 3, (3, 9), kernel_w=3, pad_left=1, pad_right=2, stride_w=2),
        conv(4 * 3 * 3, (3, 9), kernel_w=3, pad_left=SAME, stride_w=2),
        case((3, 9), (5, 3, 2), kernel_w=2, dynamic_weight=1),
    ],
    "ConvolutionDepthWise1D": [conv(4 * 3, (4, 9), kernel_w=3, group=4, dilation_w=2)],
    "Convolution3D": [
        conv(4 * 3 * 27, (3, 5, 6, 7), kernel_w=3, pad_left=1),
        conv(4 * 3 * 12, (3, 5, 6, 7), kernel_w=3, kernel_d=2, kernel_h=2, pad_left=0, pad_front=2, pad_behind=1),
        conv(4 * 3 * 27, (3, 5, 6, 7), kernel_w=3, stride_w=2, stride_d=1, pad_left=SAME),
    ],
    "ConvolutionDepthWise3D": [conv(4 * 27, (4, 5, 6, 7), kernel_w=3, group=4, stride_w=2)],
    "Deconvolution": [
        conv(4 * 3 * 9, (3, 5, 6), kernel_w=3),
        conv(4 * 3 * 16, (3, 5, 6), kernel_w=4, stride_w=2, pad_left=1),
        conv(4 * 3 * 9, (3, 5, 6), kernel_w=3, stride_w=2, pad_left=1, output_pad_right=1),
        conv(4 * 3 * 6, (3, 5, 6), kernel_w=3, kernel_h=2, stride_w=3, dilation_h=2, output_pad_bottom=2),
        conv(4 * 3 * 9, (3, 5, 6), kernel_w=3, stride_w=2, pad_left=SAME, output_w=12, output_h=10),
        conv(4 * 3 * 9, (3, 5, 6), kernel_w=3, stride_w=2, pad_left=LOWER, output_w=11, output_h=9),
        case((3, 5, 6), (3, 5, 4, 4), kernel_w=4, stride_w=2, pad_left=1, dynamic_weight=1),
    ],
    "DeconvolutionDepthWise": [
        conv(4 * 9, (4, 5, 6), kernel_w=3, group=4, stride_w=2, pad_left=1),
        conv(4 * 3 * 9, (6, 5, 6), kernel_w=3, group=2),
        case((6, 5, 6), (6, 2, 3, 3), kernel_w=3, dynamic_weight=1, group=2),
    ],
    "Deconvolution1D": [
        conv(4 * 3 * 3, (3, 6), kernel_w=3, stride_w=2, pad_left=1, pad_right=0, output_pad_right=1),
        case((3, 6), (3, 5, 4), kernel_w=4, stride_w=2, dynamic_weight=1),
    ],
    "DeconvolutionDepthWise1D": [conv(4 * 3, (4, 6), kernel_w=3, group=4, stride_w=2)],
    "Deconvolution3D": [
        conv(4 * 3 * 27, (3, 3, 5, 6), kernel_w=3, stride_w=2, pad_left=1, output_pad_right=1, output_pad_behind=0),
        conv(4 * 3 * 27, (3, 3, 5, 6), kernel_w=3, stride_w=2, pad_left=SAME, output_w=12, output_h=10, output_d=6),
    ],
    "DeconvolutionDepthWise3D": [conv(4 * 27, (4, 3, 5, 6), kernel_w=3, group=4, stride_w=2)],
    "Pooling": [
        *(
            case((3, h, w), kernel_w=3, stride_w=s, pad_left=p, pad_mode=mode, pooling_type=kind)
            for (h, w) in ((8, 9), (7, 10))
            for s, p, mode, kind in ((1, 0, 0, 0), (2, 1, 0, 1), (3, 1, 0, 0), (2, 1, 1, 1), (2, 0, 2, 0), (3, 0, 3, 1))
        ),
        case((3, 8, 9), kernel_w=2, kernel_h=3, stride_w=2, pad_mode=1, pad_left=0, pad_right=1),
        case((3, 8, 9), global_pooling=1),
        case((3, 8, 9), adaptive_pooling=1, out_w=1),
        case((3, 8, 9), adaptive_pooling=1, out_w=4, out_h=-233),
    ],
    "Pooling1D": [
        *(case((3, 10), kernel_w=3, stride_w=2, pad_mode=mode) for mode in range(4)),
        case((3, 10), global_pooling=1),
        case((3, 10), adaptive_pooling=1, out_w=4),
    ],
    "Pooling3D": [
        *(case((3, 5, 6, 7), kernel_w=2, stride_w=2, pad_mode=mode) for mode in range(4)),
        case((3, 5, 6, 7), kernel_w=2, kernel_d=3, pad_mode=1, pad_left=0, pad_front=1),
        case((3, 5, 6, 7), global_pooling=1),
        case((3, 5, 6, 7), adaptive_pooling=1, out_w=2, out_h=-233, out_d=3),
    ],
    "BinaryOp": [
        case((2, 3, 4), with_scalar=1, b=2.0),
        *(case(shape, shape) for shape in RANKS),
        *(case((2, 3, 4), b) for b in ((2, 1, 1), (1, 3, 1), (1, 1, 4), (1, 1, 1), (2, 3), (2, 1), (2,), (4,), (1,))),
        *(case(a, (2, 3, 4)) for a in ((1, 3, 4), (2, 3), (2,), (4,), (1,))),
        *(case((2, 3, 4, 5), b) for b in ((2, 3, 4), (2, 3), (2,), (5,), (1, 3, 1, 5), (2, 1, 4), (1,))),
        *(case((3, 4), b) for b in ((3,), (4,), (1,), (1, 4), (3, 1))),
        *(case(a, b) for a, b in (((3, 1), (1, 4)), ((5,), (1,)))),
    ],
    "Eltwise": [case(shape, shape, shape, op_type=1) for shape in RANKS],
    "InnerProduct": [
        *(conv(4 * int(np.prod(shape)), shape) for shape in RANKS),
        conv(4 * 6, (3, 6)),
        conv(4 * 6, (1, 6), bias_term=1),
    ],
    "MatMul": [
        *(
            case(a, b)
            for a, b in (
                ((5,), (5,)),
                ((5,), (5, 3)),
                ((2, 5), (5,)),
                ((2, 5), (5, 3)),
                ((5,), (4, 5, 3)),
                ((4, 2, 5), (5,)),
                ((5,), (2, 4, 5, 3)),
                ((2, 4, 3, 5), (5,)),
                ((4, 2, 5), (4, 5, 3)),
                ((4, 2, 5), (1, 5, 3)),
                ((1, 2, 5), (4, 5, 3)),
                ((2, 5), (4, 5, 3)),
                ((4, 2, 5), (5, 3)),
                ((6, 4, 2, 5), (5, 3)),
                ((2, 5), (6, 4, 5, 3)),
                ((6, 4, 2, 5), (4, 5, 3)),
                ((6, 1, 2, 5), (1, 4, 5, 3)),
            )
        ),
        case((4, 2, 5), (4, 3, 5), transB=1),
        case((5,), (3, 5), transB=1),
    ],
    "Gemm": [
        case((2, 5), (5, 3)),
        case((5, 2), (5, 3), transA=1),
        case((2, 5), (3, 5), transB=1),
        *(case((2, 5), (5, 3), c) for c in ((1,), (2,), (3,), (2, 1), (1, 3), (2, 3))),
        case((2, 5), constantB=1, constantN=3, constantK=5, constantC=1, constant_broadcast_type_C=4, transB=1),
        case((2, 5), constantB=1, constantN=3, constantK=5, constantC=1, constant_broadcast_type_C=-1),
        case((5, 3), constantA=1, constantM=2, constantK=5, constantC=1, constant_broadcast_type_C=2),
        case((2, 3), constantA=1, constantB=1, constantM=2, constantN=3, constantK=5),
        case((2, 5), (5, 3), output_transpose=1),
        case((2, 5), (5, 3), output_N1M=1),
        case((2, 5), (5, 3), output_N1M=1, output_transpose=1),
        case((5,), (5, 3)),
        case((2, 1, 5), (5, 3)),
    ],
    "Reshape": [
        case((2, 3, 4), w=24),
        case((2, 3, 4), w=6, h=-1),
        case((2, 3, 4), w=-1, h=1, c=2),
        case((2, 3, 4), w=0, h=0, c=-1),
        case((2, 3, 4), w=0, h=-1),
        case((2, 3, 4), w=2, h=2, d=3, c=-1),
        case((2, 3, 4, 5), w=0, h=-1, c=0),
        case((2, 3, 4, 5), w=0, h=0, d=0, c=0),
        case((24,), w=4, h=3, d=1, c=2),
        case((2, 3, 4), shape_expr="*(0w,0h),0c"),
        case((2, 3, 4), shape_expr="-1,//(0h,3)"),
        case((2, 3, 4), (5, 6), shape_expr="//(1h,5),-1,//(1w,3)"),
        case((2, 3, 4), shape_expr="0c,0w,1,0h"),
    ],
    "Permute": [
        *(case(shape, order_type=i) for shape, count in zip(RANKS[1:], (2, 6, 24), strict=True) for i in range(count)),
        case((6,), order_type=0),
    ],
    "Squeeze": [
        case((1, 3, 1), axes=(0, 2)),
        case((1, 3, 1), axes=(-1,)),
        case((2, 3, 1), axes=(0, 1, 2)),
        case((1, 1, 1), axes=(0, 1, 2)),
        case((1, 3, 1, 4), axes=(0, 2)),
        case((1, 3, 1, 4), squeeze_c=1, squeeze_h=1, squeeze_d=1, squeeze_w=1),
        case((1, 5), axes=(0,)),
        case((1,), axes=(0,)),
    ],
    "ExpandDims": [
        case((5,), axes=(0,)),
        case((5,), axes=(1,)),
        case((5,), axes=(0, -1)),
        case((5,), axes=(1, 2, 3)),
        case((4, 5), axes=(1,)),
        case((4, 5), axes=(0, 2)),
        case((3, 4, 5), axes=(-1,)),
        case((3, 4, 5), axes=(1,)),
    ],
    "Concat": [
        case((3,), (4,), (5,)),
        *(case((2, 3), (2, 3), axis=a) for a in (0, 1, -1)),
        case((2, 3, 4), (5, 3, 4)),
        case((2, 3, 4), (2, 5, 4), (2, 1, 4), axis=1),
        case((2, 3, 4), (2, 3, 6), axis=-1),
        *(case((2, 3, 4, 5), (2, 3, 4, 5), axis=a) for a in range(4)),
    ],
    "Slice": [
        case((7,), slices=(3, 4), outputs=2),
        case((7, 2), slices=(3, -233, -233), outputs=3),
        case((2, 7), slices=(-233, -233), axis=1, outputs=2),
        case((6, 2, 3), slices=(1, 2, 3), outputs=3),
        case((2, 6, 3), indices=(1, -2), axis=1, outputs=3),
        case((2, 3, 6), slices=(-233, -233, -233), axis=-1, outputs=3),
        *(case((4, 4, 4, 4), slices=(-233, -233), axis=a, outputs=2) for a in range(4)),
    ],
    "Crop": [
        case((7,), starts=(2,), ends=(5,)),
        case((5, 7), starts=(1, -3), ends=(-1, 7), axes=(0, 1)),
        case((5, 7), starts=(-233,), ends=(-2,), axes=(-1,)),
        case((3, 5, 7), starts=(1,), ends=(-233,), axes=(1,)),
        case((3, 5, 7), starts=(1, 0, 2), ends=(2, 2147483647, 4)),
        case((3, 5, 7), starts=(1,), ends=(0,), axes=(0,)),
        case((2, 3, 5, 7), starts=(1, 1), ends=(2, 3), axes=(1, 3)),
        case((3, 5, 7), woffset=1, hoffset=2, outw=3, outh=-233, outc=2),
        case((3, 5, 7), woffset2=1, hoffset2=2, coffset2=1, outw=-233, outh=-233, outc=-233),
        case((2, 3, 5, 7), doffset=1, outw=-233, outh=4, outd=-233, outc=-233),
        case((3, 5, 7), (2, 4, 6), woffset=1),
        case((3, 5, 7), (4, 6)),
        case((5, 7), (2, 3)),
        case((2, 3, 5, 7), (1, 2, 4, 6)),
        case((3, 5, 7), starts_expr="1,2", ends_expr="//(0h,2),-(0w,1)", axes_expr="1,2"),
        case((3, 5, 7), (2, 4), starts_expr="1", ends_expr="1w", axes_expr="2"),
    ],
    "Padding": [
        case((7,), left=1, right=2),
        case((5, 7), left=1, right=2, top=3, bottom=0, type=1),
        case((3, 5, 7), left=1, right=2, top=3, bottom=4, type=2),
        case((3, 5, 7), front=1, behind=2),
        case((3, 5, 7), front=1, behind=0, per_channel_pad_data_size=4, left=1),
        case((3, 4, 5, 7), front=1, behind=2, left=1),
        case((3, 5, 7), left=-1, right=-2, top=-1, bottom=3),
        case((3, 5, 7)),
    ],
    "Tile": [
        *(case((2, 3, 4, 5), axis=a, tiles=2) for a in range(4)),
        case((3, 4), axis=1, tiles=3),
        case((3,), tiles=2),
        case((3,), repeats=(2, 2)),
        case((2, 3, 4), repeats=(3,)),
        case((2, 3), repeats=(2, 1, 1, 3)),
        case((2, 3, 4, 5), repeats=(2, 1, 2)),
    ],
    "Reduction": [
        *(case(shape, operation=3, keepdims=k) for shape in RANKS for k in (0, 1)),
        *(
            case(shape, operation=3, reduce_all=0, axes=tuple(axes), keepdims=k, fixbug0=1)
            for shape, *axes in (((6,), 0), ((4, 6), 1), ((2, 4, 6), 1, 2), ((2, 4, 6), 0), ((2, 3, 4, 6), -1, 1))
            for k in (0, 1)
        ),
        case((2, 4, 6), reduce_all=0),
    ],
    "Interp": [
        case((3, 5, 6), resize_type=1, height_scale=2.0, width_scale=2.0),
        case((3, 5, 6), resize_type=2, height_scale=0.5, width_scale=1.5),
        case((3, 5, 7), resize_type=2, height_scale=0.3333333, width_scale=0.7),
        case((3, 5, 6), resize_type=2, output_height=9, output_width=4),
        case((3, 5, 6), resize_type=3, output_height=9, output_width=4, height_scale=2.0),
        case((5, 6), resize_type=2, output_height=9, output_width=4),
        case((5, 6), resize_type=2, width_scale=2.0),
        case((5,), resize_type=1, output_height=3, output_width=4),
        case((3, 5, 6), (1, 8, 9), resize_type=1, dynamic_target_size=1),
        case((3, 5, 6), resize_type=1, size_expr="*(0w,2),+(0h,1)"),
        case((3, 5, 6), (7, 8), resize_type=1, size_expr="1w,1h"),
        case((3, 5, 6), resize_type=1, size_expr="9"),
    ],
    "PixelShuffle": [case((8, 3, 4), upscale_factor=2), case((9, 3, 4), upscale_factor=3, mode=1)],
    "BatchNorm": [case(shape, channels=shape[0]) for shape in RANKS],
    "Bias": [case((3, 4, 5), bias_data_size=3), case((2, 3, 4, 5), bias_data_size=2), case((4, 5), bias_data_size=1)],
    "Cast": [case(shape, type_from=1, type_to=1) for shape in RANKS],
    "InstanceNorm": [case((3, 4, 5), channels=3), case((2, 3, 4, 5), channels=2), case((3, 4, 5), affine=0)],
    "GroupNorm": [case((4, *shape[1:]), channels=4, group=2) for shape in RANKS],
    **dict.fromkeys(("LayerNorm", "RMSNorm"), INNER_NORM),
    "LRN": [case((3, 4, 5), region_type=region, local_size=3) for region in (0, 1)],
    "Normalize": [
        case((3, 4, 5), scale_data_size=3),
        case((3, 4, 5), scale_data_size=1, channel_shared=1, across_spatial=1),
        case((2, 3, 4, 5), scale_data_size=2),
        case((4, 5), scale_data_size=1),
    ],
    "PReLU": [case(shape, num_slope=n) for shape in RANKS for n in (1, shape[0])],
    "Scale": [
        *(case(shape, scale_data_size=shape[0], bias_term=1) for shape in RANKS),
        case((2, 3, 4), (2,), scale_data_size=-233),
    ],
    "Quantize": [case(shape, scale_data_size=n) for shape in RANKS[1:] for n in (1, shape[0])],
    "Dequantize": [case(shape, scale_data_size=n, bias_data_size=shape[0]) for shape in RANKS for n in (1, shape[0])],
    "Requantize": [case(shape, scale_in_data_size=n) for shape in RANKS for n in (1, shape[0])],
    "Packing": [case(shape) for shape in RANKS],
    "Split": [case(shape, outputs=3) for shape in RANKS],
    "Noop": [case((3, 4), outputs=1), case((3, 4), (5,), outputs=2)],
    "Flip": [case(shape, axes=(-1, 0)) for shape in RANKS],
    "MemoryData": [case(w=3), case(w=3, h=2), case(w=3, h=2, c=4), case(w=3, h=2, d=5, c=4)],
    "GLU": [case(shape, axis=-1) for shape in RANKS],
    "Diag": [
        *(case((4,), diagonal=d) for d in (-2, 0, 1)),
        *(case(shape, diagonal=d) for shape in ((4, 6), (6, 4)) for d in (-3, -1, 0, 1, 3)),
    ],
    "CopyTo": [
        case((7,), (3,), starts=(2,)),
        case((5, 7), (2, 3), starts=(1, -4), axes=(0, 1)),
        case((3, 5, 7), (2, 3, 4), woffset=1, hoffset=2, coffset=1),
        case((2, 3, 5, 7), (2, 2, 5, 7), doffset=1),
    ],
    "Unfold": [
        case((3, 6, 7), kernel_w=3, pad_left=1),
        case((3, 6, 7), kernel_w=2, kernel_h=3, stride_w=2, dilation_w=2, dilation_h=1),
        case((3, 6, 7), kernel_w=3, stride_w=2, pad_left=SAME),
    ],
    "Fold": [
        case((18, 20), kernel_w=3, output_w=7, output_h=6),
        case((12, 12), kernel_w=2, stride_w=2, pad_left=1, output_w=6, output_h=4),
    ],
    "DeformableConv2D": [
        conv(108, (3, 8, 9), (18, 6, 7), kernel_w=3),
        conv(108, (3, 8, 9), (18, 4, 5), (9, 4, 5), kernel_w=3, stride_w=2, pad_left=1),
    ],
    "GridSample": [
        case((3, 5, 6), (7, 8, 2)),
        case((3, 5, 6), (2, 7, 8), permute_fusion=1, sample_type=2),
        case((3, 4, 5, 6), (7, 8, 9, 3)),
        case((3, 4, 5, 6), (3, 7, 8, 9), permute_fusion=1),
    ],
    "ROIAlign": [case((3, 9, 9), (4,), pooled_width=4, pooled_height=3)],
    "ROIPooling": [case((3, 9, 9), (4,), pooled_width=4, pooled_height=3)],
    "PSROIPooling": [case((24, 9, 9), (4,), pooled_width=4, pooled_height=3, output_dim=2)],
    "PriorBox": [
        case((2, 3, 4), (3, 9, 9), min_sizes=(1.0, 2.0), aspect_ratios=(2.0,), image_width=-233, image_height=-233),
        case((2, 3, 4), min_sizes=(1.0,), max_sizes=(2.0,), aspect_ratios=(2.0, 3.0), image_width=9, image_height=9),
        case((2, 3, 4), (3, 9, 9), min_sizes=(1.0, 3.0), max_sizes=(2.0, 4.0), aspect_ratios=(2.0, 3.0), flip=0),
        case((2, 3, 4), min_sizes=(1.0, 2.0), aspect_ratios=(2.0, 3.0), image_width=-233, image_height=-233),
    ],
    "Embed": [case((5,), num_output=4, input_dim=6, weight_data_size=24)],
    **{
        type: [
            case((5, 3), num_output=4, weight_data_size=3 * 4 * gates),
            case((5, 3), num_output=4, weight_data_size=3 * 4 * gates * 2, direction=2, outputs=1 + states),
            case((5, 3), *[(1, 4)] * states, num_output=4, weight_data_size=3 * 4 * gates, outputs=1 + states),
            case((5, 3), *[(4,)] * states, num_output=4, weight_data_size=3 * 4 * gates, outputs=1 + states),
            case(
                (5, 3), *[(2, 4)] * states, num_output=4, weight_data_size=24 * gates, direction=2, outputs=1 + states
            ),
        ]
        for type, gates, states in (("RNN", 1, 1), ("GRU", 3, 1), ("LSTM", 4, 2))
    },
    "SDPA": [
        case((4, 5, 6), (2, 7, 6), (2, 7, 3)),
        case((4, 5, 6), (4, 7, 6), (4, 7, 3), (5, 7), attn_mask=1),
        case((4, 5, 6), (4, 7, 6), (4, 7, 3), (4, 5, 7), attn_mask=1),
        case((4, 5, 6), (4, 7, 6), (4, 7, 3), (1, 5, 7), attn_mask=1),
    ],
    "MultiHeadAttention": [
        case((5, 6), embed_dim=6, num_heads=2, weight_data_size=36),
        case((5, 6), (7, 4), embed_dim=6, num_heads=3, weight_data_size=36, kdim=4, vdim=4),
        case(
            (5, 8), (7, 4), (7, 3), (5, 7), embed_dim=6, num_heads=2, weight_data_size=48, kdim=4, vdim=3, attn_mask=1
        ),
        case((5, 6), (2, 5, 5), embed_dim=6, num_heads=2, weight_data_size=36, attn_mask=1),
    ],
    "RotaryEmbed": [
        case((2, 5, 6), (5, 3), (5, 3)),
        case((2, 5, 6), (5, 3), (5, 3), interleaved=1),
        case((5, 6), (5, 3), (5, 3)),
        case((2, 5, 6), (1, 5, 6), (1, 5, 6)),
    ],
    "Spectrogram": [
        case((40,), n_fft=16),
        case((40,), n_fft=16, hoplen=5, center=0, power=1),
        case((40,), n_fft=15, onesided=0, pad_type=0, power=2),
    ],
    "InverseSpectrogram": [
        case((9, 11, 2), n_fft=16),
        case((16, 11, 2), n_fft=16, hoplen=5, returns=1),
        case((9, 11, 2), n_fft=16, center=0),
        case((8, 11, 2), n_fft=15, hoplen=5),
    ],
    "StatisticsPooling": [case(shape, include_stddev=n) for shape in RANKS[2:] for n in (0, 1)],
    "Einsum": [
        case(*shapes, equation=tuple(map(ord, equation)))
        for equation, *shapes in (
            ("ii", (4, 4)),
            ("ik,kj->ij", (3, 4), (4, 5)),
            ("ijm,ikm->ijk", (2, 3, 4), (2, 5, 4)),
            ("xi->i", (3, 4)),
            ("ijkl,l->ijkl", (2, 3, 4, 5), (5,)),
        )
    ],
    "Reorg": [case((2, 4, 6), stride=2), case((2, 3, 6), stride=3, mode=1)],
    "ShuffleChannel": [case((6, 3, 4), group=2), case((6, 2, 3, 4), group=3, reverse=1)],
}

# Cases that break the assumptions about symbols.
CLAMPED: list[tuple[str, Case]] = [
    ("Crop", case((5, 7), starts=(1, -3), ends=(-1, 100), axes=(0, 1))),
    ("Crop", case((5, 7), woffset=1, outw=100, outh=-233)),
]


def make_layer(type: str, params: Params, shapes: Sequence[Shape], outputs: int, batches: Sequence[Dim] = ()) -> Layer:
    counts = batches or [1] * len(shapes)
    inputs = [Blob(f"in{i}", shape, n) for i, (shape, n) in enumerate(zip(shapes, counts, strict=True))]
    return Layer(type, "layer", inputs, [Blob(f"out{i}") for i in range(outputs)], params)


def token(id: int, value: Any) -> str:
    if isinstance(value, tuple):
        return f"{-23300 - id}={','.join(map(str, (len(value), *value)))}"
    return f'{id}="{value}"' if isinstance(value, str) else f"{id}={value}"


def write(layer: Layer, folder: Path) -> tuple[Path, Path]:
    """The layer as a net of its own, with all weights 0."""
    spec, params = layer.spec, layer.resolved
    assert spec
    names = [blob.name for blob in layer.inputs], [blob.name for blob in layer.outputs]
    tokens = [token(spec.by_name[str(name)].id, value) for name, value in layer.params.items()]
    present = [weight for weight in spec.weights if weight.present(params)]
    return write_net(
        folder,
        *(f"Input {name} 0 1 {name}" for name in names[0]),
        " ".join((layer.type, "layer", *map(str, map(len, names)), *names[0], *names[1], *tokens)),
        weights=bytes(sum(4 * weight.count(params) + 4 * weight.is_tagged(params) for weight in present)),
    )


def run(worker: NcnnWorker, layer: Layer, folder: Path, *, batched: bool = False) -> list[tuple[int, ...]]:
    """The shapes that ncnn computes; with the batch count first where `batched`."""
    runner = NcnnRunner(*write(layer, folder), worker=worker)
    axis = 0 if batched else None
    feeds = {}
    for blob in layer.inputs:
        assert blob.shape is not None
        sizes = (blob.batch, *blob.shape) if batched else blob.shape
        feeds[blob.name] = Feed(np.full([int(size) for size in sizes], 0.5, np.float32), axis)  # type: ignore[arg-type]
    results = runner.run(feeds, [Fetch(blob.name, axis) for blob in layer.outputs])
    return [results[blob.name].shape for blob in layer.outputs]


ALL = [
    pytest.param(type, *one, id=f"{type}-{i}-{','.join(map(str, one[1])).replace(' ', '')}")
    for type, cases in CASES.items()
    for i, one in enumerate(cases)
]
WITH_TRAITS = [spec for spec in LAYERS.values() if spec.traits or spec.bounds is not None]
CLAMPED_PARAMS = [pytest.param(type, *one, id=f"clamped-{type}-{i}") for i, (type, one) in enumerate(CLAMPED)]


@pytest.mark.parametrize(("type", "params", "shapes", "outputs"), [*ALL, *CLAMPED_PARAMS])
def test_shapes_are_those_of_the_runtime(
    worker: NcnnWorker, tmp_path: Path, type: str, params: Params, shapes: list[tuple[int, ...]], outputs: int
) -> None:
    layer = make_layer(type, params, shapes, outputs)
    assert [shape for shape, _ in infer_shapes(layer)] == run(worker, layer, tmp_path)


def test_every_type_with_a_trait_has_a_case() -> None:
    assert {spec.type for spec in WITH_TRAITS} <= CASES.keys()


@pytest.mark.parametrize(
    ("type", "params", "shapes", "outputs"), [one for one in ALL if LAYERS[str(one.values[0])] in WITH_TRAITS]
)
def test_traits_are_true_in_the_runtime(
    worker: NcnnWorker, tmp_path: Path, type: str, params: Params, shapes: list[tuple[int, ...]], outputs: int
) -> None:
    layer = make_layer(type, params, shapes, outputs)
    rng = np.random.default_rng(0)
    inputs = [rng.permutation(np.linspace(-9, 9, int(np.prod(shape)), dtype=np.float32)) for shape in shapes]
    runner = NcnnRunner(*write(layer, tmp_path), worker=worker)

    def computed(arrays: list[NDArray[Any]]) -> NDArray[Any]:
        feeds = {b.name: a.reshape(shape) for b, a, shape in zip(layer.inputs, arrays, shapes, strict=True)}
        return np.concatenate([output.reshape(-1) for output in runner.run(feeds).values()])

    result = computed(inputs)
    if layer.has(Trait.ELEMENTWISE):
        order = rng.permutation(inputs[0].size)
        np.testing.assert_allclose(computed([inputs[0][order]]), result[order], rtol=1e-5, atol=1e-5)
    if layer.has(Trait.MOVES):
        assert np.isin(result, np.concatenate(inputs)).all()
    if layer.has(Trait.VIEW):
        assert np.array_equal(np.sort(result), np.sort(inputs[0]))
    bounds = LAYERS[type].bounds
    if bounds is not None:
        assert (bounds[0] <= result).all()
        assert (result <= bounds[1]).all()


@pytest.mark.parametrize(("type", "params", "shapes", "outputs"), ALL)
def test_symbols_give_the_same_sizes(type: str, params: Params, shapes: list[tuple[int, ...]], outputs: int) -> None:
    """Every size a symbol at once (equal sizes the same one), and each of them alone; 1 stays: it may broadcast."""
    expected = infer_shapes(make_layer(type, params, shapes, outputs))
    sizes = sorted({size for shape in shapes for size in shape if size > 1})
    for chosen in (set(sizes), *({size} for size in sizes)):
        symbols = {size: symbol(f"s{size}") for size in chosen}
        values = {f"s{size}": size for size in chosen}
        symbolic = [tuple(symbols.get(size, size) for size in shape) for shape in shapes]
        found = infer_shapes(make_layer(type, params, symbolic, outputs))
        for (shape, _), (want, _) in zip(found, expected, strict=True):
            if shape is not None:
                assert tuple(s.subs(values) if isinstance(s, Sym) else s for s in shape) == want


@pytest.mark.parametrize(("type", "params", "shapes", "outputs"), ALL)
def test_batches_are_those_of_the_runtime(
    worker: NcnnWorker, tmp_path: Path, type: str, params: Params, shapes: list[tuple[int, ...]], outputs: int
) -> None:
    """All inputs in batches of 2, and then each of several inputs without one."""
    several = len(shapes) > 1
    for single in range(-1, len(shapes)) if several else (-1,):
        batches = [1 if i == single else 2 for i in range(len(shapes))]
        layer = make_layer(type, params, shapes, outputs, batches)
        found = [(batch, *shape) for shape, batch in infer_shapes(layer) if shape is not None]
        assert found == run(worker, layer, tmp_path, batched=True), batches


def test_detections_have_no_known_shape() -> None:
    for type in sorted(DATA_DEPENDENT):
        assert infer_shapes(make_layer(type, {}, [(3, 4, 5)] * 3, 1)) == [(None, 1)]


def test_every_type_of_the_runtime_is_covered() -> None:
    assert set(CASES) == {spec.type for spec in LAYERS.values() if spec.in_runtime} - DATA_DEPENDENT - {"Input"}


DATA_DEPENDENT = {"DetectionOutput", "Proposal", "YoloDetectionOutput", "Yolov3DetectionOutput"}


def sizes(least: int = 1, most: int = 9) -> st.SearchStrategy[int]:
    return st.integers(least, most)


# What the fixed cases above may have missed: random parameters, where inference finds nothing wrong with them.
RANDOM = {
    "Convolution": st.tuples(
        st.fixed_dictionaries(
            {
                **{name: sizes(1, 4) for name in ("kernel_w", "kernel_h")},
                **{name: sizes(1, 3) for name in ("stride_w", "stride_h", "dilation_w", "dilation_h")},
                **{name: sizes(0, 3) for name in ("pad_left", "pad_right", "pad_top", "pad_bottom")},
            }
        ),
        st.tuples(st.just(2), sizes(), sizes()),
    ),
    "Pooling": st.tuples(
        st.fixed_dictionaries(
            {
                **{name: sizes(1, 4) for name in ("kernel_w", "kernel_h", "stride_w", "stride_h")},
                **{name: sizes(0, 2) for name in ("pad_left", "pad_right", "pad_top", "pad_bottom", "pooling_type")},
                "pad_mode": sizes(0, 3),
            }
        ),
        st.tuples(st.just(2), sizes(), sizes()),
    ),
    "Crop": st.tuples(
        st.fixed_dictionaries(
            {
                "starts": st.tuples(st.integers(-4, 3), st.sampled_from([-233, -2, 0, 1])),
                "ends": st.tuples(st.integers(-2, 9), st.sampled_from([-233, -1, 0, 3, 1 << 30])),
                "axes": st.permutations([0, -1, 1]).map(lambda axes: tuple(axes[:2])),
            }
        ),
        st.tuples(sizes(3, 6), sizes(3, 6), sizes(3, 6)),
    ),
    "Interp": st.tuples(
        st.fixed_dictionaries(
            {
                "resize_type": st.sampled_from([1, 2]),
                "height_scale": st.floats(0.25, 3, width=32).map(lambda scale: round(scale, 6)),
                "width_scale": st.sampled_from([0.5, 2.0, 0.3333333, 1.1, 0.7]),
                "output_height": st.sampled_from([0, 0, 5]),
                "output_width": st.sampled_from([0, 0, 4]),
            }
        ),
        st.tuples(st.just(2), sizes(4, 40), sizes(4, 40)),
    ),
    "Deconvolution": st.tuples(
        st.fixed_dictionaries(
            {
                **{name: sizes(1, 4) for name in ("kernel_w", "kernel_h")},
                **{name: sizes(1, 3) for name in ("stride_w", "stride_h", "dilation_w", "dilation_h")},
                **{name: sizes(0, 2) for name in ("pad_left", "pad_right", "pad_top", "pad_bottom")},
                **{name: sizes(0, 1) for name in ("output_pad_right", "output_pad_bottom")},
            }
        ),
        st.tuples(st.just(2), sizes(1, 6), sizes(1, 6)),
    ),
}


@pytest.mark.parametrize("type", RANDOM)
def test_random_parameters(worker: NcnnWorker, tmp_path: Path, type: str) -> None:
    compared = 0

    @settings(derandomize=True, max_examples=50, deadline=None, database=None)
    @given(RANDOM[type])
    def compare(drawn: tuple[dict[str, Any], tuple[int, ...]]) -> None:
        nonlocal compared
        params, shape = drawn
        if "onvolution" in type:
            weights = 3 * shape[0] * params["kernel_w"] * params["kernel_h"]
            params = {**params, "num_output": 3, "weight_data_size": weights}
        if type == "Pooling":
            params = {**params, "pooling_type": min(params["pooling_type"], 1)}
        layer = make_layer(type, dict(params.items()), [shape], 1)
        try:
            found = [shape for shape, _ in infer_shapes(layer)]
        except ShapeError:
            return
        assert found == run(worker, layer, tmp_path)
        compared += 1

    compare()
    assert compared > 20


@settings(derandomize=True, max_examples=100, deadline=None, database=None)
@given(st.lists(sizes(1, 3), min_size=1, max_size=4), st.lists(sizes(1, 3), min_size=1, max_size=4))
def test_matmul_takes_what_numpy_takes(a: list[int], b: list[int]) -> None:
    try:
        expected = np.matmul(np.zeros(a), np.zeros(b)).shape or (1,)
    except ValueError:
        expected = None
    layer = make_layer("MatMul", {}, [tuple(a), tuple(b)], 1)
    if expected is None:
        with pytest.raises(ShapeError):
            infer_shapes(layer)
    else:
        assert infer_shapes(layer) == [(expected, 1)]


@settings(derandomize=True, max_examples=100, deadline=None, database=None)
@given(st.integers(1, 4).flatmap(lambda rank: st.tuples(*[st.tuples(sizes(1, 3), sizes(1, 3))] * rank)))
def test_equal_ranks_broadcast_as_in_numpy(pairs: tuple[tuple[int, int], ...]) -> None:
    a, b = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
    try:
        expected = np.broadcast_shapes(a, b)
    except ValueError:
        expected = None
    layer = make_layer("BinaryOp", {}, [a, b], 1)
    if expected is None:
        with pytest.raises(ShapeError):
            infer_shapes(layer)
    else:
        assert infer_shapes(layer) == [(expected, 1)]
