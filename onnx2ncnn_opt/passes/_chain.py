"""A builder for several layers that replace one layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnx2ncnn_opt.ir.dim import Dim
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.kernels import cost
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.view import Regroup, step_layer
from onnx2ncnn_opt.ir.weight import Array, Weight
from onnx2ncnn_opt.passes.fuse_activation import separate_activation
from onnx2ncnn_opt.rewrite.rule import require


class Chain:
    """New layers in place of `layer`; each new blob has its shape at once."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.made: list[Layer] = []
        self._weights: list[tuple[Layer, str, Callable[[], Weight]]] = []

    def add(
        self,
        type: str,
        suffix: str,
        *inputs: Blob,
        weights: Mapping[str, Array | Weight | Callable[[], Weight]] | None = None,
        **params: Any,
    ) -> Blob:
        """Append a layer and return its only output; `suffix` is the end of its name.

        A weight may be a function that returns it; `result` calls it, so only if the layers are fast enough.
        """
        layer = Layer(type, self.layer.name, inputs, (), params).without_defaults()
        for name, weight in (weights or {}).items():
            if callable(weight):
                self._weights.append((layer, name, weight))
            else:
                layer.weights[name] = weight
        return self.put(layer, suffix)

    def put(self, layer: Layer, suffix: str) -> Blob:
        """Append the caller's layer and return its output, like `add`."""
        layer.name, layer.outputs = f"{self.layer.name}_{suffix}", (Blob(f"{self.layer.output.name}_{suffix}"),)
        assign_shapes(layer)
        self.made.append(layer)
        return layer.output

    def reshape(self, blob: Blob, shape: Sequence[Dim], suffix: str) -> Blob:
        """Return the same elements in another shape; the blob itself if it has that shape."""
        if blob.shape == tuple(shape):
            return blob
        kind, sizes = step_layer(Regroup(tuple(shape)))
        return self.add(kind, suffix, blob, **sizes)

    def crop(self, blob: Blob, ranges: Mapping[int, tuple[int, int]], suffix: str) -> Blob:
        """Return ranges of the blob along axes; the blob itself if all ranges are whole axes."""
        cut = {axis: range for axis, range in ranges.items() if range != (0, blob.known_shape[axis])}
        if not cut:
            return blob
        starts, ends = zip(*cut.values(), strict=True)
        return self.add("Crop", suffix, blob, starts=starts, ends=ends, axes=tuple(cut))

    def activate(self, blob: Blob) -> Blob:
        """Return the blob after a layer for the built-in activation of `layer`, if it has one."""
        activation = separate_activation(self.layer)
        return self.add(activation[0], "activation", blob, **activation[1]) if activation else blob

    def finish(self, *after: Layer) -> list[Layer]:
        """Return the `result` that replaces the layer and the layers `after` it; refused if it is not faster."""
        replaced = [self.layer, *after]
        name = f"{self.layer.type} '{self.layer.name}'"
        require(cost(self.made) < cost(replaced), f"{name} is too small to gain by it")
        assert self.made[-1].output.shape == replaced[-1].output.shape
        return self.result()

    def result(self) -> list[Layer]:
        """Return the layers, even if they are slower."""
        for layer, name, make in self._weights:
            layer.weights[name] = make()
        # The layer with the weights keeps the original name.
        main = next(layer for layer in self.made if layer.weights)
        main.name = self.layer.name
        self.made[-1].outputs = ()
        return self.made


def gathered(chain: Chain, parts: list[Blob], group: int) -> Blob:
    """Concatenate the elements that each tap reads, tap by tap within each group: (taps * channels, ...)."""
    if len(parts) == 1:
        return parts[0]
    if group == 1:
        return chain.add("Concat", "taps", *parts)
    channels, *sizes = parts[0].known_shape
    shape = group, channels // group, sizes[0] * sizes[1], sizes[2]
    return chain.add("Concat", "taps", *(chain.reshape(p, shape, f"group{k}") for k, p in enumerate(parts)), axis=1)
