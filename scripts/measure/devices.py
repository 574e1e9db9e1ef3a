"""Run nets of fixtures and folders on devices in fp32 and fp16, and count the right ones.

    python -m scripts.measure.devices run RESULTS.jsonl [FOLDER...] [--on vulkan --on qemu-aarch64] [--jobs N] [-k PART]
    python -m scripts.measure.devices table RESULTS.jsonl [--write]
    python -m scripts.measure.devices check

run     A FOLDER has models NAME.onnx, and NAME.npz with inputs in_0, in_1, ... if they are not drawn. The reference
        is ONNX Runtime; for nets of fixtures/passes it is the net before any pass, in fp32 on this machine or on the
        device ("neither": that net fails there, too). Nets have the feature masks of `convert` and `optimize`; with
        --no-masks those of folders have none. In fp16 a net is right within 2e-2 of the largest value of an output.
        It is "rounded" within four times the error of a net whose blobs are all rounded to fp16. Integers have to be
        equal. "named" is a net that is not right, if `convert` says so itself. RESULTS.jsonl gets a line for each
        net, with the commit, the masks and the error that `convert` estimated for fp16. Results that are right for
        the same bytes and inputs stay.
table   Print the table of fixtures/measured/devices.tsv, how well the estimate agrees with devices, and the names of
        all nets that are not right.
check   Run a dozen nets, as `.ci/run` does. The exit code is 1 if a net is not right. A missing device (qemu, or a
        Vulkan driver) is named, and is not a failure; docs/devices.md says how to get one.
"""

import argparse
import collections
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.errors import Error, RunError, UsageError
from onnx2ncnn_opt.runtime.base import Array, Failure, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.verdict.errors import compare, in_mode
from scripts.measure.device_nets import MODELS, WORKER, Cases, Net, models, op_fixtures, pass_fixtures, snippets
from scripts.measure.measured import ROOT
from scripts.measure.measured import table as measured_table
from testing.machine import lack

SECONDS = 120.0  # for a run here, and ten times as many on an emulated CPU
HERE = "x86-64"
RIGHT = ("right", "rounded")
CHECKED_ON = {
    "aarch64": "qemu-aarch64",
    "AVX2": "qemu-x86_64:Haswell",
    "SSE": "qemu-x86_64:Nehalem",
    "Vulkan": "vulkan",
}
CHECKED = (
    *("attention.dyn", "attention.ts", "dense.tsbn", "inverted.ts", "loops.ts", "residual.tsbn"),
    *("residual-batch.ts", "shuffle.dyn", "siamese.dyn", "siamese.tsbn", "temporal.tsbn", "video.ts"),
)
_ROUNDINGS = 4.0
_FAR, _NOTHING = 3.0, 2e-3  # factors, and errors, beyond which an estimate is wrong


def outcome(net: Net, mode: str, worker: NcnnWorker) -> tuple[str, float | None, str]:
    """Return the outcome as `judged`; a net made from another net may also give that one's results on the device."""
    found = judged(net, net.references, mode, worker)
    if net.before is None or found[0] in RIGHT:
        return found
    try:
        there = NcnnRunner(*net.before, timeout=SECONDS, threads=1, worker=worker).run(net.feeds, list(net.references))
    except RunError:
        return "neither", None, "the net before fails there as well"
    return judged(net, {fetch: there[fetch.blob] for fetch in net.references}, mode, worker)


def judged(net: Net, references: Mapping[Fetch, Array], mode: str, worker: NcnnWorker) -> tuple[str, float | None, str]:
    """Return right, rounded, off, nan, failed or named; the largest error in units of the largest value; a message."""
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
    """Run every n-th case, and append the results."""
    known = {(line["suite"], line["name"]): line for line in lines(path)}
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    workers = {HERE: WORKER, **{target: NcnnWorker(find_target(target)) for target in on}}
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
    """Yield the existing results."""
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def run_table(options: argparse.Namespace) -> int:
    """Print the counts of each suite, and all nets that are not right."""
    path = options.results
    found = {(line["suite"], line["name"]): line for line in lines(path)}
    last = {at: line["outcomes"] for at, line in found.items()}
    columns = list(dict.fromkeys(column for outcomes in last.values() for column in outcomes))
    with measured_table("devices", ("suite", "nets", *columns), write=options.write) as add:
        for suite in dict.fromkeys(suite for suite, _ in last):
            rows = [outcomes for (of, _), outcomes in last.items() if of == suite]
            counts = [collections.Counter(row[column][0] for row in rows if column in row) for column in columns]
            cells = [", ".join(f"{count} {kind}" for kind, count in counter.most_common()) for counter in counts]
            add(suite, len(rows), *cells)
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
    return 0


