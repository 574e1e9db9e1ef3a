"""Hold the estimate of fp16 against devices: MODELS are .onnx files, with inputs in_0, in_1 in NAME.npz, or drawn.

Each model is converted without masks and with them, and run in fp16 on every --on. A line for each goes to --out (in
which models that are there already are not run again): the largest error of an output in units of its largest value in
fp32, estimated and on each device; NaN where an output is not finite.

    python -m scripts.measure.estimate --on qemu-aarch64 --on vulkan --out estimate.tsv FOLDER/*.onnx
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.onnx.read.load import load_model
from onnx2ncnn_opt.runtime.base import Array, Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.verification.estimate import Estimator, Walk
from onnx2ncnn_opt.verification.masks import error_of
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.runs import any_feeds


def inputs_of(model: Path) -> dict[str, Array] | None:
    """The arrays beside a model, by its inputs' names; None where there are none."""
    path = model.with_suffix(".npz")
    if not path.is_file():
        return None
    with np.load(path) as arrays:
        given = [arrays[f"in_{i}"] for i in range(len(arrays.files)) if f"in_{i}" in arrays.files]
    return dict(zip((info.name for info in load_model(model).inputs), given, strict=True))


def errors(
    conversion: Conversion, feeds: Mapping[Blob, Feed], reference: Walk, workers: Mapping[str, NcnnWorker]
) -> dict[str, float]:
    """The error in fp16 on each device."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = conversion.save(Path(folder) / "net")
        manifest = conversion.manifest()
        names = {port.blob: entry.blob for port, entry in zip(conversion.inputs, manifest.inputs, strict=True)}
        for on, worker in workers.items():
            runner = NcnnRunner(files.param, files.bin, mode="fp16", worker=worker)
            fetches = [Fetch(entry.blob, entry.batch_axis) for entry in manifest.outputs]
            try:
                results = runner.run({names[blob]: feed for blob, feed in feeds.items()}, fetches)
            except Error:
                found[on] = math.inf
                continue
            walk = Walk()
            for port, entry in zip(conversion.outputs, manifest.outputs, strict=True):
                walk.outputs[port.blob] = results[entry.blob].reshape(reference.outputs[port.blob].shape)
            found[on] = error_of(walk, reference)
    return found


def measured(model: Path, workers: Mapping[str, NcnnWorker]) -> list[str]:
    """The cells of a model: estimated and on each device, without masks, then with them, and how many these are."""
    given = inputs_of(model)
    cells, last = list[str](), list[str]()
    for masks in (False, True):
        plain = lower(model, masks=masks)
        conversion = plain.estimated(verification=Verification(feeds=given), masks=masks)
        assert conversion.precision is not None
        arrays = given or any_feeds(model, conversion.model, conversion.manifest())
        feeds = {port.blob: Feed(arrays[port.name], port.batch_axis) for port in conversion.inputs}
        with Estimator(conversion.graph, feeds) as estimator:
            reference = estimator.run()
        found = errors(conversion, feeds, reference, workers)
        cells += [f"{error:.1e}" for error in (conversion.precision.error, *found.values())]
        last = [str(len(conversion.masks)), f"{conversion.precision.allowed:.0e}"]
    return [*cells, *last]


def main() -> None:
    """Measure all models, and write a line for each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODELS")
    parser.add_argument("--on", action="append", default=[], metavar="TARGET")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    done = {line.split("\t")[0] for line in options.out.read_text().splitlines()} if options.out.exists() else set()
    workers = {on: NcnnWorker(find_target(on)) for on in options.on}
    with options.out.open("a") as out:
        if not done:
            heads = [f"{kind}{name}" for kind in ("", "masks: ") for name in ("estimate", *workers)]
            out.write("\t".join(("model", *heads, "masks", "allowed")) + "\n")
        for model in options.models:
            if model.stem in done:
                continue
            try:
                cells = measured(model, workers)
            except Error as error:
                cells = [str(error).split("\n")[0]]
            out.write("\t".join((model.stem, *cells)) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
