"""Run the nets of all fixtures, and those of folders, on devices in fp32 and fp16, and count what is right.

    python -m scripts.measure.devices RESULTS.jsonl [FOLDER...] [--on vulkan --on qemu-aarch64] [--jobs N] [-k PART]
    python -m scripts.measure.devices RESULTS.jsonl --table

A FOLDER has models NAME.onnx, and NAME.npz with the inputs in_0, in_1, ... where they are not to be drawn. The
reference is ONNX Runtime; for nets of fixtures/passes it is the net before any pass, in fp32 on this machine or on the
device ("neither" is one that fails there even so). Nets have the feature masks that `convert` and `optimize` give them.
In fp16 a net is right within 2e-2 of the largest value of an output, or ("rounded") within four times what rounding of
every blob to fp16 costs there; integers have to be equal. "named" is what is not right, but `convert` says so itself.

RESULTS.jsonl gets a line for each net, with the commit, the masks and the error that `convert` estimated for fp16; what
is there and right for the same bytes and inputs is not run again. `--table` prints the table of docs/measurements.md,
how well the estimate agrees with devices, and the names of all that is not right.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from onnx2ncnn_opt import passes
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import Error, RunError, UnsupportedError, VerificationError
from onnx2ncnn_opt.ir.graph import Blob, Graph
from onnx2ncnn_opt.param.files import write_net
from onnx2ncnn_opt.param.splits import list_layers
from onnx2ncnn_opt.rewrite.masks import prove_masks, put_masks
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.verification.compare import DEFAULT, Tolerance, compare, in_mode
from onnx2ncnn_opt.verification.comparison import tolerance_of
from onnx2ncnn_opt.verification.estimate import Estimator
from onnx2ncnn_opt.verification.inputs import draw_inputs
from onnx2ncnn_opt.verification.masks import Precision, error_of, find_masks
from onnx2ncnn_opt.verification.options import Verification
from testing import op_cases, pass_cases
from testing.skeletons import refill
from testing.snippets import VARIANTS, kept

ROOT = Path(__file__).resolve().parents[2]

MODELS = ROOT / "fixtures" / "models"  # skeletons, whose weights are drawn
SECONDS = 120.0  # for a run here, and ten times as many on an emulated CPU
HERE = "x86-64"
RIGHT = ("right", "rounded")
_ROUNDINGS = 4.0
_FAR, _NOTHING = 3.0, 2e-3  # factors, and errors, beyond which an estimate is wrong
_WORKER = NcnnWorker()  # on this machine, for all nets


@dataclass(frozen=True)
class Net:
    """A net that was written, what goes in, and what has to come out."""

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
        """Changes with everything that the outcome depends on, but ncnn."""
        digest = hashlib.sha256(self.param.read_bytes() + self.bin.read_bytes())
        for feed in self.feeds.values():
            digest.update(np.ascontiguousarray(feed.array).tobytes())
        return digest.hexdigest()[:16]

    def is_named(self) -> bool:
        """Whether `convert` says that fp16 is not enough for it."""
        return self.precision is not None and not self.precision.ok

    def rounding(self) -> float:
        """What rounding every blob to fp16 costs, in units of an output's largest value; NaN if one is not finite."""
        with Estimator(self.graph, by_blob(self.graph, self.feeds), worker=_WORKER) as estimator:
            return error_of(estimator.run("fp16"), estimator.run())


def by_blob(graph: Graph, feeds: Mapping[str, Feed]) -> dict[Blob, Feed]:
    """What is fed, by the graph's inputs, which have their names in the file."""
    names = list_layers(graph).names
    return {blob: feeds[names[blob]] for blob in graph.inputs if names[blob] in feeds}


# A suite's cases by name; each writes its net into a folder, or gives None if it is refused on purpose.
Cases = Iterator[tuple[str, Callable[[Path], Net | None]]]


def op_fixtures() -> Cases:
    """fixtures/ops: each case at its first sizes."""
    for case in op_cases.load_cases():

        def write(folder: Path, case: op_cases.Case = case) -> Net | None:
            model = case.model()
            return of_model(model, folder, lambda: case.feeds(model, case.sizes[0]))

        yield str(case), write


def pass_fixtures() -> Cases:
    """fixtures/passes: each net after all passes against itself before."""
    for path in sorted(pass_cases.FOLDER.glob("*.md")):
        for case in pass_cases.load(path) if path.stem != "README" else ():

            def write(folder: Path, case: pass_cases.Case = case) -> Net | None:
                before = case.net()
                write_net(before, folder / "before.param", folder / "before.bin")
                names = [blob.name for blob in before.outputs]
                runner = NcnnRunner(folder / "before.param", folder / "before.bin", exact=True, worker=_WORKER)
                arrays = case.feeds(before)
                reference = runner.run(arrays, names)
                after = case.net()
                passes.run(after)
                feeds = {name: Feed(array) for name, array in arrays.items()}
                masks, precision = masked(after, feeds)
                param, bin = folder / "net.param", folder / "net.bin"
                write_net(after, param, bin)
                references = {Fetch(name): reference[name] for name in names}
                before_files = folder / "before.param", folder / "before.bin"
                return Net(param, bin, feeds, references, after, masks, precision, before=before_files)

            yield str(case), write


