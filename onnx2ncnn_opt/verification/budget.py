"""Where the error of an output comes from: rounding, 16 or 8 bits, ncnn's faster kernels, or the conversion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.errors import BinError, GraphError, ParamError, RunError, UsageError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.slots import Slot, feeds_of
from onnx2ncnn_opt.verification.compare import INFINITE, UNKNOWN_ROUNDING, with_quantisation
from onnx2ncnn_opt.verification.estimate import Estimator
from onnx2ncnn_opt.verification.rounding import Rounding

# Another order of a sum is about as far from float64 as ONNX Runtime's: the right nets of the zoo were up to 8 times as
# far from ONNX Runtime, with ncnn's plain kernels, as that is from float64. The least is for sums that it got right by
# chance: of one output, and of many that are compared (`float32_budget`).
_ROUNDINGS, _LEAST, LEAST_BUDGET = 16.0, 2.0**-21, 2.0**-15
# Where rounding does more, an output as a whole proves nothing: its elements may differ by what moves them (`spread`).
MOST_BUDGET = 5e-2
# Weights that are rounded after they were folded, and a device's own order of sums, are other errors of the same size.
ROOM = 4.0


@dataclass(frozen=True)
class Budget:
    """What explains the error of an output, in units of its largest value; None where that is not known.

    `rounding` is how far ONNX Runtime's float32 is from float64, `bits` how much the `kind` of 16 or 8 bits explains.
    """

    rounding: float | None
    bits: float | None
    kind: str = ""

    def cause(self, error: float | None, mode: str, *, ok: bool) -> str:
        """What an error comes of: "rounding", `kind`, "kernels" for ncnn's faster ones, or "conversion"."""
        if error is None:
            return "" if ok else self.kind if self.bits == math.inf else "conversion"
        if error == 0:
            return ""
        if self.rounding is not None and error <= max(_ROUNDINGS * self.rounding, _LEAST):
            return "rounding"
        if self.bits is not None and error <= ROOM * self.bits:
            return self.kind
        if ok:
            return "kernels" if mode == "fp32" else mode
        return "conversion"


def float32_budget(rounding: float | None, least: float) -> float:
    """What an output may be off by in float32, in units of its largest value, by what rounding does to the model.

    That holds for ncnn's plain kernels. The faster ones have errors of their own, up to what `Tolerance` says.
    """
    return UNKNOWN_ROUNDING if rounding is None else max(_ROUNDINGS * rounding, least)


def weights_encoding(param: Path, bin: Path) -> Encoding | None:
    """The encoding that rounds a net's weights most; None where they have 32 bits, or it cannot be read."""
    try:
        graph = read_net(param, bin, entry_points.layer_types()).graph
    except (ParamError, BinError, GraphError, UsageError):  # which ncnn will say more about
        return None
    found = {weight.encoding for layer in graph for _, weight in layer.weights.stored_items()}
    return next((encoding for encoding in (Encoding.INT8, Encoding.BF16, Encoding.FP16) if encoding in found), None)


def budgets(
    rounding: Rounding,
    feeds: Mapping[str, Array],
    reference: Mapping[str, Array],
    net: tuple[Path, Path],
    way: Sequence[Slot],
    blobs: Mapping[str, str | None],
    mode: str,
    by_weights: Mapping[str, float],
) -> dict[str, Budget]:
    """A budget for each output, on inputs that are fed in this way; `blobs` are the outputs' in the net.

    `by_weights` is how far the outputs move if the model's weights are rounded as the net's are.
    """
    measured = rounding.measured(feeds, reference)
    encoding = weights_encoding(*net)
    by_bits: Mapping[str, float] = {}
    kind = ""
    if mode != "fp32":
        kind, by_bits = mode, _estimated(net, feeds, way, blobs, mode)
    elif encoding is Encoding.INT8:
        layers = _int8_layers(read_net(*net, entry_points.layer_types()).graph)
        kind, by_bits = "int8", dict.fromkeys(reference, with_quantisation([8] * layers).relative)
    elif encoding is not None:
        kind, by_bits = f"weights in {encoding.value}", by_weights
    return {name: Budget(measured.get(name), by_bits.get(name), kind) for name in reference}


def _int8_layers(graph: Graph) -> int:
    return sum(any(weight.encoding is Encoding.INT8 for _, weight in layer.weights.stored_items()) for layer in graph)


def _estimated(
    net: tuple[Path, Path], feeds: Mapping[str, Array], way: Sequence[Slot], blobs: Mapping[str, str | None], mode: str
) -> dict[str, float]:
    """What rounding every blob to 16 bits does to the outputs here; nothing where ncnn cannot run the net so."""
    found: dict[str, float] = {}
    try:
        graph = read_net(*net, entry_points.layer_types()).graph
        inputs = {blob.name: blob for blob in graph.inputs}
        given = {inputs[name]: feed for name, feed in feeds_of(way, feeds).items() if name in inputs}
        with Estimator(graph, given) as estimator:
            right, rounded = estimator.run(), estimator.run(mode)
    except (ParamError, BinError, GraphError, UsageError, RunError):
        return {}
    outputs = {blob.name: blob for blob in right.outputs}
    for name, blob in blobs.items():
        if blob in outputs:
            a, b = (walk.outputs[outputs[blob]].astype(np.float64) for walk in (rounded, right))
            known = np.abs(b) < INFINITE
            largest = float(np.abs(b[known]).max(initial=0.0)) or 1.0
            distance = np.abs(a - b)[known].max(initial=0.0)
            found[name] = float(distance) / largest if np.isfinite(distance) else math.inf
    return found
