from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import factor, mul, multiplied, times
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

# With a larger or smaller factor, the product may be too large or too small for 16 bits.
_LARGEST = 16.0


@rewrite(mul("x", op("Sigmoid", "sigmoid")(times("x", "scaled"))), exact=False, purpose="CLIP")
def fuse_quickgelu(x: Blob, scaled: Layer, sigmoid: Layer) -> list[Layer]:
    """x * Sigmoid(c * x)   ⇒   Swish(c * x) * (1 / c)

    As in CLIP, with c = 1.702. Other passes fold the factors into layers with weights before and after.
    """
    c = factor(scaled)
    require(1 / _LARGEST <= abs(c) <= _LARGEST, f"'{scaled.name}' multiplies by {c:.3g}")
    large, swish = Blob(scaled.output.name, x.shape, x.batch), Blob(f"{sigmoid.output.name}_swish", x.shape, x.batch)
    return [
        multiplied(x, c, scaled.name, [large]),
        Layer("Swish", sigmoid.name, [large], [swish]),
        multiplied(swish, 1 / c, f"{sigmoid.name}_scale"),
    ]
