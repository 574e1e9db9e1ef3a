"""The content of a report page as plain records: everything in them is a number, a text, or a list of these."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx2ncnn_opt.manifest import Int8
from onnx2ncnn_opt.outputs import OutputReport

Number = float | None


@dataclass(frozen=True)
class LayerError:
    """The error of a layer's worst output, relative to the largest value of the reference.

    `status` is "right", "reordered" (the reference's numbers in another order), "wrong", or "unknown" if the reference
    has no such value; `max_rel` is None if there is no number. `value` is the reference's name of the output.
    """

    status: str
    max_rel: Number
    message: str
    value: str | None


@dataclass(frozen=True)
class LayerRow:
    """A layer of a net, or a node of a model.

    `reads` are the numbers of the layers that it reads, in their list. `blobs` are its outputs with their shapes.
    `origin` are the nodes that it comes from. `macs` are multiplications with an addition, `weights` elements,
    `weight_bytes` their bytes in the file, `blob_bytes` the bytes that the layer reads and writes. Unknown fields are
    None.
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
class LayerGroup:
    """Layers before and after that belong together, by number, and the passes that have made them so."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    passes: tuple[str, ...]


@dataclass(frozen=True)
class NearMissRow:
    """A pattern that was found but could not be rewritten; `layers` are those of the net after, where they are left."""

    pass_name: str
    text: str
    reason: str
    layers: tuple[int, ...]


@dataclass(frozen=True)
class MemoryCourse:
    """The bytes of all blobs while each layer runs, in the order in which ncnn runs them; `layers` are numbers."""

    layers: tuple[int, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """The differences of two nets: each line is about a layer (what, before, after, difference)."""

    about: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class NetRecord:
    """One net with the facts about it.

    `verdict` is "ok", "wrong", or "unverified", `headline` says it in a sentence. `facts` are labels and texts. `names`
    are the titles of the lists `before` and `after`. `rows` show the two side by side, see
    `rewrite.lineage.side_by_side`. `memory` is before and after, None if sizes are unknown. `timing` says how `seconds`
    were measured, and is empty if nothing was; `errors` says the same about the layers' errors. `int8` is what
    `quantize` measured.
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
    groups: tuple[LayerGroup, ...] = ()
    rewrites: tuple[tuple[str, int], ...] = ()
    near_misses: tuple[NearMissRow, ...] = ()
    memory: tuple[MemoryCourse | None, MemoryCourse | None] = (None, None)
    comparison: Comparison | None = None
    timing: str = ""
    errors: str = ""
    int8: Int8 | None = None
