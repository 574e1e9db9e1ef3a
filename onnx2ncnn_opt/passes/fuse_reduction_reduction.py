from onnx2ncnn_opt.ir.codes import Reduction
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._constants import finite_float32
from onnx2ncnn_opt.passes._fold import one_factor
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

_LINEAR = frozenset({Reduction.SUM, Reduction.MEAN})
# The result over all axes is the result over some of them, and then over the others.
_IN_PARTS = _LINEAR | {Reduction.MAX, Reduction.MIN}


@rewrite(
    op("Reduction", "last", operation=_IN_PARTS)(op("Reduction", "first", operation=_IN_PARTS)),
    exact=False,
    purpose="means over the columns, then over the rows, as in FocalNet",
)
def fuse_reduction_reduction(first: Layer, last: Layer) -> Layer:
    """x ── Reduction (axis 2) ── Reduction (axis 1) ──   ⇒   x ── Reduction (axes 1, 2) ──"""
    names = f"'{first.name}' and '{last.name}'"
    require(first["operation"] == last["operation"], f"{names} compute different results")
    require(first["operation"] in _LINEAR or first["coeff"] == last["coeff"] == 1, f"{names} have a factor")
    coeff = one_factor(first["coeff"], last["coeff"])
    require(finite_float32(coeff), "the factors together are too large")
    left = list(range(len(known_shape(first.input))))
    axes = list[set[int]]()
    for layer in (first, last):
        require(left, f"'{first.name}' leaves no axis")
        axes.append(set(left if layer["reduce_all"] else (left[axis] for axis in layer["axes"])))
        left = left if layer["keepdims"] else [axis for axis in left if axis not in axes[-1]]
    keepdims = last["keepdims"]
    same = first["keepdims"] == keepdims or (not keepdims and axes[0] <= axes[1])
    require(same, f"only one of {names} keeps its axes")
    reduced = tuple(sorted(axes[0] | axes[1]))
    return first.having(reduce_all=0, axes=reduced, keepdims=keepdims, coeff=coeff).without_defaults()
