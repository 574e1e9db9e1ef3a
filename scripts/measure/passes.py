"""Measure how often passes apply, how much time they save, and how long they take themselves.

    python -m scripts.measure.passes count [--models FOLDER] [--nets FOLDER]
    python -m scripts.measure.passes worth [--models FOLDER] [--nets FOLDER] [--only TEXT] [--seconds S] [--again]
    python -m scripts.measure.passes long [--sizes 1000 10000 100000] [--ncnnoptimize PATH] [--limit SECONDS]
    python -m scripts.measure.passes products [--seconds S] [--pairs P]

count      Write fixtures/firings.tsv: in how many nets each pass applies. The nets are the models, snippets
           and operators of fixtures/, the ONNX models of --models, and the *.ncnn.param below --nets, which pnnx made.
           A missing folder keeps its column. Each cell is nets / rewrites; the last column is the whole net with the
           most rewrites for its size.
worth      Write fixtures/benefit.tsv, which docs/passes.md shows: the time in ncnn on one thread, after / before. Once
           for a whole net of fixtures/firings.tsv, with all passes and with all but this one; once for the net `large`
           of its fixture. Passes with numbers are left out: an interrupted run continues. --again measures all.
long       Print the CPU time of `optimize` per layer, for nets of 1,000 to 100,000 layers: it must stay flat. With
           --ncnnoptimize also the time of that program, until it exceeds the limit.
products   Print the time of products with a constant matrix: Gemm in milliseconds, InnerProduct and a MatMul of a
           MemoryData as ratios. "A" is a Gemm with the constant as first matrix. With --pairs a net has P products of
           K x N and P of N x K, as transformers have: then weights come from memory, not from the cache.

`long` and `products` print tables, and keep them in fixtures/measured/ with --write.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from onnx2ncnn_opt import optimize
from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.api.optimize import Optimized
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.outputs import Latency
from onnx2ncnn_opt.param.files import NetFiles, read_net, write_net
from onnx2ncnn_opt.passes import PASSES
from onnx2ncnn_opt.passes import run as run_passes
from onnx2ncnn_opt.passes.eliminate_orphaned_memorydata import eliminate_orphaned_memorydata
from onnx2ncnn_opt.rewrite.events import Applied
from onnx2ncnn_opt.rewrite.pipeline import run
from onnx2ncnn_opt.rewrite.rule import Pass
from scripts.measure.latency import NetPaths, compare
from scripts.measure.measured import BENEFIT, FIRINGS, ROOT, SOURCES, WHOLE, Rows, read_table, table, write_table
from testing.exports import refilled
from testing.op_cases import load_cases
from testing.optimized import apply_passes
from testing.pass_cases import FOLDER, Case, load_large
from testing.snippets import VARIANTS, kept

WORTH = ("net", "net ms", "net ratio", "net median", "alone ms", "alone ratio", "alone median")
LONG = ("net", "layers", "after", "read", "passes", "write", "all of optimize", "ncnnoptimize")  # us for each layer
CHANNELS, SIZE, WIDTH = 8, 16, 32
ROWS = (1, 3, 4, 7, 8, 12, 13, 16, 20, 32, 50, 64, 77, 128, 160, 196, 197)
SIZES = ((64, 64), (128, 128), (256, 256), (256, 1024), (512, 512), (768, 768), (768, 3072))  # K, N
PRODUCTS = ("Gemm", "InnerProduct", "MatMul", "A")
T = TypeVar("T")


def rewrites(source: str, folder: Path | None) -> Iterator[tuple[str, int, Sequence[Applied]]]:
    """Yield name, number of layers and rewrites of every net of a source that converts."""
    for name, read in nets(source, folder):
        print(f"{source}: {name}", file=sys.stderr)
        try:
            net = read()
        except Error as error:
            print(f"  {type(error).__name__}", file=sys.stderr)
        else:
            layers = net.layers[0] if isinstance(net, Optimized) else net.layers_before
            yield name, layers, net.applied


def nets(source: str, folder: Path | None) -> Iterator[tuple[str, Callable[[], Conversion | Optimized]]]:
    """Yield the name of every net of a source, and what converts or optimises it."""
    if source == "snippets":
        for variant in VARIANTS:
            yield from ((f"{variant}/{name}", partial(lower, model)) for name, model in kept(variant))
    elif source == "ops":
        yield from ((str(case), partial(lower, case.model())) for case in load_cases())
    elif folder is not None:
        for path in sorted(folder.rglob("*.ncnn.param") if source == "pnnx" else folder.glob("*.onnx")):
            if source == "pnnx":
                yield path.parent.name, partial(apply_passes, path, path.with_suffix(".bin"))
            else:
                yield path.stem, partial(lower, refilled(path) if source == "models" else path)


def count(source: str, folder: Path | None, rows: Rows) -> None:
    """Fill in the column of a source."""
    found: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    for name, layers, applied in rewrites(source, folder):
        for pass_name, times in Counter(event.pass_name for event in applied).items():
            found[pass_name].append((times / layers, f"{source}:{name}", times))
    for p in PASSES:
        row = rows.setdefault(p.name, {})
        if row.get("net", "-").startswith(f"{source}:"):
            row["net"] = "-"
        counts = found[p.name]
        row[source] = f"{len(counts)}/{sum(number for *_, number in counts)}" if counts else "-"
        if counts and source in WHOLE and row.get("net", "-") == "-":
            row["net"] = max(counts)[1]


def run_count(options: argparse.Namespace) -> None:
    """Count, and write the table."""
    folders = {"models": ROOT / "fixtures" / "models", "zoo": options.models, "pnnx": options.nets}
    rows = read_table(FIRINGS)
    for source in SOURCES:
        if source not in folders or folders[source] is not None:
            count(source, folders.get(source), rows)
    write_table(FIRINGS, (*SOURCES, "net"), rows)


def measure_alone(p: Pass, case: Case, folder: Path, seconds: float) -> Latency | None:
    """Time the net that was made for the pass, without the pass and with it."""
    before, after = ((folder / f"{stem}.param", folder / f"{stem}.bin") for stem in ("before", "after"))
    graph = case.net()
    write_net(graph, *before)
    run(graph, [p, eliminate_orphaned_memorydata])
    write_net(graph, *after)
    return compare(before, after, _shapes(graph), seconds)


def measure_whole(p: Pass, path: Path, folder: Path, seconds: float) -> Latency | None:
    """Time a real net without the pass and with it."""
    files: list[NetPaths] = []
    for skip in ([p.name], []):
        if path.suffix == ".onnx":
            model = lower(refilled(path) if path.parent.name == "models" else path, skip=skip)
            graph = model.graph
        else:
            graph = apply_passes(path, path.with_suffix(".bin"), skip=skip).graph
        files.append((folder / f"net{len(files)}.param", folder / f"net{len(files)}.bin"))
        write_net(graph, *files[-1])
    shapes = _shapes(graph)
    return compare(files[0], files[1], shapes, seconds) if shapes else None


def locate(net: str, models: Path | None, nets: Path | None) -> Path | None:
    """Return the file of a net that fixtures/firings.tsv names; None if its folder is not given."""
    source, _, name = net.partition(":")
    folder = {"models": ROOT / "fixtures" / "models", "zoo": models, "pnnx": nets}.get(source)
    if folder is None:
        return None
    pattern = f"{name}/*.ncnn.param" if source == "pnnx" else f"{name}.onnx"
    return next(folder.glob(pattern), None)


def _shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the inputs, chosen if dynamic; none if a rank is unknown, or a batch is fed."""
    if any(blob.shape is None or blob.batch != 1 for blob in graph.inputs):
        return {}
    return {blob.name: tuple(s if isinstance(s, int) else 64 for s in blob.shape or ()) for blob in graph.inputs}


