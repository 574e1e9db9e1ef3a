"""Models from ONNX's text form."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError


def parsed(graph: str, opset: int = 18, **weights: Any) -> onnx.ModelProto:
    """Return the model of a graph without its name, and perhaps functions; weights become initializers."""
    domains = [f', "{name}": 1' for name in ("com.microsoft", "made.up", "ai.onnx.ml") if name in graph]
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}{"".join(domains)}]> g {graph}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    return model


def serialized(graph: str, opset: int = 18, **weights: Any) -> bytes:
    """Return `parsed` as bytes."""
    return bytes(parsed(graph, opset, **weights).SerializeToString())


def write_model(folder: Path, graph: str, name: str = "model.onnx", opset: int = 18, **weights: Any) -> Path:
    """Write `parsed` to a file of a folder, which need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(parsed(graph, opset, **weights), folder / name)
    return folder / name


def nodes(text: str) -> list[onnx.NodeProto]:
    """Return the nodes of a graph's text: ``c = Greater(a, b)  y = Cast<to = 1>(c)``."""
    return list(parsed(f"() => () {{ {text} }}").graph.node)


def refusal(graph: str, opset: int = 17) -> UnsupportedError:
    """Return the error that the importer raises for a graph, of which nothing may follow the net."""
    with pytest.raises(UnsupportedError) as error:
        lower(parsed(graph, opset), tail="never")
    return error.value
