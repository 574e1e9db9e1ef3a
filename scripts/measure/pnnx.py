"""Compare with pnnx: its nets of our models, its nets before and after `optimize`, and its operators.

    python -m scripts.measure.pnnx models
    python -m scripts.measure.pnnx ops [-k OPERATOR]
    python -m scripts.measure.pnnx nets FOLDER [--keep FOLDER] [--only TEXT] [--seconds S] [--no-verify]

pnnx is the program of the pip package `pnnx`, or the one of --pnnx. Each table is printed; --write keeps those of
`models` and `nets` in fixtures/measured/.

models   Convert every model of fixtures/models with this package and with pnnx. One verification judges both nets,
         without a manifest, on the same inputs. pnnx gets fp16=0, and the sizes of dynamic axes.
ops      Convert a few of ONNX's own cases for each operator, and write fixtures/pnnx_ops.tsv, which docs/ops.md shows.
         The cases have one node, with weights and shapes as initializers. A net may be fed in any way. It is judged
         against the suite's own outputs, to 1e-3 of the largest value: "right"; "wrong" (or ncnn crashes); or "no net"
         (pnnx gives up, or ncnn does not load the net).
nets     Run `optimize` over pnnx's nets of the models in FOLDER. Where sizes are dynamic, an .npz beside a model has
         arrays in_0, in_1, ... of the shapes to use. Latency is CPU time of one thread, both nets in turns, if
         `optimize` changes something. With --keep, converted models are not converted again. pnnx runs with its
         defaults (fp16).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx2ncnn_opt.api.optimize import Optimized
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.inputs.draws import draw_inputs
from onnx2ncnn_opt.onnx.ops import all_ops
from onnx2ncnn_opt.onnx.read.load import load_model
from onnx2ncnn_opt.outputs import Latency
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.options import Verification
from scripts.measure.latency import compare
from scripts.measure.measured import ROOT, table
from testing.conformance import Case, collect
from testing.exports import refilled
from testing.optimized import apply_passes

OPS = ROOT / "fixtures" / "pnnx_ops.tsv"
CASES = 2  # of each operator
MODEL_TIMEOUT, CASE_TIMEOUT = 300, 60
MODELS = ("model", "ours", "layers", "seconds", "pnnx", "pnnx layers", "pnnx seconds")
NETS = ("model", "layers", "layers after", "relative difference", "latency ratio", "latency median", "seconds", "note")

_NOISE = 0.03  # of the ratio of two times
_TYPES = {1: "f32", 6: "i32", 7: "i64", 9: "i32"}
_NAMES = {"float32": "f32", "float64": "f64", "float16": "f16", "int64": "i64", "int32": "i32", "int8": "i8"}
_NAMES |= {"uint8": "u8", "int16": "i16", "bool": "i32"}


@dataclass(frozen=True)
class Result:
    """The outcome for a model: "right", or the error; the layers of the .param; seconds of the conversion."""

    outcome: str
    layers: int | None
    seconds: float


def judged(command: list[str], model: Path, param: Path, bin: Path) -> Result:
    """Convert with a command, in the model's folder, and verify the net."""
    start = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=model.parent, capture_output=True, timeout=MODEL_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return Result("does not end", None, MODEL_TIMEOUT)
    seconds = time.perf_counter() - start
    if done.returncode or not param.exists():
        return Result("refused" if 0 < done.returncode < 128 else "crashed", None, seconds)
    layers = int(param.read_text().split()[1])
    try:
        report = verify_net(model, param, bin)
    except Error as error:
        return Result(str(error).splitlines()[0], layers, seconds)
    worst = next((output.status for output in report.outputs if output.status != "ok"), "right")
    return Result({"refused": "does not load"}.get(worst, worst), layers, seconds)


