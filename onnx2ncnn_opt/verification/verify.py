"""A net in ncnn against its model in ONNX Runtime, output by output."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, get_args

import numpy as np

from onnx2ncnn_opt.errors import UsageError, VerificationError, check_options
from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.read.given import GivenShapes
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.outputs import OutputReport, Status
from onnx2ncnn_opt.runtime.base import Array, Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import Slot, model_feeds, too_small
from onnx2ncnn_opt.runtime.targets import check_modes, find_target
from onnx2ncnn_opt.verification.budget import Budget, budgets, least_budget
from onnx2ncnn_opt.verification.compare import (
    DEFAULT,
    UNKNOWN_ROUNDING,
    Tolerance,
    chosen,
    in_mode,
)
from onnx2ncnn_opt.verification.comparison import Comparison, tolerance_of
from onnx2ncnn_opt.verification.inputs import (
    Draw,
    Feeds,
    Wanted,
    given_inputs,
)
from onnx2ncnn_opt.verification.rounding import Rounding
from onnx2ncnn_opt.verification.runs import (
    Run,
    any_feeds,
    check_feeds,
    drawn_runs,
    load_converted,
    small_runs,
    wanted_runs,
)

MODEL = "ONNX Runtime's"  # outputs, which a converted net is held against


@dataclass(frozen=True)
class VerifyReport:
    """All outputs, in the model's order, in each mode; `seed` is the first of the inputs, None where they were given.

    `sizes` are the dynamic sizes that it was run at, one entry for a net that has none, `shapes` those of the inputs
    that have such sizes, and `draws` the inputs at these sizes, in turns. `notes` are things about the model that the
    reader should know. An output's numbers are the largest of all runs, its status the worst. `checked` says where ncnn
    ran and in which modes, as people read it. `against` is whose outputs they are held against. Where weights were
    stored in 16 bits, `optimize` has in `folded` the outputs of the same net in 32 bits, which agree much better.
    `wrong` is the first mode and the inputs by name with which an output was wrong, None where none was. `manifest` is
    the one that said how arrays go in and out.
    """

    outputs: tuple[OutputReport, ...]
    seed: int | None
    sizes: tuple[Mapping[str, int], ...] = ({},)
    shapes: tuple[Mapping[str, tuple[int, ...]], ...] = ({},)
    checked: str = ""
    draws: tuple[Draw, ...] = ()
    notes: tuple[str, ...] = ()
    against: str = MODEL
    folded: tuple[OutputReport, ...] = ()
    wrong: tuple[str, Mapping[str, Array]] | None = field(default=None, repr=False, compare=False)
    manifest: Manifest | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"VerifyReport({', '.join(map(str, self.rows))}; {self.checked})"

    @property
    def rows(self) -> tuple[OutputReport, ...]:
        """`folded` and `outputs`."""
        return (*self.folded, *self.outputs)

    @property
    def ok(self) -> bool:
        """Whether every output agrees."""
        return all(output.status == "ok" for output in self.rows)

    def check(self) -> None:
        """Raise VerificationError with a line for each output that does not agree."""
        check_outputs(self.folded, f"from {self.against} before their weights are stored in 16 bits")
        check_outputs(self.outputs, f"from {self.against}")


def check_outputs(outputs: Sequence[OutputReport], what: str) -> None:
    """Raise VerificationError with a line for each output that differs `what`, as "from ONNX Runtime's"."""
    wrong = [
        f"  {output.name}{'' if output.mode == 'fp32' else f' in {output.mode}'}: {output.message}"
        for output in outputs
        if output.status != "ok"
    ]
    if wrong:
        raise VerificationError(f"{len(wrong)} of {len(outputs)} outputs differ {what}:\n" + "\n".join(wrong))


class VerifyOptions(TypedDict, total=False):
    """The options of `verify_net` that `verify` and `Conversion.verify` hand on."""

    feeds: Feeds | None
    shapes: GivenShapes | None
    values: Mapping[str, Any] | None
    outputs: Sequence[str]
    seed: int
    wanted: Wanted | None
    tolerance: Tolerance | None
    rtol: float | None
    atol: float | None
    exact: bool
    timeout: float
    on: str | None
    modes: Sequence[str]
    worker: NcnnWorker | None
    explain: bool
    step: Callable[[str], None]


def verify_net(
    model: Path | bytes,
    param: Path,
    bin: Path,
    *,
    manifest: Manifest | None = None,
    feeds: Feeds | None = None,
    shapes: GivenShapes | None = None,
    values: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
    seed: int = 0,
    wanted: Wanted | None = None,
    tolerance: Tolerance | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    exact: bool = False,
    timeout: float = 300.0,
    on: str | None = None,
    modes: Sequence[str] = (),
    worker: NcnnWorker | None = None,
    explain: bool = False,
    step: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """Run the original model and the net on the same inputs and compare every output.

    `feeds` are the inputs by ONNX name, a file of them (.npz, .npy), or an image. Otherwise they are drawn from `seed`
    at the sizes of `shapes`, of the manifest, or at small ones: for a large net twice, once with large numbers, for a
    small one as `draws` says; or as `wanted`. Sizes that the manifest leaves open are run at two values,
    such that ONNX Runtime takes. `values` are inputs that the net has constants for, those of the manifest by default.
    `tolerance` is that of `tolerance_of` the model by default; `rtol` and `atol` replace its `relative` and `absolute`,
    in every mode. `outputs` are values to compare instead of the model's outputs. With a manifest arrays have to have
    exactly the model's shapes; without one, sizes of 1 do not count, as other converters drop them freely. `exact`
    takes ncnn's plain kernels instead of the ones that it would choose. `on` is where ncnn runs: "vulkan",
    "qemu-aarch64", "qemu-x86_64:CPU", "ssh:user@host", or a command that starts a Python with numpy and ncnn; this
    machine's CPU by default. `modes` are of "fp32", "fp16" and "bf16"; by default fp32, and with `on` also fp16, which
    is what ncnn does by itself on phones and GPUs. Whatever is wrong with the net is in the report; each run may take
    `timeout` seconds, and ten times as many on an emulated CPU. `worker` is a process to use again, instead of one of
    its own. `explain` finds out where errors come from, on the inputs on which a net is wrong, or on those of the
    largest error. `step` is told what is being done.

    A net whose weights have 16 or 8 bits may be off by `budget.ROOM` times what rounding the model's own weights does.

    Raises:
        ModelError, UsageError: the model, the inputs or the manifest are broken or do not belong together, or there is
            no ncnn to run `on`.
        VerificationError: the net has inputs that the model does not have.
        RunError: ONNX Runtime does not take the model or the inputs.
    """
    check_options(outputs=outputs, shapes=shapes, values=values, seed=seed, timeout=timeout, step=step)
    check_feeds(feeds)
    if wanted is not None and not isinstance(wanted, Wanted):
        raise UsageError(f"wanted has to be a Wanted, not {wanted!r:.80}")
    chosen(DEFAULT, rtol, atol)
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise UsageError(f"tolerance has to be a Tolerance, not {tolerance!r:.80}; rtol and atol are numbers")
    target = find_target(on)
    target.require()
    modes = check_modes(modes) or target.modes
    loaded = load_converted(model, manifest, shapes=shapes, values=values, outputs=outputs)
    threads = os.cpu_count() or 1
    step("ONNX Runtime loads the model")
    model_runner = OrtRunner(model, outputs=outputs, values=loaded.values, threads=threads, timeout=timeout)
    if feeds is None:
        runs = (
            wanted_runs(loaded, model_runner, manifest, seed, wanted, step)
            if wanted
            else drawn_runs(loaded, model_runner, manifest, seed, step)
        )
    else:
        given = given_inputs(feeds, loaded)
        if small := too_small(manifest, given):
            raise UsageError(small)
        step("ONNX Runtime runs the model")
        runs = iter([Run({}, None, given, model_runner.run(given))])
    allowed = tolerance_of(loaded) if tolerance is None else tolerance
    is_fixed = (rtol, atol) != (None, None)
    least = least_budget(param, bin, vulkan=target.vulkan)
    is_usual = allowed == DEFAULT and tolerance is None and not is_fixed
    rounding = Rounding(model, outputs, loaded.values, threads)
    done: list[Run] = []
    notes: list[str] = []
    merged: list[OutputReport] = []
    wrong: tuple[str, Mapping[str, Array]] | None = None
    with nullcontext(worker) if worker else NcnnWorker(target) as process:
        for mode in modes:
            options: dict[str, Any] = {"mode": mode, "timeout": timeout, "threads": None, "worker": process}
            runner = NcnnRunner(param, bin, exact=exact, **options)
            reports: list[list[OutputReport]] = []
            worst: tuple[Comparison, Sequence[Slot]] | None = None
            largest = -1.0
            for run in tuple(done) or _kept(runs, done):
                step(f"ncnn runs the net in {mode}, {run or 'on the inputs'}")
                passes = chosen(in_mode(mode, allowed), rtol, atol)
                comparison = Comparison(runner, run.feeds, run.reference, manifest, passes, rounding, is_fixed, least)
                way, found = comparison.best()
                error = max((output.max_rel or 0.0 for output in found), default=0.0)
                if error > largest:
                    worst, largest = (comparison, way), error
                if is_usual and mode == "fp32" and comparison.leaves_budget(found):
                    found = comparison.closer(NcnnRunner(param, bin, exact=True, **options)).outputs()
                reports.append([found_at(output, str(run)) for output in found])
                if any(output.status not in ("ok", "unproven") for output in reports[-1]):
                    wrong = wrong or (mode, run.feeds)
                    worst = comparison, way
                    break  # it is wrong, whatever else it does
            rows = [replace(worst_of(of_output), mode=mode) for of_output in zip(*reports, strict=True)]
            if explain and worst is not None:
                step("ONNX Runtime runs the model in float64")
                rows, problem = _explained(rows, *worst, mode, is_close=is_usual)
                notes += [f"what {mode} explains is not known: {problem}"] if problem else []
            if mode != "fp32" and wrong is not None and worst is not None:
                passes = chosen(in_mode("fp32", allowed), rtol, atol)
                runner = NcnnRunner(param, bin, exact=exact, **{**options, "mode": "fp32"})
                rows = _blamed(rows, replace(worst[0], runner=runner, tolerance=passes), mode)
            merged += rows
        checked = process.checked(modes)
    of_sizes = {tuple(run.sizes.items()): run for run in done}.values()
    small = small_runs(loaded, manifest, done) if feeds is None and wanted is None else ""
    open_inputs = [info.name for info in loaded.inputs if any(isinstance(size, Sym) for size in info.shape)]
    return VerifyReport(
        outputs=tuple(merged),
        seed=seed if feeds is None else None,
        sizes=tuple(run.sizes for run in of_sizes),
        shapes=tuple({name: run.feeds[name].shape for name in open_inputs} for run in of_sizes),
        checked=checked,
        draws=tuple(run.draw for run in done if run.draw is not None),
        notes=(*_notes(loaded, done, rounding, is_fixed), *notes, *([small] if small else [])),
        wrong=wrong,
        manifest=manifest,
    )


def _explained(
    rows: Sequence[OutputReport], comparison: Comparison, way: Sequence[Slot], mode: str, *, is_close: bool
) -> tuple[list[OutputReport], str]:
    """The reports with where their errors come from, and why nobody knows what bits explain, if so."""
    net = comparison.runner.param, comparison.runner.bin
    blobs = {row.name: row.blob for row in rows}
    stored = comparison.by_weights
    found, problem = budgets(comparison.rounding, comparison.feeds, comparison.reference, net, way, blobs, mode, stored)

    def explained(row: OutputReport, budget: Budget) -> OutputReport:
        # What a user's tolerance lets pass may be no more right for that.
        is_lax = comparison.is_fixed and (row.max_rel or 0.0) > DEFAULT.relative
        cause = budget.cause(row.max_rel, mode, ok=row.status in ("ok", "unproven") and not is_lax)
        if cause == "kernels" and (row.max_abs or 0.0) <= comparison.spread[row.name].max(initial=0.0):
            cause = "rounding"  # as far as that moves the model, though ONNX Runtime was luckier
        bits = budget.bits if budget.bits is None or math.isfinite(budget.bits) else None
        allowed = comparison.allowed(row.name, close=is_close and mode == "fp32")
        return replace(row, rounding=budget.rounding, bits=bits, allowed=allowed, cause=cause)

    return [explained(row, found[row.name]) for row in rows], problem


def _blamed(rows: Sequence[OutputReport], in_fp32: Comparison, mode: str) -> list[OutputReport]:
    """Return the reports with the mode as the cause of errors that the net does not have in fp32 on the same inputs."""
    is_wrong = any(row.status in ("mismatch", "nan") for row in rows)
    right = {found.name for found in in_fp32.outputs() if found.status == "ok"} if is_wrong else set()
    text = f"; the net is right in fp32, so the cause is {mode}"
    return [
        replace(row, cause=mode, message=row.message + text)
        if row.name in right and row.status in ("mismatch", "nan")
        else row
        for row in rows
    ]


def _kept(runs: Iterable[Run], done: list[Run]) -> Iterator[Run]:
    """The runs, each put into a list as it comes."""
    for run in runs:
        done.append(run)
        yield run


def net_feeds(
    model: Path | bytes,
    param: Path,
    bin: Path,
    *,
    manifest: Manifest | None = None,
    feeds: Feeds | None = None,
    shapes: GivenShapes | None = None,
    values: Mapping[str, Any] | None = None,
    seed: int = 0,
    tolerance: Tolerance | None = None,
    timeout: float = 300.0,
) -> dict[str, Feed]:
    """What to feed a net, by its blobs, so that it computes what the model does up to a `tolerance`, in fp32 here.

    Raises VerificationError where it does not, and what `verify_net` raises.
    """
    loaded = load_converted(model, manifest, shapes=shapes, values=values)
    given = any_feeds(model, loaded, manifest, feeds=feeds, seed=seed)
    threads = os.cpu_count() or 1
    reference = OrtRunner(model, values=loaded.values, threads=threads, timeout=timeout).run(given)
    rounding = Rounding(model, (), loaded.values, threads)
    with NcnnWorker() as worker:
        runner = NcnnRunner(param, bin, timeout=timeout, threads=None, worker=worker)
        way, outputs = Comparison(
            runner, given, reference, manifest, tolerance or tolerance_of(loaded), rounding
        ).best()
    check_outputs(outputs, "from ONNX Runtime's in fp32 already, which masks do not change")
    return model_feeds(way, given)


def _notes(model: LoadedModel, runs: Sequence[Run], rounding: Rounding, is_fixed: bool) -> Iterator[str]:
    """What the reader should know about a model that gives not only numbers, or that does not run in float64.

    `is_fixed` says that the user chose the tolerance.
    """
    if rounding.problem and not is_fixed:
        allowed = f"an error of {UNKNOWN_ROUNDING:g} is allowed with ncnn's plain kernels"
        yield f"the model does not run in float64 ({_reason(rounding.problem)}), so that {allowed}"
    if rounding.unmoved:
        yield f"how far rounding errors move the model is not known ({_reason(rounding.unmoved)})"
    if rounding.overflown:
        names = ", ".join(sorted(rounding.overflown))
        yield f"ONNX Runtime's float32 overflows or underflows on the way to {names}; float64 was asked there"
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype.is_floating_point():
            array = np.asarray(tensor.numpy())
            if not np.isfinite(array.astype(np.float32) if array.dtype.kind == "V" else array).all():
                yield f"the model's weight '{value.name}' is not finite: {_special_counts(array)}"
    for name in runs[0].reference:
        for run in runs:
            array = run.reference[name]
            if array.dtype.kind == "f" and np.isnan(array).any():
                yield f"the model itself gives NaN for '{name}' ({run}): {_special_counts(array)}"
                break


def _reason(problem: str) -> str:
    """Of an error of ONNX Runtime's the last part."""
    return problem.rpartition("Status Message: ")[2]


