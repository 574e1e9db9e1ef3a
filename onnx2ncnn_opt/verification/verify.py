"""A net in ncnn against its model in ONNX Runtime, output by output."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, get_args

import numpy as np

from onnx2ncnn_opt.errors import CrashError, Error, RunError, UsageError, VerificationError, check_options
from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.ops import traits_of
from onnx2ncnn_opt.onnx.read.given import GivenShapes
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.outputs import OutputReport, Status
from onnx2ncnn_opt.runtime.base import Array, Failure, Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import Slot, alike, model_feeds, too_small
from onnx2ncnn_opt.runtime.targets import check_modes, find_target
from onnx2ncnn_opt.verification.budget import (
    LEAST_BUDGET,
    MOST_BUDGET,
    ROOM,
    Budget,
    budgets,
    float32_budget,
    weights_encoding,
)
from onnx2ncnn_opt.verification.compare import (
    DEFAULT,
    UNKNOWN_ROUNDING,
    Tolerance,
    chosen,
    compare,
    in_mode,
    with_quantisation,
)
from onnx2ncnn_opt.verification.inputs import (
    LENGTHS,
    Draw,
    Feeds,
    Image,
    Wanted,
    draw_inputs,
    draws,
    given_inputs,
    is_tiny,
    open_sizes,
    sweeps,
    tables,
    totals,
)
from onnx2ncnn_opt.verification.match import input_slots, manifest_slots, pair
from onnx2ncnn_opt.verification.rounding import Rounding

# A net of dynamic sizes has to be right at two values of each.
_SIZES_EACH = 2
_MOST_TOTALS = 30  # sums that are tried where ONNX Runtime takes no sizes of their own

# Nets up to so many weights, with so many numbers as inputs, are run more often: it takes no longer than to load them.
_SMALL_WEIGHTS, _SMALL_INPUTS = 2**25, 2**18


UNPROVEN = (
    "there is no number in it on either side, which proves nothing; give inputs that suit the model with --inputs"
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
    "qemu-aarch64", "ssh:user@host", or a command that starts a Python with numpy and ncnn; this machine's CPU by
    default. `modes` are of "fp32", "fp16" and "bf16"; by default fp32, and with `on` also fp16, which is what ncnn does
    by itself on phones and GPUs. Whatever is wrong with the net is in the report; each run may take `timeout` seconds,
    and ten times as many on an emulated CPU. `worker` is a process to use again, instead of one of its own. `explain`
    finds out where errors come from, on the inputs on which a net is wrong, or on those of the largest error. `step` is
    told what is being done.

    A net whose weights have 16 or 8 bits may be off by `budget.ROOM` times what rounding the model's own weights does.

    Raises:
        ModelError, UsageError: the model, the inputs or the manifest are broken or do not belong together, or there is
            no ncnn to run `on`.
        VerificationError: the net has inputs that the model does not have.
        RunError: ONNX Runtime does not take the model or the inputs.
    """
    check_options(outputs=outputs, shapes=shapes, values=values, seed=seed, timeout=timeout, step=step)
    _check_feeds(feeds)
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
            _wanted_runs(loaded, model_runner, manifest, seed, wanted, step)
            if wanted
            else _drawn_runs(loaded, model_runner, manifest, seed, step)
        )
    else:
        given = given_inputs(feeds, loaded)
        if small := too_small(manifest, given):
            raise UsageError(small)
        step("ONNX Runtime runs the model")
        runs = iter([_Run({}, None, given, model_runner.run(given))])
    allowed = tolerance_of(loaded) if tolerance is None else tolerance
    is_fixed = (rtol, atol) != (None, None)
    # A GPU's exp and its like are nearly as good as a CPU's, and it has no plain kernels.
    least = UNKNOWN_ROUNDING if target.vulkan else LEAST_BUDGET
    is_usual = allowed == DEFAULT and tolerance is None and not is_fixed
    rounding = Rounding(model, outputs, loaded.values, threads)
    done: list[_Run] = []
    notes: list[str] = []
    merged: list[OutputReport] = []
    wrong: tuple[str, Mapping[str, Array]] | None = None
    with nullcontext(worker) if worker else NcnnWorker(target) as process:
        for mode in modes:
            options: dict[str, Any] = {"mode": mode, "timeout": timeout, "threads": None, "worker": process}
            runner = NcnnRunner(param, bin, exact=exact, **options)
            reports: list[list[OutputReport]] = []
            worst: tuple[_Comparison, Sequence[Slot]] | None = None
            largest = -1.0
            for run in tuple(done) or _kept(runs, done):
                step(f"ncnn runs the net in {mode}, {run or 'on the inputs'}")
                passes = chosen(in_mode(mode, allowed), rtol, atol)
                comparison = _Comparison(runner, run.feeds, run.reference, manifest, passes, rounding, is_fixed, least)
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
            merged += rows
        checked = process.checked(modes)
    of_sizes = {tuple(run.sizes.items()): run for run in done}.values()
    open_inputs = [info.name for info in loaded.inputs if any(isinstance(size, Sym) for size in info.shape)]
    return VerifyReport(
        outputs=tuple(merged),
        seed=seed if feeds is None else None,
        sizes=tuple(run.sizes for run in of_sizes),
        shapes=tuple({name: run.feeds[name].shape for name in open_inputs} for run in of_sizes),
        checked=checked,
        draws=tuple(run.draw for run in done if run.draw is not None),
        notes=(*_notes(loaded, done, rounding, is_fixed), *notes),
        wrong=wrong,
        manifest=manifest,
    )


