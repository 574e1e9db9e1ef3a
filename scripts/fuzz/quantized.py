"""Random nets in int8: every output is near the float net's, or the report names it.

    python -m scripts.fuzz.quantized [--count 200] [--seed 0] [--first 0] [--on TARGET ...]

A third of the nets each are images (convolutions with groups, strides, residuals, Concat), sequences (Gemm, attention,
LSTM, GRU, RNN), and token ids behind an Embed. Rows of weights may be zeros or outliers. All layers become int8,
however long they take; half of the nets have a budget, which has to be kept. With `--on` the int8 net also runs there,
and has to be as near as on this machine, less 3 dB.
"""

import math
from contextlib import ExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.param.binary import weight_blocks
from onnx2ncnn_opt.param.files import NetFiles, write_net
from onnx2ncnn_opt.quantization.quantize import WEIGHTS, Budget, Options, quantize_net
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.verification.sqnr import Agreement, decibels
from scripts.fuzz import campaign

_LEAST, _ROOM = 15.0, 3.0  # decibels
_SAMPLES = 10


class RandomNet:
    """A float net of some layers, and samples for it."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.numbers = rng, np.random.default_rng(rng.randrange(2**32))
        self.graph = Graph()
        self.kind = rng.choice(("image", "sequence", "tokens"))
        self.blob = self.graph.add(Layer("Input", "in", (), [Blob("x")])).output
        if self.kind == "image":
            self.images()
        else:
            self.sequences()
        self.graph.outputs = (self.blob,)

    def add(self, type: str, inputs: tuple[Blob, ...] | None = None, **params: Any) -> Blob:
        """Append a layer with random weights."""
        name = f"l{len(self.graph)}"
        layer = Layer(type, name, inputs or (self.blob,), [Blob(f"{name}_out")], params)
        self.graph.add(layer)
        for block in weight_blocks(layer):
            layer.weights[block.name] = self.weights(layer, block.name, block.count)
        self.blob = layer.output
        return self.blob

    def weights(self, layer: Layer, name: str, count: int) -> NDArray[np.float32]:
        """Return random weights; some rows are zeros, and some much larger than the others."""
        values = self.numbers.standard_normal(count)
        rows = layer.params.get("num_output", layer.params.get("constantN", layer.params.get("embed_dim", 1)))
        if "bias" in name or "C_data" in name or "gamma" in name or count % rows or count == rows:
            return (values * 0.1 + ("gamma" in name)).astype(np.float32)
        matrix = values.reshape(rows, -1) / math.sqrt(count / rows)
        if layer.type in ("LSTM", "GRU", "RNN"):
            matrix *= 0.5
        if self.rng.random() < 0.2:
            matrix[self.rng.randrange(rows)] = 0
        if self.rng.random() < 0.2 and layer.type not in ("Embed", "LSTM", "GRU", "RNN"):
            matrix[self.rng.randrange(rows)] *= self.rng.choice((5, 20))
        return matrix.reshape(-1).astype(np.float32)

    def images(self) -> None:
        """Append convolutions."""
        rng, channels = self.rng, self.rng.choice((3, 8, 12))
        self.shape: tuple[int, ...] = (channels, rng.choice((16, 17)), rng.choice((16, 21)))
        for _ in range(rng.randint(2, 6)):
            block = rng.choice(("plain", "depthwise", "grouped", "residual", "concat", "split"))
            if block == "depthwise":
                self.conv(channels, channels, group=channels)
            elif block == "grouped":
                group = rng.choice([n for n in (1, 2, 3, 4, 8) if channels % n == 0])
                self.conv(channels, channels, group=group)
            elif block == "residual":
                before = self.blob
                self.conv(channels, channels)
                self.conv(channels, channels)
                self.add("BinaryOp", (before, self.blob), op_type=0)
                self.add("ReLU")
            elif block in ("concat", "split"):
                before, halves, count = self.blob, [], rng.choice((8, 12))
                for _ in range(2):
                    self.blob = before
                    halves.append(self.conv(channels, count, kernel=1))
                channels = 2 * count if block == "concat" else count
                join: dict[str, Any] = {"axis": 0} if block == "concat" else {"op_type": 0}
                self.add("Concat" if block == "concat" else "BinaryOp", tuple(halves), **join)
            else:
                count = rng.choice((8, 16, 20, 64))
                self.conv(channels, count)
                channels = count
        if rng.random() < 0.7:
            self.add("Pooling", pooling_type=1, global_pooling=1)
            self.add("InnerProduct", num_output=10, bias_term=1, weight_data_size=10 * channels)

    def conv(self, inputs: int, outputs: int, group: int = 1, kernel: int = 0) -> Blob:
        """Append a convolution that keeps the size."""
        kernel = kernel or self.rng.choice((1, 3, 3, 3, 5))
        params: dict[str, Any] = {
            "num_output": outputs,
            "kernel_w": kernel,
            "pad_left": kernel // 2,
            "bias_term": self.rng.randint(0, 1),
        }
        params |= {"weight_data_size": inputs * outputs // group * kernel**2}
        if self.rng.random() < 0.1:
            params["pad_value"] = 1.5
        if self.rng.random() < 0.6:
            params["activation_type"] = 1
        if group == 1:
            return self.add("Convolution", **params)
        return self.add("ConvolutionDepthWise", **params, group=group)

    def sequences(self) -> None:
        """Append products, attention and recurrent layers."""
        rng, width = self.rng, self.rng.choice((32, 48, 96))
        self.shape = (rng.choice((1, 5, 12)), width)
        if self.kind == "tokens":
            self.shape = self.shape[:1]
            self.add("Embed", num_output=width, input_dim=50, weight_data_size=50 * width)
        for _ in range(rng.randint(1, 4)):
            block = rng.choice(("Gemm", "Gemm", "MultiHeadAttention", "LSTM", "GRU", "RNN"))
            if block == "Gemm":
                count = rng.choice((32, 64, 100))
                self.add(
                    "Gemm",
                    transB=1,
                    constantB=1,
                    constantC=1,
                    constantN=count,
                    constantK=width,
                    constant_broadcast_type_C=4,
                )
                self.add(rng.choice(("ReLU", "GELU", "TanH")))
                width = count
            elif block == "MultiHeadAttention":
                self.add(block, embed_dim=width, num_heads=rng.choice((1, 2, 4)), weight_data_size=width * width)
            else:
                gates, hidden, both = {"LSTM": 4, "GRU": 3, "RNN": 1}[block], rng.choice((16, 24)), rng.randint(0, 1)
                size = gates * hidden * width * (1 + both)
                self.add(block, num_output=hidden, weight_data_size=size, direction=2 * both)
                width = hidden * (1 + both)
        self.add("Gemm", transB=1, constantB=1, constantC=1, constantN=10, constantK=width, constant_broadcast_type_C=4)

    def sample(self) -> NDArray[Any]:
        """Return one input."""
        if self.kind == "tokens":
            return self.numbers.integers(0, 50, self.shape).astype(np.int32)
        return self.numbers.standard_normal(self.shape).astype(np.float32)


def trial(number: int, seed: int, folder: Path, workers: dict[str, NcnnWorker]) -> str:
    """Quantise a net; return the outcome."""
    net = RandomNet(Random(f"{seed} {number}"))
    files, int8 = NetFiles.at(folder / "float"), NetFiles.at(folder / "int8")
    write_net(net.graph, files.param, files.bin)
    feeds = [{"x": Feed(net.sample())} for _ in range(_SAMPLES)]
    budget = Budget(decibels=net.rng.uniform(25, 60)) if net.rng.random() < 0.5 else Budget()
    try:
        weights = net.rng.choice(WEIGHTS)  # the default is by the clock
        result = quantize_net(files.param, files.bin, feeds, Options(every=True, weights=weights, budget=budget))
    except UsageError as error:
        return f"refused: {str(error).rpartition(': ')[2]}"
    if result.missed:
        return f"{net.kind}: missed"
    if wrong := result.misses(budget):
        return f"BUDGET {net.kind}: {wrong}"
    if result.decibels < _LEAST and not any(" dB " in note for note in result.notes):
        return f"UNNAMED {net.kind}: {result.decibels:.1f} dB"
    write_net(result.graph, int8.param, int8.bin)
    for on, worker in workers.items():
        there = NcnnRunner(int8.param, int8.bin, worker=worker, timeout=60)
        here = NcnnRunner(files.param, files.bin, worker=worker, timeout=60)
        agreement = Agreement()
        for feed in feeds:
            agreement.add(here.run(feed), there.run(feed))
        if not agreement.decibels > result.decibels - _ROOM:
            return f"DIFFERENT on {on}, {net.kind}: {agreement.decibels:.1f} dB, here {result.decibels:.1f}"
    alone = decibels(sum(row.noise or 0.0 for row in result.layers if row.is_int8))
    off = ", sum 2 dB off" * (abs(alone - result.decibels) > 2)
    return f"{net.kind}: {'named' if result.decibels < _LEAST else 'near'}{off}"


def main() -> int:
    """Print the faults, then the count of each outcome."""
    parser = campaign.arguments(__doc__, 200)
    parser.add_argument("--on", action="append", default=[])
    given = parser.parse_args()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        workers = {on: stack.enter_context(NcnnWorker(find_target(on))) for on in given.on}
        return campaign.report(campaign.judged(given, lambda n: trial(n, given.seed, Path(folder), workers)))


if __name__ == "__main__":
    raise SystemExit(main())