def masked(graph: Graph, feeds: Mapping[str, Feed]) -> tuple[int, Precision]:
    """Put masks on a net as `optimize` does; how many, and what is left of its precision."""
    proved = prove_masks(graph)
    put_masks(graph, ((layer, mask.features) for layer, mask in proved.items()))
    with Estimator(graph, by_blob(graph, feeds), worker=_WORKER) as estimator:
        found, precision = find_masks(estimator)
    put_masks(graph, ((layer, mask.features) for layer, mask in found.items()))
    return len(proved) + len(found), precision


def snippets() -> Cases:
    """fixtures/snippets."""
    for variant in VARIANTS:
        for name, model in kept(variant):

            def write(folder: Path, model: onnx.ModelProto = model) -> Net | None:
                return of_model(model, folder)

            yield f"{variant} {name}", write


def models(folder: Path) -> Cases:
    """The models of a folder, the small ones first."""
    for path in sorted(folder.glob("*.onnx"), key=lambda path: path.stat().st_size):

        def write(target: Path, path: Path = path) -> Net | None:
            given = path.with_suffix(".npz")

            def feeds() -> Mapping[str, Array]:
                names = OrtRunner(path).input_names()
                with np.load(given, allow_pickle=False) as arrays:
                    return {name: arrays[f"in_{i}"] for i, name in enumerate(names)}

            if path.parent == MODELS:
                return of_model(refill(onnx.load(path)), target)
            return of_model(path, target, feeds if given.exists() else None)

        yield path.stem, write


def of_model(
    model: Path | onnx.ModelProto, folder: Path, given: Callable[[], Mapping[str, Array]] | None = None
) -> Net | None:
    """A model as `convert` writes it, with inputs that are given or drawn; those of a fixture as --inputs."""
    try:
        conversion = lower(model)
    except UnsupportedError:
        return None
    feeds = draw_inputs(conversion.model) if given is None else given()
    with suppress(RunError, VerificationError):  # as `convert` does
        conversion = conversion.estimated(
            verification=Verification(feeds=None if isinstance(model, Path) else feeds), worker=_WORKER
        )
    try:
        runtime = OrtRunner(model if isinstance(model, Path) else model.SerializeToString(), threads=1)
        reference = runtime.run(feeds)
    except RunError:
        if isinstance(model, Path):
            raise
        evaluator = ReferenceEvaluator(model)  # of what ONNX Runtime has no kernel for
        results: Sequence[Any] = list(evaluator.run(None, dict(feeds)))
        reference = dict(zip(evaluator.output_names, results, strict=True))
    files, manifest = conversion.save(folder / "net"), conversion.manifest()
    return Net(
        files.param,
        files.bin,
        {entry.blob: Feed(np.asarray(feeds[entry.name]), entry.batch_axis) for entry in manifest.inputs},
        {Fetch(e.blob, e.batch_axis): np.asarray(reference[e.name]) for e in manifest.outputs},
        conversion.graph,
        len(conversion.masks),
        conversion.precision,
        tolerance_of(conversion.model),
    )


def outcome(net: Net, mode: str, worker: NcnnWorker) -> tuple[str, float | None, str]:
    """As `judged`; what is made of another net may also be what that one gives on the device."""
    found = judged(net, net.references, mode, worker)
    if net.before is None or found[0] in RIGHT:
        return found
    try:
        there = NcnnRunner(*net.before, timeout=SECONDS, threads=1, worker=worker).run(net.feeds, list(net.references))
    except RunError:
        return "neither", None, "the net before fails there as well"
    return judged(net, {fetch: there[fetch.blob] for fetch in net.references}, mode, worker)


def judged(net: Net, references: Mapping[Fetch, Array], mode: str, worker: NcnnWorker) -> tuple[str, float | None, str]:
    """Right, rounded, off, nan, failed or named; the largest error in units of the largest value; what is said."""
    runner = NcnnRunner(net.param, net.bin, mode=mode, timeout=SECONDS, threads=1, worker=worker)
    try:
        results = runner.extract(net.feeds, list(net.references))
    except RunError as error:
        return "failed", None, str(error)
    worst, said, kind = 0.0, "", "right"
    for fetch, reference in references.items():
        result = results[fetch.blob]
        if isinstance(result, Failure):
            return "failed", None, str(result)
        if result.size != reference.size:
            return "failed", None, f"{fetch.blob} has the shape {list(result.shape)}, not {list(reference.shape)}"
        difference = compare(result.reshape(reference.shape), reference, in_mode(mode, net.tolerance))
        worst = max(worst, difference.max_rel or 0.0)
        is_excused = mode == "fp16" and reference.dtype.kind not in "iub" and kind != "off"
        if difference.special:
            kind, said = "nan", difference.special
        elif difference.excess and kind != "nan":
            kind, said = "rounded" if is_excused else "off", difference.excess
    if kind == "rounded" and not worst <= _ROUNDINGS * net.rounding():
        kind = "off"
    if mode == "fp16" and kind not in RIGHT and net.is_named():
        kind, said = "named", f"{kind}: {said}"
    return kind, worst, said


