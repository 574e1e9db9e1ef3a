from onnx2ncnn_opt.ir.dim import is_fixed
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

    ncnn aligns a blob of fewer dims with the outer axes; a vector with the outermost axis if it has that size, else
    with the innermost one.
    """
    require(isinstance(step_of(view), Regroup), f"{view.type} '{view.name}' is not a mere reshape")
    small, shape = known_shape(x), known_shape(other)
    ones = (1,) * (len(shape) - len(small))
    require(ones and is_fixed(small), f"'{other.name}' has no more axes than '{x.name}'")
    if len(small) == 1 and view.output.shape == (*ones, *small) != shape:
        differ = is_fixed(shape[:1]) and shape[0] != small[0] == shape[-1]
        require(differ, f"the outermost axis of '{other.name}' may be as long as '{x.name}'")
    else:
        require(view.output.shape == (*small, *ones), f"'{view.name}' does not only add inner axes")
        require(shape[: len(small)] == small, f"'{other.name}' does not have the outer axes of '{x.name}'")
    require(view.output.uses == 1, f"'{view.output.name}' is used twice")
    return binary.having(inputs=[x if blob is view.output else blob for blob in binary.inputs])
