"""Measure how fast nets are, and how many bytes they move: ours, pnnx's, ncnnoptimize's of it, and ONNX Runtime.

    python -m scripts.measure.speed FOLDER RESULTS.jsonl --pnnx PATH/TO/pnnx [--ncnnoptimize PATH] [--keep FOLDER]
                                    [--only TEXT...] [--again RATIO] [--seconds S] [--write NAME]

FOLDER has the ONNX models (zoo.py exports some); see pnnx.py for dynamic sizes and --keep. Times are milliseconds of
CPU time on one thread, the fastest run. Every net is loaded twice, because the place of its memory makes a difference.
All nets run alternately, in random order, so other work slows all alike. Subnormal numbers are flushed: random weights
make them, trained ones do not. A net whose outputs are not the model's has no time.

A model in RESULTS is not measured again, so an interrupted run continues. --again measures models below this ratio to
pnnx once more, and the last time counts. --write keeps the table in fixtures/measured/NAME.tsv.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.net_shapes import infer_net
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.ir.cost import multiplications
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.memory import blob_bytes, peak_memory
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.param.files import read_graph
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.runtime.ort import OrtRunner, OrtWorker
from scripts.measure.measured import table
from scripts.measure.pnnx import convert as convert_with_pnnx
from scripts.measure.pnnx import input_shapes

_NETS = ("ours", "pnnx", "ncnnoptimize")
_COLUMNS = (*_NETS, "ONNX Runtime")
_LEAST_TURNS = 3
_INTEGERS = {"i32": np.int32, "i64": np.int64}
_COMBINING = ("BinaryOp", "Eltwise", "Concat", "Scale")  # move elements, or make each of those at its index

_TOLERANCE = 0.05  # of an output's largest value

Times = Callable[[float], list[float]]  # repeats a run for some seconds, at least once
Record = dict[str, dict[str, float | None]]  # "ms", "layers", "moved", "peak", "macs" of each column


def nets_of(
    model: Path, folder: Path, pnnx: tuple[Path, Path] | None, ncnnoptimize: Path | None
) -> dict[str, list[str]]:
    """Return the files of each column's net, if it can be made."""
    found: dict[str, list[str]] = {"ONNX Runtime": [str(model)]}
    try:
        files = lower(model).save(folder / "ours")
        found["ours"] = [str(files.param), str(files.bin)]
    except Error as error:
        print(f"{model.stem}: {error}", file=sys.stderr)
    if pnnx is not None:
        found["pnnx"] = [str(path) for path in pnnx]
        if ncnnoptimize is not None:
            made = [str(folder / "optimized.param"), str(folder / "optimized.bin")]
            done = subprocess.run(
                [ncnnoptimize, *pnnx, *made, "0"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )
            if done.returncode == 0:
                found["ncnnoptimize"] = made
    return found


def costs(param: str, model: Path) -> dict[str, float | None]:
    """Return the layers of the file, bytes moved, peak memory and multiplications of a net; None for unknown ones."""
    graph = read_graph(Path(param))
    sizes = [shape[1:] if len(shape) > 1 and shape[0] == 1 else shape for shape, _ in input_shapes(model)]
    found: dict[str, float | None] = {"layers": int(Path(param).read_text().split()[1])}
    try:
        infer_net(graph, {blob.name: shape for blob, shape in zip(graph.inputs, sizes, strict=True)})
    except (Error, ValueError):
        return found
    memory = peak_memory(graph)
    return {
        **found,
        "moved": bytes_moved(graph),
        "peak": None if memory.unknown else memory.peak,
        "macs": multiplications(graph),
    }


def bytes_moved(graph: Graph) -> int | None:
    """Return the bytes read and written by layers that only move elements, or make each from those at its index."""
    total = 0
    for layer in graph:
        is_elementwise = layer.has(Trait.ELEMENTWISE) or layer.type in _COMBINING
        if not layer.inputs or layer.has(Trait.SHARES) or not (is_elementwise or layer.has(Trait.MOVES)):
            continue
        for blob in (*layer.inputs, *layer.outputs):
            size = blob_bytes(blob.shape)
            if size is None or not isinstance(blob.batch, int):
                return None
            total += size * blob.batch
    return total


def kind_of(model: Path) -> str:
    """Return the kind of a model's net, by its operators."""
    graph = onnx.load(model, load_external_data=False).graph
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    kernels = {ranks.get(node.input[1]) for node in graph.node if node.op_type in ("Conv", "ConvTranspose")}
    if 5 in kernels:
        return "3-D nets"
    if 3 in kernels:
        return "1-D nets"
    products = sum(node.op_type in ("MatMul", "Attention") for node in graph.node)
    return "transformers and hybrids" if products >= 4 else "others"


def measure(model: Path, nets: Mapping[str, list[str]], seconds: float) -> dict[str, float]:
    """Return milliseconds by column, without those of nets that fail or are wrong."""
    arrays = _inputs(model)
    loaded: list[tuple[str, Times]] = []
    best: dict[str, float] = {}
    with ExitStack() as stack:
        try:
            right, _ = _onnxruntime(nets["ONNX Runtime"], arrays, stack)
        except Error:
            return {}
        for name in random.sample([*nets] * 2, 2 * len(nets)):
            load = _onnxruntime if len(nets[name]) == 1 else _ncnn
            try:
                outputs, times = load(nets[name], arrays, stack)
            except (Error, ValueError):
                continue
            if _are_close(outputs, right):
                loaded.append((name, times))
        turns, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end or turns < _LEAST_TURNS:
            turns += 1
            for name, times in random.sample(loaded, len(loaded)):
                best[name] = min(best.get(name, np.inf), *(run * 1e3 for run in times(0.0)))
    return best


def _inputs(model: Path) -> list[Array]:
    """Return the inputs of the .npz beside a model, or random numbers and zeros."""
    shapes, given = input_shapes(model), model.with_suffix(".npz")
    if given.exists():
        with np.load(given) as data:
            return [data[f"in_{i}"] for i in range(len(shapes))]
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal(shape, np.float32) if dtype == "f32" else np.zeros(shape, _INTEGERS[dtype])
        for shape, dtype in shapes
    ]