def campaign(
    suites: Mapping[str, Cases],
    on: Sequence[str],
    modes: Sequence[str],
    path: Path,
    part: str,
    shard: tuple[int, int],
) -> None:
    """Run every n-th case, and append what comes out."""
    known = {(line["suite"], line["name"]): line for line in lines(path)}
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    workers = {HERE: _WORKER, **{target: NcnnWorker(find_target(target)) for target in on}}
    columns = [(HERE, "fp32"), *((target, mode) for target in on for mode in modes)]
    cases = [(suite, name, write) for suite, of_suite in suites.items() for name, write in of_suite if part in name]
    for suite, name, write in cases[shard[0] :: shard[1]]:
        with tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-") as folder:
            try:
                net = write(Path(folder))
            except Error as error:
                print(f"{suite} {name}: {error}", file=sys.stderr, flush=True)
                continue
            if net is None:
                continue
            key = net.key()
            before = known.get((suite, name), {})
            outcomes = before.get("outcomes", {}) if before.get("key") == key else {}
            outcomes = {column: found for column, found in outcomes.items() if found[0] in RIGHT}
            for target, mode in columns:
                if f"{target} {mode}" not in outcomes:
                    outcomes[f"{target} {mode}"] = outcome(net, mode, workers[target])
        line: dict[str, Any] = {"suite": suite, "name": name, "key": key, "commit": commit, "outcomes": outcomes}
        if net.precision is not None:
            line |= {"estimate": net.precision.error, "masks": net.masks}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    for worker in workers.values():
        worker.close()


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The results that are there."""
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def table(path: Path) -> None:
    """Print the counts of each suite, and all that is not right."""
    found = {(line["suite"], line["name"]): line for line in lines(path)}
    last = {at: line["outcomes"] for at, line in found.items()}
    columns = list(dict.fromkeys(column for outcomes in last.values() for column in outcomes))
    print("| suite | nets |", " | ".join(columns), "|")
    print("|---|---|" + "---|" * len(columns))
    for suite in dict.fromkeys(suite for suite, _ in last):
        rows = [outcomes for (of, _), outcomes in last.items() if of == suite]
        counts = [collections.Counter(row[column][0] for row in rows if column in row) for column in columns]
        cells = [", ".join(f"{count} {kind}" for kind, count in counter.most_common()) for counter in counts]
        print(f"| {suite} | {len(rows)} |", " | ".join(cells), "|")
    print("commits:", dict(collections.Counter(line.get("commit", "unknown") for line in found.values())))
    for column in (column for column in columns if column.endswith("fp16")):
        pairs = [
            (line["estimate"], line["outcomes"][column][1])
            for line in found.values()
            if column in line["outcomes"] and line.get("estimate") and line["outcomes"][column][1]
        ]
        low, high = (sum(bool(far(*pair)) for pair in pairs) for far in (_is_too_low, _is_too_high))
        print(f"{column}: the estimate is too low by more than {_FAR} for {low} of {len(pairs)}, too high for {high}")
    for (suite, name), outcomes in sorted(last.items()):
        for column, (kind, worst, said) in outcomes.items():
            if kind not in RIGHT:
                print(f"{suite}\t{name}\t{column}\t{kind}\t{'-' if worst is None else f'{worst:.2g}'}\t{said[:160]!r}")


def _is_too_low(estimate: float, error: float) -> bool:
    return error > max(_FAR * estimate, _NOTHING)


def _is_too_high(estimate: float, error: float) -> bool:
    return estimate > max(_FAR * error, _NOTHING)


def main() -> None:
    """Run the campaign, or print its table."""
    parser = argparse.ArgumentParser(description="fixtures and folders of models on devices")
    parser.add_argument("results", type=Path)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--on", action="append", default=[], help="targets, as convert takes them")
    parser.add_argument("--modes", default="fp32,fp16", help="by comma")
    parser.add_argument("--suites", default="ops,models,snippets,passes", help="of the fixtures, by comma")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("-k", dest="part", default="", help="only cases whose name contains this")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        table(options.results)
        return
    fixtures = {
        "ops": op_fixtures,
        "passes": pass_fixtures,
        "models": lambda: models(MODELS),
        "snippets": snippets,
    }

    def run(job: int) -> None:
        chosen = {suite: fixtures[suite]() for suite in filter(None, options.suites.split(","))}
        chosen |= {folder.name: models(folder) for folder in options.folders}
        on = options.on or ["vulkan", "qemu-aarch64"]
        campaign(chosen, on, options.modes.split(","), options.results, options.part, (job, options.jobs))

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    jobs = [multiprocessing.get_context("fork").Process(target=run, args=(job,)) for job in range(options.jobs)]
    for process in jobs:
        process.start()
    for process in jobs:
        process.join()


if __name__ == "__main__":
    main()
