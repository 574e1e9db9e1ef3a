from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.weight import digest
from onnx2ncnn_opt.rewrite.rule import Edits, Miss, Replacement, graph_pass

# An Input is the caller's array; Noop and Split exist to give one value several public names.
_UNIQUE = frozenset({"Input", "Noop", "Split"})
# A Split packs rows by 4 or more if their number allows it, and ncnn unpacks each of its outputs for these layers.
_UNPACKED = frozenset({"MatMul", "RotaryEmbed", "SDPA"})
_FIRST = 64
_SMALL = 2**13  # elements: a constant of this size is copied faster than packed and unpacked


@graph_pass(exact=True, purpose="views and masks that every layer of a transformer computes again")
def merge_equal_layers(graph: Graph) -> Edits:
    """x ── Layer ── a, x ── Layer ── b   ⇒   x ── Layer ── a, a

    For layers of one type with the same inputs, parameters and weights. Small constants stay if copies are faster than
    sharing. Custom layers stay, because they may have side effects.
    """
    duplicates: dict[Blob, Blob] = {}  # constants that stay, and their equal predecessors
    first: dict[Hashable, Layer] = {}
    with_weights: dict[Hashable, dict[Hashable, Layer]] = {}
    for layer in graph.layers:
        if layer.type in _UNIQUE or layer.is_custom:
            continue
        key = _key(layer, [duplicates.get(blob, blob) for blob in layer.inputs])
        other = first.setdefault(key, layer)
        if other is layer:
            continue
        if len(layer.weights):
            # Compare weights only if everything else is equal.
            by_weights = with_weights.setdefault(key, {_weights(other): other})
            other = by_weights.setdefault(_weights(layer), layer)
        if other is layer:
            continue
        if _is_faster_copied(layer) and _is_faster_copied(other):
            duplicates[layer.output] = other.output
            yield Miss((other, layer), "a small constant is copied faster than packed and unpacked")
            continue
        yield Replacement((layer,), reads=dict(zip(layer.outputs, other.outputs, strict=True)), heirs=(other,))


def _is_faster_copied(layer: Layer) -> bool:
    if layer.type != "MemoryData" or layer.weights["data"].size > _SMALL:
        return False
    shape, users = layer.output.shape, layer.output.users
    is_packed = shape is not None and isinstance(shape[0], int) and shape[0] % 4 == 0
    return is_packed and not layer.output.is_output and all(user.type in _UNPACKED for user in users)


def _key(layer: Layer, inputs: Sequence[Blob]) -> Hashable:
    # Most different weights differ in their first numbers; hashing all weights of a large model takes seconds.
    starts = (weight.data.flat[:_FIRST].tobytes() for _, weight in layer.weights.stored_items())
    params = sorted((str(name), _frozen(value)) for name, value in layer.params.items() if name != "shape_hints")
    return layer.type, tuple(map(id, inputs)), tuple(params), len(layer.outputs), *starts


def _frozen(value: Any) -> str:
    """Return a parameter as text, with floats in 32 bits as in the file: ncnn distinguishes 0, 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_frozen, value))
    return repr(float(np.float32(value))) if isinstance(value, (float, np.floating)) else repr(value)


def _weights(layer: Layer) -> Hashable:
    """Return a key of the weights as stored in the file."""
    return tuple((name, weight.data.size, digest(weight)) for name, weight in layer.weights.stored_items())
