from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._linear import offset
from onnx2ncnn_opt.passes._statistics import axes_of, known_shape, mean, over_root, square
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_FORMS = tuple(form for squares in square("x", "x") for form in over_root("x", mean(squares, "mean")))


@rewrite(*_FORMS, exact=False)
def fuse_rmsnorm(x: Blob, mean: Layer, eps: Layer, root: Layer) -> Layer:
    """x / sqrt(mean(x * x) + eps)   ⇒   RMSNorm(x)

    For means over the innermost axis of matrices and stacks of them.
    """
    shape = known_shape(x)
    require(len(shape) in (2, 3), f"'{x.name}' is not one or several matrices")
    width = shape[-1]
    require(axes_of(mean, len(shape)) == (len(shape) - 1,), f"'{mean.name}' is not over the innermost axis")
    require(isinstance(width, int), f"the width of '{x.name}' is unknown")
    return Layer("RMSNorm", root.name, [x], (), {"affine_size": width, "eps": offset(eps), "affine": 0})
