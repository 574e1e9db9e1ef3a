"""Models that are read to change them, and to run them from their folder."""

from collections.abc import Collection
from pathlib import Path

import onnx
import onnx_ir

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.onnx.read import structure
from onnx2ncnn_opt.onnx.read.embedded import without_weights

_OLDEST_OPSET = 11  # Range exists, and Slice and Pad have their numbers as inputs
_WANTED_OPSET = 13  # Clip has float64
_IR_VERSION = 10  # of models of a graph alone


def read_model(
    source: Path | bytes, outputs: Collection[str] = (), *, typed: bool = False, upgraded: bool = False
) -> onnx_ir.Model:
    """Return a model, sorted, with its functions inlined, and cut to `outputs`; its weights stay in its folder.

    If `typed`, it has the types and shapes that ONNX infers, and if also `upgraded`, an opset that rewritten models can
    use. Raises RunError if ONNX cannot convert it.
    """
    proto = onnx.ModelProto.FromString(source if isinstance(source, bytes) else without_weights(source))
    if typed:
        proto = onnx.shape_inference.infer_shapes(_upgraded(proto) if upgraded else proto)
    with structure.quiet("onnx_ir.serde"):
        model: onnx_ir.Model = onnx_ir.from_proto(proto)
    unsorted = list(model.graph)
    model.graph.sort()
    if typed and (model.functions or list(model.graph) != unsorted):  # ONNX infers nothing there
        model = read_model(to_bytes(read_model(source)), typed=True, upgraded=upgraded)
    graph = model.graph
    structure.name_domains(model)
    structure.inline_functions(model)
    if isinstance(source, Path):
        onnx_ir.external_data.set_base_dir(graph, source.absolute().parent)
    if outputs:
        defaults = [value for value in graph.inputs if value.is_initializer()]  # a cut makes them constants
        structure.cut(graph, [*outputs])
        graph.inputs.extend(value for value in defaults if value.uses())
        # For a model in memory, ONNX Runtime reads external weights, but not external shapes and axes.
        for value in graph.initializers.values() if isinstance(source, Path) else ():
            if isinstance(value.const_value, onnx_ir.ExternalTensor) and len(value.const_value.shape) <= 1:
                value.const_value = onnx_ir.tensor(value.const_value.numpy(), name=value.name)
    return model


def model_of(graph: onnx_ir.Graph) -> onnx_ir.Model:
    """Return a model of a graph alone."""
    return onnx_ir.Model(graph, ir_version=_IR_VERSION)


def to_bytes(model: onnx_ir.Model | onnx_ir.Graph) -> bytes:
    """Return the message of a model, or of a graph. Raises EncodeError, or ValueError, if it is too large."""
    model = model_of(model) if isinstance(model, onnx_ir.Graph) else model
    with structure.quiet("onnx_ir.serde"):  # ONNX may infer a shape and no type
        return bytes(onnx_ir.to_proto(model).SerializeToString())


def _upgraded(proto: onnx.ModelProto) -> onnx.ModelProto:
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 1)
    if opset >= _WANTED_OPSET:
        return proto
    try:
        proto = onnx.version_converter.convert_version(proto, _WANTED_OPSET)
    except (onnx.version_converter.ConvertError, RuntimeError) as error:
        if opset >= _OLDEST_OPSET:
            return proto
        raise RunError(f"opset {opset} cannot be converted to {_WANTED_OPSET}: {error}") from error
    for node in proto.graph.node:
        if node.op_type == "Resize" and opset < 11:  # ONNX's conversion changes its coordinates
            modes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            others = [attribute for attribute in node.attribute if attribute.name not in modes]
            del node.attribute[:]
            node.attribute.extend((*others, *(onnx.helper.make_attribute(*item) for item in modes.items())))
    return proto
