"""Graph builder: adds layers and constants, with inferred shapes and names after the node."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.cut import input_params
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, by_axis, product
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer, check_layer
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.ir.shapes import infer_shapes
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.ir.view import View
from onnx2ncnn_opt.ir.weight import Array, Weight
from onnx2ncnn_opt.onnx.lower.checks import Checks

Weights: TypeAlias = Mapping[str, Array | Weight] | None
Results: TypeAlias = Sequence[tuple[Shape | None, Dim]]


class Builder(Checks):
    """Appends layers and constants, named after the node."""

    def __init__(self, types: Mapping[str, LayerSpec], public: Sequence[str]) -> None:
        """`types` is the table of layers; the names `public` are reserved for the model's inputs and outputs."""
        self.graph = Graph(types)
        self._label = ""
        self._names = NamePool(public)
        self._layer_names = NamePool()
        self._memory: dict[tuple[bytes, Shape], Blob] = {}
        self._open_inputs: list[Blob] = []

    def layer(self, kind: str, /, *inputs: Blob, weights: Weights = None, **params: Any) -> Blob:
        """Append a layer with one output; see `layers` for more."""
        return self.layers(kind, *inputs, weights=weights, **params)[0]

    def layers(
        self, kind: str, /, *inputs: Blob, weights: Weights = None, outputs: int = 1, **params: Any
    ) -> tuple[Blob, ...]:
        """Append a layer, and return its output blobs with inferred shapes; omit parameters with default values."""
        new = self._layer(kind, inputs, params, weights).without_defaults()
        new.outputs = tuple(Blob("") for _ in range(outputs))
        return self._append(new, infer_shapes(new))

    def custom(
        self, kind: str, /, *inputs: Blob, results: Results, params: Mapping[Any, Any], weights: Weights = None
    ) -> tuple[Blob, ...]:
        """Append a layer that ncnn does not have; `results` are shape and batch count of each output.

        The keys of `params` are names for declared types (docs/plugins.md), else ids. Only declared types have weights.
        """
        return self._append(self._layer(kind, inputs, params, weights), results)

    def _layer(self, kind: str, inputs: Sequence[Blob], params: Mapping[Any, Any], weights: Weights) -> Layer:
        name = self._layer_names.take(self._label)
        stored = {key: data if isinstance(data, Weight) else self.f32(data) for key, data in (weights or {}).items()}
        return Layer(kind, name, inputs, (), params, stored, (self._label,), self.graph.types.get(kind))

    def _append(self, layer: Layer, results: Results) -> tuple[Blob, ...]:
        layer.outputs = tuple(Blob(self._names.take(f"{self._label}_out"), shape, batch) for shape, batch in results)
        check_layer(layer)
        self.graph.add(layer)
        return layer.outputs

    def memory(self, array: Array) -> Blob:
        """Return a constant as a blob of the same shape (rank 1 to 4); equal constants share a blob."""
        if not array.size:
            raise self.refuse("a tensor is empty, and ncnn has no empty tensors", "remove it from the model")
        data = self.i32(array) if np.issubdtype(array.dtype, np.integer) else self.f32(array)
        key = (data.dtype.char.encode() + data.tobytes(), tuple(data.shape))
        if key not in self._memory:
            name = self._layer_names.take(f"{self._label}_const")
            blob = Blob(self._names.take(name), tuple(data.shape))
            self.graph.add(Layer("MemoryData", name, (), (blob,), by_axis(data.shape), {"data": data}, (self._label,)))
            self._memory[key] = blob
        return self._memory[key]

    def input(self, name: str, view: View) -> Blob:
        """Append an input of the net, in the layout of its view."""
        blob = Blob(name, view.mat_shape, product(atom.size for atom in view.batch))
        self.graph.add(Layer("Input", self._layer_names.take(name), (), (blob,), input_params(blob.shape)))
        if any(isinstance(size, Sym) for size in (*view.mat_shape, blob.batch)):
            self._open_inputs.append(blob)
        return blob