def _are_close(outputs: list[Array], right: list[Array]) -> bool:
    """Return True if these are the outputs, in any shapes; pnnx's weights have 16 bits."""
    return len(outputs) == len(right) and all(
        a.size == b.size and np.allclose(a.ravel(), b.ravel(), rtol=0, atol=_TOLERANCE * (np.abs(b).max() + 1e-6))
        for a, b in zip(outputs, right, strict=True)
        if b.dtype == np.float32
    )


def _ncnn(files: list[str], arrays: list[Array], stack: ExitStack) -> tuple[list[Array], Times]:
    net = stack.enter_context(NcnnRunner(Path(files[0]), Path(files[1]), mode="fp16"))
    items = (item[0] if item.ndim > 1 and item.shape[0] == 1 else item for item in arrays)
    feeds = dict(zip(net.input_names(), items, strict=True))
    return [*net.run(feeds).values()], partial(net.time, feeds, net.output_names())


def _onnxruntime(files: list[str], arrays: list[Array], stack: ExitStack) -> tuple[list[Array], Times]:
    worker = OrtWorker()
    stack.callback(worker.close)
    runner = OrtRunner(Path(files[0]), fast=True, worker=worker)
    feeds = dict(zip(runner.input_names(), arrays, strict=True))
    return [*runner.run(feeds).values()], partial(runner.time, feeds)


def ratio(record: Record, name: str) -> float | None:
    """Return the speed of our net as a multiple of another column's."""
    theirs, ours = record.get(name, {}).get("ms"), record.get("ours", {}).get("ms")
    return theirs / ours if theirs and ours else None


