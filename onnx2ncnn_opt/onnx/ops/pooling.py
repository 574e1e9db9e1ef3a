"""Poolings over windows and over everything."""

from __future__ import annotations

from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.pool import average_pool, global_average_pool, global_pool, max_pool
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Ints, Tensor


@onnx_op("MaxPool", batch=0, integers=True)
def max_pool_op(
    im: ImportContext,
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints = (),
    kernel_shape: Ints,
    pads: Ints = (),
    storage_order: int = 0,
    strides: Ints = (),
) -> Tensor:
    """Pooling[1D|3D] max; along an axis with dilation BinaryOp max of Crops before it."""
    return max_pool(
        im,
        x,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        dilations=dilations,
        kernel_shape=kernel_shape,
        pads=pads,
        storage_order=storage_order,
        strides=strides,
    )


@onnx_op("AveragePool", since=7, batch=0)
def average_pool_op(
    im: ImportContext,
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints = (),
    kernel_shape: Ints,
    pads: Ints = (),
    strides: Ints = (),
) -> Tensor:
    """Pooling[1D|3D] avg; with dilation ConvolutionDepthWise, and BinaryOp mul by how many are in a window."""
    return average_pool(
        im,
        x,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        dilations=dilations,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )


@onnx_op("GlobalAveragePool", batch=0)
def global_average_pool_op(im: ImportContext, x: Tensor) -> Tensor:
    """Pooling avg over everything: a 1-D Mat, one number per channel."""
    return global_average_pool(im, x)


@onnx_op("GlobalMaxPool", batch=0)
def global_max_pool(im: ImportContext, x: Tensor) -> Tensor:
    """Pooling max over everything."""
    return global_pool(im, x, 0)
