"""Inputs of a model and ONNX Runtime's results: the user's inputs, or drawn ones at sizes that the model accepts."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import CrashError, RefusalError, RunError, UsageError
from onnx2ncnn_opt.inputs import draws
from onnx2ncnn_opt.inputs.draws import Draw, Wanted, draw_inputs, dynamic_sizes
from onnx2ncnn_opt.inputs.given import Feeds, given_inputs
from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.read.given import GivenShapes, parsed_size
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import too_small

_MAX_SIZES = 2  # at which each dynamic dimension runs
# Input ranges, and seeds for each, for outputs without finite numbers so far, e.g. if inputs are frequencies.
_RANGES, _SEEDS_PER_RANGE = ((0.0, 1.0), (1.0, 1.0), (0.0, 100.0), (1.0, 10000.0)), 4
# Nets up to these numbers of weights and input elements run on more inputs, because runs take less time than loading.
_SMALL_WEIGHTS, _SMALL_INPUTS = 2**25, 2**18
_COSTLY = 2**32  # multiply-adds of a run, a tenth of a second: sizes with more are tried after others
_TOO_COSTLY = 2**35  # attention over the pixels of a large image takes gigabytes
_LARGE_INPUT = 2**22  # elements; larger ones are not tried after smaller ones were refused
_MAX_CASES, _LONGEST = 8, 2**10  # sets of sizes, and the longest of a dimension, to run in all cases of the net
_EMPTY, _UNINFORMATIVE, _INFORMATIVE = range(3)  # outputs, from worst to best
_SHORTEST = 8  # elements; real images, sentences and sounds are longer


@dataclass(frozen=True)
class Run:
    """The inputs of a model at some dynamic sizes, and its results; `label` describes the run."""

    sizes: Mapping[str, int]
    draw: Draw | None
    feeds: Mapping[str, Array]
    reference: Mapping[str, Array]
    label: str = ""

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return ", ".join(filter(None, (sizes, str(self.draw or ""), self.label)))


def load_converted(
    model: Path | bytes,
    manifest: Manifest | None,
    *,
    shapes: GivenShapes | None = None,
    values: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
) -> LoadedModel:
    """Load a model like `load_model`; sizes, values and the cut default to the manifest's."""
    if manifest is None:
        return load_model(model, shapes=shapes, values=values, outputs=outputs)
    bound = {value.name: value.array() for value in manifest.values} | dict(values or {})
    inputs = manifest.model_inputs if set(outputs) - set(manifest.cut) else manifest.inputs
    converted = {entry.name: entry.shape for entry in inputs if not entry.length} | dict(shapes or {})
    load = partial(load_model, model, shapes=converted, values=bound)
    try:
        loaded = load(outputs=outputs or manifest.cut)
        inner = _inner_outputs(manifest, loaded)
        return load(outputs=inner) if inner and not outputs else loaded
    except UsageError as error:
        if shapes or values:
            raise
        raise UsageError(f"the manifest belongs to another model: {error}") from None


def _inner_outputs(manifest: Manifest, model: LoadedModel) -> tuple[str, ...]:
    """Return the net's outputs if it was converted up to inner values of the model (`--outputs`), else none."""
    names = tuple(entry.name for entry in manifest.outputs)
    if manifest.tail or manifest.caches or {info.name for info in model.outputs}.issuperset(names):
        return ()
    values = {value.name for node in model.graph for value in node.outputs}
    return names if values.issuperset(names) else ()


def any_feeds(
    model: Path | bytes,
    loaded: LoadedModel,
    manifest: Manifest | None,
    *,
    outputs: Sequence[str] = (),
    feeds: Feeds | None = None,
    seed: int = 0,
) -> Mapping[str, Array]:
    """Return inputs of a converted model: the user's, or the first that `verify_net` draws."""
    if feeds is not None:
        return given_inputs(feeds, loaded, manifest)
    draw = Draw(seed, plain=True)
    return draw_inputs(loaded, first_sizes(model, loaded, manifest, draw, outputs=outputs), draw=draw)


def first_sizes(
    model: Path | bytes, loaded: LoadedModel, manifest: Manifest | None, draw: Draw, *, outputs: Sequence[str] = ()
) -> Mapping[str, int]:
    """Return the first choice of dynamic sizes that the model accepts for a draw."""
    if not dynamic_sizes(loaded):
        return {}
    runner = OrtRunner(model, outputs=outputs or loaded.cut, values=loaded.values, threads=None)
    return DrawnRuns(loaded, runner, manifest).settings(draw)[0].sizes


