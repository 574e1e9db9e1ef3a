"""The events of a run of the pipeline: plain records for reports, free of graph objects."""

from dataclasses import dataclass
from typing import TypeAlias

from onnx2ncnn_opt.ir.graph import Layer


@dataclass(frozen=True)
class LayerRef:
    """A layer as it was called when something happened to it."""

    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.type} '{self.name}'"


@dataclass(frozen=True)
class Applied:
    """A rewrite that happened: the layers that went, and those that replace them."""

    pass_name: str
    before: tuple[LayerRef, ...]
    after: tuple[LayerRef, ...]

    def __str__(self) -> str:
        after = " + ".join(map(str, self.after)) or "nothing"
        return f"{self.pass_name}: {' + '.join(map(str, self.before))} => {after}"


@dataclass(frozen=True)
class NearMiss:
    """A pattern that was found but could not be rewritten, and why."""

    pass_name: str
    layers: tuple[LayerRef, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.pass_name}: {' + '.join(map(str, self.layers))}: {self.reason}"


@dataclass(frozen=True)
class Failed:
    """A pass that raised an error, or made an invalid layer, and was left out."""

    pass_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}; the net is made without it. Please report this, with the model"


Event: TypeAlias = Applied | NearMiss | Failed


class Rewritten:
    """A result of the pipeline, which knows its events."""

    events: tuple[Event, ...]

    @property
    def applied(self) -> tuple[Applied, ...]:
        """The rewrites that happened, in order."""
        return tuple(event for event in self.events if isinstance(event, Applied))

    @property
    def near_misses(self) -> tuple[NearMiss, ...]:
        """Patterns that were found but could not be rewritten, with the reasons."""
        return tuple(event for event in self.events if isinstance(event, NearMiss))

    @property
    def failed(self) -> tuple[Failed, ...]:
        """The passes that were left out, with the errors."""
        return tuple(event for event in self.events if isinstance(event, Failed))


def refs(layers: tuple[Layer, ...]) -> tuple[LayerRef, ...]:
    """Return the layers as records."""
    return tuple(LayerRef(layer.type, layer.name) for layer in layers)
