from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._views import VIEWS, step_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

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
    require(x.shape is not None and other.shape is not None, f"the shape of '{other.name}' is unknown")
    assert x.shape is not None
    assert other.shape is not None
    channels = x.shape[0]
    require(len(x.shape) == 1, f"'{x.name}' is no vector")
    require(view.output.shape == (channels, *(1,) * (len(other.shape) - 1)), f"'{view.name}' makes no channels of it")
    fits = isinstance(channels, int) and other.shape[0] == channels and len(other.shape) > 1
    require(fits, f"'{other.name}' has not as many channels as '{x.name}' elements")
    require(view.output.uses == 1, f"'{view.output.name}' is used twice")
    return binary.having(inputs=[x if blob is view.output else blob for blob in binary.inputs])
