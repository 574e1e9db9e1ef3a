"""What is known of a blob's numbers from the layers that make it."""

from __future__ import annotations

import math
from collections.abc import Callable

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._views import VIEWS

_ABS, _SQUARE, _SQRT, _EXP = 0, 4, 5, 7
_NOTHING = -math.inf
_FUSED: dict[int, Callable[[Layer], float]] = {  # by activation_type: ReLU, Clip, Sigmoid
    1: lambda layer: 0.0,
    3: lambda layer: float(layer["activation_params"][0]),
    4: lambda layer: 0.0,
}
_LEAST: dict[str, Callable[[Layer], float]] = {
    "AbsVal": lambda layer: 0.0,
    "Clip": lambda layer: float(layer["min"]),
    "Exp": lambda layer: 0.0,
    "HardSigmoid": lambda layer: 0.0,
    "ReLU": lambda layer: _NOTHING if layer["slope"] else 0.0,
    "Sigmoid": lambda layer: 0.0,
    "Softmax": lambda layer: 0.0,
    "Softplus": lambda layer: 0.0,
    "UnaryOp": lambda layer: 0.0 if layer["op_type"] in (_ABS, _SQUARE, _SQRT, _EXP) else _NOTHING,
}
_MOVING = VIEWS | {"Concat", "Crop", "Slice"}


def least(blob: Blob) -> float:
    """A number below which no element of the blob can be; minus infinity where nothing is known."""
    found, blobs, seen = math.inf, [blob], {blob}
    while blobs and found > _NOTHING:
        layer = blobs.pop().producer
        if layer is None:
            return _NOTHING
        if layer.type in _MOVING:
            blobs += [each for each in layer.inputs if each not in seen]
            seen.update(layer.inputs)
        elif layer.type in _LEAST:
            found = min(found, _LEAST[layer.type](layer))
        else:
            has_activation = layer.spec is not None and "activation_type" in layer.spec.by_name
            known = _FUSED.get(layer["activation_type"]) if has_activation else None
            found = min(found, known(layer) if known else _NOTHING)
    return found
