from __future__ import annotations

from onnx2ncnn_opt.ir.codes import Eltwise, Reduction
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._views import shortest, view_layers
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_KINDS = {
    Reduction.SUM: Eltwise.SUM,
    Reduction.MEAN: Eltwise.SUM,
    Reduction.MAX: Eltwise.MAX,
    Reduction.PROD: Eltwise.PROD,
}


@rewrite(
    op("Reduction", "reduction", operation=frozenset(_KINDS), reduce_all=0)(op("Concat", "concat")),
    exact=False,
    purpose="means and sums of stacked branches (HiFi-GAN, selective kernels, ensembles)",
)
def fuse_concat_reduction(concat: Layer, reduction: Layer) -> list[Layer]:
    """a, b, ... ── Concat (size 1 each) ── Reduction over it ──   ⇒   a, b, ... ── Eltwise ──

    ncnn has kernels for Eltwise, and for Reduction a plain loop.
    """
    shapes = [known_shape(blob) for blob in concat.inputs]
    rank = len(shapes[0])
    axis = concat["axis"] % rank
    require([a % rank for a in reduction["axes"]] == [axis], f"'{reduction.name}' reduces other axes than that")
    require(all(shape[axis] == 1 for shape in shapes), f"not all that '{concat.name}' puts together has size 1")
    by = reduction["coeff"] / (len(shapes) if reduction["operation"] == Reduction.MEAN else 1)
    kind = _KINDS[Reduction(reduction["operation"])]
    require(kind == Eltwise.SUM or by == 1, f"'{reduction.name}' has a factor")
    out = Blob(concat.output.name, shapes[0], concat.output.batch)
    params = {"op_type": kind} | ({"coeffs": (by,) * len(shapes)} if by != 1 else {})
    first = Layer("Eltwise", reduction.name, concat.inputs, [out], params)
    result = known_shape(reduction.output)
    steps = shortest(shapes[0], (Regroup(result),))
    require(steps is not None, f"'{reduction.output.name}' has several dynamic sizes")
    return [first, *view_layers(out, steps or (), like=[reduction])]