def _special_counts(array: Array) -> str:
    """How much of an array is NaN or infinite."""
    numbers = array.astype(np.float64)
    counts = {"NaN": np.isnan(numbers).sum(), "+inf": np.isposinf(numbers).sum(), "-inf": np.isneginf(numbers).sum()}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) + f" of {array.size}"


_COMPARED = ("ok", "mismatch", "nan")


def found_at(output: OutputReport, where: str) -> OutputReport:
    """The report of an output with the sizes and inputs at which it is wrong."""
    return replace(output, message=f"at {where}: {output.message}") if where and output.message else output


def worst_of(reports: Sequence[OutputReport]) -> OutputReport:
    """The report of an output from those of all runs."""
    # What proves nothing at some inputs is none the worse for that.
    proven = [output for output in reports if output.status != "unproven"] or reports
    worst = max(proven, key=lambda output: get_args(Status).index(output.status))

    def most(numbers: Iterable[float | None], of: Callable[[Iterable[float]], float]) -> float | None:
        found = [number for number in numbers if number is not None]
        return of(found) if found and worst.status in _COMPARED else None

    return replace(
        worst,
        max_abs=most((output.max_abs for output in reports), max),
        max_rel=most((output.max_rel for output in reports), max),
        cosine=most((output.cosine for output in reports), min),
    )
