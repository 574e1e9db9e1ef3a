"""Inputs to compare a net before and after the passes."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.inputs.draws import LARGEST_INPUT, Draw, draw_array, draws, is_tiny, sweeps
from onnx2ncnn_opt.inputs.input_uses import Uses
from onnx2ncnn_opt.ir.attention import caches
from onnx2ncnn_opt.ir.codes import Direction
from onnx2ncnn_opt.ir.graph import Blob, Graph
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.runtime.base import Array

# Nets up to these numbers of weights, input elements and layers run on more inputs. Verification against ONNX Runtime
# has higher limits, because ncnn's plain kernels take ten times as long as others.
_SMALL_WEIGHTS, _SMALL_INPUTS, _SMALL_LAYERS = 2**22, 2**14, 2**14


def draw_runs(
    graph: Graph,
    shapes: Mapping[str, Sequence[int]],
    *,
    seed: int = 0,
    examples: Mapping[str, str] | None = None,
    wanted: Sequence[Draw] = (),
) -> Iterator[tuple[Draw, dict[Blob, Array]]]:
    """Yield the `wanted` sets of inputs, or the usual ones (see `draws`); a seed always gives the same inputs.

    Caches stay unset, as in a first run. `shapes` maps names of inputs to shapes. Raises UsageError for an input with
    no shape or an impossible one; the error proposes a shape, from `examples` if they have the input.
    """
    unset = caches(graph)
    inputs = {blob: n for n, blob in enumerate(graph.inputs) if blob.users and blob not in unset}
    if missing := [blob for blob in inputs if blob.name not in shapes]:
        shown = {blob.name: _example(blob) for blob in missing} | dict(examples or {})
        options = " ".join(f"--shape {blob.name}:{shown[blob.name]}" for blob in missing)
        raise UsageError(
            f"the shape of the input {' and '.join(repr(blob.name) for blob in missing)} is unknown: give it, like "
            f"{options} (outermost size first), or leave out the verification with --no-verify"
        )
    sizes = {blob: tuple(shapes[blob.name]) for blob in inputs}
    for blob, shape in sizes.items():
        if not 1 <= len(shape) <= 4 or not 0 < math.prod(shape) <= LARGEST_INPUT:
            raise UsageError(f"the input '{blob.name}' cannot have the shape {','.join(map(str, shape))}")
    uses = {blob: _uses(blob) for blob in inputs}
    swept: Counter[Blob] = Counter()
    image_sizes = {layer.inputs[2] for layer in graph if layer.type == "Proposal"}
    largest = max(sizes.values(), key=math.prod, default=())
    image_size = np.array([*largest[-2:], 1], np.float32)  # height, width and scale

    def drawn(draw: Draw) -> tuple[Draw, dict[Blob, Array]]:
        feeds = {}
        for blob, number in inputs.items():
            dtype = np.dtype(np.float32 if uses[blob].table is None else np.int32)
            if blob in image_sizes:
                feeds[blob] = np.resize(image_size, math.prod(sizes[blob])).reshape(sizes[blob])
            else:
                feeds[blob] = draw_array(dtype, uses[blob], sizes[blob], draw, number, swept[blob])
        swept.update({blob: array.size for blob, array in feeds.items()})
        return draw, feeds

    weights = sum(weight.array.size for layer in graph for _, weight in layer.weights.stored_items())
    numbers = sum(map(math.prod, sizes.values()))
    is_small = weights <= _SMALL_WEIGHTS and numbers <= _SMALL_INPUTS and len(graph) <= _SMALL_LAYERS
    yield from map(drawn, wanted or draws(seed, is_small=is_small, is_tiny=is_tiny(weights, numbers, len(graph))))
    if is_small and not wanted:
        entries = {blob: use.table for blob, use in uses.items() if use.table is not None}
        yield from map(drawn, sweeps(seed, entries, swept))


def _example(blob: Blob) -> str:
    """Return an example of an input's shape, with the rank and the channels of its first suitable consumer."""
    sides = {"Convolution": ",224,224", "Deconvolution": ",224,224", "ConvolutionDepthWise": ",224,224"}
    sides |= {"Convolution1D": ",224", "Convolution3D": ",16,112,112", "InnerProduct": ""}
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}
    for layer in blob.users:
        if layer.type == "Embed":
            return "16"
        if layer.type in gates and layer["num_output"]:
            hidden = layer["hidden_size"] if layer.type == "LSTM" else layer["num_output"]
            rows = gates[layer.type] * hidden * (2 if layer["direction"] == Direction.BIDIRECTIONAL else 1)
            return f"16,{max(layer['weight_data_size'] // max(rows, 1), 1)}"
        if layer.type in sides and layer.spec is not None and layer["num_output"]:
            kernel = [int(layer[name]) for name in ("kernel_w", "kernel_h", "kernel_d") if name in layer.spec.by_name]
            group = layer["group"] if "group" in layer.spec.by_name else 1
            window = math.prod(kernel) * layer["num_output"]
            return f"{max(layer['weight_data_size'] * group // max(window, 1), 1)}{sides[layer.type]}"
    return "3,224,224"


def _uses(blob: Blob) -> Uses:
    """Return the uses of an input's values in the net: the table that they index, also after layers that move them."""
    users = (layer for copy in reached([blob], _copies) for layer in copy.users)
    table = min((int(layer["input_dim"]) for layer in users if layer.type == "Embed"), default=None)
    return Uses(table, domain=None, divides=False, is_guarded=False)


def _copies(blob: Blob) -> Iterator[Blob]:
    """Yield the blobs with the values of a blob, moved by one layer."""
    for layer in blob.users:
        is_idle = layer.type == "Padding" or (layer.type == "Dropout" and layer["scale"] == 1.0)
        if is_idle or layer.has(Trait.MOVES):
            yield from layer.outputs
