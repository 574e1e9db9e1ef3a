"""Records of a faulty layer and its inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.events import LayerRef, refs
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verdict.blobs import UNKNOWN, Match


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


def locate(
    blob: Blob,
    mode: str,
    message: str,
    value: str | None = None,
    origin: tuple[str, ...] = (),
    *,
    suspects: Sequence[Layer] = (),
    verdicts: Mapping[Blob, Match] | None = None,
    arrays: Mapping[str, Array] | None = None,
) -> Located:
    """Return the record for the producer of a blob; the default suspect is this layer.

    `verdicts` and `arrays` are those of the layer's inputs, if they were computed.
    """
    assert blob.producer is not None
    arrays, inputs = arrays or {}, []
    for read in blob.producer.inputs:
        verdict = (verdicts or {}).get(read, Match("right") if read.is_input else UNKNOWN)
        shape = arrays[read.name].shape if read.name in arrays else ()
        if read.producer is not None:
            inputs.append(LayerInput(read.name, refs((read.producer,))[0], shape, verdict.status, verdict.value))
    [layer] = refs((blob.producer,))
    blamed = refs(tuple(suspects)) or (layer,)
    return Located(layer, blob.name, message, mode, value, origin, tuple(inputs), blamed, arrays)
