from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._views import VIEWS, step_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import fixed_shape, known_shape, require, rewrite


@rewrite(
    op("InnerProduct", "layer")(op(VIEWS, "view")("x")),
    exact=True,
    purpose="classifiers in nets of other converters; one layer less",
)
def eliminate_reshape_before_innerproduct(x: Blob, view: Layer, layer: Layer) -> Layer:
    """x ── Flatten or Reshape (to a vector) ── InnerProduct ──   ⇒   x ── InnerProduct ──

    InnerProduct flattens its input, except for matrices whose rows are as long as its weights.
    """
    require(isinstance(step_of(view), Regroup), f"{view.type} '{view.name}' is not a mere reshape")
    vector = known_shape(view.output, 1)
    require(layer["int8_scale_term"] == 0, f"InnerProduct '{layer.name}' is quantised to int8")
    require(x.known_shape[1:] != vector, f"'{x.name}' is one row, and would stay a matrix")
    fixed_shape(x)
    return layer.having(inputs=[x])