def both(source: Path, pnnx: str) -> tuple[Result, Result]:
    """Run both converters on one model."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        onnx.save(refilled(source), model)
        net = [Path(folder) / f"model.ncnn.{suffix}" for suffix in ("param", "bin")]
        ours = judged([sys.executable, "-m", "onnx2ncnn_opt", "convert", "model.onnx", "--no-verify"], model, *net)
        for path in net:
            path.unlink(missing_ok=True)
        shapes = ",".join(str(list(array.shape)).replace(" ", "") for array in draw_inputs(load_model(model)).values())
        return ours, judged([pnnx, "model.onnx", "fp16=0", f"inputshape={shapes}"], model, *net)


def run_models(options: argparse.Namespace) -> None:
    """Compare all models."""
    with table("pnnx_models", MODELS, write=options.write) as add:
        for source in sorted((ROOT / "fixtures" / "models").glob("*.onnx")):
            cells = ((r.outcome, r.layers, f"{r.seconds:.1f}") for r in both(source, str(options.pnnx)))
            add(source.stem, *(cell for three in cells for cell in three))


def chosen(cases: Sequence[Case]) -> list[Case]:
    """Choose some cases of one operator: with constants if there are any, of float32 numbers if some are."""
    # Of both variants of a case the one with constants comes last.
    variants = {case.name.removesuffix(" (constants)"): case for case in cases if case.feeds}
    runnable = [case for case in variants.values() if all(map(_is_numbers, case.feeds.values()))]
    floats = [case for case in runnable if all(array.dtype == np.float32 for array in case.feeds.values())]
    known = floats or runnable
    places = np.linspace(0, len(known) - 1, min(CASES, len(known))).round().astype(int)
    return [known[i] for i in places]


def _is_numbers(array: object) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.name in _NAMES and array.ndim > 0 and array.size > 0


def answered(case: Case) -> bytes:
    """Return a model with the case's inputs and outputs that always gives the suite's outputs."""
    names = [value.name for value in case.model.graph.output]
    arrays = [numpy_helper.from_array(np.asarray(a), f"{n}_") for n, a in zip(names, case.expected, strict=True)]
    inputs = [value for value in case.model.graph.input if value.name in case.feeds]
    nodes = [helper.make_node("Identity", [f"{name}_"], [name]) for name in names]
    outputs = [helper.make_tensor_value_info(n, a.data_type, a.dims) for n, a in zip(names, arrays, strict=True)]
    graph = helper.make_graph(nodes, "answers", inputs, outputs, arrays)
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10).SerializeToString()
    )


def judge(case: Case, pnnx: str, folder: Path) -> str:
    """Return the outcome of one case."""
    for path in folder.iterdir():
        path.unlink()
    onnx.save(case.model, folder / "m.onnx")
    shapes = ",".join(f"[{','.join(map(str, array.shape))}]{_NAMES[array.dtype.name]}" for array in case.feeds.values())
    command = [pnnx, "m.onnx", "fp16=0", f"inputshape={shapes}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=CASE_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return "no net"
    param, bin = folder / "m.ncnn.param", folder / "m.ncnn.bin"
    if done.returncode or not param.exists():
        return "no net"
    try:
        options = Verification(feeds=case.feeds, timeout=CASE_TIMEOUT)
        report = verify_net(answered(case), param, bin, verification=options)
    except Error:  # other inputs than the model's
        return "wrong"
    statuses = {output.status for output in report.outputs}
    return "right" if statuses == {"ok"} else "no net" if "refused" in statuses else "wrong"


def run_ops(options: argparse.Namespace) -> None:
    """Run the cases, and write the table."""
    os.nice(10)
    wanted = {op.name for op in all_ops() if not op.domain}
    by_operator: dict[str, list[Case]] = {}
    for case in collect():
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type in wanted and options.operator in ("", nodes[0].op_type):
            by_operator.setdefault(nodes[0].op_type, []).append(case)
    lines = [f"operator\tcase\twith pnnx {version('pnnx')}"]
    with tempfile.TemporaryDirectory(prefix="pnnx-") as folder:
        for operator, cases in sorted(by_operator.items()):
            for case in chosen(cases):
                lines.append(f"{operator}\t{case.name}\t{judge(case, str(options.pnnx), Path(folder))}")
                print(lines[-1], flush=True)
    if not options.operator:
        OPS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def input_shapes(model: Path) -> list[tuple[tuple[int, ...], str]]:
    """Return the shape and pnnx's name of the type of every input."""
    graph = onnx.load(model, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    infos = [info.type.tensor_type for info in graph.input if info.name not in constants]
    shapes = [tuple(dim.dim_value for dim in info.shape.dim) for info in infos]
    arrays = model.with_suffix(".npz")
    if arrays.exists():
        with np.load(arrays) as data:
            shapes = [data[f"in_{i}"].shape for i in range(len(infos))]
    return [(shape, _TYPES[info.elem_type]) for shape, info in zip(shapes, infos, strict=True)]


def convert(model: Path, pnnx: Path, folder: Path) -> tuple[Path, Path] | None:
    """Return pnnx's net for a model, made once; None if pnnx makes none."""
    param, bin = folder / "m.ncnn.param", folder / "m.ncnn.bin"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "m.onnx").symlink_to(model.resolve())
        shapes = ",".join(f"[{','.join(map(str, shape))}]{dtype}" for shape, dtype in input_shapes(model))
        with suppress(subprocess.TimeoutExpired):
            command = [str(pnnx), "m.onnx", f"inputshape={shapes}"]
            subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=MODEL_TIMEOUT)
        (folder / "done").touch()
    return (param, bin) if param.exists() and bin.exists() else None