@dataclass(frozen=True)
class DrawnRuns:
    """The runs of a model in ONNX Runtime on drawn inputs, at sizes that the model and the manifest's net accept."""

    model: LoadedModel
    runner: OrtRunner
    manifest: Manifest | None

    def run(self, sizes: Mapping[str, int], draw: Draw, swept: Mapping[str, int] | None = None) -> Run:
        """Run the model on one draw; `swept` are indexes of tables, see `draw_inputs`."""
        announce(f"ONNX Runtime runs the model, {draw}")
        feeds = draw_inputs(self.model, sizes, draw=draw, swept=swept)
        return Run(sizes, draw, feeds, self.runner.run(feeds))

    def wanted(self, seed: int, wanted: Wanted) -> Iterator[Run]:
        """Yield a run for each wanted draw at each wanted set of sizes, or at the sizes of `usual`."""
        names = list(dynamic_sizes(self.model))
        for sizes in wanted.sizes:
            if set(sizes) != set(names):
                known = ", ".join(names) or "none"
                raise UsageError(f"the model's dynamic dimensions are {known}, not {', '.join(sizes)}")
        settings = wanted.sizes or [run.sizes for run in self.settings(Draw(seed, plain=True))]
        for sizes, draw in product(settings, wanted.draws(seed)):
            run = self.run(sizes, draw)
            if small := too_small(self.manifest, run.feeds):
                raise UsageError(small)
            yield run

    def usual(self, seed: int, notes: list[str]) -> Iterator[Run]:
        """Yield runs at two values of every dynamic size, or at one if ONNX Runtime accepts no second value.

        A small model also runs in the other cases of the manifest; `notes` get those sizes that the net does not take.
        If ONNX Runtime rejects independent sizes, one size becomes the sum of two others. Raise its error if it rejects
        these too. Later inputs that it rejects are left out: for example detectors may fail without detections. So are
        inputs with NaN alone in an output that had numbers before: for example a graph without edges has no softmax.
        """
        announce("ONNX Runtime runs the model")
        settings = self.settings(draws.draws(seed, is_small=False)[0])
        entries = draws.tables(self.model)
        swept: Counter[str] = Counter()
        proven: set[str] = set()

        def count(run: Run) -> Run:
            swept.update({name: run.feeds[name].size for name in entries})
            proven.update(_with_numbers(run.reference))
            return run

        def drawn(sizes: Mapping[str, int], draw: Draw) -> Iterator[Run]:
            try:
                run = self.run(sizes, draw, swept)
            except CrashError:
                raise
            except (RunError, UsageError):
                return
            if too_small(self.manifest, run.feeds):
                notes.append(f"not tried: {Run(sizes, None, {}, {})}, which the model takes, and the net does not")
            elif not any(np.isnan(run.reference[name]).all() for name in proven if run.reference[name].size):
                yield run

        yield count(settings[0])
        initializers = [value.const_value for value in self.model.graph.initializers.values()]
        weights = sum(tensor.size for tensor in initializers if tensor is not None)
        numbers, layers = sum(array.size for array in settings[0].feeds.values()), len(self.model.graph)
        is_small = weights <= _SMALL_WEIGHTS and numbers <= _SMALL_INPUTS
        first, *further = draws.draws(seed, is_small=is_small, is_tiny=draws.is_tiny(weights, numbers, layers))
        usual = [run.sizes for run in settings]
        for sizes in (*usual[1:], *self._other_cases(usual)) if is_small else ():
            yield from map(count, drawn(sizes, first))
        for number, draw in enumerate(further):
            yield from map(count, drawn(usual[(number + 1) % len(usual)], draw))
        for draw in draws.sweeps(seed, entries, swept) if is_small else ():
            yield from map(count, drawn(usual[0], draw))
        for draw in (Draw(seed + number, between=between) for between in _RANGES for number in range(_SEEDS_PER_RANGE)):
            if len(proven) == len(settings[0].reference):
                return
            yield from (count(run) for run in drawn(usual[0], draw) if _with_numbers(run.reference) - proven)

    def _other_cases(self, usual: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
        """Return sizes near the first, at which one of the manifest's `cases` is above 0, or not, as at no `usual`."""
        tried, first = list(usual), usual[0]

        def is_case(text: str, is_above: bool, sizes: Mapping[str, int]) -> bool:
            size = parsed_size(text, sizes)
            return isinstance(size, int) and (size > 0) == is_above

        for text, is_above in product(self.manifest.cases if self.manifest else (), (False, True)):
            if len(tried) < _MAX_CASES and not any(map(partial(is_case, text, is_above), tried)):
                steps = product((name for name in first if name in text), range(_LONGEST), (-1, 1))
                near = ({**first, name: first[name] + sign * step} for name, step, sign in steps)
                positive = (sizes for sizes in near if min(sizes.values()) > 0)
                tried += islice(filter(partial(is_case, text, is_above), positive), 1)
        return [sizes for sizes in tried[len(usual) :] if self._cost(sizes) <= self._cost(first)]

    def settings(self, draw: Draw) -> list[Run]:
        """Return a run for each set of dynamic sizes that ONNX Runtime accepts, see `usual`."""
        names = list(dynamic_sizes(self.model))
        most = _MAX_SIZES if names and self.manifest is not None else 1
        problem: RunError | None = None
        small = ""
        for total in draws.totals(names):
            by_quality: list[list[Run]] = [[], [], []]
            for sizes in self._choices(total):
                has_run = problem is not None or any(by_quality)
                try:
                    largest = _LARGE_INPUT if has_run else draws.LARGEST_INPUT
                    feeds = draw_inputs(self.model, sizes, draw=draw, most=largest)
                    if below := too_small(self.manifest, feeds):
                        small = below
                        continue
                    run = Run(sizes, draw, feeds, self.runner.run(feeds))
                except CrashError:  # or a timeout: other sizes would not help
                    raise
                except UsageError:
                    if not has_run:
                        raise
                    continue  # too large, and smaller ones were refused or prove nothing
                except RunError as error:
                    problem = problem or error
                    if total is not None and not any(by_quality):
                        break  # try the next sum
                    continue
                quality = _quality(run.reference)
                by_quality[quality].append(run)
                is_large = sum(array.size for array in feeds.values()) > _SMALL_INPUTS
                if len(by_quality[_INFORMATIVE]) == most or (quality != _INFORMATIVE and is_large):
                    break
            if any(by_quality):
                return [*by_quality[_INFORMATIVE], *by_quality[_UNINFORMATIVE]][:most] or by_quality[_EMPTY][:1]
        if problem is None:
            raise UsageError(small)
        hint = f", and --shape says how long {', '.join(names)} may be" if names else ""
        advice = f"; the inputs were random; --inputs gives others{hint}"
        refused = RefusalError(f"{problem}{advice}")
        refused.advice = advice
        raise refused

    def _choices(self, total: draws.Total | None) -> list[dict[str, int]]:
        """Return values for all dynamic sizes, in the order to try them; costly ones follow the other usual ones."""
        axes = _batch_axes(self.manifest)
        dims = [(info.name, axis, str(dim)) for info in self.model.inputs for axis, dim in enumerate(info.shape)]
        batches = {dim for name, axis, dim in dims if axis == axes.get(name)}
        choices = [dynamic_sizes(self.model, lengths, batches, total) for lengths in draws.LENGTHS]
        least = Counter(self.manifest.minimum if self.manifest else {})
        above = [{name: size + (size < least[name]) * least[name] for name, size in sizes.items()} for sizes in choices]
        usual = sorted(above[: draws.USUAL], key=self._cost)
        unusual = (sizes for sizes in above[draws.USUAL :] if self._cost(sizes) < _TOO_COSTLY)
        return [*usual, *unusual] if choices[0] else choices[:1]

    def _cost(self, sizes: Mapping[str, int]) -> int:
        """Return the multiply-adds of a run, if there are many."""
        count = parsed_size(self.manifest.macs, sizes) if self.manifest else None
        return max(count, _COSTLY) if isinstance(count, int) else _COSTLY


def _quality(reference: Mapping[str, Array]) -> int:
    """Return the value of outputs as a test: none if one is empty, little if one has NaN or all are 0.

    Example: a few samples of a sound may give no feature.
    """
    outputs = reference.values()
    if not all(array.size for array in outputs):
        return _EMPTY
    has_nan = any(np.isnan(array).any() for array in outputs)
    has_numbers = any((np.isfinite(array) & (array != 0)).any() for array in outputs)
    return _INFORMATIVE if has_numbers and not has_nan else _UNINFORMATIVE


def _with_numbers(reference: Mapping[str, Array]) -> set[str]:
    """Return the names of outputs with a finite number or without elements."""
    return {name for name, array in reference.items() if not array.size or np.isfinite(array).any()}


def small_runs(model: LoadedModel, manifest: Manifest | None, runs: Sequence[Run]) -> str:
    """Return a note about inputs that ran at tiny sizes only, because the model accepts no others."""
    batches = _batch_axes(manifest)
    small = [
        info.name
        for info in model.inputs
        for axis, dim in enumerate(info.shape)
        if axis and axis != batches.get(info.name) and isinstance(dim, Sym)
        if max(run.feeds[info.name].shape[axis] for run in runs) < _SHORTEST
    ]
    if not small:
        return ""
    names = ", ".join(dict.fromkeys(small))
    return f"{names} ran at tiny sizes only, which proves little; give your sizes with --shape, or arrays with --inputs"


def _batch_axes(manifest: Manifest | None) -> dict[str, int | None]:
    return {entry.name: entry.batch_axis for entry in manifest.inputs} if manifest else {}
