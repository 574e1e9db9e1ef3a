from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._views import VIEWS, step_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_BINARY = op("BinaryOp", "binary", with_scalar=0)


@rewrite(
    _BINARY(op(VIEWS, "view")("x"), "other"),
    _BINARY("other", op(VIEWS, "view")("x")),
    exact=True,
    purpose="squeeze-and-excitation in nets of other converters",
)
def eliminate_reshape_before_binaryop(x: Blob, other: Blob, view: Layer, binary: Layer) -> Layer:
    """x, a ── Reshape (c, 1, 1) ── BinaryOp ──   ⇒   x, a ── BinaryOp ──

    ncnn lays a vector along the outermost axis if it has that size.
    """
    require(isinstance(step_of(view), Regroup), f"{view.type} '{view.name}' is not a mere reshape")
    (channels,), shape = known_shape(x, 1), known_shape(other)
    require(view.output.shape == (channels, *(1,) * (len(shape) - 1)), f"'{view.name}' makes no channels of it")
    fits = isinstance(channels, int) and shape[0] == channels and len(shape) > 1
    require(fits, f"'{other.name}' does not have as many channels as '{x.name}' elements")
    require(view.output.uses == 1, f"'{view.output.name}' is used twice")
    return binary.having(inputs=[x if blob is view.output else blob for blob in binary.inputs])
