"""A wrong net, its model, and a new conversion of the model, with the values of their blobs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.api.lower import Files, reconverted
from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.param.names import clean_name
from onnx2ncnn_opt.param.storage import ROUNDING
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import Slot, model_feeds
from onnx2ncnn_opt.verdict.blobs import Match, Reference
from onnx2ncnn_opt.verdict.errors import Tolerance, compare, in_mode, with_rounding
from onnx2ncnn_opt.verdict.rules import UNKNOWN_ROUNDING
from onnx2ncnn_opt.verification.inner_values import BlobRun, extract_all, likeliest_run, model_values
from onnx2ncnn_opt.verification.model_accuracy import tolerance_within
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.outputs import input_slots
from onnx2ncnn_opt.verification.report import VerifyReport

Results = Mapping[str, Array | Failure]


@dataclass(frozen=True)
class Fresh:
    """A new conversion of the model: its files, their graph, and the ONNX nodes of its layers."""

    files: Files
    graph: Graph
    manifest: Manifest
    origins: Mapping[str, tuple[str, ...]]


def convert_anew(model: Path | bytes, manifest: Manifest, folder: Path) -> Fresh | None:
    """Convert the model with the passes in the manifest; return None if the net would differ."""
    conversion = reconverted(model, manifest)
    if conversion is None:
        return None
    files = conversion.save(folder / "fresh")
    origins = {clean_name(layer.name): layer.origin for layer in conversion.graph}
    graph = read_net(files.param, files.bin, entry_points.layer_types()).graph
    return Fresh(files, graph, conversion.manifest(), origins)


@dataclass
class WrongNet:
    """A wrong net, with the inputs and the mode in which verification failed.

    `worker` runs it on the device of verification, `local` runs a new conversion on this machine's CPU.
    """

    model: Path | bytes
    loaded: LoadedModel
    param: Path
    bin: Path
    graph: Graph
    manifest: Manifest | None
    report: VerifyReport
    verification: Verification
    worker: NcnnWorker
    local: NcnnWorker

    def __post_init__(self) -> None:
        assert self.report.wrong is not None
        self.mode, self.feeds = self.report.wrong
        wrong = [o for o in self.report.outputs if o.mode == self.mode and o.status not in ("ok", "unproven")]
        self.wrong = {output.blob: output.message for output in wrong if output.blob}
        self.names = {output.blob: output.name for output in self.report.outputs if output.blob}
        # In 16 bits, blobs may have larger errors than outputs. If outputs are NaN, only special values count.
        self.is_special = self.mode != "fp32" and all(output.status == "nan" for output in wrong)
        # If ncnn crashes on the whole net, every output counts as wrong.
        if any(output.blob is None and output.status != "missing" for output in wrong):
            self.wrong = {blob.name: "" for blob in self.graph.outputs} | self.wrong

    def run(self, verdict: Callable[[str, Array | Failure], Match], *, exact: bool) -> BlobRun[Sequence[Slot]] | None:
        """Feed the net in all ways; return the run with the most right blobs, None if ncnn refuses the net."""
        net, timeout = (self.param, self.bin), self.verification.timeout
        runner = NcnnRunner(*net, worker=self.worker, mode=self.mode, exact=exact, timeout=timeout, threads=None)
        try:
            ways = input_slots(self.manifest, self.feeds, runner.input_names())
            fed = ((way, model_feeds(way, self.feeds)) for way in ways)
            return likeliest_run(runner, self.graph, fed, verdict)
        except RunError:
            return None

    def fresh_blobs(self, fresh: Fresh, *, exact: bool) -> Results | None:
        """Return all blobs of the new conversion; None if it differs from the model, too."""
        net, timeout = (fresh.files.param, fresh.files.bin), self.verification.timeout
        runner = NcnnRunner(*net, worker=self.local, exact=exact, timeout=timeout, threads=None)
        way = input_slots(fresh.manifest, self.feeds, runner.input_names())[0]
        results = extract_all(runner, fresh.graph, model_feeds(way, self.feeds))
        bound, outputs = self.loaded.values, self.loaded.cut
        expected = OrtRunner(self.model, values=bound, outputs=outputs, timeout=timeout).run_any(self.feeds)
        for entry in fresh.manifest.read:
            result, array = results.get(entry.blob), expected[entry.name]
            if not isinstance(result, np.ndarray) or result.size != array.size:
                return None
            if entry.batch_axis:
                array = np.moveaxis(array, entry.batch_axis, 0)
            if not compare(result.reshape(array.shape), array, tolerance_within(self.loaded)).ok:
                return None
        return results

    @cached_property
    def reference(self) -> Reference:
        """ONNX Runtime's value of every node of the model's graph, and its inputs."""
        values = model_values(self.model, self.feeds, self.loaded.values, self.verification.timeout)
        return Reference(values, self.names)

    def tolerance(self, *, exact: bool) -> Tolerance:
        """Return the tolerance for a blob against the model's value; it is tighter for `exact` kernels."""
        usual = tolerance_within(self.loaded)
        tighter = replace(usual, relative=min(usual.relative, UNKNOWN_ROUNDING), slices=False) if exact else usual
        return self.in_mode(tighter)

    def in_mode(self, tolerance: Tolerance) -> Tolerance:
        """Widen a tolerance for the mode, and for weights in 16 or 8 bits."""
        used = [{w.encoding for _, w in layer.weights.stored_items()} for layer in self.graph if layer.weights]
        for encoding in (Encoding.INT8, Encoding.BF16, Encoding.FP16):
            if count := sum(encoding in encodings for encodings in used):
                tolerance = with_rounding(ROUNDING.get(encoding, 0.5 / 127), count, tolerance)
                break
        return in_mode(self.mode, tolerance)


def as_integers(array: Array) -> Array:
    """View a float32 array as int32 if its bits are integers: as floats, these are subnormal, zero or NaN."""
    if array.dtype == np.float32 and array.any() and (~(np.abs(array) >= np.finfo(np.float32).tiny)).all():
        return array.view(np.int32)
    return array
