"""Records of a faulty layer and its inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.rewrite.events import LayerRef, refs
from onnx2ncnn_opt.runtime.base import Array


@dataclass(frozen=True)
class LayerInput:
    """An input of a layer: the blob, the layer that produces it, its shape in ncnn, and whether it is right.

    `status` is "right", "wrong", or "unknown" if the model has no such value; `value` is the model's name for it.
    """

    blob: str
    layer: LayerRef
    shape: tuple[int, ...]
    status: str
    value: str | None


@dataclass(frozen=True)
class Located:
    """The first layer whose output exceeds the tolerance, on the inputs and in the mode in which verification failed.

    `blob` is this output, `message` describes its error, and `value` is the model's name for it. `origin` names the
    ONNX nodes of the layer, if known. `suspects` are the layers that may have the fault, in the order of the net:
    several if the model has no value for the blobs between them. `arrays` are the layer's inputs by blob.
    """

    layer: LayerRef
    blob: str
    message: str
    mode: str
    value: str | None
    origin: tuple[str, ...]
    inputs: tuple[LayerInput, ...]
    suspects: tuple[LayerRef, ...]
    arrays: Mapping[str, Array] = field(repr=False, compare=False)


def without_numbers(
    blob: Blob, mode: str, message: str, value: str | None = None, origin: tuple[str, ...] = ()
) -> Located:
    """Return the record for the producer of a blob, without numbers."""
    assert blob.producer is not None
    layer = refs((blob.producer,))[0]
    inputs = tuple(
        LayerInput(b.name, refs((b.producer,))[0], (), "right" if b.is_input else "unknown", None)
        for b in blob.producer.inputs
        if b.producer is not None
    )
    return Located(layer, blob.name, message, mode, value, origin, inputs, (layer,), {})
