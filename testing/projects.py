"""Folders of models with an ncnn-check.toml, as a user has them."""

import sys
from pathlib import Path

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.param.files import read_net, write_net
from onnx2ncnn_opt.regression.result import CheckResult, Measurement, ModelResult
from testing.models import write_model

# A convolution with unequal pads and a fused activation, and a second output.
MODEL = (
    "(float[1, 3, 9, 8] x) => (float[1, 4, 9, 8] y, float[1, 4, 9, 8] z)"
    f"<float[4, 3, 2, 2] w = {{{', '.join(str((7 * i % 11 - 5) / 8) for i in range(48))}}}>"
    "{ c = Conv<pads = [1, 0, 0, 1]>(x, w) y = Relu(c) z = Tanh(y) }"
)


def write_project(folder: Path, text: str, **models: str) -> Path:
    """Write ncnn-check.toml with this text, and models/NAME.onnx for each model."""
    for name, graph in models.items():
        write_model(folder / "models", graph, f"{name}.onnx")
    file = folder / "ncnn-check.toml"
    file.write_text(f'models = ["models/*.onnx"]\n{text}')
    return file


def write_right_net(folder: Path, name: str, model: Path, *, storage: str | None = None) -> Graph:
    """Write FOLDER/NAME.param, .bin and .json for a model; return the graph in them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = lower(model, storage=storage).save(folder / "net")
    for path, suffix in ((files.param, ".param"), (files.bin, ".bin"), (files.manifest, ".json")):
        path.rename(folder / f"{name}{suffix}")
    return read_net(folder / f"{name}.param", folder / f"{name}.bin").graph


def save_graph(graph: Graph, folder: Path, name: str) -> None:
    """Put a graph in the place of FOLDER/NAME."""
    write_net(graph, folder / f"{name}.param", folder / f"{name}.bin")


def insert_layers(graph: Graph, count: int) -> None:
    """Put absolute values before the TanH of MODEL."""
    (tanh,) = (layer for layer in graph if layer.type == "TanH")
    blob = tanh.input
    for number in range(count):
        layer = Layer("UnaryOp", f"abs{number}", [blob], [Blob(f"abs{number}")], {"op_type": 0})
        blob = graph.add(layer, before=tanh).output
    graph.set_inputs(tanh, [blob])


def python(program: str) -> str:
    """Return a converter for a TOML text: a line of Python whose sys.argv[1:] are the model and the prefix."""
    return f'''convert = """{sys.executable} -c "{program}" {{onnx}} {{out}}"""'''


def by_name(result: CheckResult) -> dict[str, ModelResult]:
    """Return the results without the folder in their names."""
    return {model.name.removeprefix("models/"): model for model in result.models}


def failed(result: ModelResult) -> list[str]:
    """Return the measurements that failed."""
    return [measurement.name for measurement in result.failures]


def measured(result: ModelResult, name: str) -> Measurement:
    """Return one measurement."""
    (found,) = (measurement for measurement in result.measurements if measurement.name == name)
    return found