def _is_too_low(estimate: float, error: float) -> bool:
    return error > max(_FAR * estimate, _NOTHING)


def _is_too_high(estimate: float, error: float) -> bool:
    return estimate > max(_FAR * error, _NOTHING)


def run_check(options: argparse.Namespace) -> int:
    """Run a dozen nets wherever that is possible."""
    workers: dict[str, NcnnWorker] = {}
    for device, on in CHECKED_ON.items():
        try:
            worker = NcnnWorker(find_target(on))
            worker.start()
            if worker.target.vulkan and (reason := lack("Vulkan")):
                raise UsageError(reason)
        except UsageError as error:
            print(f"NOT CHECKED on {device}: {error}", flush=True)
        else:
            workers[device] = worker
    wrong = 0
    cases = ((name, write) for name, write in models(MODELS) if name in CHECKED) if workers else ()
    for name, write in cases:
        with tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-") as folder:
            net = write(Path(folder))
            if net is None:
                raise SystemExit(f"{name} is refused")
            for device, worker in workers.items():
                for mode in worker.target.modes:
                    kind, _, said = outcome(net, mode, worker)
                    if kind not in RIGHT:
                        wrong += 1
                        print(f"{name} on {device} in {mode}: {kind}: {said}", flush=True)
    for worker in workers.values():
        print(f"checked: {len(CHECKED)} nets, {worker.checked(worker.target.modes)}", flush=True)
        worker.close()
    print(
        "devices:", ", ".join(f"{device} {'yes' if device in workers else 'NO'}" for device in CHECKED_ON), flush=True
    )
    return 1 if wrong else 0


def run_campaign(options: argparse.Namespace) -> int:
    """Run the nets of the suites and folders, in several processes."""
    fixtures = {
        "ops": op_fixtures,
        "passes": pass_fixtures,
        "models": lambda: models(MODELS),
        "snippets": snippets,
    }

    def run(job: int) -> None:
        chosen: dict[str, Cases] = {suite: fixtures[suite]() for suite in filter(None, options.suites.split(","))}
        chosen |= {folder.name: models(folder, masks=not options.no_masks) for folder in options.folders}
        on = options.on or ["vulkan", "qemu-aarch64"]
        campaign(chosen, on, options.modes.split(","), options.results, options.part, (job, options.jobs))

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    jobs = [multiprocessing.get_context("fork").Process(target=run, args=(job,)) for job in range(options.jobs)]
    for process in jobs:
        process.start()
    for process in jobs:
        process.join()
    return 0


def main() -> int:
    """Run nets, print the table, or check a dozen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run, table, check = map(commands.add_parser, ("run", "table", "check"))
    for command, function in ((run, run_campaign), (table, run_table), (check, run_check)):
        command.set_defaults(run=function)
    for command in (run, table):
        command.add_argument("results", type=Path)
    run.add_argument("folders", type=Path, nargs="*")
    run.add_argument("--on", action="append", default=[], help="targets, as convert takes them")
    run.add_argument("--modes", default="fp32,fp16", help="by comma")
    run.add_argument("--suites", default="ops,models,snippets,passes", help="of the fixtures, by comma")
    run.add_argument("--jobs", type=int, default=1)
    run.add_argument("-k", dest="part", default="", help="only cases whose name contains this")
    run.add_argument("--no-masks", action="store_true", help="no feature masks for nets of folders")
    table.add_argument("--write", action="store_true", help="keep the table in fixtures/measured")
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
