"""The share of each layer in the noise at a net's outputs, from samples of all blobs of one run.

The error of a blob has two sources: its layer's own arithmetic, whose size is known, and the errors of its inputs. So
the power of the noise at an output is divided among the layers from the last one to the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.precision.fp16_run import Walk
from onnx2ncnn_opt.runtime.base import Array


def noise_shares(
    graph: Graph, walk: Walk, reference: Walk, outputs: Sequence[tuple[Blob, float]]
) -> tuple[dict[Layer, Array], dict[Layer, Array]]:
    """Divide the noise of a walk among the layers of a graph; `outputs` are blobs with the power of their noise.

    The first result are powers of a layer's arithmetic, the second ones those of rounding what it writes.
    """
    squares = {blob: _mean_square(sample) for blob, sample in reference.samples.items()}
    # An output is not known before its own errors, but with them.
    gone = {
        blob: sum(walk.errors[blob]) if blob in walk.outputs or blob in walk.scores else 0.0 for blob in walk.errors
    }
    with np.errstate(invalid="ignore"):  # infinity less infinity, as in masks, is left out of the mean
        came = {
            blob: max(_mean_square(sample - reference.samples[blob]) - gone[blob], 0.0)
            for blob, sample in walk.samples.items()
        }
    total = np.array([power for _, power in outputs])
    arriving: dict[Blob, Array] = {}
    for (blob, _), row in zip(outputs, np.diag(total), strict=True):
        arriving[blob] = arriving.get(blob, 0.0) + row
    found: dict[Layer, Array] = {}
    rounding: dict[Layer, Array] = {}
    for layer in reversed(list(graph)):
        powers = [arriving.pop(blob) for blob in layer.outputs if blob in arriving]
        if not powers:
            continue
        power = np.sum(powers, axis=0)
        known = [blob for blob in layer.outputs if blob in came]
        own, rounded = (sum(walk.errors[blob][at] for blob in known if walk.errors[blob]) for at in range(2))
        inputs = {blob: came[blob] + sum(walk.errors[blob]) for blob in layer.inputs if blob in came}
        inputs = {blob: square for blob, square in inputs.items() if square}
        error = own + rounded + (sum(came[blob] for blob in known) if inputs else 0.0)  # or all of it begins here
        if error:
            found[layer], rounding[layer] = power * (own / error), power * (rounded / error)
            power = power * max(1.0 - (own + rounded) / error, 0.0)
        if not layer.computes(BinaryOp.ADD, BinaryOp.SUB, BinaryOp.RSUB, Eltwise.SUM) and layer.type != "Concat":
            inputs = {blob: square / (squares[blob] or 1.0) for blob, square in inputs.items()}
        for blob, part in inputs.items():
            arriving[blob] = arriving.get(blob, 0.0) + power * (part / sum(inputs.values()))
    return found, rounding


def _mean_square(numbers: Array) -> float:
    """Return the mean square of the finite numbers."""
    squares = np.square(numbers, dtype=np.float64)
    return float(squares.mean(where=np.isfinite(squares))) if np.isfinite(squares).any() else 0.0
