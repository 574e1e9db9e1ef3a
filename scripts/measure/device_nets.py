"""Nets of the fixtures and of folders, with inputs and references, for scripts/measure/devices.py."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnx2ncnn_opt import passes
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import RunError, UnsupportedError, VerificationError
from onnx2ncnn_opt.inputs.draws import draw_inputs
from onnx2ncnn_opt.ir.attention import caches
from onnx2ncnn_opt.ir.graph import Blob, Graph
from onnx2ncnn_opt.param.files import write_net
from onnx2ncnn_opt.param.splits import list_layers
from onnx2ncnn_opt.precision.fp16_run import Estimator
from onnx2ncnn_opt.precision.mask_judge import errors_of, largest_error
from onnx2ncnn_opt.precision.masks import Precision, find_masks
from onnx2ncnn_opt.rewrite.prove_masks import prove_masks, put_masks
from onnx2ncnn_opt.runtime.base import Array, Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verdict.errors import DEFAULT, Tolerance
from onnx2ncnn_opt.verification.model_accuracy import tolerance_within
from onnx2ncnn_opt.verification.options import Verification
from scripts.measure.measured import ROOT
from testing import op_cases, pass_cases
from testing.exports import refilled
from testing.snippets import VARIANTS, kept

MODELS = ROOT / "fixtures" / "models"  # skeletons, whose weights are drawn
WORKER = NcnnWorker()  # on this machine, for all nets


@dataclass(frozen=True)
class Net:
    """A written net, its inputs, and the right outputs."""

    param: Path
    bin: Path
    feeds: Mapping[str, Feed]
    references: Mapping[Fetch, Array]
    graph: Graph
    masks: int
    precision: Precision | None
    tolerance: Tolerance = DEFAULT
    before: tuple[Path, Path] | None = None  # what it was made of, if that is the reference

    def key(self) -> str:
        """Return a key of everything that the outcome depends on, except ncnn."""
        digest = hashlib.sha256(self.param.read_bytes() + self.bin.read_bytes())
        for feed in self.feeds.values():
            digest.update(np.ascontiguousarray(feed.array).tobytes())
        return digest.hexdigest()[:16]

    def is_named(self) -> bool:
        """Return True if `convert` says that fp16 is not enough for the net."""
        return self.precision is not None and not self.precision.ok

    def rounding(self) -> float:
        """Return the error if every blob is fp16, in units of an output's largest value; NaN if one is not finite."""
        with Estimator(self.graph, by_blob(self.graph, self.feeds), worker=WORKER) as estimator:
            return largest_error(errors_of(estimator.run(rounded=True), estimator.run()))


def by_blob(graph: Graph, feeds: Mapping[str, Feed]) -> dict[Blob, Feed]:
    """Return the feeds by the graph's inputs, which have their names in the file."""
    names = list_layers(graph).names
    return {blob: feeds[names[blob]] for blob in graph.inputs if names[blob] in feeds}


# A suite's cases by name; each writes its net into a folder, or gives None if it is refused on purpose.
Cases = Iterator[tuple[str, Callable[[Path], Net | None]]]


def op_fixtures() -> Cases:
    """Yield fixtures/ops: each case at its first sizes."""
    for case in op_cases.load_cases():

        def write(folder: Path, case: op_cases.Case = case) -> Net | None:
            model = case.model()
            return of_model(model, folder, lambda: case.feeds(model, case.sizes[0]), partial(case.reference, model))

        yield str(case), write


