"""Products with a constant matrix in ncnn, on one thread: Gemm, beside InnerProduct and MatMul of a MemoryData.

    python -m scripts.measure.bench_products [--seconds S]

One row of Markdown for each size: milliseconds of Gemm, and how much longer the others take.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.param.files import write_net
from scripts.measure.latency import NetPaths, compare

ROWS = (1, 3, 4, 7, 12, 13, 16, 20, 50, 64, 128, 196, 197)
SIZES = ((64, 64), (128, 128), (256, 256), (768, 768), (768, 3072))  # K, N
LAYERS = ("Gemm", "InnerProduct", "MatMul")


def net(type: str, rows: int, k: int, n: int, folder: Path) -> NetPaths:
    """A blob of some rows (a vector for none) times a constant matrix, as a layer of this type does it."""
    weight = np.random.default_rng(0).standard_normal((k, n), np.float32)
    graph, y = Graph(), Blob("y")
    x = Blob("x", (rows, k))
    graph.add(Layer("Input", "x", (), [x]))
    if type == "MatMul":
        constant = Layer("MemoryData", "c", (), [Blob("c")], {"w": n, "h": k}, {"data": weight.reshape(-1)})
        graph.add(Layer("MatMul", "m", [x, graph.add(constant).output], [y]))
    elif type == "InnerProduct":
        params = {"num_output": n, "weight_data_size": weight.size}
        graph.add(Layer("InnerProduct", "m", [x], [y], params, {"weight_data": weight.T.reshape(-1)}))
    else:
        params = {"constantB": 1, "constantC": 1, "constantN": n, "constantK": k, "constant_broadcast_type_C": -1}
        params |= {"transB": 1}
        graph.add(Layer("Gemm", "m", [x], [y], params, {"B_data": weight.T.reshape(-1)}))
    graph.outputs = [y]
    files = folder / f"{type}.param", folder / f"{type}.bin"
    write_net(graph, *files)
    return files


def measure(rows: int, k: int, n: int, seconds: float) -> Sequence[str]:
    """The cells of a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        gemm, *others = (net(type, rows, k, n, Path(folder)) for type in LAYERS)
        found = [compare(gemm, other, {"x": (rows, k)}, seconds) for other in others]
    first = min((times.first for times in found if times is not None), default=0.0)
    return [f"{first:.3g}", *(f"{times.ratio:.2f}" if times else "-" for times in found)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="time of each measurement")
    options = parser.parse_args()
    print(f"| rows | K | N | {LAYERS[0]}, ms | {' | '.join(LAYERS[1:])} |\n|---|---|---|---|---|---|", flush=True)
    for k, n in SIZES:
        for rows in ROWS:
            print(f"| {rows} | {k} | {n} | {' | '.join(measure(rows, k, n, options.seconds))} |", flush=True)


if __name__ == "__main__":
    main()
