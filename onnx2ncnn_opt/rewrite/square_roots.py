"""Square roots of subnormal numbers, of which ncnn makes -infinity on x86 without AVX-512.

GCC's -ffast-math computes vectors of sqrt(x) there as x * rsqrt(x) with a Newton step, and takes rsqrt of a subnormal
number for infinity. Products, sums of squares and variances may be that small. Emulators compute rsqrt exactly.
"""

from onnx2ncnn_opt.ir.codes import UnaryOp
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.ranges import Ranges
from onnx2ncnn_opt.ir.releases import too_new
from onnx2ncnn_opt.rewrite.edit import Names

_SUBNORMAL = 1.2e-38  # a bit more than float32's smallest normal number, as ncnn reads numbers a bit inexactly


def flush_subnormal_operands(graph: Graph, release: int) -> None:
    """Put a Shrink, which makes 0 of small numbers, before square roots of computed numbers that may be subnormal."""
    ranges, names = Ranges(), Names(graph)
    for layer in graph:
        if not layer.computes(UnaryOp.SQRT):
            continue
        operand = ranges.of(layer.input)
        if operand.may_be_nan or operand.is_whole or not 0 <= operand.low < _SUBNORMAL:
            continue
        name = f"{layer.name}_flush"
        flushed = Blob(name, layer.input.shape, layer.input.batch)
        params = {"bias": 0.0, "lambd": _SUBNORMAL}
        flush = Layer("Shrink", name, [layer.input], [flushed], params, origin=layer.traced)
        if too_new(flush, release):
            continue
        names.give(flush, ())
        graph.add(flush, before=layer)
        graph.set_inputs(layer, [flushed])
