"""Products with a constant matrix in ncnn, on one thread: Gemm, beside InnerProduct and MatMul of a MemoryData.

    python -m scripts.measure.bench_products [--seconds S] [--pairs P]

One row of Markdown for each size: milliseconds of Gemm, and how much longer the others take. With --pairs, a net has so
many products by K x N, each followed by one of N x K, as transformers have them: then weights come from memory. "A" is
Gemm with the constant as its first matrix.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.param.files import write_net
from scripts.measure.latency import NetPaths, compare

ROWS = (1, 3, 4, 7, 8, 12, 13, 16, 20, 32, 50, 64, 77, 128, 160, 196, 197)
SIZES = ((64, 64), (128, 128), (256, 256), (256, 1024), (512, 512), (768, 768), (768, 3072))  # K, N
LAYERS = ("Gemm", "InnerProduct", "MatMul", "A")


def net(type: str, rows: int, k: int, n: int, pairs: int, folder: Path) -> NetPaths:
    """A blob of some rows (a vector for none) times constant matrices, as a layer of this type does it."""
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


def measure(rows: int, k: int, n: int, pairs: int, seconds: float) -> Sequence[str]:
    """The cells of a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        gemm, *others = (net(type, rows, k, n, pairs, Path(folder)) for type in LAYERS)
        found = [compare(gemm, other, {"x": (rows, k)}, seconds) for other in others]
    first = min((times.first for times in found if times is not None), default=0.0)
    return [f"{first:.3g}", *(f"{times.ratio:.2f}" if times else "-" for times in found)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="time of each measurement")
    parser.add_argument("--pairs", type=int, default=0, help="products by K x N, and as many by N x K, in each net")
    options = parser.parse_args()
    print(f"| rows | K | N | {LAYERS[0]}, ms | {' | '.join(LAYERS[1:])} |\n|{'---|' * 7}", flush=True)
    for k, n in SIZES:
        for rows in ROWS:
            cells = measure(rows, k, n, options.pairs, options.seconds)
            print(f"| {rows} | {k} | {n} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
