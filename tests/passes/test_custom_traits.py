"""The traits that a custom layer's declaration may state, and what passes make of them."""

import pytest

from onnx2ncnn_opt import passes
from onnx2ncnn_opt.errors import GraphError
from onnx2ncnn_opt.ir.layers import with_custom
from onnx2ncnn_opt.ir.ranges import Ranges
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.ir.spec import CUSTOM, LayerSpec, Trait
from onnx2ncnn_opt.param.text import parse_param

NET = """7767517
4 4
Input    x    0 1 x 0=4 1=3 2=2
Permute  to   1 1 x t 0=5
MyLayer  mine 1 1 t m
Permute  back 1 1 m y 0=5
"""


def optimised(spec: LayerSpec) -> list[str]:
    graph = parse_param(NET, types=with_custom([spec])).graph
    infer_graph(graph)
    passes.run(graph, passes.PASSES)
    return [layer.type for layer in graph]


def test_views_move_over_an_elementwise_layer() -> None:
    assert optimised(LayerSpec("MyLayer", CUSTOM)) == ["Input", "Permute", "MyLayer", "Permute"]
    assert optimised(LayerSpec("MyLayer", CUSTOM, traits=Trait.ELEMENTWISE)) == ["Input", "MyLayer"]


def test_elementwise_takes_one_input() -> None:
    with pytest.raises(GraphError, match="MyLayer cannot be declared as elementwise"):
        with_custom([LayerSpec("MyLayer", CUSTOM, inputs=(2, 2), traits=Trait.ELEMENTWISE)])


def test_ranges_know_bounds() -> None:
    types = with_custom([LayerSpec("MyLayer", CUSTOM, bounds=(-2, 3))])
    graph = parse_param(NET, types=types).graph
    (output,) = graph.outputs
    found = Ranges().of(output)
    assert (found.low, found.high, found.may_be_nan, found.may_be_inf) == (-2, 3, True, False)