def measure(
    model: Path, param: Path, bin: Path, folder: Path, seconds: float, *, verify: bool
) -> tuple[Sequence[object], Latency | None]:
    """Return the cells of a row after its name, and the latency in it."""
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
        return (*[None] * 6, " ".join(str(error).split())[:160]), None
    worst = f"{max(output.max_rel or 0.0 for output in outputs):.1e}" if outputs else "-"
    wrong = [f"{output.name}: {output.status}" for output in outputs if output.status != "ok"]
    is_timed = seconds > 0 and not wrong and (result.applied or result.exchanged)
    latency = compare((param, bin), (files.param, files.bin), shapes, seconds) if is_timed else None
    before, after = result.layers
    again = len(apply_passes(files.param, files.bin, shapes=shapes).applied)
    note = ", ".join([*wrong, *([f"second run: {again} rewrites"] if again else []), memory_note(result)])
    ratios = (f"{latency.net / latency.other:.2f}", f"{latency.ratio:.2f}") if latency else (None, None)
    return (before, after, worst, *ratios, f"{taken:.2f}", note), latency


def memory_note(result: Optimized) -> str:
    """Return the peak memory of blobs before and after in MB."""
    (before, after) = (memory.peak / 1e6 for memory in result.memory)
    return "" if result.memory[0].unknown else f"{before:.1f} -> {after:.1f} MB"


def run_nets(options: argparse.Namespace) -> None:
    """Print a row for each model, and the mean of the ratios."""
    models = [model for model in sorted(options.folder.glob("*.onnx")) if options.only in model.stem]
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary, table("pnnx_nets", NETS, write=options.write) as add:
        for model in models:
            files = convert(model, options.pnnx, (options.keep or Path(temporary)) / model.stem)
            if files is None:
                add(model.stem, *[None] * 6, "pnnx makes no net")
                continue
            row, latency = measure(model, *files, Path(temporary), options.seconds, verify=not options.no_verify)
            if latency is not None:
                ratios[model.stem] = min(latency.net / latency.other, latency.ratio)
            add(model.stem, *row)
    if ratios:
        slower = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio > 1 + _NOISE]
        mean = float(np.exp(np.mean(np.log(list(ratios.values())))))
        print(f"{len(ratios)} nets timed, {mean:.2f} of the time on the geometric mean; slower: {slower or 'none'}")


def program() -> Path | None:
    """Return the program of the pip package, without its Python wrapper; None if it is not installed."""
    package = find_spec("pnnx")
    return Path(package.origin).with_name("pnnx") if package is not None and package.origin is not None else None


def main() -> int:
    """Run one of the comparisons; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    models, ops, nets = map(commands.add_parser, ("models", "ops", "nets"))
    for command, function in ((models, run_models), (ops, run_ops), (nets, run_nets)):
        command.set_defaults(run=function)
        command.add_argument("--pnnx", type=Path, default=program(), help="the program pnnx")
    for command in (models, nets):
        command.add_argument("--write", action="store_true", help="keep the table in fixtures/measured")
    ops.add_argument("-k", dest="operator", default="", help="only this operator; prints outcomes")
    nets.add_argument("folder", type=Path)
    nets.add_argument("--keep", type=Path, help="keep pnnx's nets here, and use those that are here")
    nets.add_argument("--only", default="", help="models with this in their name")
    nets.add_argument("--seconds", type=float, default=2.0, help="time of running each pair of nets; 0 for none")
    nets.add_argument("--no-verify", action="store_true", help="do not compare outputs")
    options = parser.parse_args()
    if options.pnnx is None:
        print("pnnx is not installed; pip install pnnx", file=sys.stderr)
        return 1
    options.pnnx = options.pnnx.resolve()
    options.run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
