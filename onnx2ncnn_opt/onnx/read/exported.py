"""Export of PyTorch's models (.pt2 files, torch.export.ExportedProgram, torch.nn.Module) by torch's own exporter."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.errors import ModelError, UsageError
from onnx2ncnn_opt.onnx.read.structure import quiet, root_cause
from onnx2ncnn_opt.system import temporary_folder

_NEEDED = ("torch", "onnxscript")


def exported(model: Any, inputs: Sequence[Any] | Mapping[str, Any] | None = None, dynamic_shapes: Any = None) -> Any:
    """Return the torch.onnx.ONNXProgram of a PyTorch model; return any other model unchanged.

    `inputs` are example inputs of an nn.Module, in order or by name. `dynamic_shapes` lists their dynamic dimensions in
    the format of torch.export.export. An ExportedProgram and a .pt2 file contain both. Raises UsageError if `inputs` or
    torch are missing, if the module is in training mode, or if the model takes no `inputs`; ModelError if the file is
    broken or not plain data, or torch cannot export the model.
    """
    kind = pytorch_kind(model)
    if kind != "module" and (inputs is not None or dynamic_shapes is not None):
        raise UsageError("inputs and dynamic_shapes are for an nn.Module; other models say theirs")
    if not kind:
        return model
    missing = [name for name in _NEEDED if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"PyTorch's models need {' and '.join(missing)}: pip install {' '.join(missing)}")
    import torch  # optional

    if kind == "file":
        model = _loaded(Path(model))
    options: dict[str, Any] = {"dynamo": True, "verbose": False}
    if kind == "module":
        if inputs is None:
            example = "convert(module, inputs=(torch.randn(1, 3, 224, 224),))"
            raise UsageError(f"an nn.Module needs example inputs: {example}")
        if model.training:
            raise UsageError("the nn.Module is in training mode; call module.eval() first")
        options |= {"kwargs": dict(inputs)} if isinstance(inputs, Mapping) else {"args": tuple(inputs)}
        options["dynamic_shapes"] = dynamic_shapes
    try:
        with quiet():
            return torch.onnx.export(model if kind == "module" else _unrolled(model), **options)
    except Exception as error:
        raise ModelError(f"torch cannot export the model: {root_cause(error)}") from error


def _unrolled(program: Any) -> Any:
    """Return a program without LSTMs if one has a projection, of which torch would write a part."""
    import torch

    lstm = torch.ops.aten.lstm.input
    states = [node.args[1] for node in program.graph.nodes if node.target is lstm]
    if all(hidden.meta["val"].shape == cell.meta["val"].shape for hidden, cell in states):
        return program
    return program.run_decompositions(torch._decomp.get_decompositions([lstm]))


def reference(model: Any) -> Path | bytes:
    """Return the model in a form that ONNX Runtime accepts: a path or bytes."""
    if isinstance(model, (str, os.PathLike)):
        return Path(model)
    if isinstance(model, (bytes, bytearray, memoryview)):
        return bytes(model)
    if hasattr(model, "SerializeToString"):
        return bytes(model.SerializeToString())
    import onnx_ir  # slow to import; already loaded if the model is an onnx_ir.Model

    inner = model if isinstance(model, onnx_ir.Model) else getattr(model, "model", None)
    if isinstance(inner, onnx_ir.Model):
        return bytes(onnx_ir.to_proto(inner).SerializeToString())
    if not hasattr(model, "model_proto"):
        raise no_model(model)
    return bytes(model.model_proto.SerializeToString())


def no_model(source: object) -> UsageError:
    """Return the error for a source that is not a model."""
    known = "a path, bytes, onnx.ModelProto, onnx_ir.Model or ONNXProgram"
    return UsageError(f"a {type(source).__name__} is not a model; give {known}")


def pytorch_kind(model: Any) -> str:
    """Return the kind of a PyTorch model: "file", "program" or "module"; empty for others. Does not import torch."""
    if isinstance(model, (str, os.PathLike)):
        return "file" if Path(model).suffix == ".pt2" else ""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "export"):
        return ""
    if isinstance(model, torch.export.ExportedProgram):
        return "program"
    return "module" if isinstance(model, torch.nn.Module) else ""


def _loaded(path: Path) -> Any:
    import torch

    from onnx2ncnn_opt.onnx.read.pt2 import write_safe_copy

    if not path.is_file():
        raise ModelError(f"{path} {'is not a plain file' if path.exists() else 'does not exist'}")
    with temporary_folder() as folder:
        safe = Path(folder) / "model.pt2"
        with safe.open("wb") as file:
            write_safe_copy(path, file)
        try:
            with quiet():
                return torch.export.load(safe)
        except Exception as error:
            raise ModelError(f"{path}: torch.export.load refuses it: {root_cause(error)}") from error
