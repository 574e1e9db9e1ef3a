"""What `optimize` makes of pnnx's own nets: layers, largest difference, latency; one line of Markdown for each.

    python -m scripts.measure.pnnx FOLDER --pnnx PATH/TO/pnnx [--keep FOLDER] [--only TEXT] [--seconds S] [--no-verify]

FOLDER has the ONNX models; where sizes are dynamic, an .npz beside a model has arrays in_0, in_1, ... of shapes to use.
Latency is CPU time of one thread, both nets in turns, where `optimize` changes something; the last line sums up. With
--keep, models that pnnx has converted are not converted again. pnnx runs with its defaults (weights in fp16). The pip
package `pnnx` has the program in site-packages/pnnx/.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx

from onnx2ncnn_opt.api.apply_passes import Optimized, apply_passes
from onnx2ncnn_opt.errors import Error
from scripts.measure.latency import Latency, compare

_NOISE = 0.03  # of the ratio of two times

_NAMES = {1: "f32", 6: "i32", 7: "i64", 9: "i32"}


def input_shapes(model: Path) -> list[tuple[tuple[int, ...], str]]:
    """Shape and pnnx's name of the type of every input."""
    graph = onnx.load(model, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    infos = [info.type.tensor_type for info in graph.input if info.name not in constants]
    shapes = [tuple(dim.dim_value for dim in info.shape.dim) for info in infos]
    arrays = model.with_suffix(".npz")
    if arrays.exists():
        with np.load(arrays) as data:
            shapes = [data[f"in_{i}"].shape for i in range(len(infos))]
    return [(shape, _NAMES[info.elem_type]) for shape, info in zip(shapes, infos, strict=True)]


def convert(model: Path, pnnx: Path, folder: Path) -> tuple[Path, Path] | None:
    """pnnx's net for a model, made once; None where it makes none."""
    param, bin = folder / "m.ncnn.param", folder / "m.ncnn.bin"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "m.onnx").symlink_to(model.resolve())
        shapes = ",".join(f"[{','.join(map(str, shape))}]{dtype}" for shape, dtype in input_shapes(model))
        done = subprocess.run([pnnx, "m.onnx", f"inputshape={shapes}"], cwd=folder, capture_output=True, check=False)
        (folder / "done").write_text(str(done.returncode))
    return (param, bin) if param.exists() and bin.exists() else None


def measure(
    model: Path, param: Path, bin: Path, folder: Path, seconds: float, *, verify: bool
) -> tuple[str, Latency | None]:
    """One row of the table, and the latency in it."""
    try:
        names = [blob.name for blob in apply_passes(param, bin).graph.inputs]
        inputs = [shape for shape, _ in input_shapes(model)]
        shapes = {
            name: shape[1:] if len(shape) > 1 and shape[0] == 1 else shape
            for name, shape in zip(names, inputs, strict=True)
        }
        start = time.perf_counter()
        result = apply_passes(param, bin, shapes=shapes)
        taken = time.perf_counter() - start
        files = result.save(folder / "optimized")
        outputs = result.verify().outputs if verify else ()
    except (Error, ValueError) as error:
        return f"| {model.stem} | - | - | - | - | {_short(str(error))} |", None
    worst = f"{max(output.max_rel or 0.0 for output in outputs):.1e}" if outputs else "-"
    wrong = [f"{output.name}: {output.status}" for output in outputs if output.status != "ok"]
    is_timed = seconds > 0 and not wrong and (result.applied or result.exchanged)
    latency = compare((param, bin), (files.param, files.bin), shapes, seconds) if is_timed else None
    before, after = result.layers
    again = len(apply_passes(files.param, files.bin, shapes=shapes).applied)
    note = ", ".join([*wrong, *([f"second run: {again} rewrites"] if again else []), memory_note(result)])
    return f"| {model.stem} | {before} -> {after} | {worst} | {latency or '-'} | {taken:.2f} s | {note} |", latency


def memory_note(result: Optimized) -> str:
    """Peak memory of blobs before and after in MB."""
    (before, after) = (memory.peak / 1e6 for memory in result.memory)
    return "" if result.memory[0].unknown else f"{before:.1f} -> {after:.1f} MB"


def _short(text: str) -> str:
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 160 else f"{line[:160]}..."


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pnnx", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="keep pnnx's nets here, and use those that are here")
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--seconds", type=float, default=2.0, help="time of running each pair of nets; 0 for none")
    parser.add_argument("--no-verify", action="store_true", help="do not compare outputs")
    options = parser.parse_args()
    print(
        "| model | layers | relative difference | latency after / before | time | |\n|---|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary:
        nets = options.keep or Path(temporary)
        models = [model for model in sorted(options.folder.glob("*.onnx")) if options.only in model.stem]
        ratios: dict[str, float] = {}
        start = time.perf_counter()
        for number, model in enumerate(models, 1):
            print(f"{number}/{len(models)}, {time.perf_counter() - start:.0f} s: {model.stem}", file=sys.stderr)
            files = convert(model, options.pnnx.resolve(), nets / model.stem)
            if files is None:
                print(f"| {model.stem} | - | - | - | - | pnnx makes no net |", flush=True)
                continue
            row, latency = measure(model, *files, Path(temporary), options.seconds, verify=not options.no_verify)
            if latency is not None:
                ratios[model.stem] = min(latency.ratio, latency.median)
            print(row, flush=True)
    if ratios:
        slower = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio > 1 + _NOISE]
        mean = float(np.exp(np.mean(np.log(list(ratios.values())))))
        print(f"\n{len(ratios)} nets timed, {mean:.2f} of the time on the geometric mean; slower: {slower or 'none'}")


if __name__ == "__main__":
    main()
