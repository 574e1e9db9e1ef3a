import pytest

from onnx2ncnn_opt.ir.releases import NEWEST
from onnx2ncnn_opt.rewrite.square_roots import flush_subnormal_operands
from testing.param_text import bare as net


@pytest.mark.parametrize(
    ("layers", "flushed"),
    [
        (["Sigmoid a 1 1 p a", "BinaryOp b 2 1 a a b 0=2", "UnaryOp y 1 1 b y 0=5"], True),
        (["UnaryOp a 1 1 p a 0=4", "UnaryOp y 1 1 a y 0=5"], True),
        (["UnaryOp a 1 1 p a 0=4", "BinaryOp b 1 1 a b 1=1 2=1e-6", "UnaryOp y 1 1 b y 0=5"], False),
        (["UnaryOp a 1 1 x a 0=4", "UnaryOp y 1 1 a y 0=5"], False),  # which may be NaN, and Shrink makes 0 of that
        (["UnaryOp a 1 1 p a 0=4", "UnaryOp y 1 1 a y 0=6"], False),
    ],
    ids=["product", "square", "with epsilon", "input", "rsqrt"],
)
def test_operands_that_may_be_subnormal(layers: list[str], *, flushed: bool) -> None:
    graph = net("Input x 0 1 x 0=8", "InnerProduct p 1 1 x p 0=8 2=64", *layers)
    for _ in range(2):
        flush_subnormal_operands(graph, NEWEST)
        assert [layer.type for layer in graph].count("Shrink") == flushed