def row(name: str, kind: str, record: Record) -> tuple[object, ...]:
    """Return the cells of one line of the table."""
    times = [_cell(record, column, "ms", 1, ".3g") for column in _COLUMNS]
    values = (_cell(record, column, key, unit, form) for _, key, unit, form in _QUANTITIES for column in _NETS)
    return name, kind, *times, *values


def _cell(record: Record, column: str, key: str, unit: float, form: str) -> str | None:
    value = record.get(column, {}).get(key)
    return None if value is None else format(value / unit, form)


# Headings, keys of records, units and formats.
_QUANTITIES = (
    ("layers", "layers", 1, ".0f"),
    ("MB moved", "moved", 1e6, ".3g"),
    ("peak MB", "peak", 1e6, ".3g"),
    ("million products", "macs", 1e6, ".4g"),
)
HEAD = (
    *("model", "kind", *(f"{name} ms" for name in _COLUMNS)),
    *(f"{name} {heading}" for heading, *_ in _QUANTITIES for name in _NETS),
)


def summary(rows: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, ...]]:
    """Yield for each kind of net how many times as fast as the other columns ours is, and of how many nets."""
    kinds = dict.fromkeys(row["kind"] for row in rows)
    for kind in (*kinds, "all"):
        chosen = [row for row in rows if kind in ("all", row["kind"])]
        cells = []
        for column in _COLUMNS[1:]:
            pairs = [(row[f"{column} ms"], row["ours ms"]) for row in chosen]
            ratios = [float(theirs) / float(ours) for theirs, ours in pairs if "-" not in (theirs, ours)]
            cells.append(f"{np.exp(np.mean(np.log(ratios))):.2f} ({len(ratios)})" if ratios else "-")
        yield kind, *cells


def read_records(path: Path) -> dict[str, Record]:
    """Return the records of a file by model; of several the last, because the times of a record belong together."""
    return dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}


def main() -> None:
    """Measure the models that are missing in the results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--pnnx", type=Path)
    parser.add_argument("--ncnnoptimize", type=Path, help="its program, which is given pnnx's nets")
    parser.add_argument("--keep", type=Path, help="keep pnnx's nets here, and use those that are here")
    parser.add_argument("--only", nargs="*", default=[""], help="models with one of these in their name")
    parser.add_argument("--again", type=float, default=0.0, help="measure those again that are below this ratio")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of running the nets of each model")
    parser.add_argument("--write", metavar="NAME", help="keep the table in fixtures/measured/NAME.tsv")
    options = parser.parse_args()
    models = [model for model in sorted(options.folder.glob("*.onnx")) if any(t in model.stem for t in options.only)]
    known = read_records(options.results)
    for model in models:
        if model.stem in known and (ratio(known[model.stem], "pnnx") or 1) >= options.again:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            kept = (options.keep or folder / "pnnx") / model.stem
            pnnx = convert_with_pnnx(model, options.pnnx.resolve(), kept) if options.pnnx else None
            nets = nets_of(model, folder, pnnx, options.ncnnoptimize)
            times = measure(model, nets, options.seconds)
            record = {
                name: {"ms": times.get(name), **(costs(files[0], model) if len(files) > 1 else {})}
                for name, files in nets.items()
            }
        with options.results.open("a") as file:
            file.write(json.dumps([model.stem, record]) + "\n")
        print(model.stem, record, file=sys.stderr, flush=True)
    known = read_records(options.results)
    with table(options.write or "", HEAD, write=bool(options.write)) as add:
        rows = [row(model.stem, kind_of(model), known[model.stem]) for model in models]
        for cells in rows:
            add(*cells)
    texts = [["-" if cell is None else str(cell) for cell in cells] for cells in rows]
    for line in summary([dict(zip(HEAD, cells, strict=True)) for cells in texts]):
        print(*line, sep="\t")


if __name__ == "__main__":
    main()
