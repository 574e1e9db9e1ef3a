"""Published architectures at fixed and dynamic sizes, from both of torch's exporters: layers, speed, and fp16.

    python -m scripts.measure.architectures export FOLDER [-k PART] [--exporter ts|dynamo] [--fixed|--dynamic]
    python -m scripts.measure.architectures run FOLDER RESULTS.jsonl [-k PART]
    python -m scripts.measure.architectures devices FOLDER RESULTS.jsonl [-k PART] [--on qemu-aarch64 --on vulkan]
    python -m scripts.measure.architectures table RESULTS.jsonl [--speed SPEED.jsonl] [--write]

fixtures/architectures.toml names the architectures. `export` needs their packages:

    pip install torch==2.14.1 torchvision==0.29.1 onnxscript timm transformers diffusers spandrel monai kornia
        segmentation-models-pytorch einops

export   Write NAME.ts.onnx, NAME.ts-dynamic.onnx, NAME.dynamo.onnx and NAME.dynamo-dynamic.onnx, unless they exist.
run      Convert each model by the plain command. If its sizes are dynamic, verify the net at the table's five sizes.
         `seconds` are of the CPU, without verification.
devices  Compare the estimate for fp16 with devices, as trained.py does, on inputs that the conversion has not seen.
table    Print the tables of fixtures/measured/architectures.tsv and architectures_fp16.tsv. SPEED.jsonl are the
         results of `python -m scripts.measure.speed FOLDER SPEED.jsonl --pnnx PATH`.

Each architecture or model has a process of its own, and a limited time. RESULTS.jsonl gets a line for each; the last
line counts.
"""

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.options import Verification
from scripts.measure.measured import ROOT, table
from scripts.measure.speed import read_records

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = ROOT / "fixtures" / "architectures.toml"
EXPORTERS, ON = ("ts", "dynamo"), ("qemu-aarch64", "vulkan")
SECONDS = 600
_OUTCOMES = {0: "right", 1: "refused", 2: "unproven", 3: "wrong"}


