"""Conv and ConvTranspose in one, two and three dimensions."""

from __future__ import annotations

from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.conv import conv, conv_transpose
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Ints, Tensor, Value


@onnx_op("Conv", batch=0)
def conv_op(
    im: ImportContext,
    x: Tensor,
    w: Value,
    b: Value | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = (),
    group: int = 1,
    kernel_shape: Ints = (),
    pads: Ints = (),
    strides: Ints = (),
) -> Value:
    """Convolution[DepthWise][1D|3D], also of weights that are computed; InnerProduct where the image is one pixel."""
    return conv(
        im,
        x,
        w,
        b,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )


@onnx_op("ConvTranspose", batch=0)
def conv_transpose_op(
    im: ImportContext,
    x: Tensor,
    w: Value,
    b: Value | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = (),
    group: int = 1,
    kernel_shape: Ints = (),
    output_padding: Ints = (),
    output_shape: Ints = (),
    pads: Ints = (),
    strides: Ints = (),
) -> Value:
    """Deconvolution[DepthWise][1D|3D]; Padding after it for negative pads."""
    return conv_transpose(
        im,
        x,
        w,
        b,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        output_padding=output_padding,
        output_shape=output_shape,
        pads=pads,
        strides=strides,
    )
