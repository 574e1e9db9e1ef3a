from math import prod

from onnx2ncnn_opt.ir.codes import Reduction
from onnx2ncnn_opt.ir.dim import is_fixed
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._constants import finite_float32
from onnx2ncnn_opt.passes._fold import one_factor
from onnx2ncnn_opt.passes._linear import close, factor, times
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import require, rewrite

_REDUCTION = op("Reduction", "reduction", operation=frozenset({Reduction.SUM, Reduction.SUMSQ, Reduction.MEAN}))


@rewrite(times(_REDUCTION("x"), "scaling"), exact=False, purpose="hand-written means, for passes that fuse norms")
def fuse_reduction_mul(x: Blob, reduction: Layer, scaling: Layer) -> Layer:
    """x ── Reduction (sum, mean) ── BinaryOp mul (number) ──   ⇒   x ── Reduction (coeff) ──

    A sum divided by the number of its elements is a mean.
    """
    coeff = one_factor(reduction["coeff"], factor(scaling))
    require(finite_float32(coeff), "the factors together are too large")
    if reduction["operation"] == Reduction.SUM and x.shape is not None:
        axes = range(len(x.shape)) if reduction["reduce_all"] else reduction["axes"]
        sizes = [x.shape[axis] for axis in axes]
        if is_fixed(sizes) and close(coeff * prod(sizes), 1.0):
            return reduction.having(operation=Reduction.MEAN, coeff=None)
    return reduction.having(coeff=coeff)