@dataclass(frozen=True)
class Input:
    """An input: integers below `below`, or floats if that is 0. An axis is a number, a symbol, or 16*H."""

    name: str
    axes: tuple[str, ...]
    below: int

    @classmethod
    def parse(cls, text: str) -> "Input":
        """Parse `name:1,3,16*H,16*W` or `name:1,S<100`."""
        name, _, rest = text.partition(":")
        axes, _, below = rest.partition("<")
        return cls(name, tuple(axes.split(",")), int(below or 0))

    @property
    def dynamic(self) -> dict[int, tuple[int, str]]:
        """Return the factor and the symbol of each dynamic axis."""
        found = {i: re.fullmatch(r"(?:(\d+)\*)?([A-Z])", axis) for i, axis in enumerate(self.axes)}
        return {i: (int(match[1] or 1), match[2]) for i, match in found.items() if match}

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape for these sizes of the symbols."""
        dynamic = {i: factor * sizes[symbol] for i, (factor, symbol) in self.dynamic.items()}
        return tuple(dynamic[i] if i in dynamic else int(axis) for i, axis in enumerate(self.axes))


@dataclass(frozen=True)
class Architecture:
    """An entry of the table."""

    make: str
    inputs: tuple[Input, ...]
    options: Mapping[str, Any]
    sizes: tuple[dict[str, int], ...]  # of the symbols, the first for export; empty if there are none
    outputs: tuple[str, ...]
    part: str
    method: str
    seed: int


def read_architectures() -> dict[str, Architecture]:
    """Return the architectures of the table by name."""
    found = {}
    for name, entry in tomllib.loads(TABLE.read_text(encoding="utf-8")).items():
        inputs = tuple(map(Input.parse, entry["inputs"].split()))
        symbols = dict.fromkeys(symbol for each in inputs for _, symbol in each.dynamic.values())
        numbers = (map(int, each.split(",")) for each in entry.get("sizes", "").split())
        found[name] = Architecture(
            make=entry["make"],
            inputs=inputs,
            options=entry.get("options", {}),
            sizes=tuple(dict(zip(symbols, each, strict=True)) for each in numbers),
            outputs=tuple(entry.get("outputs", "").split()),
            part=entry.get("part", ""),
            method=entry.get("method", "forward"),
            seed=entry.get("seed", 0),
        )
    return found


def limited(command: Sequence[str], seconds: float) -> str:
    """Run a module of this project; return how it failed, or "". After the time it dies, with all that it started."""
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
    with subprocess.Popen([sys.executable, "-m", *command], env=environment, start_new_session=True) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"does not end in {seconds:.0f} s"
    return f"exit code {code}" if code else ""


def run_export(options: argparse.Namespace) -> None:
    """Export the models that the folder does not have."""
    for name, architecture in read_architectures().items():
        sizes = [""] if options.sizes != "dynamic" else []
        sizes += ["-dynamic"] if options.sizes != "fixed" and architecture.sizes else []
        variants = [f"{exporter}{size}" for exporter in options.exporter or EXPORTERS for size in sizes]
        missing = [each for each in variants if not (options.folder / f"{name}.{each}.onnx").exists()]
        if missing and options.part in name:
            command = ["scripts.measure.architecture_export", name, str(options.folder), *missing]
            failure = limited(command, SECONDS * len(missing))
            if failure:
                print(name, "-", "-", failure, sep="\t", flush=True)


def each_model(options: argparse.Namespace) -> None:
    """Measure a model in this process; those of a folder that have no result in a process each."""
    path, measure = options.folder, options.measure
    if path.is_file():
        append(options.results, path.stem, measure(path, options))
        return
    for on in options.on:
        find_target(on).require()
    known = read_results(options.results)
    for model in sorted(path.glob("*.onnx")):
        if options.part not in model.stem or options.key in known.get(model.stem, {}):
            continue
        command = ["scripts.measure.architectures", options.command, str(model), str(options.results)]
        failure = limited([*command, *(word for on in options.on for word in ("--on", on))], options.seconds)
        if failure:
            append(options.results, model.stem, {options.key: {"outcome": failure}})


def append(results: Path, model: str, found: Mapping[str, Any]) -> None:
    """Add a line to the results, and print it."""
    line = json.dumps([model, found])
    with results.open("a") as file:
        file.write(line + "\n")
    print(line[:400], flush=True)


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results of each model: "net" of `run`, and "fp16" of `devices`."""
    found: dict[str, dict[str, Any]] = {}
    for model, result in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        found.setdefault(model, {}).update(result)
    return found


