"""Time of `optimize` per layer, for nets of 1,000 to 100,000 layers: it must stay flat.

    python -m scripts.measure.bench_passes [--sizes 1000 10000 100000] [--ncnnoptimize PATH] [--limit SECONDS]

Reading, the passes and writing, and what else `optimize` does with the net; beside it the time of ncnnoptimize on the
same files, where its program is given, until it has taken longer than the limit. It is CPU time, so that a busy machine
matters less.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from onnx2ncnn_opt.api.apply_passes import apply_passes
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.param.files import NetFiles, read_net, write_net
from onnx2ncnn_opt.passes import run

CHANNELS, SIZE, WIDTH = 8, 16, 32
T = TypeVar("T")


def cnn(layers: int) -> Graph:
    """Convolution, BatchNorm, ReLU, Dropout, a product with a sigmoid of the same blob, and views, over and over."""
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
    """Attention of two heads written out, a sum, an expanded GELU between two Gemms, and a sum, over and over."""
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
    """CPU seconds that something takes, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def ncnnoptimize(program: Path, files: NetFiles, limit: float) -> float | None:
    """CPU seconds of ncnnoptimize; None where it takes longer than the limit."""
    out = files.param.with_name("other")
    command: list[str | Path] = [program, files.param, files.bin, f"{out}.param", f"{out}.bin", "0"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    try:
        subprocess.run(command, capture_output=True, timeout=limit, check=True)
    except subprocess.TimeoutExpired:
        return None
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def main() -> None:
    """Print a row of Markdown for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--ncnnoptimize", type=Path, help="its program, to compare with")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which it is stopped")
    options = parser.parse_args()
    print("| net | layers | after | us per layer: read | passes | write | all of optimize | ncnnoptimize |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, net in NETS.items():
        limit = options.limit if options.ncnnoptimize else 0.0
        for size in options.sizes:
            with tempfile.TemporaryDirectory() as folder:
                row, theirs = measure(net(size), Path(folder), options.ncnnoptimize if limit else None, limit)
            limit = limit if theirs is not None else 0.0
            print(f"| {name} | {row} |", flush=True)


def measure(graph: Graph, folder: Path, program: Path | None, limit: float) -> tuple[str, float | None]:
    """A row of the table, and what ncnnoptimize takes."""
    files = NetFiles.at(folder / "net")
    write_net(graph, files.param, files.bin)
    before = len(graph)
    reading, _ = timed(lambda: read_net(files.param, files.bin))
    passing, _ = timed(lambda: run(graph))
    writing, _ = timed(lambda: write_net(graph, folder / "a", folder / "b"))
    whole, _ = timed(lambda: apply_passes(files.param, files.bin).save(folder / "out"))
    theirs = ncnnoptimize(program, files, limit) if program is not None else None
    times = [reading, passing, writing, whole, *([theirs] if theirs is not None else [])]
    each = [f"{seconds / before * 1e6:.0f}" for seconds in times]
    return " | ".join([str(before), str(len(graph)), *each, *(["-"] if theirs is None else [])]), theirs


if __name__ == "__main__":
    main()
