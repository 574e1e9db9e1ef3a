"""What a net's layers and weights say about its errors."""

from dataclasses import dataclass
from pathlib import Path

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.errors import BinError, GraphError, ParamError, UsageError
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.verdict.errors import DEFAULT
from onnx2ncnn_opt.verdict.rules import LEAST_ROUNDING, UNKNOWN_ROUNDING


@dataclass(frozen=True)
class NetFacts:
    """The encodings of a net's weights, and whether Vulkan approximates a GELU by tanh, with an error up to 5e-4."""

    encodings: frozenset[Encoding] = frozenset()
    has_inexact_gelu: bool = False

    @classmethod
    def of(cls, param: Path, bin: Path) -> "NetFacts":
        """Read the facts of a net; there are none if it cannot be read, because ncnn's own error says more."""
        try:
            layers = list(read_net(param, bin, entry_points.layer_types()).graph)
        except (ParamError, BinError, GraphError, UsageError):
            return cls()
        encodings = frozenset(weight.encoding for layer in layers for _, weight in layer.weights.stored_items())
        gelus = (layer for layer in layers if layer.type == "GELU")  # see gelu.comp
        return cls(encodings, any(not x["fast_gelu"] and not x["featmask"] & Feature.NO_VULKAN for x in gelus))

    @property
    def has_integers(self) -> bool:
        """True for int8 layers, and for weights in blocks of integers."""
        return not self.encodings.isdisjoint((Encoding.INT8, Encoding.BYTES))

    @property
    def weights(self) -> Encoding | None:
        """The coarsest encoding of weights; None if they have 32 bits."""
        return next((x for x in (Encoding.INT8, Encoding.BF16, Encoding.FP16) if x in self.encodings), None)

    def least_rounding(self, *, vulkan: bool) -> float:
        """Return the float32 error allowed for any model, relative to an output's largest value.

        A GPU has no plain kernels, but its exp is nearly as exact as a CPU's.
        """
        if not vulkan:
            return LEAST_ROUNDING
        return DEFAULT.relative if self.has_inexact_gelu else UNKNOWN_ROUNDING
