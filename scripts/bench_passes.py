"""Time of the pass pipeline per layer, for nets of 1,000 to 100,000 layers: it must stay flat."""

from __future__ import annotations

import time

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.passes import run

CHANNELS, SIZE = 8, 16


def chain(layers: int) -> Graph:
    """Convolution, BatchNorm, ReLU, Dropout, and a product with a sigmoid of the same blob, over and over."""
    graph = Graph()
    shape = (CHANNELS, SIZE, SIZE)
    ones = np.ones(CHANNELS, np.float32)
    kernel = np.ones(CHANNELS * CHANNELS, np.float32)
    convolution = {"num_output": CHANNELS, "kernel_w": 1, "weight_data_size": kernel.size}
    norm = {"slope_data": ones, "mean_data": ones, "var_data": ones, "bias_data": ones}

    def add(type: str, *inputs: Blob, params: dict[str, object] | None = None, weights: object = None) -> Blob:
        name = f"l{len(graph)}"
        layer = Layer(type, name, inputs, [Blob(name, shape)], params, weights, [name])  # type: ignore[arg-type]
        return graph.add(layer).output

    x = add("Input")
    while len(graph) < layers:
        x = add("Convolution", x, params=dict(convolution), weights={"weight_data": kernel})
        x = add("BatchNorm", x, params={"channels": CHANNELS, "eps": 1e-5}, weights=norm)
        x = add("ReLU", x)
        x = add("Dropout", x)
        x = add("BinaryOp", x, add("Sigmoid", x), params={"op_type": 2})
    graph.outputs = [x]
    return graph


def main() -> None:
    """Print one line per size."""
    for layers in (1_000, 10_000, 100_000):
        graph = chain(layers)
        before = len(graph)
        start = time.perf_counter()
        events = run(graph)
        seconds = time.perf_counter() - start
        print(
            f"{before:7} layers -> {len(graph):6}: {seconds:6.2f} s, {seconds / before * 1e6:6.1f} us per layer, "
            f"{len(events)} events"
        )


if __name__ == "__main__":
    main()
