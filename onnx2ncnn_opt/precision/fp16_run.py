"""An estimate of a net's results in 16 bits on a device that is not at hand.

ncnn runs the net here in 32 bits, blob by blob. Each blob is rounded before the next is computed from it, so values too
large for fp16 become infinite as on the device. The errors of a layer's own arithmetic in fp16 (winograd, sums) are
measured on a sample of each layer, and added as random errors of that size.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from types import MappingProxyType

import numpy as np

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.ir.attention import caches
from onnx2ncnn_opt.ir.detections import after_boxes, before_boxes, before_indexes, sorts
from onnx2ncnn_opt.ir.dim import Dim
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.onnx.read.given import solved
from onnx2ncnn_opt.param.binary import write_weights
from onnx2ncnn_opt.param.files import NetFiles, write_param
from onnx2ncnn_opt.precision.half_sums import Inner, inner_arithmetic
from onnx2ncnn_opt.rewrite.integers import index_blobs
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES
from onnx2ncnn_opt.runtime.base import Array, Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import BlobStats, NcnnRunner, NcnnWorker, WalkStep
from onnx2ncnn_opt.system import temporary_folder

# Layers that accumulate in fp16, whose sums are sampled.
SAMPLED = frozenset(
    {"Convolution", "Convolution1D", "ConvolutionDepthWise", "Deconvolution", "Gemm", "InnerProduct", "MatMul"}
    | {"Reduction", "SDPA", "Softmax"}
)
_SAMPLE = 2**11  # numbers of each blob, to see how errors grow from layer to layer
# Each layer is run and asked for on its own, several times: a net of 100,000 would take minutes.
_MOST_LAYERS = 2**14
# The largest output of a trained layer in units of its largest bias, as powers of 2: of the first, and of all.
_BIASES, _MOST_BIASES = ("bias_data", "C_data"), 12
_FIRST_RATIO, _RATIO = 3.0, 1.5
_EXACT = Inner("")


@dataclass(frozen=True)
class Walk:
    """One run: the blobs of `Estimator.compared`, and the `BlobStats` of each blob."""

    outputs: dict[Blob, Array] = field(default_factory=dict)
    largest: dict[Blob, float] = field(default_factory=dict)
    special: dict[Blob, int] = field(default_factory=dict)
    samples: dict[Blob, Array] = field(default_factory=dict)  # some numbers of each blob, before its own errors, ...
    errors: dict[Blob, Sequence[float]] = field(default_factory=dict)  # ... which are these (`BlobStats.errors`)
    inner: dict[Layer, tuple[Inner, ...]] = field(default_factory=dict)  # errors in fp16, if the run is in 32 bits

    def largest_of(self, blobs: Iterable[Blob]) -> float:
        """Return the largest finite number of some blobs."""
        return max((self.largest.get(blob, 0.0) for blob in blobs), default=0.0)


@dataclass(eq=False)
class Estimator:
    """Runs a net in 32 and in 16 bits, with the masks that its layers have at each run; use as a context manager.

    `compared` are the outputs, and their names in the written net; in place of chosen boxes, whose number is not
    stable, are the blobs that they are chosen by; `choices` are blobs of which it looks for the largest number.
    """

    graph: Graph
    feeds: Mapping[Blob, Feed]
    timeout: float = 300.0
    worker: NcnnWorker | None = None  # a process to use again, instead of one of its own
    bin: Path | None = None  # the graph's weights, if they are written already
    # The rows of sorts in 32 bits, with which all runs go on: 16 bits may exchange rows.
    _rows: Mapping[str, Feed] | None = field(default=None, init=False)

    def __enter__(self) -> "Estimator":
        if len(self.graph) > _MOST_LAYERS:
            raise RunError(f"fp16 is estimated for nets of up to {_MOST_LAYERS:,} layers, not {len(self.graph):,}")
        self._folder = temporary_folder()
        self._worker = self.worker or NcnnWorker()
        files = NetFiles.at(Path(self._folder.name) / "net")
        if self.bin is None:
            with files.bin.open("wb") as stream:
                write_weights(self.graph, stream)
        listing = write_param(self.graph, files.param)
        bin = self.bin or files.bin
        self._runner = NcnnRunner(files.param, bin, worker=self._worker, timeout=self.timeout, threads=None)
        self.names = listing.tops
        self._sorts = sorts(self.graph)
        self._indexes = index_blobs(self.graph)
        self._opaque = caches(self.graph) | after_boxes(self.graph, but=self._sorts)
        public = [blob for blob in self.graph.outputs if not blob.is_input and blob not in self._opaque]
        names = {**listing.inner_names, **listing.names}
        self.choices = {blob for blob in before_indexes(self.graph) if not blob.is_input and blob not in self._opaque}
        self.compared = {
            blob: names[blob] for blob in (*before_boxes(self.graph, but=self._sorts), *self.choices, *public)
        }
        return self

    def __exit__(self, *_: object) -> None:
        if self.worker is None:
            self._worker.close()
        self._folder.cleanup()

    def on(self, feeds: Mapping[Blob, Feed]) -> "Estimator":
        """Return the same net on other inputs, while this one is open."""
        other = copy(self)
        other.feeds, other._rows = feeds, None
        return other

    def fetch(self, blob: Blob) -> Fetch:
        """Return a blob of `compared` as the written net has it, with a batch as in `feeds`."""
        return Fetch(self.compared[blob], self._batch)

    @property
    def _batch(self) -> int | None:
        """The axis of a batch in results."""
        batches = [array.shape[axis] for array, axis in self.feeds.values() if axis is not None]
        return 0 if max(batches, default=1) > 1 else None

    def sizes(self) -> dict[str, Dim]:
        """Return the dynamic sizes that the inputs have."""
        mats = [(blob, *feed.mat) for blob, feed in self.feeds.items()]
        dims = [pair for blob, shape, _ in mats for pair in zip(blob.shape or (), shape, strict=False)]
        return solved([*dims, *((blob.batch, batch) for blob, _, batch in mats)])

    def run(
        self,
        noise: Mapping[Layer, Inner] = MappingProxyType({}),
        *,
        rounded: bool = False,
        sampled: bool = False,
        seed: int = 0,
    ) -> Walk:
        """Run the net, in fp16 if `rounded`: with every blob rounded, except by masks.

        With `noise`, arithmetic in fp16 puts these errors on the outputs of layers, for a seed. A `sampled` run
        computes `Walk.inner`.
        """
        walk, waiting = Walk(), dict[Blob, Array]()
        readers = {layer for layer in self.graph if layer.type in SAMPLED} if sampled else set[Layer]()
        left = {blob: sum(user in readers for user in blob.users) for blob in self.names}
        steps = self._steps(noise, readers, rounded=rounded)
        names = {step.blob for step in steps}
        # Outputs behind Splits.
        ends = {WalkStep(name, send=True): blob for blob, name in self.compared.items() if name not in names}

        def visit(step: WalkStep, stats: BlobStats) -> None:
            blob = ends.get(step) or steps[step]
            array = stats.array if step.send else None
            if array is not None and self.compared.get(blob) == step.blob:
                walk.outputs[blob] = array
            if step in ends:
                return
            walk.largest[blob], walk.special[blob] = stats.largest, stats.special
            if stats.array is not None:
                every = 1 if array is None else array.size // step.sample | 1
                walk.samples[blob], walk.errors[blob] = stats.array.reshape(-1)[::every].copy(), stats.errors
            if array is None or not left[blob]:
                return
            waiting[blob] = array[0] if stats.is_batch else array
            for layer in blob.users:
                if layer in readers and all(each in waiting for each in layer.inputs):
                    walk.inner[layer] = inner_arithmetic(layer, [waiting[each] for each in layer.inputs])
                    for each in layer.inputs:
                        left[each] -= 1
                        if not left[each]:
                            del waiting[each]

        self._runner.walk(self._fed(), [*steps, *ends], visit, seed)
        return walk

    def _fed(self) -> dict[str, Feed]:
        fed = {self.names[blob]: feed for blob, feed in self.feeds.items()}
        if self._rows is None:
            blobs = [self.names[layer.output] for layer in self._sorts]
            found = self._runner.run(fed, [Fetch(name, self._batch) for name in blobs]) if blobs else {}
            self._rows = {name: Feed(array, self._batch) for name, array in found.items()}
        return {**fed, **self._rows}

    def largest(self, blobs: Collection[Blob]) -> dict[Blob, float]:
        """Return the largest finite numbers of some blobs in fp32; the net is computed up to the last of them."""
        found: dict[Blob, float] = {}
        steps = {WalkStep(self.names[blob]): blob for _, blob in self._known() if blob in blobs}
        self._runner.walk(self._fed(), list(steps), lambda step, stats: found.update({steps[step]: stats.largest}))
        return found

    def _steps(
        self, noise: Mapping[Layer, Inner], readers: Collection[Layer], *, rounded: bool
    ) -> dict[WalkStep, Blob]:
        """Return the blobs of a run, in the order of the file; `readers` need theirs sent."""
        steps: dict[WalkStep, Blob] = {}
        for layer, blob in self._known():
            is_sent = self.compared.get(blob) == self.names[blob] or any(user in readers for user in blob.users)
            own, is_rounded = noise.get(layer, _EXACT), rounded and blob not in self._indexes and not _stays(blob)
            steps[WalkStep(self.names[blob], is_rounded, own.spread, own.relative, is_sent, _SAMPLE)] = blob
        return steps

    def _known(self) -> Iterator[tuple[Layer, Blob]]:
        """Yield the layers and their blobs of which ncnn has one array, in the order of the file."""
        for layer in self.graph:
            for blob in layer.outputs:
                is_unfed = layer.type == "Input" and blob not in self.feeds
                if blob in self.names and blob not in self._opaque and not is_unfed:
                    yield layer, blob


def most_ordinary(scales: Sequence[Estimator]) -> int:
    """Return which of the same inputs at several scales gives the numbers of a net the most ordinary sizes.

    A trained layer has outputs a few times as large as its bias: pixels of 0..255 for a net that wants 0..1 make them
    hundreds of times as large, and the other way round hardly larger. The first of such layers counts as much as the
    median of the first few.
    """
    first = scales[0]
    if all(_equal(scale.feeds, first.feeds) for scale in scales):
        return 0
    biased = ((layer, name) for layer in first.graph for name in _BIASES if name in layer.weights)
    biases = {
        layer.outputs[0]: float(np.abs(np.asarray(layer.weights[name], np.float32)).max(initial=0.0))
        for layer, name in islice(biased, _MOST_BIASES)
    }

    def oddity(scale: Estimator) -> float:
        sizes = scale.largest(biases)
        ratios = [math.log2(size / biases[blob]) for blob, size in sizes.items() if size > 0 and biases[blob] > 0]
        return abs(ratios[0] - _FIRST_RATIO) + abs(median(ratios) - _RATIO) if ratios else 0.0

    oddities = [oddity(scale) for scale in scales]
    return oddities.index(min(oddities))


def _equal(feeds: Mapping[Blob, Feed], others: Mapping[Blob, Feed]) -> bool:
    return all(np.array_equal(feed.array, others[blob].array) for blob, feed in feeds.items())


def _stays(blob: Blob) -> bool:
    """Return True if a blob keeps 32 bits: its producer writes them, and all consumers want them."""
    maker = blob.producer
    deciding = (*blob.users, *([maker] if maker is not None and maker.type not in SOURCES else ()))
    return all(layer["featmask"] & Feature.NO_FP16_STORAGE for layer in deciding)
