"""Conv and ConvTranspose in one, two and three dimensions."""

from onnx2ncnn_opt.onnx.lower.functional.conv import conv, conv_transpose
from onnx2ncnn_opt.onnx.registry import onnx_op

onnx_op("Conv", batch=0)(conv)
onnx_op("ConvTranspose", batch=0)(conv_transpose)