def _explained(
    rows: Sequence[OutputReport], comparison: _Comparison, way: Sequence[Slot], mode: str, *, is_close: bool
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


def _kept(runs: Iterable[_Run], done: list[_Run]) -> Iterator[_Run]:
    """The runs, each put into a list as it comes."""
    for run in runs:
        done.append(run)
        yield run


def load_converted(
    model: Path | bytes,
    manifest: Manifest | None,
    *,
    shapes: GivenShapes | None = None,
    values: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
) -> LoadedModel:
    """The model with the sizes and values that it was converted with, as its manifest says, or with others.

    Raises what `load_model` raises.
    """
    bound = {**({value.name: value.array() for value in manifest.values} if manifest else {}), **(values or {})}
    converted = {entry.name: entry.shape for entry in manifest.inputs} if manifest else {}
    try:
        return load_model(model, shapes={**converted, **(shapes or {})}, values=bound, outputs=outputs)
    except UsageError as error:
        if manifest is None or shapes or values:
            raise
        raise UsageError(f"the manifest is that of another model: {error}") from None


def _check_feeds(feeds: object) -> None:
    if not isinstance(feeds, (str, os.PathLike, Image)):
        check_options(feeds=feeds)


def any_feeds(
    model: Path | bytes,
    loaded: LoadedModel,
    manifest: Manifest | None,
    *,
    outputs: Sequence[str] = (),
    feeds: Feeds | None = None,
    seed: int = 0,
) -> Mapping[str, Array]:
    """Inputs that a converted model takes: those given, or those that `verify_net` draws first."""
    check_options(seed=seed)
    _check_feeds(feeds)
    if feeds is not None:
        return given_inputs(feeds, loaded)
    return drawn_feeds(model, loaded, manifest, [Draw(seed, plain=True)], outputs=outputs)[0]


def drawn_feeds(
    model: Path | bytes,
    loaded: LoadedModel,
    manifest: Manifest | None,
    draws: Sequence[Draw],
    *,
    outputs: Sequence[str] = (),
) -> list[Mapping[str, Array]]:
    """Inputs of each draw that a converted model takes: the first at the first of the `_settings`, others at the last.

    ONNX Runtime is asked only for sizes.
    """
    if not open_sizes(loaded, LENGTHS[0]):
        return [draw_inputs(loaded, draw=draw) for draw in draws]
    first, *others = draws
    runner = OrtRunner(model, outputs=outputs, values=loaded.values, threads=os.cpu_count() or 1)
    settings = _settings(loaded, runner, manifest, first)
    return [settings[0].feeds, *(draw_inputs(loaded, settings[-1].sizes, draw=draw) for draw in others)]


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
        way, outputs = _Comparison(
            runner, given, reference, manifest, tolerance or tolerance_of(loaded), rounding
        ).best()
    check_outputs(outputs, "from ONNX Runtime's in fp32 already, which masks do not change")
    return model_feeds(way, given)


@dataclass(frozen=True)
class _Run:
    """What the model makes of inputs at some dynamic sizes."""

    sizes: Mapping[str, int]
    draw: Draw | None
    feeds: Mapping[str, Array]
    reference: Mapping[str, Array]

    def __str__(self) -> str:
        return ", ".join(filter(None, (sizes_text(self.sizes), str(self.draw or ""))))


def _wanted_runs(
    model: LoadedModel,
    runner: OrtRunner,
    manifest: Manifest | None,
    seed: int,
    wanted: Wanted,
    step: Callable[[str], None],
) -> Iterator[_Run]:
    """A run for each of the wanted draws and sizes; at the usual sizes where none are wanted."""
    names = list(open_sizes(model, LENGTHS[0]))
    for sizes in wanted.sizes:
        if set(sizes) != set(names):
            raise UsageError(f"the model's dynamic dimensions are {', '.join(names) or 'none'}, not {', '.join(sizes)}")
    settings = wanted.sizes or [run.sizes for run in _settings(model, runner, manifest, Draw(seed, plain=True))]
    for sizes in settings:
        for draw in wanted.draws(seed):
            feeds = draw_inputs(model, sizes, draw=draw)
            if small := too_small(manifest, feeds):
                raise UsageError(small)
            step(f"ONNX Runtime runs the model, {draw}")
            yield _Run(sizes, draw, feeds, runner.run(feeds))


def _drawn_runs(
    model: LoadedModel, runner: OrtRunner, manifest: Manifest | None, seed: int, step: Callable[[str], None]
) -> Iterator[_Run]:
    """Runs at two values of every size that is dynamic in the net, or at one where ONNX Runtime takes no others.

    Where it takes none, one size may be the sum of two. Raises its error where it does not take that either.
    """
    step("ONNX Runtime runs the model")
    settings = _settings(model, runner, manifest, draws(seed, is_small=False)[0])
    sizes = [run.sizes for run in settings]
    entries = tables(model)
    swept: Counter[str] = Counter()

    def count(run: _Run) -> _Run:
        swept.update({name: run.feeds[name].size for name in entries})
        return run

    def drawn(number: int, draw: Draw) -> _Run:
        at = sizes[number % len(sizes)]
        feeds = draw_inputs(model, at, draw=draw, swept=swept)
        step(f"ONNX Runtime runs the model, {draw}")
        return count(_Run(at, draw, feeds, runner.run(feeds)))

    yield count(settings[0])
    numbers = _numbers(model), sum(array.size for array in settings[0].feeds.values())
    is_small = numbers[0] <= _SMALL_WEIGHTS and numbers[1] <= _SMALL_INPUTS
    first, *further = draws(seed, is_small=is_small, is_tiny=is_tiny(*numbers, len(model.graph)))
    if len(settings) > 1 and is_small:
        yield drawn(1, first)
    for number, draw in enumerate(further):
        yield drawn(number + 1, draw)
    for draw in sweeps(seed, entries, swept) if is_small else ():
        yield drawn(0, draw)


def _numbers(model: LoadedModel) -> int:
    """How many numbers the model's weights are."""
    return sum(value.const_value.size for value in model.graph.initializers.values() if value.const_value is not None)


def _settings(model: LoadedModel, runner: OrtRunner, manifest: Manifest | None, draw: Draw) -> list[_Run]:
    """A run at each of the values of the dynamic sizes, see `_drawn_runs`."""
    batches = _open_batches(model, manifest)
    open_names = list(open_sizes(model, LENGTHS[0]))
    most = _SIZES_EACH if open_names and manifest is not None else 1
    problem: RunError | None = None
    empty: _Run | None = None
    small = ""
    for total in (None, *islice(totals(open_names), _MOST_TOTALS)):
        runs: list[_Run] = []
        for lengths in LENGTHS if open_names else LENGTHS[:1]:
            known = open_sizes(model, lengths, batches, total)
            sizes = {name: known[name] for name in open_names}
            feeds = draw_inputs(model, sizes, draw=draw)
            if below := too_small(manifest, feeds):
                small = below
                continue
            try:
                reference = runner.run(feeds)
            except CrashError:  # it is dead, or has taken too long: others would not do better
                raise
            except RunError as error:
                problem = problem or error
                if total is not None and not runs:
                    break  # it is another sum
                continue
            run = _Run(sizes, draw, feeds, reference)
            if not all(array.size for array in reference.values()):
                empty = empty or run
                continue
            runs.append(run)
            if len(runs) == most:
                break
        if not runs and empty:
            runs = [empty]
        if runs:
            return runs
    if problem is None:
        raise UsageError(small)
    raise RunError(
        f"{problem}; the inputs were random; --inputs gives others"
        + (f", and --shape says how long {', '.join(open_names)} may be" if open_names else "")
    )


def _notes(model: LoadedModel, runs: Sequence[_Run], rounding: Rounding, is_fixed: bool) -> Iterator[str]:
    """What the reader should know about a model that gives not only numbers, or that does not run in float64.

    `is_fixed` says that the user chose the tolerance.
    """
    if rounding.problem and not is_fixed:
        reason = rounding.problem.rpartition("Status Message: ")[2]  # of ONNX Runtime's errors the last part
        allowed = f"an error of {UNKNOWN_ROUNDING:g} is allowed with ncnn's plain kernels"
        yield f"the model does not run in float64 ({reason}), so that {allowed}"
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


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Dynamic sizes as people read them."""
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def tolerance_of(model: LoadedModel) -> Tolerance:
    """What a net may differ from the model by: the usual, and more where the model quantises what it computes."""
    return with_quantisation(_quantised_bits(model))


def _quantised_bits(model: LoadedModel) -> list[int]:
    """To how many bits the model quantises what it computes, each time; 8 unless its zero point says otherwise."""
    return [
        node.inputs[2].dtype.bitwidth
        if node.op_type == "QuantizeLinear" and len(node.inputs) > 2 and node.inputs[2] and node.inputs[2].dtype
        else 8
        for node in model.graph
        if traits_of(node.domain, node.op_type, model.opsets.get(node.domain, 1)).quantises
    ]


def _open_batches(model: LoadedModel, manifest: Manifest | None) -> set[str]:
    """The names of dynamic dimensions that are the batch of an input."""
    axes = {entry.name: entry.batch_axis for entry in manifest.inputs} if manifest else {}
    batches = [(info.shape, axes.get(info.name)) for info in model.inputs]
    return {str(shape[axis]) for shape, axis in batches if axis is not None and isinstance(shape[axis], Sym)}


@dataclass(frozen=True)
class _Comparison:
    """A net and what it has to agree with."""

    runner: NcnnRunner
    feeds: Mapping[str, Array]
    reference: Mapping[str, Array]
    manifest: Manifest | None
    tolerance: Tolerance
    rounding: Rounding
    is_fixed: bool = False  # the tolerance is the user's
    least: float = LEAST_BUDGET  # that needs no run in float64
    is_close: bool = False

    def closer(self, runner: NcnnRunner) -> _Comparison:
        """The same with ncnn's plain kernels, whose errors are none but those of rounding: `budget` holds for them."""
        return replace(self, runner=runner, is_close=True)

    @cached_property
    def budget(self) -> Mapping[str, float]:
        """What each output may be off by in float32; the model runs in float64 for it."""
        measured = self.rounding.measured(self.feeds, self.reference)
        return {name: float32_budget(measured.get(name), self.least) for name in self.reference}

    def allowed(self, name: str, *, close: bool) -> float:
        """What an output may be off by, in units of its largest value; `close` with ncnn's plain kernels."""
        if self.is_fixed:
            return self.tolerance.relative
        usual = self.budget[name] if close else max(self.tolerance.relative, min(self.budget[name], MOST_BUDGET))
        return max(usual, ROOM * self.by_weights.get(name, 0.0))

    def leaves_budget(self, outputs: Sequence[OutputReport]) -> bool:
        """Whether outputs are right, but not as right as rounding alone would leave them."""
        off = {output.name: output.max_rel for output in outputs if (output.max_rel or 0.0) > self.least}
        return all(output.status in ("ok", "unproven") for output in outputs) and any(
            error > self.budget[name] for name, error in off.items() if error
        )

    @cached_property
    def spread(self) -> Mapping[str, Array]:
        """How far the reference moves with rounding errors; found out only where a net differs."""
        return self.rounding.spread(self.feeds, self.reference)

    @cached_property
    def by_weights(self) -> Mapping[str, float]:
        """How far the reference moves if weights are rounded as the net's are."""
        encoding = weights_encoding(self.runner.param, self.runner.bin)
        if encoding is None:
            return {}
        return self.rounding.stored(encoding, self.feeds, self.reference)

    def outputs(self) -> list[OutputReport]:
        """The reports of the likeliest way to feed the net that works best."""
        return self.best()[1]

    def best(self) -> tuple[Sequence[Slot], list[OutputReport]]:
        """The likeliest way to feed the net that works best, and its reports."""
        try:
            ways, blobs = input_slots(self.manifest, self.feeds, self.runner.input_names()), self.runner.output_names()
        except RunError as error:
            return (), self.failed(error)
        best: tuple[Sequence[Slot], list[OutputReport]] = (), []
        for way in ways:
            try:
                outputs = self.attempt(way, blobs)
            except (RunError, UsageError) as error:  # UsageError: an array that no Mat can hold
                outputs = self.failed(error)
            if not best[1] or _severity(outputs) < _severity(best[1]):
                best = way, outputs
            if all(output.status == "ok" for output in best[1]):
                break
        return best

    def failed(self, error: Error) -> list[OutputReport]:
        """The reports of a net that fails as a whole."""
        status: Status = "crashed" if isinstance(error, CrashError) else "refused"
        return [OutputReport(name, None, status, str(error)) for name in self.reference]

    def attempt(self, way: Sequence[Slot], blobs: Sequence[str]) -> list[OutputReport]:
        """Feed the net in this way, and judge what comes out of it; `blobs` are its outputs."""
        arrays = model_feeds(way, self.feeds)
        if self.manifest is not None:
            slots = manifest_slots("output", list(self.reference), self.manifest.outputs)
            results = self.runner.extract(arrays, [slot.fetch for slot in slots])
            return [self.judge(slot, results[slot.blob], exact_shape=True) for slot in slots]
        # A name of the model's that is not an output of the net may still be a blob inside it. They are read first:
        # once a consumer has run, a blob is gone.
        inner = [name for name in self.reference if name not in blobs] if len(blobs) < len(self.reference) else []
        results = self.runner.extract(arrays, [Fetch(blob, 0) for blob in (*inner, *blobs)])
        found = [*(blob for blob in inner if not isinstance(results[blob], Failure)), *blobs]
        pairs = pair(list(self.reference), found, lambda name, blob: _alike(results[blob], self.reference[name]))
        nothing = f"the net has no blob for it; its outputs are {', '.join(blobs)}"
        return [
            self.judge(Slot(name, pairs[name], 0), results[pairs[name]], exact_shape=False)
            if name in pairs
            else OutputReport(name, None, "missing", nothing)
            for name in self.reference
        ]

    def judge(self, slot: Slot, result: Array | Failure, *, exact_shape: bool) -> OutputReport:
        """The report of one output."""
        reference = self.reference[slot.name]
        if isinstance(result, Failure):
            return OutputReport(slot.name, slot.blob, "crashed" if result.crashed else "missing", result.reason)
        if exact_shape:
            array = slot.restored(result, reference.shape)
        else:
            array = result.reshape(reference.shape) if _alike(result, reference) else None
        if array is None:
            message = f"its shape is {list(result.shape)}, the model's {list(reference.shape)}"
            return OutputReport(slot.name, slot.blob, "shape", message)
        # A manifest says what the elements are, and is not to be helped where it is wrong.
        result = array.astype(np.float64) if exact_shape and reference.dtype.kind in "iub" else array
        allowed = self.tolerance
        if self.is_close:
            allowed = replace(allowed, relative=self.budget[slot.name], slices=False)
            if slot.name in self.rounding.exact(self.feeds):  # it is known what is left of terms that cancel
                allowed = replace(allowed, absolute=float(np.finfo(np.float32).tiny))
        difference = compare(result, reference, allowed)
        is_literal = self.is_fixed and self.tolerance.relative < DEFAULT.relative  # rounding is no excuse then
        if not difference.ok and not is_literal:
            reference = self.rounding.resolved(slot.name, self.feeds, reference, result)
            difference = compare(result, reference, allowed, self.spread[slot.name])
        if difference.excess and not self.is_fixed:
            slices = allowed.slices and not self.by_weights
            allowed = replace(allowed, relative=self.allowed(slot.name, close=self.is_close), slices=slices)
            difference = compare(result, reference, allowed, self.spread[slot.name])
        status: Status = "ok"
        message = ""
        if difference.special:
            status, message = "nan", difference.special
        elif difference.excess:
            status, message = "mismatch", difference.excess
        elif reference.size and difference.max_abs is None:
            status, message = "unproven", UNPROVEN
        numbers = (difference.max_abs, difference.max_rel, difference.cosine)
        return OutputReport(slot.name, slot.blob, status, message, *numbers)


def _alike(result: Array | Failure, reference: Array) -> bool:
    return not isinstance(result, Failure) and alike(result.shape, reference.shape)


def _severity(outputs: Sequence[OutputReport]) -> list[int]:
    """The worst first, to be compared with that of another attempt."""
    return sorted((get_args(Status).index(output.status) for output in outputs), reverse=True)
