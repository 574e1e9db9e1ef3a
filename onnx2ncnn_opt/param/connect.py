"""Building a graph from the layers of a file: connect blobs, resolve Splits, name parameters."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from onnx2ncnn_opt.errors import GraphError, ParamError
from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer, check_blob_counts
from onnx2ncnn_opt.ir.spec import FEATMASK_ID, SHAPE_HINTS_ID, LayerSpec
from onnx2ncnn_opt.param.values import Value, as_kind


class DroppedSplit(NamedTuple):
    """A Split layer of a file that the written net does not need."""

    layer: str
    reason: str


class ParsedNet(NamedTuple):
    """The content of a .param file: the graph, without weights until the .bin is read, and the removed Splits.

    `unsplit` are blobs that several layers read without a Split, which ncnn cannot run. `unread_layers` is the number
    of layers beyond the header's count, `trailing_bytes` the number of bytes after the last weight of the .bin.
    """

    graph: Graph
    dropped_splits: tuple[DroppedSplit, ...]
    names: Mapping[str, Blob]  # by every name in the file, names of Splits' tops included
    unsplit: tuple[Blob, ...] = ()
    unread_layers: int = 0
    trailing_bytes: int = 0
    is_binary: bool = False


class LayerLine(NamedTuple):
    """A layer of a file before its blobs are connected; `where` is its line in the file, for messages."""

    where: str
    type: str
    name: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    values: Mapping[int, Value]


def connect(entries: Sequence[LayerLine], types: Mapping[str, LayerSpec]) -> ParsedNet:
    """Return the graph of the lines, with Splits resolved.

    A Split with one top that a layer reads stays; a pass removes it.
    """
    consumed = {name for entry in entries for name in entry.bottoms}
    roots = _roots(entries, consumed)
    splits: dict[str, list[LayerLine]] = {}
    aliases: dict[str, list[str]] = {}
    for entry in entries:
        if _is_fork(entry, consumed):
            splits.setdefault(roots[entry.tops[0]], []).append(entry)
            aliases.setdefault(roots[entry.tops[0]], []).extend(top for top in entry.tops if top not in consumed)
    graph = Graph(types)
    blobs: dict[str, Blob] = {}  # by roots
    public: dict[str, Blob] = {}
    for entry in entries:
        if _is_fork(entry, consumed):
            bottom = roots[entry.bottoms[0]]
            if entry is splits[bottom][0] and aliases[bottom]:
                tops = [Blob(name, blobs[bottom].shape) for name in aliases[bottom]]
                public.update((blob.name, blob) for blob in tops)
                graph.add(Layer("Split", entry.name, [blobs[bottom]], tops))
            continue
        tops = [Blob(name) for name in entry.tops]
        for blob in tops:
            blobs[blob.name] = blob
            new_names = aliases.get(blob.name, [])
            if new_names and entry.type != "Input":
                blob.name = new_names.pop(0)
            public[blob.name] = blob
        graph.add(_layer(entry, [blobs[roots[name]] for name in entry.bottoms], tops, types.get(entry.type)))
    graph.outputs = [public[name] for entry in entries for name in entry.tops if name not in consumed]
    names = {name: public.get(name, blobs[roots[name]]) for entry in entries for name in entry.tops}
    reads = Counter(name for entry in entries for name in entry.bottoms)
    unsplit = tuple(names[name] for name, count in reads.items() if count > 1)
    return ParsedNet(graph, tuple(_dropped(splits, blobs)), names, unsplit)


def _is_fork(entry: LayerLine, consumed: Collection[str]) -> bool:
    """Return True for a Split with several tops, or with one that no layer reads (an output of the net)."""
    return entry.type == "Split" and (len(entry.tops) > 1 or entry.tops[0] not in consumed)


def _roots(entries: Sequence[LayerLine], consumed: Collection[str]) -> dict[str, str]:
    """Return for each blob name the name before all Splits. Raises ParamError for names that are not connected."""
    roots: dict[str, str] = {}
    producers: dict[str, str] = {}
    later = {name: entry.where for entry in reversed(entries) for name in entry.tops}
    for entry in entries:
        where = f"{entry.where}: layer '{entry.name}'"
        for name in entry.bottoms:
            if name not in roots:
                hint = f"only {later[name]} produces it" if name in later else "no layer produces it"
                raise ParamError(f"{where} reads the blob '{name}', but {hint}")
        if entry.type == "Split" and (len(entry.bottoms) != 1 or not entry.tops):
            raise ParamError(f"{where} is a Split of {len(entry.bottoms)} blobs into {len(entry.tops)}")
        for name in entry.tops:
            if name in producers:
                raise ParamError(f"{where} produces the blob '{name}', which {producers[name]} already does")
            producers[name] = entry.where
            roots[name] = roots[entry.bottoms[0]] if _is_fork(entry, consumed) else name
    return roots


def _dropped(splits: Mapping[str, Sequence[LayerLine]], blobs: Mapping[str, Blob]) -> Iterator[DroppedSplit]:
    """Yield the Splits that a written net does not need: a blob with several uses needs one Split, others none."""
    for name, entries in splits.items():
        blob = blobs[name]
        needed = len(blob.users) + blob.is_output > 1 or any(user.type == "Split" for user in blob.users)
        forks = sorted(entries, key=lambda entry: len(entry.tops) == 1)
        for entry in forks[1:] if needed else forks:
            if not needed or len(entry.tops) == 1:
                yield DroppedSplit(entry.name, "nothing needs a copy: there is only one use after it")
            else:
                yield DroppedSplit(entry.name, f"joined with '{forks[0].name}', which splits the same blob")


def _layer(entry: LayerLine, inputs: Sequence[Blob], outputs: Sequence[Blob], spec: LayerSpec | None) -> Layer:
    where = entry.where
    params: dict[str | int, Any] = {}
    for id, value in entry.values.items():
        param = spec.by_id.get(id) if spec else None
        if param is None:
            params[id] = value
        elif (converted := as_kind(param.kind, value)) is not None:
            params[param.name] = converted
    layer = Layer(entry.type, entry.name, inputs, outputs, params, spec=spec)
    try:
        check_blob_counts(layer)
    except GraphError as error:
        raise ParamError(f"{where}: {error}") from None
    if not isinstance(entry.values.get(FEATMASK_ID, 0), int):
        raise ParamError(f"{where}: layer '{entry.name}': the feature mask (31) must be an integer")
    if SHAPE_HINTS_ID in entry.values:
        hints = as_kind("int[]", entry.values[SHAPE_HINTS_ID])
        if not isinstance(hints, tuple) or len(hints) not in (0, 4 * len(outputs), 5 * len(outputs)):
            raise ParamError(f"{where}: layer '{entry.name}': shape hints (30) are 4 or 5 integers for each output")
        size = len(hints) // max(len(outputs), 1)
        for i, blob in enumerate(outputs if size else ()):
            dims, w, h, *d, c = hints[i * size : (i + 1) * size]
            blob.shape = _shape(dims, w, h, d[0] if d else 0, c)
    elif layer.type in ("Input", "MemoryData"):
        w, h, d, c = (layer[name] for name in "whdc")
        for blob in outputs:
            blob.shape = _shape(4 if d else 3 if c else 2 if h else 1, w, h, d, c)
    return layer


def _shape(dims: Any, w: Any, h: Any, d: Any, c: Any) -> Shape | None:
    """Return the numpy shape of a Mat; None if it has an invalid size or number of dims."""
    shape = {1: (w,), 2: (h, w), 3: (c, h, w), 4: (c, d, h, w)}.get(dims)
    return shape if shape and all(size > 0 for size in shape) else None