def _numbers(prefix: str, found: Latency | None) -> dict[str, str]:
    texts = (f"{found.other:.4g}", f"{found.net / found.other:.3f}", f"{found.ratio:.3f}") if found else ("-", "-", "-")
    return dict(zip((f"{prefix} ms", f"{prefix} ratio", f"{prefix} median"), texts, strict=True))


def run_worth(options: argparse.Namespace) -> None:
    """Measure all passes, and write the table after each one."""
    rows, firings, start = read_table(BENEFIT), read_table(FIRINGS), time.perf_counter()
    todo = [p for p in PASSES if options.only in p.name and (options.again or p.name not in rows)]
    for number, p in enumerate(todo, 1):
        net = firings.get(p.name, {}).get("net", "-")
        path = locate(net, options.models, options.nets)
        whole = None
        with tempfile.TemporaryDirectory() as folder:
            large = load_large(FOLDER / f"{p.name}.md")
            alone = measure_alone(p, large, Path(folder), options.seconds) if large else None
            if path is not None:
                try:
                    whole = measure_whole(p, path, Path(folder), options.seconds)
                except Error as error:
                    print(f"{p.name}: {error}", file=sys.stderr)
        rows[p.name] = {"net": net if whole else "-"}
        rows[p.name] |= _numbers("net", whole) | _numbers("alone", alone)
        write_table(BENEFIT, WORTH, rows)
        at = f"{number}/{len(todo)}, {time.perf_counter() - start:.0f} s"
        print(f"{at}: {p.name}: {net}: {whole or '-'}; alone: {alone or '-'}", flush=True)


