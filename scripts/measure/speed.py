"""How fast nets are: ours, an earlier version's, pnnx's as they are and optimised, and ONNX Runtime's; in Markdown.

    python -m scripts.measure.speed FOLDER [--pnnx PATH/TO/pnnx] [--keep FOLDER] [--before CHECKOUT] [--only TEXT]
                                    [--seconds S]

FOLDER has the ONNX models (speed_nets.py makes some); see measure_pnnx.py for dynamic sizes and --keep. --before is
another checkout of this repository. Times are milliseconds of CPU time on one thread, the median; every net is loaded
twice, and the faster of the two counts, for where its memory lies makes a difference. All take turns in random order,
so that what else the machine does slows all alike. Subnormal numbers are flushed: random weights make them, trained
ones do not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from onnx2ncnn_opt.api.optimize import optimize
from onnx2ncnn_opt.errors import Error
from scripts.measure.pnnx import convert as convert_with_pnnx
from scripts.measure.pnnx import input_shapes

_COLUMNS = ("ours", "before", "pnnx", "pnnx optimized", "ONNX Runtime")
_LEAST_TURNS = 3
_DTYPES = {"f32": "float32", "i32": "int32", "i64": "int64"}


def nets_of(model: Path, folder: Path, before: Path | None, pnnx: tuple[Path, Path] | None) -> dict[str, list[str]]:
    """The files of each column's net, where it can be had."""
    found: dict[str, list[str]] = {"ONNX Runtime": [str(model)]}
    for name, checkout in (("ours", Path(__file__).parents[2]), ("before", before)):
        if checkout is None:
            continue
        stem = folder / name
        command = [
            sys.executable,
            "-m",
            "onnx2ncnn_opt",
            "convert",
            str(model.resolve()),
            "-o",
            str(stem),
            "--no-verify",
        ]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, check=False)
        if done.returncode == 0:
            found[name] = [f"{stem}.ncnn.param", f"{stem}.ncnn.bin"]
    if pnnx is not None:
        found["pnnx"] = [str(path) for path in pnnx]
        shapes = {f"in{i}": shape[1:] if shape[0] == 1 else shape for i, (shape, _) in enumerate(input_shapes(model))}
        try:
            files = optimize(*pnnx, shapes=shapes, fixed_shapes=True).save(folder / "optimized")
            found["pnnx optimized"] = [str(files.param), str(files.bin)]
        except Error as error:
            print(f"{model.stem}: {error}", file=sys.stderr)
    return found


def measure(model: Path, nets: dict[str, list[str]], seconds: float) -> dict[str, float]:
    """Milliseconds by column, from a child process; a net that crashes it is left out."""
    inputs = [(shape, _DTYPES[dtype]) for shape, dtype in input_shapes(model)]
    left = dict(nets)
    while left:
        request = json.dumps([left, inputs, seconds])
        done = subprocess.run(
            [sys.executable, __file__, "--child", request], capture_output=True, text=True, check=False
        )
        lines = done.stdout.splitlines()
        if done.returncode == 0:
            times: dict[str, float] = json.loads(lines[-1])
            return times
        left.pop(lines[-1] if lines and lines[-1] in left else next(iter(left)))
    return {}


def _child(request: str) -> None:
    """Print the times as JSON; before each net its name, so that the parent knows which one ends the process."""
    nets, inputs, seconds = json.loads(request)
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(shape).astype(dtype) if dtype == "float32" else np.zeros(shape, dtype)
        for shape, dtype in inputs
    ]
    loaded: list[tuple[str, Any]] = []
    for name, files in nets.items():
        print(name, flush=True)
        for _ in range(2):
            run = _onnxruntime(files[0], arrays) if len(files) == 1 else _ncnn(files, arrays)
            run()
            loaded.append((name, run))
    times: dict[int, list[float]] = {i: [] for i in range(len(loaded))}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < _LEAST_TURNS:
        for i in random.sample(range(len(loaded)), len(loaded)):
            times[i].append(loaded[i][1]())
    best: dict[str, float] = {}
    for i, (name, _) in enumerate(loaded):
        best[name] = min(best.get(name, np.inf), median(times[i]) * 1e3)
    print(json.dumps(best))


def _ncnn(files: list[str], arrays: list[Any]) -> Any:
    import ncnn  # type: ignore[import-untyped]

    net = ncnn.Net()
    net.opt.num_threads = 1
    assert net.load_param(files[0]) == net.load_model(files[1]) == 0
    items = [array.astype(np.int32) if array.dtype == np.int64 else array for array in arrays]
    items = [np.ascontiguousarray(item[0] if item.ndim > 1 and item.shape[0] == 1 else item) for item in items]

    def run() -> float:
        extractor = net.create_extractor()
        for name, item in zip(net.input_names(), items, strict=True):
            extractor.input(name, ncnn.Mat(item).clone())
        start = time.process_time()
        for name in net.output_names():
            assert extractor.extract(name)[0] == 0
        return time.process_time() - start

    return run


def _onnxruntime(model: str, arrays: list[Any]) -> Any:
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    session = onnxruntime.InferenceSession(model, options)
    feeds = {item.name: array for item, array in zip(session.get_inputs(), arrays, strict=True)}

    def run() -> float:
        start = time.process_time()
        session.run(None, feeds)
        return time.process_time() - start

    return run


def row(model: Path, nets: dict[str, list[str]], times: dict[str, float]) -> str:
    """One line of the table."""
    cells = [f"{times[name]:.3g}" if name in times else "-" for name in _COLUMNS]
    layers = [str(_layers(nets[name][0])) if name in nets else "-" for name in _COLUMNS[:-1]]
    return f"| {model.stem} | {' | '.join(cells)} | {' / '.join(layers)} |"


def _layers(param: str) -> int:
    """The layers of a net as its file counts them, Splits and Inputs included."""
    return int(Path(param).read_text().split()[1])


def main() -> None:
    """Print the table, and what it comes to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pnnx", type=Path)
    parser.add_argument("--keep", type=Path, help="keep pnnx's nets here, and use those that are here")
    parser.add_argument("--before", type=Path, help="another checkout, whose nets are timed too")
    parser.add_argument("--only", nargs="*", default=[""], help="models with one of these in their name")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of running the nets of each model")
    options = parser.parse_args()
    print(f"| model | {' | '.join(f'{name}, ms' for name in _COLUMNS)} | layers |\n|{'---|' * (len(_COLUMNS) + 2)}")
    models = [model for model in sorted(options.folder.glob("*.onnx")) if any(t in model.stem for t in options.only)]
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for model in models:
            folder = Path(temporary) / model.stem
            folder.mkdir()
            kept = (options.keep or Path(temporary) / "pnnx") / model.stem
            pnnx = convert_with_pnnx(model, options.pnnx.resolve(), kept) if options.pnnx else None
            nets = nets_of(model, folder, options.before, pnnx)
            times = measure(model, nets, options.seconds)
            print(row(model, nets, times), flush=True)
            for name in _COLUMNS[1:]:
                if name in times and "ours" in times:
                    ratios.setdefault(name, []).append(times[name] / times["ours"])
    for name, found in ratios.items():
        print(f"\nours is {np.exp(np.mean(np.log(found))):.2f} times as fast as {name} on the geometric mean", end="")
    print()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2])
    else:
        main()
