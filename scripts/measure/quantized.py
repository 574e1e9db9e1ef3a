"""Compare `quantize` with ncnn's own tools: ncnn2table (kl) and ncnn2int8, rewritten here for the comparison.

    python -m scripts.measure.quantized [MODEL.onnx ...] [--data SAMPLES.npz] [-k PART] [--fixtures]

Models are float and have one input; `--fixtures` takes the CNNs of fixtures/models too, whose weights are random. Each
net becomes int8 by either way, in all layers that can be; a third column has the layers that are faster. Without data
samples are smooth random images. Prints the ratio of signal to noise at the worst output, the share of rows with the
same largest entry, the sum over the layers, and the time of the int8 net in units of the float net's.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.int8 import LEVELS, WITH_SCALE, row_scales, rows_of
from onnx2ncnn_opt.param.files import NetFiles, read_net
from onnx2ncnn_opt.quantization.emit import Scales, obstacle, quantise
from onnx2ncnn_opt.quantization.observe import Observed, observe
from onnx2ncnn_opt.quantization.quantize import Options, Quantized, Runs, quantize_net
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.runtime.slots import Slot, feeds_of
from onnx2ncnn_opt.verification.sqnr import decibels
from testing.exports import save_refilled

Feeds = Sequence[Mapping[str, Feed]]
_CNNS = (
    *("residual.ts", "inverted.ts", "unet.ts", "shuffle.ts", "detector.ts", "superres.ts", "dense.ts", "restore.ts"),
    *("resnet18.ts", "squeezenet1_1.ts", "mobilenet_v3_small.ts", "googlenet.ts", "shufflenet_v2_x1_0.ts"),
    *("repvgg_a0.ts", "ghostnet_100.ts"),
)
_LEVELS, _BINS, _EPSILON = 128, 2048, 1e-4
_SAMPLES = 24


def kl_threshold(seen: Observed) -> float:
    """Return ncnn2table's threshold: of 2048 bins those whose distribution in 128 levels differs least if clipped."""
    centres = (np.arange(seen.counts.size) + 0.5) * (seen.top or 1.0) / seen.counts.size
    shares, _ = np.histogram(centres, _BINS, (0, max(seen.largest, 1e-30)), weights=seen.counts.astype(np.float64))
    shares[0] = 0  # nearly all of it are zeros, which ncnn2table leaves out
    shares /= max(shares.sum(), 1.0)
    sums, best = np.concatenate([[0], np.cumsum(shares)]), (np.inf, _LEVELS)
    for end in range(_LEVELS, _BINS):
        clipped = shares[:end] + _EPSILON
        clipped[-1] += shares[end:].sum()
        edges = np.linspace(0, end, _LEVELS + 1)
        levels = np.interp(edges, np.arange(_BINS + 1), sums)
        spread = np.diff(np.interp(np.arange(end + 1), edges, levels)) + _EPSILON
        best = min(best, (float((clipped * np.log(clipped / spread)).sum()), end))
    return max((best[1] + 0.5) * seen.largest / _BINS, 1e-30)


def as_ncnn_does(graph: Graph, files: NetFiles, feeds: Feeds) -> dict[str, Scales]:
    """Return the scales of ncnn2table with kl: 6 bits for each 3x3 of stride 1, no blocks, no means."""
    layers = [layer for layer in graph if not obstacle(layer)]
    with NcnnRunner(files.param, files.bin) as runner:
        seen = observe(graph, runner, [layer for layer in layers if layer.type in WITH_SCALE], feeds)
    found = {}
    for layer in layers:
        if layer.name not in seen:
            found[layer.name] = Scales(1.0, whole=True)
            continue
        window = [
            layer[name] for name in ("kernel_w", "kernel_h", "stride_w", "stride_h") if layer.type == "Convolution"
        ]
        rows = row_scales(rows_of(layer), 6 if window == [3, 3, 1, 1] else 8)
        found[layer.name] = Scales(LEVELS / kl_threshold(seen[layer.name]), None, rows)
    return found


def drawn(shape: Sequence[Any], count: int) -> list[NDArray[np.float32]]:
    """Return smooth random images: the sum of noise at three sizes."""
    sizes = [size if isinstance(size, int) else 1 for size in shape]
    rng, samples = np.random.default_rng(0), []
    for _ in range(count):
        total = np.zeros(sizes, np.float32)
        for each in (1, 4, 16):
            small = rng.standard_normal([*sizes[:-2], -(-sizes[-2] // each), -(-sizes[-1] // each)])
            large = small.repeat(each, -2).repeat(each, -1)[..., : sizes[-2], : sizes[-1]]
            total += large.astype(np.float32)
        samples.append(total * np.float32(rng.uniform(0.3, 1)))
    return samples


def columns(name: str, model: Path, data: Path | None, folder: Path) -> list[str]:
    """Return the row of a model."""
    conversion = lower(model)
    files, manifest = conversion.save(folder / "net"), conversion.manifest()
    [entry] = manifest.inputs
    arrays = drawn(entry.shape, _SAMPLES) if data is None else list(np.load(data)[entry.name][:128, None])
    feeds = [feeds_of([Slot.of(entry)], {entry.name: array}) for array in arrays]
    graph = read_net(files.param, files.bin).graph
    theirs = as_ncnn_does(graph, files, [each for i, each in enumerate(feeds) if i % 5 != 4])
    quantise(graph, theirs)
    for layer in graph:
        layer.params.pop("featmask", None)  # its tools take winograd everywhere
    with ExitStack() as stack:
        runs = Runs(files, feeds, Options(every=True), stack)
        net = runs.written(graph, "ncnn", runs.worker)
        worst, seconds = runs.agreements(net, runs.held, range(len(feeds)))[0], runs.net_times(net)
    ncnn = _texts(worst.decibels, math.nan, worst.top1, seconds, len(theirs))
    results = [quantize_net(files.param, files.bin, feeds, Options(every=every)) for every in (True, False)]
    return [name, *ncnn, *(text for result in results for text in _shown(result))]


def _shown(result: Quantized) -> tuple[str, ...]:
    alone = decibels(sum(row.noise or 0.0 for row in result.layers if row.is_int8))
    layers = sum(row.is_int8 for row in result.layers)
    return _texts(result.decibels, alone, result.top1, result.seconds, layers)


def _texts(
    found: float, alone: float, top1: float | None, seconds: tuple[float, float], layers: int
) -> tuple[str, ...]:
    share = "" if top1 is None else f"{top1:.3f}"
    return f"{found:.1f}", f"{alone:.1f}", share, f"{seconds[1] / seconds[0]:.2f}", str(layers)


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--fixtures", action="store_true")
    parser.add_argument("-k", dest="part", default="")
    options = parser.parse_args()
    each = ("dB", "sum", "top-1", "time", "layers")
    print("model", *(f"{which} {what}" for which in ("ncnn", "all", "faster") for what in each), sep="\t")
    with TemporaryDirectory() as folder:
        models = [(path.stem, path) for path in options.models]
        models += [(name, Path()) for name in _CNNS if options.fixtures]
        for name, path in models:
            if options.part not in name:
                continue
            try:
                source = path if path.suffix else save_refilled(name, Path(folder))
                print(*columns(name, source, options.data, Path(folder)), sep="\t", flush=True)
            except Error as error:
                print(name, str(error).splitlines()[0], sep="\t", flush=True)


if __name__ == "__main__":
    main()
