"""The rows of a report: a net's layers with their costs, errors and times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnx2ncnn_opt.ir.correspondence import parameters
from onnx2ncnn_opt.ir.cost import multiplications_of
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.memory import blob_bytes, most_items, peak_memory
from onnx2ncnn_opt.report.record import LayerError, LayerRow, MemoryCourse
from onnx2ncnn_opt.report.words import value_text
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.ncnn import Times
from onnx2ncnn_opt.verdict.blobs import Match

_MAX_PARAMS = 300  # characters of a layer's parameters


@dataclass(frozen=True)
class LayerRun:
    """Verdicts on a net's blobs by mode and blob name, and seconds by blob name."""

    feeds: Mapping[str, Feed]  # of the run
    verdicts: Mapping[str, Mapping[str, Match]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    times: Times | None = None  # None if nothing was timed
    checked: str = ""  # ncnn's device and modes
    problem: str = ""  # the error that ended the run, if any


def layer_rows(graph: Graph, origins: Sequence[tuple[str, ...]]) -> list[LayerRow]:
    """Return a row for each layer; `origins` are the ONNX nodes of each layer."""
    numbers = {layer: number for number, layer in enumerate(graph)}
    return [_row(layer, origin, numbers) for layer, origin in zip(graph, origins, strict=True)]


def _row(layer: Layer, origin: tuple[str, ...], numbers: Mapping[Layer, int]) -> LayerRow:
    params = " ".join(f"{name}={value_text(value)}" for name, value in parameters(layer).items())
    blocks = [weight for _, weight in layer.weights.stored_items()]
    macs = multiplications_of(layer)
    moved = [bytes_of(blob) for blob in dict.fromkeys((*layer.inputs, *layer.outputs))]
    sizes = [size for size in moved if size is not None]
    return LayerRow(
        type=layer.type,
        name=layer.name,
        params=params if len(params) <= _MAX_PARAMS else f"{params[:_MAX_PARAMS]}\u2026",
        reads=tuple(dict.fromkeys(numbers[blob.producer] for blob in layer.inputs if blob.producer)),
        blobs=tuple(_blob_text(blob) for blob in layer.outputs),
        origin=origin,
        macs=macs if isinstance(macs, int) else None,
        weights=sum(block.data.size for block in blocks),
        weight_bytes=sum(b.data.nbytes + (0 if b.table is None else b.table.nbytes) for b in blocks),
        blob_bytes=sum(sizes) if len(sizes) == len(moved) else None,
    )


def _blob_text(blob: Blob) -> str:
    if blob.shape is None:
        return blob.name
    batch = "" if blob.batch == 1 else f"{blob.batch}\u00d7"
    return f"{blob.name} {batch}[{', '.join(map(str, blob.shape))}]"


def bytes_of(blob: Blob) -> int | None:
    """Return the bytes of a blob with its batch; None if a size is unknown."""
    size = blob_bytes(blob.shape)
    return None if size is None or not isinstance(blob.batch, int) else size * blob.batch


def memory_course(graph: Graph) -> MemoryCourse | None:
    """Return the bytes of all blobs in memory while each layer runs; None if a size is unknown."""
    memory, items = peak_memory(graph), most_items(graph)
    if memory.unknown or items is None:
        return None
    numbers = {layer: number for number, layer in enumerate(graph)}
    return MemoryCourse(
        tuple(numbers[layer] for layer, _ in memory.course), tuple(size * items for _, size in memory.course)
    )


def with_measurements(
    graph: Graph, rows: Sequence[LayerRow], run: LayerRun, masks: Mapping[str, str]
) -> list[LayerRow]:
    """Return the rows with the times, errors and masks of a run."""
    measured = []
    for layer, row in zip(graph, rows, strict=True):
        names = [blob.name for blob in layer.outputs]
        timed = [run.seconds[name] for name in names if name in run.seconds]
        errors = {
            mode: _worst([verdicts[name] for name in names if name in verdicts])
            for mode, verdicts in run.verdicts.items()
            if any(name in verdicts for name in names)
        }
        seconds = sum(timed) if timed else None
        measured.append(replace(row, seconds=seconds, errors=errors, mask=masks.get(layer.name, "")))
    return measured


def _worst(verdicts: Sequence[Match]) -> LayerError:
    """Return the error of a layer's worst output: the worst status decides, then the largest error."""

    def badness(verdict: Match) -> tuple[int, float]:
        error = verdict.difference.max_rel if verdict.difference else None
        return ("unknown", "right", "reordered", "wrong").index(verdict.status), -1.0 if error is None else error

    worst = max(verdicts, key=badness)
    error = worst.difference.max_rel if worst.difference else None
    return LayerError(worst.status, error, worst.message, worst.value)