def cnn(layers: int) -> Graph:
    """Return a net of Convolution, BatchNorm, ReLU, Dropout, a blob times its own sigmoid, and views, repeated."""
    ones = np.ones(CHANNELS, np.float32)
    kernel = np.ones(CHANNELS * CHANNELS, np.float32) / CHANNELS
    convolution = {"num_output": CHANNELS, "kernel_w": 1, "weight_data_size": kernel.size}
    norm = {"slope_data": ones, "mean_data": ones, "var_data": ones, "bias_data": ones}
    net = _Net()
    x = net.add("Input", w=SIZE, h=SIZE, c=CHANNELS)
    while len(net.graph) < layers:
        x = net.add("Convolution", x, weights={"weight_data": kernel}, **convolution)
        x = net.add("BatchNorm", x, weights=norm, channels=CHANNELS, eps=1e-5)
        x = net.add("Dropout", net.add("ReLU", x))
        x = net.add("BinaryOp", x, net.add("Sigmoid", x), op_type=2)
        x = net.add("Permute", net.add("Permute", x, order_type=1), order_type=1)
    net.graph.outputs = [x]
    return net.graph


def transformer(layers: int) -> Graph:
    """Return a net of written-out attention with two heads, a sum, an expanded GELU between Gemms, a sum, repeated."""
    weight = np.eye(WIDTH, dtype=np.float32).reshape(-1)
    net = _Net()

    def gemm(x: Blob) -> Blob:
        params = {"transB": 1, "constantB": 1, "constantC": 1, "constantN": WIDTH, "constantK": WIDTH}
        return net.add("Gemm", x, weights={"B_data": weight}, constant_broadcast_type_C=-1, **params)

    def heads(x: Blob) -> Blob:
        return net.add("Permute", net.add("Reshape", gemm(x), w=WIDTH // 2, h=2, c=SIZE), order_type=2)

    x = net.add("Input", w=WIDTH, h=SIZE)
    while len(net.graph) < layers:
        product = net.add("MatMul", heads(x), heads(x), transB=1)
        scaled = net.add("BinaryOp", product, op_type=2, with_scalar=1, b=0.5)
        attended = net.add("MatMul", net.add("Softmax", scaled, axis=2, fixbug0=1), heads(x))
        merged = net.add("Reshape", net.add("Permute", attended, order_type=2), w=WIDTH, h=SIZE)
        x = net.add("BinaryOp", x, gemm(merged))
        hidden = gemm(x)
        inner = net.add("Erf", net.add("BinaryOp", hidden, op_type=3, with_scalar=1, b=2**0.5))
        both = net.add("BinaryOp", hidden, net.add("BinaryOp", inner, with_scalar=1, b=1.0), op_type=2)
        x = net.add("BinaryOp", x, gemm(net.add("BinaryOp", both, op_type=2, with_scalar=1, b=0.5)))
    net.graph.outputs = [x]
    return net.graph


class _Net:
    """A graph that grows at its end, shapes inferred."""

    def __init__(self) -> None:
        self.graph = Graph()

    def add(self, type: str, *inputs: Blob, weights: Mapping[str, Array] | None = None, **params: object) -> Blob:
        name = f"l{len(self.graph)}"
        layer = self.graph.add(Layer(type, name, inputs, [Blob(name)], params, weights, [name]))
        assign_shapes(layer)
        return layer.output


NETS: Mapping[str, Callable[[int], Graph]] = {"cnn": cnn, "transformer": transformer}


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the CPU seconds of a call, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def ncnnoptimize(program: Path, files: NetFiles, limit: float) -> float | None:
    """Return the CPU seconds of ncnnoptimize; None if it takes longer than the limit."""
    out = files.param.with_name("other")
    command: list[str | Path] = [program, files.param, files.bin, f"{out}.param", f"{out}.bin", "0"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    try:
        subprocess.run(command, capture_output=True, timeout=limit, check=True)
    except subprocess.TimeoutExpired:
        return None
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def run_long(options: argparse.Namespace) -> None:
    """Print a row for each net and size."""
    with table("long_nets", LONG, write=options.write) as add:
        for name, net in NETS.items():
            limit = options.limit if options.ncnnoptimize else 0.0
            for size in options.sizes:
                with tempfile.TemporaryDirectory() as folder:
                    row, theirs = measure_long(net(size), Path(folder), options.ncnnoptimize if limit else None, limit)
                limit = limit if theirs is not None else 0.0
                add(name, *row)


def measure_long(
    graph: Graph, folder: Path, program: Path | None, limit: float
) -> tuple[Sequence[object], float | None]:
    """Return the cells of a row, and the time of ncnnoptimize."""
    files = NetFiles.at(folder / "net")
    write_net(graph, files.param, files.bin)
    before = len(graph)
    reading, _ = timed(lambda: read_net(files.param, files.bin))
    passing, _ = timed(lambda: run_passes(graph))
    writing, _ = timed(lambda: write_net(graph, folder / "a", folder / "b"))
    whole, _ = timed(lambda: optimize(files.param, files.bin, folder / "out", verification=None))
    theirs = ncnnoptimize(program, files, limit) if program is not None else None
    each = [s if s is None else f"{s / before * 1e6:.0f}" for s in (reading, passing, writing, whole, theirs)]
    return (before, len(graph), *each), theirs


def product_net(type: str, rows: int, k: int, n: int, pairs: int, folder: Path) -> NetPaths:
    """Write a net that multiplies some rows (a vector for none) by constant matrices, in layers of this type."""
    graph, x = Graph(), Blob("x", (rows, k))
    graph.add(Layer("Input", "x", (), [x]))
    for i, (inner, outer) in enumerate([(k, n), (n, k)] * pairs or [(k, n)]):
        x = _product(graph, type, f"y{i}", x, np.random.default_rng(i).standard_normal((inner, outer), np.float32))
    graph.outputs = [x]
    files = folder / f"{type}.param", folder / f"{type}.bin"
    write_net(graph, *files)
    return files


def _product(graph: Graph, type: str, name: str, x: Blob, weight: Any) -> Blob:
    y, (k, n) = Blob(name), weight.shape
    weight /= k**0.5
    if type == "MatMul":
        c = Blob(f"c{name}")
        graph.add(Layer("MemoryData", c.name, (), [c], {"w": n, "h": k}, {"data": weight.reshape(-1)}))
        graph.add(Layer("MatMul", name, [x, c], [y]))
    elif type == "InnerProduct":
        params = {"num_output": n, "weight_data_size": weight.size}
        graph.add(Layer("InnerProduct", name, [x], [y], params, {"weight_data": weight.T.reshape(-1)}))
    else:
        params = {"constantC": 1, "constantK": k, "constant_broadcast_type_C": -1, "transB": 1}
        a = {"constantA": 1, "constantM": n, "output_transpose": 1}
        b = {"constantB": 1, "constantN": n}
        data = {"A_data" if type == "A" else "B_data": weight.T.reshape(-1)}
        graph.add(Layer("Gemm", name, [x], [y], params | (a if type == "A" else b), data))
    return y


def measure_products(rows: int, k: int, n: int, pairs: int, seconds: float) -> Sequence[str]:
    """Return the cells of a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        gemm, *others = (product_net(type, rows, k, n, pairs, Path(folder)) for type in PRODUCTS)
        found = [compare(gemm, other, {"x": (rows, k)}, seconds) for other in others]
    first = min((times.other for times in found if times is not None), default=0.0)
    return [f"{first:.3g}", *(f"{times.net / times.other:.2f}" if times else "-" for times in found)]


def run_products(options: argparse.Namespace) -> None:
    """Print a row for each size."""
    name = "product_pairs" if options.pairs else "products"
    with table(name, ("rows", "K", "N", f"{PRODUCTS[0]} ms", *PRODUCTS[1:]), write=options.write) as add:
        for k, n in SIZES:
            for rows in ROWS:
                add(rows, k, n, *measure_products(rows, k, n, options.pairs, options.seconds))


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    count, worth, long, products = map(commands.add_parser, ("count", "worth", "long", "products"))
    for command, function in ((count, run_count), (worth, run_worth), (long, run_long), (products, run_products)):
        command.set_defaults(run=function)
    for command in (count, worth):
        command.add_argument("--models", type=Path, help="a folder of more ONNX models")
        command.add_argument("--nets", type=Path, help="a folder of nets that pnnx has made")
    worth.add_argument("--only", default="", help="passes with this in their name")
    worth.add_argument("--again", action="store_true", help="measure those that have numbers, too")
    worth.add_argument("--seconds", type=float, default=1.0, help="time of each measurement")
    long.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    long.add_argument("--ncnnoptimize", type=Path, help="its program, to compare with")
    long.add_argument("--limit", type=float, default=300.0, help="seconds after which it is stopped")
    products.add_argument("--seconds", type=float, default=0.3, help="time of each measurement")
    products.add_argument("--pairs", type=int, default=0, help="products by K x N, and as many by N x K, in each net")
    for command in (long, products):
        command.add_argument("--write", action="store_true", help="keep the table in fixtures/measured")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
