"""What `optimize` makes of pnnx's own nets: layers, largest difference, latency; one line of Markdown for each.

    python scripts/measure_pnnx.py FOLDER --pnnx PATH/TO/pnnx [--keep FOLDER] [--only TEXT] [--runs N]

FOLDER has the ONNX models; where sizes are open, an .npz beside a model has arrays in_0, in_1, ... of shapes to use.
pnnx runs with its defaults (weights in fp16). The pip package `pnnx` has the program in site-packages/pnnx/.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx

from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.optimize import Optimized, optimize

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


def measure(model: Path, param: Path, bin: Path, folder: Path, runs: int) -> str:
    """One row of the table."""
    try:
        names = [blob.name for blob in optimize(param, bin).graph.inputs]
        inputs = [shape for shape, _ in input_shapes(model)]
        shapes = {
            name: shape[1:] if len(shape) > 1 and shape[0] == 1 else shape
            for name, shape in zip(names, inputs, strict=True)
        }
        start = time.perf_counter()
        result = optimize(param, bin, shapes=shapes)
        seconds = time.perf_counter() - start
        files = result.save(folder / "optimized")
        report = result.verify()
    except (Error, ValueError) as error:
        return f"| {model.stem} | - | - | - | - | {_short(str(error))} |"
    worst = max((output.max_rel or 0.0 for output in report.outputs), default=0.0)
    wrong = [f"{output.name}: {output.status}" for output in report.outputs if output.status != "ok"]
    ratio = latency_ratio((param, bin), (files.param, files.bin), shapes, runs) if report.ok and runs else "-"
    before, after = result.layers
    again = len(optimize(files.param, files.bin, shapes=shapes).applied)
    note = ", ".join([*wrong, *([f"second run: {again} rewrites"] if again else []), memory_note(result)])
    return f"| {model.stem} | {before} -> {after} | {worst:.1e} | {ratio} | {seconds:.2f} s | {note} |"


def memory_note(result: Optimized) -> str:
    """Peak memory of blobs before and after in MB."""
    (before, after) = (memory.peak / 1e6 for memory in result.memory)
    return "" if result.memory[0].unknown else f"{before:.1f} -> {after:.1f} MB"


def latency_ratio(
    before: tuple[Path, Path], after: tuple[Path, Path], shapes: dict[str, tuple[int, ...]], runs: int
) -> str:
    """Least time after / before, of interleaved runs in a process of their own."""
    request = json.dumps([[*map(str, before)], [*map(str, after)], shapes, runs])
    done = subprocess.run([sys.executable, __file__, "--time", request], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "-"


def time_nets(request: str) -> None:
    """Print the ratio for two nets; runs in the process of `latency_ratio`."""
    import ncnn  # type: ignore[import-untyped]

    *files, shapes, runs = json.loads(request)
    nets = []
    for param, bin in files:
        net = ncnn.Net()
        net.opt.num_threads = 1
        assert net.load_param(param) == net.load_model(bin) == 0
        nets.append(net)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    indexes = {name: np.zeros(shape, np.int32) for name, shape in shapes.items() if len(shape) == 1}
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for net, seconds in zip(nets, times, strict=True):
            extractor = net.create_extractor()
            for name, array in {**feeds, **indexes}.items():
                extractor.input(name, ncnn.Mat(array).clone())
            start = time.perf_counter()
            for name in net.output_names():
                extractor.extract(name)
            seconds.append(time.perf_counter() - start)
    first, second = (min(seconds) for seconds in times)
    print(f"{second / first:.2f} of {first * 1e3:.1f} ms")


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
    parser.add_argument("--runs", type=int, default=15, help="interleaved runs to time; 0 for none")
    options = parser.parse_args()
    print(
        "| model | layers | relative difference | latency after / before | time | |\n|---|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary:
        nets = options.keep or Path(temporary)
        for model in sorted(options.folder.glob("*.onnx")):
            if options.only not in model.stem:
                continue
            files = convert(model, options.pnnx.resolve(), nets / model.stem)
            row = (
                measure(model, *files, Path(temporary), options.runs)
                if files
                else f"| {model.stem} | - | - | - | - | pnnx makes no net |"
            )
            print(row, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--time"]:
        time_nets(sys.argv[2])
    else:
        main()
