"""ONNX Runtime on the original model: the reference that a net is held against."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.runtime.base import Array, require

if TYPE_CHECKING:
    import onnx

_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


class OrtRunner:
    """An ONNX model on ONNX Runtime's CPU provider.

    `model` is a path (external data is found beside it, the size has no limit) or the bytes of a whole model of less
    than 2 GB, whose external data is in `folder`. `outputs` are values of the graph to compute instead of its outputs.
    `values` are fed in every run to the inputs of their names, as far as the outputs need those. Raises RunError if
    ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        model: Path | bytes,
        *,
        outputs: Collection[str] = (),
        values: Mapping[str, Array] | None = None,
        threads: int = 1,
        folder: Path | None = None,
    ) -> None:
        require("onnxruntime")
        import onnxruntime  # type: ignore[import-untyped]
        from onnxruntime.capi import onnxruntime_pybind11_state as state  # type: ignore[import-untyped]

        # Its exceptions have no base of their own; the others come from its Python side, on feeds that do not fit.
        own = (kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception))
        self._errors: tuple[type[Exception], ...] = (*own, RuntimeError, TypeError, ValueError)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.use_deterministic_compute = True
        # Its errors come as exceptions; the log on stderr would only repeat them.
        options.log_severity_level = 4
        self._name = "the model" if isinstance(model, bytes) else os.fspath(model)
        if outputs:
            folder = model.absolute().parent if isinstance(model, Path) else folder
            model = _cut(model, outputs)
        if folder is not None:
            options.add_session_config_entry(_EXTERNAL_FOLDER, os.fspath(folder))
        try:
            self._session = onnxruntime.InferenceSession(
                model if isinstance(model, bytes) else os.fspath(model), options, providers=["CPUExecutionProvider"]
            )
        except self._errors as error:
            raise RunError(f"ONNX Runtime refuses {self._name}: {error}") from error
        with_default = self._session.get_overridable_initializers()
        taken = {value.name for value in (*self._session.get_inputs(), *with_default)}
        self._values = {name: array for name, array in (values or {}).items() if name in taken}

    def input_names(self) -> list[str]:
        """The inputs that have to be fed, in the model's order."""
        return [value.name for value in self._session.get_inputs() if value.name not in self._values]

    def output_names(self) -> list[str]:
        """The outputs, in the model's order."""
        return [value.name for value in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Every output by name; RunError if ONNX Runtime does not take the feeds or fails."""
        try:
            results = self._session.run(None, {**self._values, **feeds})
        except self._errors as error:
            raise RunError(f"ONNX Runtime failed on {self._name}: {error}") from error
        return dict(zip(self.output_names(), results, strict=True))


def _cut(model: Path | bytes, outputs: Collection[str]) -> bytes:
    """The model with other outputs; external data stays where it is."""
    import onnx

    proto = onnx.ModelProto.FromString(model if isinstance(model, bytes) else model.read_bytes())
    cut_model(proto, outputs, model.absolute().parent if isinstance(model, Path) else None)
    return bytes(proto.SerializeToString())


def cut_model(proto: onnx.ModelProto, outputs: Collection[str], folder: Path | None) -> None:
    """Give a model other outputs, and take what these do not need; `folder` is where its external data lies."""
    import onnx
    from onnx.external_data_helper import load_external_data_for_tensor

    needed = set(outputs)
    kept = []
    for node in reversed(proto.graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed.update(node.input)
            needed.update(name for attribute in node.attribute for name in _names(attribute.g))
    inputs = [value for value in proto.graph.input if value.name in needed]
    if folder is not None:
        # From memory ONNX Runtime reads external weights, but not the shapes and axes among them.
        for tensor in proto.graph.initializer:
            if len(tensor.dims) <= 1 and tensor.data_location == onnx.TensorProto.EXTERNAL:
                load_external_data_for_tensor(tensor, os.fspath(folder))
                tensor.data_location = onnx.TensorProto.DEFAULT
    for field, values in (
        (proto.graph.node, [*reversed(kept)]),
        (proto.graph.input, inputs),
        (proto.graph.output, [onnx.ValueInfoProto(name=name) for name in outputs]),
    ):
        del field[:]
        field.extend(values)


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    """What the nodes of a subgraph read, in any depth."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            yield from _names(attribute.g)
