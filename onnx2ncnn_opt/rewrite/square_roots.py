"""Square roots of subnormal numbers: ncnn returns -infinity on x86 without AVX-512.

GCC's -ffast-math computes vectors of sqrt(x) there as x * rsqrt(x) with a Newton step, and rsqrt of a subnormal number
is infinity. Products, sums of squares and variances may be that small. Emulators compute rsqrt exactly.
"""

from onnx2ncnn_opt.ir.codes import UnaryOp
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.ranges import Range, Ranges
from onnx2ncnn_opt.ir.releases import too_new
from onnx2ncnn_opt.rewrite.edit import Names

_SUBNORMAL = 1.2e-38  # a bit above the smallest normal number of float32


def flush_subnormal_operands(graph: Graph, release: int) -> None:
    """Insert a Shrink, which flushes small numbers to 0, before square roots of numbers that may be subnormal."""
    ranges = Ranges()
    roots = [layer for layer in graph if layer.computes(UnaryOp.SQRT) and _may_be_subnormal(ranges.of(layer.input))]
    if not roots:
        return
    names = Names(graph)
    for root in roots:
        name, blob = f"{root.name}_flush", root.input
        params = {"bias": 0.0, "lambd": _SUBNORMAL}
        flush = Layer("Shrink", name, [blob], [Blob(name, blob.shape, blob.batch)], params, origin=root.traced)
        if too_new(flush, release):
            return
        names.give(flush, ())
        graph.add(flush, before=root)
        graph.set_inputs(root, flush.outputs)


def _may_be_subnormal(operand: Range) -> bool:
    """Return whether a number may be subnormal; False if one may be NaN, which Shrink turns into 0 on x86."""
    return not operand.may_be_nan and not operand.is_integer and 0 <= operand.low < _SUBNORMAL
