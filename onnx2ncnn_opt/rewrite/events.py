"""The events of a run of the pipeline: plain records for reports, without graph objects."""

from dataclasses import dataclass
from typing import TypeAlias

from onnx2ncnn_opt.ir.graph import Layer


@dataclass(frozen=True)
class LayerRef:
    """The type and name of a layer at the time of an event."""

    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.type} '{self.name}'"


@dataclass(frozen=True)
class Applied:
    """A rewrite: the removed layers, and the layers that replace them."""

    pass_name: str
    before: tuple[LayerRef, ...]
    after: tuple[LayerRef, ...]

    def __str__(self) -> str:
        after = " + ".join(map(str, self.after)) or "nothing"
        return f"{self.pass_name}: {' + '.join(map(str, self.before))} => {after}"


@dataclass(frozen=True)
class NearMiss:
    """A matched pattern that could not be rewritten, and why."""

    pass_name: str
    layers: tuple[LayerRef, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.pass_name}: {' + '.join(map(str, self.layers))}: {self.reason}"


@dataclass(frozen=True)
class Failed:
    """A pass that raised an error or made an invalid layer, so the pipeline skipped it."""

    pass_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}; the net is made without it. Please report this, with the model"


Event: TypeAlias = Applied | NearMiss | Failed


def refs(layers: tuple[Layer, ...]) -> tuple[LayerRef, ...]:
    """Return the layers as records."""
    return tuple(LayerRef(layer.type, layer.name) for layer in layers)
