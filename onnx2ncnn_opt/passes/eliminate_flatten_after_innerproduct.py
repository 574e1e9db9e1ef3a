from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import kept, op
from onnx2ncnn_opt.rewrite.rule import known_shape, rewrite


@rewrite(op("Flatten")(kept(op("InnerProduct", "ip"))), exact=True, purpose="nets of other converters")
def eliminate_flatten_after_innerproduct(ip: Layer) -> Blob:
    """x ── InnerProduct ── Flatten ──   ⇒   x ── InnerProduct ──

    Not if x is a matrix with one row per token: then Flatten changes the shape of the result.
    """
    known_shape(ip.output, 1)
    return ip.output
