"""Convert trained models of public repositories, and compare the estimate for fp16 with devices.

    OPENBLAS_NUM_THREADS=1 python -m scripts.measure.trained FOLDER [-k PART] [--on qemu-aarch64 --on vulkan]
        [--drawn] [--write]

fixtures/trained.tsv names the models: repository, path, commit and SHA-256 of the file. FOLDER gets those that it does
not have, as NAME.onnx, from raw.githubusercontent.com, and the photographs of fixtures/photographs.tsv. Each model is
converted, and gets its masks, as by the plain command. Like this command, use one thread: the last bits of sums may
decide between masks. Then the net runs on the devices in fp16, on inputs that the conversion has not seen: photographs
in place of drawn pictures, other inputs as the conversion draws them. Nets whose outputs have few numbers run on four
inputs, because errors of few numbers depend on chance, others on one. The reference is ONNX Runtime. Errors are in
units of an output's largest value; both are averaged (root mean square) over the inputs, as in the estimate. A net has
the largest error of its outputs; `within` counts those that are off by 2e-2 at most. With --drawn no net gets
photographs. With --write the table goes to fixtures/measured.
"""

import argparse
import hashlib
import math
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.inputs.draws import DATA, Data, Draw, draw_inputs, states
from onnx2ncnn_opt.inputs.pictures import picture_axes
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.precision.masks import BUDGET, open_like_data
from onnx2ncnn_opt.runtime.base import Array, Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.verification.model_runs import first_sizes
from onnx2ncnn_opt.verification.options import Verification
from scripts.measure.measured import ROOT, table

MODELS, PHOTOGRAPHS = ROOT / "fixtures" / "trained.tsv", ROOT / "fixtures" / "photographs.tsv"
ON = ("qemu-aarch64", "vulkan")
_SEED, _INPUTS, _FEW_NUMBERS = 7, 4, 64  # of the inputs on devices; so many for outputs of so few numbers


def fetched(file: Path, repository: str, path: str, commit: str, digest: str) -> Path:
    """Return a file of a repository, downloaded if it does not exist."""
    if not file.exists():
        url = f"https://raw.githubusercontent.com/{repository}/{commit}/{urllib.request.pathname2url(path)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            file.write_bytes(answer.read())
    if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
        raise SystemExit(f"{file} is not the file of {repository} at {commit}")
    return file


def photographs(folder: Path) -> list[Image.Image]:
    """Return the photographs of fixtures/photographs.tsv."""
    lines = (line.split("\t") for line in PHOTOGRAPHS.read_text().splitlines()[1:])
    return [Image.open(fetched(folder / name, *source)).convert("RGB") for name, *source in lines]


def with_photograph(
    arrays: dict[str, Array], data: Data, photograph: Image.Image, others: Collection[str]
) -> dict[str, Array]:
    """Return inputs with a photograph, cropped and scaled, in place of each picture of floats but for `others`."""
    low, high = data.pixels
    changed = dict(arrays)
    for name, array in arrays.items():
        axes = picture_axes(array.shape)
        if axes is not None and array.dtype.kind == "f" and name not in others:
            channels, height, width = (array.shape[axis] for axis in axes)
            image = photograph.convert({1: "L", 3: "RGB"}[channels])
            pixels = np.asarray(ImageOps.fit(image, (width, height))).reshape(height, width, channels) / 255
            pixels = low + (high - low) * (pixels if axes[0] == -1 else np.moveaxis(pixels, -1, 0))
            changed[name] = np.broadcast_to(pixels, array.shape).astype(array.dtype)
    return changed


def data_of(conversion: Conversion, path: Path, pictures: Sequence[Image.Image] = ()) -> Iterator[dict[str, Array]]:
    """Yield inputs of the scale that the conversion chose, and of other seeds, with `pictures` if there are any."""
    first = Draw(_SEED, plain=True, data=DATA[0])
    sizes = first_sizes(path, conversion.model, conversion.manifest(), first, outputs=conversion.cut)

    def feeds_of(draw: Draw) -> dict[Blob, Feed]:
        arrays = draw_inputs(conversion.model, sizes, draw=draw)
        return {port.blob: Feed(arrays[port.name], port.batch_axis) for port in conversion.inputs}

    with open_like_data(conversion.graph, feeds_of, Verification().seed) as (draw, estimator):
        numbers = sum(array.size for array in estimator.run().outputs.values())
    assert draw.data is not None
    for number in range(_INPUTS if numbers <= _FEW_NUMBERS else 1):
        drawn = draw_inputs(conversion.model, sizes, draw=draw._replace(seed=_SEED + number))
        yield with_photograph(drawn, draw.data, pictures[number], states(conversion.model)) if pictures else drawn


def errors_of_outputs(conversion: Conversion, inputs: list[dict[str, Array]], worker: NcnnWorker, on: str) -> Array:
    """Return the errors of the outputs on a device in fp16; NaN if one is not finite, or ncnn fails."""
    squares: dict[str, Array] = {}
    for feeds in inputs:
        how = Verification(feeds=feeds, on=on, modes=["fp16"], rtol=BUDGET, atol=0.0, timeout=120.0)
        for output in conversion.verify(how, worker=worker).outputs:
            error, ratio = output.max_abs or 0.0, output.max_rel or 0.0
            if output.status not in ("ok", "mismatch", "unproven"):
                error = math.nan
            square = np.square([error, error / ratio if ratio else 0.0])
            squares[output.name] = squares.get(output.name, 0.0) + square
    return np.array([math.sqrt(error / (size or 1.0)) for error, size in squares.values()])


def fp16_columns(on: Sequence[str]) -> tuple[str, ...]:
    """Return the headings of `fp16_cells`."""
    return ("masks", "price", "estimate", *on, "outputs", *(f"{each} within" for each in on), "said")


def fp16_cells(file: Path, workers: Mapping[str, NcnnWorker], pictures: Sequence[Image.Image] = ()) -> list[object]:
    """Convert a model and run it on the devices; return the cells of its line."""
    try:
        conversion = lower(file).estimated()
        inputs = list(data_of(conversion, file, pictures))
        errors = [errors_of_outputs(conversion, inputs, worker, on) for on, worker in workers.items()]
    except Error as error:
        return [*[None] * (4 + 2 * len(workers)), str(error).splitlines()[0]]
    precision = conversion.precision
    assert precision is not None
    said = str(precision).partition("; ")[2] if precision.may_exceed else ""
    worst = [f"{each:.1e}" for each in (precision.error, *(each.max() for each in errors))]
    within = [int((each <= BUDGET).sum()) for each in errors]
    return [len(conversion.masks), f"{precision.price:.0%}", *worst, errors[0].size, *within, said]


def main() -> None:
    """Convert and run the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", dest="part", default="", help="only models whose name has this part")
    parser.add_argument("--on", action="append", choices=ON, help="the devices, by default both")
    parser.add_argument("--drawn", action="store_true", help="give no net photographs")
    parser.add_argument("--write", action="store_true", help="write the table")
    options = parser.parse_args()
    on = options.on or list(ON)
    pictures = [] if options.drawn else photographs(options.folder)
    columns = ("model", "repository", *fp16_columns(on))
    with ExitStack() as stack:
        workers = {each: stack.enter_context(NcnnWorker(find_target(each))) for each in on}
        add = stack.enter_context(table("trained", columns, write=options.write))
        for line in MODELS.read_text().splitlines()[1:]:
            name, repository, *source = line.split("\t")
            if options.part in name:
                file = fetched(options.folder / f"{name}.onnx", repository, *source)
                add(name, repository, *fp16_cells(file, workers, pictures))


if __name__ == "__main__":
    main()
