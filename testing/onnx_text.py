"""Models from ONNX's text form."""

import onnx
import onnx.parser
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError


def parsed(graph: str, opset: int = 17) -> onnx.ModelProto:
    """Return the model of a graph's text, from its inputs on: ``(float[2] x) => (float[2] y) { y = Relu(x) }``."""
    model: onnx.ModelProto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> g {graph}')
    return model


def nodes(text: str) -> list[onnx.NodeProto]:
    """Return the nodes of a graph's text: ``c = Greater(a, b)  y = Cast<to = 1>(c)``."""
    return list(parsed(f"() => () {{ {text} }}").graph.node)


def refused(graph: str, opset: int = 17) -> UnsupportedError:
    """Return the error that the importer raises for a graph, of which nothing may follow the net."""
    with pytest.raises(UnsupportedError) as error:
        lower(parsed(graph, opset), tail="never")
    return error.value