def pass_fixtures() -> Cases:
    """Yield fixtures/passes: each net after all passes against itself before."""
    for path in sorted(pass_cases.FOLDER.glob("*.md")):
        for case in pass_cases.load(path) if path.stem != "README" else ():

            def write(folder: Path, case: pass_cases.Case = case) -> Net | None:
                before = case.net()
                write_net(before, folder / "before.param", folder / "before.bin")
                names = [blob.name for blob in before.outputs]
                runner = NcnnRunner(folder / "before.param", folder / "before.bin", exact=True, worker=WORKER)
                arrays = case.feeds(before)
                reference = runner.run(arrays, names)
                after = case.net()
                passes.run(after)
                feeds = {name: Feed(array) for name, array in arrays.items()}
                masks, precision = masked(after, feeds)
                param, bin = folder / "net.param", folder / "net.bin"
                write_net(after, param, bin)
                opaque = {blob.name for blob in caches(before) | caches(after)}
                references = {Fetch(name): reference[name] for name in names if name not in opaque}
                before_files = folder / "before.param", folder / "before.bin"
                return Net(param, bin, feeds, references, after, masks, precision, before=before_files)

            yield str(case), write


def masked(graph: Graph, feeds: Mapping[str, Feed]) -> tuple[int, Precision]:
    """Put masks on a net as `optimize` does; return their number, and the net's precision with them."""
    proved = prove_masks(graph)
    put_masks(graph, ((layer, mask.features) for layer, mask in proved.items()))
    with Estimator(graph, by_blob(graph, feeds), worker=WORKER) as estimator:
        found, precision = find_masks([estimator])
    put_masks(graph, ((layer, mask.features) for layer, mask in found.items()))
    return len(proved) + len(found), precision


def snippets() -> Cases:
    """Yield fixtures/snippets."""
    for variant in VARIANTS:
        for name, model in kept(variant):

            def write(folder: Path, model: onnx.ModelProto = model) -> Net | None:
                return of_model(model, folder)

            yield f"{variant} {name}", write


def models(folder: Path, *, masks: bool = True) -> Cases:
    """Yield the models of a folder, the small ones first; without `masks` their nets have no feature masks."""
    for path in sorted(folder.glob("*.onnx"), key=lambda path: path.stat().st_size):

        def write(target: Path, path: Path = path) -> Net | None:
            given = path.with_suffix(".npz")

            def feeds() -> Mapping[str, Array]:
                names = OrtRunner(path).input_names()
                with np.load(given, allow_pickle=False) as arrays:
                    return {name: arrays[f"in_{i}"] for i, name in enumerate(names)}

            if path.parent == MODELS:
                return of_model(refilled(path), target, masks=masks)
            return of_model(path, target, feeds if given.exists() else None, masks=masks)

        yield path.stem, write


def of_model(
    model: Path | onnx.ModelProto,
    folder: Path,
    given: Callable[[], Mapping[str, Array]] | None = None,
    computed: Callable[[Mapping[str, Array]], Mapping[str, Any]] | None = None,
    *,
    masks: bool = True,
) -> Net | None:
    """Return a model's net as `convert` writes it, with given or drawn inputs; a fixture's are as for --inputs.

    The reference is ONNX Runtime up to the cut before a tail, or what is computed from the inputs.
    """
    try:
        conversion = lower(model, masks=masks, tail="auto" if computed is None else "never")
    except UnsupportedError:
        return None
    feeds = draw_inputs(conversion.model) if given is None else given()
    with suppress(RunError, VerificationError):  # as `convert` does
        conversion = conversion.estimated(
            verification=Verification(feeds=None if isinstance(model, Path) else feeds), masks=masks, worker=WORKER
        )
    if computed is None:
        source = model if isinstance(model, Path) else model.SerializeToString()
        computed = OrtRunner(source, outputs=conversion.cut).run
    reference = computed(feeds)
    files, manifest = conversion.save(folder / "net"), conversion.manifest()
    return Net(
        files.param,
        files.bin,
        {entry.blob: Feed(np.asarray(feeds[entry.name]), entry.batch_axis) for entry in manifest.inputs},
        {Fetch(e.blob, e.batch_axis): np.asarray(reference[e.name]) for e in manifest.outputs if not e.cache},
        conversion.graph,
        len(conversion.masks),
        conversion.precision,
        tolerance_within(conversion.model),
    )
