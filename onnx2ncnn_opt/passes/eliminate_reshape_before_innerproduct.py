from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._views import VIEWS, step_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


@rewrite(
    op("InnerProduct", "layer")(op(VIEWS, "view")("x")),
    exact=True,
    purpose="classifiers in nets of other converters; one layer less",
)
def eliminate_reshape_before_innerproduct(x: Blob, view: Layer, layer: Layer) -> Layer:
    """x ── Flatten or Reshape (to a vector) ── InnerProduct ──   ⇒   x ── InnerProduct ──

    InnerProduct flattens by itself, except for matrices whose rows are as long as its weights.
    """
    require(isinstance(step_of(view), Regroup), f"{view.type} '{view.name}' is not a mere reshape")
    assert x.shape is not None
    assert view.output.shape is not None
    require(len(view.output.shape) == 1, f"'{view.output.name}' is no vector")
    require(layer["int8_scale_term"] == 0, f"InnerProduct '{layer.name}' is quantised to int8")
    require(len(x.shape) != 2 or x.shape[1] != view.output.shape[0], f"'{x.name}' is one row, and would stay a matrix")
    require(all(isinstance(size, int) for size in x.shape), f"the sizes of '{x.name}' are not fixed")
    return layer.having(inputs=[x])