def converted(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the plain command says about a model, and how many sizes are right."""
    with tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-") as folder:
        prefix = Path(folder) / "net"
        command = [sys.executable, "-m", "onnx2ncnn_opt", "convert", str(model), "-o", str(prefix), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.stdout:
            return {"net": {"outcome": "crashed", "said": done.stderr.splitlines()[-1:]}}
        result = json.loads(done.stdout)["results"][0]
        found = {
            "outcome": _OUTCOMES.get(done.returncode, "failed"),
            "layers": (result.get("layers") or {}).get("after"),
            "masks": len(result.get("masks") or ()),
            "said": (result["error"] or {}).get("message", "").splitlines() + list(result.get("notes") or ()),
            **{key: result.get(key) for key in ("seconds", "estimated", "price")},
        }
        architecture, is_right = read_architectures()[model.name.split(".")[0]], done.returncode == 0
        sizes = architecture.sizes if "-dynamic" in model.stem else ()
        if prefix.with_suffix(".ncnn.param").exists() and sizes:
            found["sizes"] = list(outcomes_at_sizes(model, prefix, architecture.inputs, sizes))
        else:
            found["sizes"] = ["ok" if is_right else found["outcome"]] * (len(sizes) or 1)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "--no-verify"], capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"net": found}


def outcomes_at_sizes(
    model: Path, prefix: Path, inputs: Sequence[Input], sizes: Sequence[Mapping[str, int]]
) -> Iterator[str]:
    """Yield "ok", or what is wrong, for each size."""
    files = [prefix.with_suffix(f".ncnn.{suffix}") for suffix in ("param", "bin", "json")]
    for size in sizes:
        shapes = {each.name: each.shape(size) for each in inputs if each.dynamic}
        how = Verification(shapes=shapes, timeout=SECONDS / 10)
        try:
            outputs = verify_net(model, files[0], files[1], how, manifest=read_manifest(files[2])).outputs
        except Error as error:
            yield f"{size}: {str(error).splitlines()[0]}"
        else:
            yield next((f"{size}: {each} {each.message}" for each in outputs if each.status != "ok"), "ok")


def on_devices(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the cells of trained.py's table."""
    from scripts.measure.trained import fp16_cells, fp16_columns  # needs Pillow

    with ExitStack() as stack:
        workers = {each: stack.enter_context(NcnnWorker(find_target(each))) for each in options.on}
        return {"fp16": dict(zip(fp16_columns(options.on), fp16_cells(model, workers), strict=True))}


NETS = ("layers", "pnnx layers", "right", "of sizes", "seconds", "ms", "ONNX Runtime ms", "pnnx ms", "said")


def run_table(options: argparse.Namespace) -> None:
    """Print both tables."""
    results, speeds = read_results(options.results), read_records(options.speed) if options.speed else {}
    with table("architectures", ("model", "outcome", *NETS), write=options.write) as add:
        for model, net in sorted((model, result["net"]) for model, result in results.items() if "net" in result):
            speed = speeds.get(model, {})
            ours, ort, pnnx = (speed.get(column, {}) for column in ("ours", "ONNX Runtime", "pnnx"))
            times = (f"{each['ms']:.3g}" if each.get("ms") else None for each in (ours, ort, pnnx))
            sizes, lines = net.get("sizes", []), net.get("said", [])
            right, seconds = sizes.count("ok"), f"{net['cpu']:.1f}" if "cpu" in net else None
            nodes = [line for line in lines if line.startswith("  ")]  # of a refusal
            said = [size for size in sizes if size != "ok"] if net["outcome"] == "right" else nodes or lines
            layers, text = (net.get("layers"), pnnx.get("layers")), " ".join("".join(said[:1]).split())[:300]
            add(model, net["outcome"], *layers, right, len(sizes), seconds, *times, text)
    columns = next((tuple(result["fp16"]) for result in results.values() if "masks" in result.get("fp16", {})), ())
    with table("architectures_fp16", ("model", *columns), write=options.write) as add:
        for model, result in sorted(results.items()):
            if "fp16" in result:
                cells = result["fp16"] | {"said": result["fp16"].get("outcome", result["fp16"].get("said"))}
                add(model, *map(cells.get, columns))


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    export, run, devices, tables = map(commands.add_parser, ("export", "run", "devices", "table"))
    export.set_defaults(run=run_export)
    run.set_defaults(run=each_model, measure=converted, key="net", on=())
    devices.set_defaults(run=each_model, measure=on_devices, key="fp16")
    tables.set_defaults(run=run_table)
    for command in (export, run, devices):
        command.add_argument("folder", type=Path, help="of the models; or one model, for `run` and `devices`")
        command.add_argument("-k", dest="part", default="", help="only those with this in their name")
    for command in (run, devices, tables):
        command.add_argument("results", type=Path)
    for command in (run, devices):
        command.add_argument("--seconds", type=float, default=SECONDS, help="the time limit of a model")
    export.add_argument("--exporter", action="append", choices=EXPORTERS, help="by default both")
    for sizes in ("fixed", "dynamic"):
        export.add_argument(f"--{sizes}", dest="sizes", action="store_const", const=sizes, help=f"only {sizes} sizes")
    devices.add_argument("--on", action="append", default=[], choices=ON, help="by default both")
    tables.add_argument("--speed", type=Path, help="the results of speed.py")
    tables.add_argument("--write", action="store_true", help="keep the tables in fixtures/measured")
    options = parser.parse_args()
    if options.command == "devices":
        options.on = options.on or ON
    options.run(options)


if __name__ == "__main__":
    main()
