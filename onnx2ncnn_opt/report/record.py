"""The content of a report page as plain records of numbers, texts, and lists."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx2ncnn_opt.manifest import Int8
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.rewrite.lineage import Group

Number = float | None


@dataclass(frozen=True)
class LayerError:
    """The error of a layer's worst output, relative to the largest value of the reference.

    `status` is "right", "reordered" (the reference's numbers in another order), "wrong", or "unknown" if the reference
    does not have the output; `max_rel` is None if there is no number. `value` is the reference's name of the output.
    """

    status: str
    max_rel: Number
    message: str
    value: str | None


@dataclass(frozen=True)
class LayerRow:
    """A layer of a net, or a node of a model.

    `reads` are the indexes of its producers in the list of layers. `blobs` are its outputs with shapes, `origin` the
    nodes that it was made from. `macs` is the number of multiply-adds, `weights` the number of elements, `weight_bytes`
    their size in the file, `blob_bytes` the size of inputs and outputs. Unknown fields are None.
    """

    type: str
    name: str
    params: str
    reads: tuple[int, ...]
    blobs: tuple[str, ...]
    origin: tuple[str, ...] = ()
    macs: int | None = None
    weights: int | None = None
    weight_bytes: int | None = None
    blob_bytes: int | None = None
    seconds: Number = None
    mask: str = ""
    errors: Mapping[str, LayerError] = field(default_factory=dict)  # by mode


@dataclass(frozen=True)
class NearMissRow:
    """A pattern that matched but could not be rewritten; `layers` are its remaining layers in the net after."""

    pass_name: str
    text: str
    reason: str
    layers: tuple[int, ...]


@dataclass(frozen=True)
class MemoryCourse:
    """The bytes of all blobs while each layer runs, in ncnn's order; `layers` are indexes."""

    layers: tuple[int, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """The differences of two nets; a row is: layer, subject, before, after, difference."""

    about: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class NetRecord:
    """One net and its report.

    `verdict` is "ok", "wrong", or "unverified", `headline` is a sentence about it. `facts` are labels and texts.
    `names` are the titles of the lists `before` and `after`. `rows` pair their layers, see
    `rewrite.lineage.side_by_side`. `memory` is before and after, None if sizes are unknown. `timing` describes the
    measurement of `seconds`, `errors` that of the layers' errors; they are empty without one. `int8` has the
    measurements of `quantize`.
    """

    title: str
    verdict: str
    headline: str
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    outputs: tuple[OutputReport, ...] = ()
    modes: tuple[str, ...] = ()
    names: tuple[str, str] = ("before", "after")
    before: tuple[LayerRow, ...] = ()
    after: tuple[LayerRow, ...] = ()
    rows: tuple[tuple[int | None, int | None], ...] = ()
    groups: tuple[Group, ...] = ()
    rewrites: tuple[tuple[str, int], ...] = ()
    near_misses: tuple[NearMissRow, ...] = ()
    memory: tuple[MemoryCourse | None, MemoryCourse | None] = (None, None)
    comparison: Comparison | None = None
    timing: str = ""
    errors: str = ""
    int8: Int8 | None = None
