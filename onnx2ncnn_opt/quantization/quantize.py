"""The int8 form of a float net: the choice of layers by their noise at the outputs and the time that they save.

Noise powers add up. So the noise of each layer alone in int8 is measured once, and sums predict the noise of several.
"""

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.cost import multiplications
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.int8 import CRASH_OF_GPUS, LEVELS, crashes_gpus, may_use_winograd
from onnx2ncnn_opt.ir.releases import NEWEST, too_new
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.param.files import NetFiles, read_graph, read_net, write_net
from onnx2ncnn_opt.param.splits import list_layers
from onnx2ncnn_opt.precision.knapsack import cheapest
from onnx2ncnn_opt.progress import announce, counted
from onnx2ncnn_opt.quantization.centre import centre
from onnx2ncnn_opt.quantization.emit import Scales, form_of, forms_of, has_static_scale, needs_sums, obstacle, quantise
from onnx2ncnn_opt.quantization.kernels import time_in_int8
from onnx2ncnn_opt.quantization.observe import Observed, add_sums, largest_sums, observe
from onnx2ncnn_opt.quantization.table import read_table
from onnx2ncnn_opt.quantization.thresholds import METHODS
from onnx2ncnn_opt.runtime.base import Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import LOCAL, find_target
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verification.latency import in_turns
from onnx2ncnn_opt.verification.sqnr import Agreement, decibels

WEIGHTS = ("int8", "block8")
_MIN_SAMPLES = 8  # fewer are not representative
_MIN_SAMPLES_FOR_BUDGET = 50  # to keep a budget on other data, too
_HELD_OUT = 5  # every fifth sample measures the noise, and does not calibrate
_MAX_SLOWDOWN, _RETRIES = 1.02, 2  # of the int8 net against the float net; more measurements if it is slower
_MIN_TURNS, _TURNS, _MAX_TURNS = 3, 15, 60  # of each net; the maximum where 15 do not decide
_RUNS_PER_TURN, _MAX_SECONDS = 5, 30.0  # the limit counts because a GPU compiles shaders in each turn
_NET_SECONDS = 0.5  # to time a float net and an int8 one
_ERROR_FACTOR = 4  # the error of a median is 4 median deviations by the root of the turns
_POOR = 15.0  # decibels; an output with less is of little use
_LOUD = 100.0  # a larger median of layers' largest inputs hints at pixels in place of normalised numbers
_SATURATED = 0.3  # a larger share of a blob's numbers at its maximum hints at pixels too: ReLU6 saturates them
_MIN_GAIN = 0.1  # the share of a layer's measured time that int8, or another form of it, has to save
_MIN_TABLE_GAIN = 0.03  # the same for times of the kernels' table, which has no noise
_CLOCK_STEP = 1e-9  # seconds
_ATTEMPTS = 12
_LAYER_WORK, _MAX_SAMPLES = 10**11, 64  # multiplications, and samples, to measure one layer's noise
_CACHE = 2**28  # bytes of the float net's outputs that are kept in memory
_CLOSE = 1.0  # decibels: the tolerance of a budget on other data, and the excess that ends the search
_TOP1_STEP, _STEP = 0.7, 0.95  # factors of the measured noise (a budget of top-1), and of the limit, for a new attempt
_INFINITE_NOISE = 1e6  # a finite power that stands for infinite noise in sums


@dataclass(frozen=True)
class Budget:
    """The least agreement with the float net: a signal-to-noise ratio in dB, or a share of rows with equal argmax.

    With `other_data` the ratio has to hold on other data as well, within 1 dB.
    """

    decibels: float = -math.inf
    top1: float = 0.0
    other_data: bool = True

    def __str__(self) -> str:
        return f"top1={self.top1:g}" if self.top1 else f"{self.decibels:g} dB"

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Parse ``40dB`` or ``top1=0.99``. Raises UsageError for another form."""
        try:
            if text.lower().endswith("db") and 0 < float(text[:-2]) < math.inf:
                return cls(decibels=float(text[:-2]))
            if text.startswith("top1=") and 0 < float(text[5:]) <= 1:
                return cls(top1=float(text[5:]))
        except ValueError:
            pass
        raise UsageError(f"a budget is 40dB or top1=0.99, not {text!r:.40}")


@dataclass(frozen=True)
class Options:
    """The options of `api.quantize.quantize` for the net; raises UsageError for an unknown method or form of weights.

    `table` is a file of ncnn2table, `like` the .param of an earlier int8 net, whose layers get the same forms.
    """

    method: str = "mse"  # one of thresholds.METHODS
    keep: Collection[str] = ()  # layers that stay float
    budget: Budget = Budget()
    every: bool = False  # layers become int8 even if they get no faster
    weights: str | None = None  # one of WEIGHTS; None is blocks, and one scale only where that is faster
    table: str | os.PathLike[str] | None = None
    like: str | os.PathLike[str] | None = None
    on: str | None = None  # the target for times, and for the noise of the final net

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"method is {', '.join(METHODS)}, not {self.method!r:.40}")
        if self.weights not in (None, *WEIGHTS):
            forms = f"weights are {' or '.join(WEIGHTS)}, not {self.weights!r:.40}"
            raise UsageError(f"{forms}: ncnn has no fast kernels of others")


@dataclass(frozen=True)
class Row:
    """A layer: its largest input, the share of it that saturates (`cut`), and the `reason` if it stays float.

    `noise` is the noise power with only this layer in int8, relative to the outputs' power. `seconds` are for float and
    int8. `form` and `bits` describe the stored weights.
    """

    layer: str
    type: str
    largest: float = math.nan
    cut: float = math.nan
    noise: float = math.nan
    seconds: tuple[float, float] = (math.nan, math.nan)
    reason: str = ""
    form: str = ""
    bits: int = 0

    @property
    def is_int8(self) -> bool:
        """True if the layer is int8."""
        return not self.reason


@dataclass(frozen=True)
class Quantized:
    """An int8 net, its layers, and its agreement with the float net.

    `decibels` is the signal-to-noise ratio of the worst output, measured with held-out samples if there are enough.
    `top1` is the share of rows with the same argmax, None if no output has rows of classes. `at_least` and
    `top1_at_least` are lower bounds for other data, with a probability of 95 %. `seconds` and `bytes` (of the .bin) are
    for the float and the int8 net; `times` names the device and the method. `missed` says which demand the net misses.
    """

    graph: Graph
    layers: tuple[Row, ...]
    decibels: float
    at_least: float
    top1: float | None
    top1_at_least: float | None
    samples: int
    seconds: tuple[float, float]
    bytes: tuple[int, int]
    times: str
    notes: tuple[str, ...] = ()
    missed: str = ""

    def kept(self, budget: Budget) -> float:
        """Return the largest number of dB that the net keeps, on other data too if the budget says so."""
        return min(self.decibels, self.at_least + _CLOSE) if budget.other_data else self.decibels

    def misses(self, budget: Budget) -> str:
        """Return a message if the net misses a budget; empty if it keeps it."""
        if self.kept(budget) < budget.decibels:
            return f"{self.decibels:.1f} dB, {self.at_least:.1f} dB or more on other data, the budget is {budget}"
        if budget.top1 and (self.top1 is None or self.top1 < budget.top1):
            top1 = "no output has rows of classes" if self.top1 is None else f"{self.top1:.1%} of rows agree"
            return f"{top1}, the budget is {budget.top1:.1%}"
        return ""


class _Nets:
    """A float net in files, and its int8 forms."""

    def __init__(
        self, param: Path, bin: Path, feeds: Sequence[Mapping[str, Feed]], folder: Path, on: str | None, stack: Any
    ) -> None:
        (target := find_target(on)).require()
        self.param, self.bin, self.feeds, self.folder = param, bin, feeds, folder
        self.worker: NcnnWorker = stack.enter_context(NcnnWorker())
        self.float = NcnnRunner(param, bin, worker=self.worker)
        self.device = self.worker if target == LOCAL else stack.enter_context(NcnnWorker(target))
        greeting = self.device.start().greeting
        self.machine = "Vulkan" if target.vulkan else greeting["machine"]
        self.where = " ".join(target.described(greeting, []).split())
        is_emulated = target.patience > 1 or "llvmpipe" in greeting.get("gpu", "")
        self.is_timed = not is_emulated
        machine = f"on {self.where}" if target != LOCAL else "on this machine"
        self.times = f"{machine}, one thread" if self.is_timed else f"by a table of kernels for {self.where}"
        self.outputs = self.float.output_names()
        are_enough = len(feeds) >= 2 * _MIN_SAMPLES
        self.held = range(_HELD_OUT - 1, len(feeds), _HELD_OUT) if are_enough else range(len(feeds))
        self._expected: dict[int, dict[str, Array]] = {}
        self._bytes = 0  # of `_expected`

    def is_faster(self, row: Row) -> bool:
        """Return True if int8 saves so much of a layer's time that clock errors of 1 % change few decisions."""
        return row.seconds[1] < row.seconds[0] * (1 - (_MIN_GAIN if self.is_timed else _MIN_TABLE_GAIN))

    def graph(self, scales: Mapping[str, Scales]) -> Graph:
        """Return the net with these layers in int8."""
        graph = read_net(self.param, self.bin).graph
        quantise(graph, scales)
        centre(graph, padded=self.machine != "Vulkan")
        return graph

    def runner(self, scales: Mapping[str, Scales], worker: NcnnWorker | None = None, name: str = "int8") -> NcnnRunner:
        """Write the net with these layers in int8 to files; return its runner."""
        return self._written(self.graph(scales), name, worker)

    def _written(self, graph: Graph, name: str, worker: NcnnWorker | None = None) -> NcnnRunner:
        files = NetFiles.at(self.folder / name)
        write_net(graph, files.param, files.bin)
        return NcnnRunner(files.param, files.bin, worker=worker or self.worker)

    def with_sums(self, scales: Mapping[str, Scales], samples: Collection[Mapping[str, Feed]]) -> dict[str, Scales]:
        """Return scales with `largest_sum` for layers whose weights do not bound it."""
        graph = read_net(self.param, self.bin).graph
        layers = [layer for layer in graph if layer.name in scales and needs_sums(layer)]
        if not layers:
            return dict(scales)
        outputs = add_sums(graph, layers)
        sums = largest_sums(self._written(graph, "sums"), outputs, samples)
        return dict(scales) | {
            name: replace(scales[name], largest_sum=sums[name] * scales[name].input) for name in sums
        }

    def whole_if_too_new(self, scales: Mapping[str, Scales], release: int) -> dict[str, Scales]:
        """Return scales without blocks for layers whose blocks need a newer ncnn than `release`."""
        new = {layer.name for layer in self.graph(scales) if layer.name in scales and too_new(layer, release)}
        return {name: replace(each, whole=True) if name in new else each for name, each in scales.items()}

    def noise_samples(self, layers: int, work: int | None) -> list[Sequence[int]]:
        """Return the held-out samples, and these with others, for the noise of one layer; as many as `work` allows."""
        affordable = _LAYER_WORK // (layers * (work or _LAYER_WORK))
        half = min(_MAX_SAMPLES, max(_MIN_SAMPLES, affordable)) // 2
        held, rest = self.held[:half], [i for i in range(len(self.feeds)) if i not in self.held][:half]
        return [held, [*held, *rest]]

    def expected(self, index: int) -> dict[str, Array]:
        """Return the float net's outputs for a sample."""
        if index in self._expected:
            return self._expected[index]
        outputs = self._run(self.float, index)
        self._bytes += sum(array.nbytes for array in outputs.values())
        if self._bytes <= _CACHE:
            self._expected[index] = outputs
        return outputs

    def _run(self, runner: NcnnRunner, index: int) -> dict[str, Array]:
        feeds = self.feeds[index]
        axis = 0 if any(axis is not None and array.shape[axis] > 1 for array, axis in feeds.values()) else None
        return runner.run(feeds, [Fetch(name, axis) for name in self.outputs])

    def compare(
        self, scales: Mapping[str, Scales], *groups: Collection[int], worker: NcnnWorker | None = None
    ) -> list[Agreement]:
        """Return the agreement of the net with these layers in int8 for each group of samples, the worst first."""
        runner = self.runner(scales, worker)
        agreements = [Agreement() for _ in groups]
        for index in sorted({index for group in groups for index in group}):
            outputs = self._run(runner, index)
            for agreement, group in zip(agreements, groups, strict=True):
                if index in group:
                    agreement.add(self.expected(index), outputs)
        return sorted(agreements, key=lambda agreement: agreement.noise, reverse=True)


@dataclass
class _Layers:
    """The layers of a float net, their scales if they may become int8, and their rows with noise and times.

    With `every`, layers become int8 even if they get no faster.
    """

    nets: _Nets
    net: Graph
    rows: dict[str, Row]
    scales: dict[str, Scales]
    notes: list[str]
    every: bool

    def change(self, name: str, **fields: Any) -> None:
        """Change fields of a layer's row."""
        self.rows[name] = replace(self.rows[name], **fields)

    def drop_too_new(self, release: int) -> None:
        """Leave layers float whose form needs a newer ncnn than `release`. Raises UsageError if no layer is left."""
        for layer in self.nets.graph(self.scales):
            if layer.name in self.scales:
                self.change(layer.name, reason=too_new(layer, release) or "")
        self.scales = {name: self.scales[name] for name in _candidates(self.rows, self.scales)}

    def drop_noisy(self) -> None:
        """Leave layers float that alone spoil an output."""
        for row in [*self.rows.values()]:
            if (alone := decibels(row.noise)) < _POOR:
                self.change(row.layer, reason=f"it alone spoils an output: {alone:.1f} dB are left")

    def add_noise(self) -> None:
        """Add to the rows the noise of each layer alone."""
        for name in counted([*self.scales], "ncnn runs the net with one layer in int8", "layers"):
            self.change(name, noise=self._noise_of({name: self.scales[name]}))

    def _noise_of(self, scales: Mapping[str, Scales]) -> float:
        groups = self.nets.noise_samples(len(self.scales), multiplications(self.net))
        return self.nets.compare(scales, *groups)[0].noise

    def add_inputs(self, observed: Mapping[str, Observed]) -> None:
        """Add to the rows the largest input of each layer, and how much of it saturates."""
        for layer in self.net:
            if layer.name in self.scales and layer.name in observed:
                stats, threshold = observed[layer.name], LEVELS / self.scales[layer.name].input
                cut = stats.share_above(threshold) if has_static_scale(layer) else 0.0
                self.change(layer.name, largest=stats.largest, cut=cut)

    def add_times(self, forms: Mapping[str, Scales] | None) -> None:
        """Add times to the rows, and replace scales by `forms` that are clearly faster.

        One scale is taken only where blocks are no faster than float. A layer with a single form takes its time from
        the faster net, because winograd of its neighbours evicts caches. If `forms` is None, times decide nothing.
        """
        nets, others = self.nets, forms or {}
        announce("timing the layers in float and in int8")
        layers = [layer for layer in self.net if layer.name in self.scales]
        variants = [self.scales, {**self.scales, **others}] if others else [self.scales]
        seconds, ratios = self._timed(layers, variants if nets.is_timed else [], are_few=forms is None)
        for i, layer in enumerate(layers):
            name, before = layer.name, float(seconds[i])
            if nets.is_timed:
                factors = ratios[: len(variants), i].tolist()
            else:
                factors = [time_in_int8(nets.machine, layer, whole=each[name].whole) or math.nan for each in variants]
            factor = factors[0] if name in others else min(factors)
            self.change(name, seconds=(before, before * factor))
            if name in others and factors[1] < factor * (1 - _MIN_GAIN):
                self._take(name, others[name], replace(self.rows[name], seconds=(before, before * factors[1])))

    def _take(self, name: str, scales: Scales, row: Row) -> None:
        """Give a layer a faster form, with its `row`, unless it is one scale and blocks are fast enough."""
        if scales.whole:
            if not self.nets.is_faster(row) or self.nets.is_faster(self.rows[name]):
                return
            row = replace(row, noise=self._noise_of({name: scales}))
        self.scales[name], self.rows[name] = scales, row

    def _timed(
        self, layers: Sequence[Layer], variants: Sequence[Mapping[str, Scales]], *, are_few: bool
    ) -> tuple[Array, Array]:
        """Return the seconds of layers in float, and ratios: of each variant to float, and of the second to the first.

        The nets run alternately in one process, and the median of the ratios over all turns counts: load slows down all
        nets of a turn alike, and each net is loaded to another place in memory. There are few turns, or as many as
        decide which layers gain enough.
        """
        nets, tops = self.nets, list_layers(self.net).tops
        firsts = [tops.get(layer.outputs[0]) for layer in self.net if layer.type != "Input" and layer.outputs]
        names = list(dict.fromkeys(filter(None, firsts)))
        columns = [names.index(tops[layer.outputs[0]]) for layer in layers]
        runners = [NcnnRunner(nets.param, nets.bin, worker=nets.device) if variants else nets.float]
        runners += [nets.runner(variant, nets.device, f"timed{i}") for i, variant in enumerate(variants)]
        turns: list[Array] = []
        most, end = _TURNS, time.monotonic() + _MAX_SECONDS
        while len(turns) < _MIN_TURNS or (not are_few and len(turns) < most and time.monotonic() < end):
            times = [runner.time_blobs(nets.feeds[0], names, runs=_RUNS_PER_TURN).blobs for runner in runners]
            turns.append(np.maximum(np.array(times)[:, columns], _CLOCK_STEP))
            ratios = [[*turn[1:] / turn[0], *turn[2:] / turn[1:2]] for turn in turns]
            median = np.median(ratios, axis=0)
            error = np.median(np.abs(np.array(ratios) - median), axis=0) * _ERROR_FACTOR / math.sqrt(len(turns))
            most = _MAX_TURNS if (np.abs(median - 1 + _MIN_GAIN) < error).any() else _TURNS
        return np.min([turn[0] for turn in turns], axis=0), median

    def within(self, budget: Budget) -> Quantized:
        """Leave out the layers with most noise for the time they save, until the measured net keeps the budget.

        If the net misses the budget, the limit of its noise falls. If it is slow, the layer that saves least stays
        float.
        """
        rows = [self.rows[name] for name in self.scales if not self.rows[name].reason]
        rows = [row for row in rows if self.every or self.nets.is_faster(row)]
        powers = {row.layer: min(row.noise, _INFINITE_NOISE) for row in rows}
        saved = {row.layer: 1.0 if self.every else max(row.seconds[0] - row.seconds[1], 1e-9) for row in rows}
        curvature, limit = 0.0, math.inf
        tried: dict[frozenset[str], Quantized] = {}
        best: frozenset[str] = frozenset()
        for _ in range(_ATTEMPTS):
            steps = [(power / saved[name], name, True, 0.0) for name, power in powers.items()]
            floats = cheapest(powers, steps, lambda name, _: saved[name], _sum_with_noise(limit, curvature))
            subset = frozenset(powers).difference(floats)
            if subset in tried:
                break
            result = tried[subset] = self._measured(subset)
            if not subset:
                break
            total, noise = sum(powers[name] for name in subset), _noise(result.decibels)
            curvature = (noise - total) / (total**2 or 1.0)
            if result.misses(budget):
                limit = _STEP * min(_allowed_noise(result, budget), limit)
            elif not self.every and result.seconds[1] > _MAX_SLOWDOWN * result.seconds[0]:
                least = min(subset, key=saved.__getitem__)
                del powers[least]
                self.change(least, reason="the whole net is no faster with it in int8")
            else:
                best = max(best, subset, key=lambda names: sum(saved[name] for name in names))
                if limit == math.inf or budget.top1 or result.kept(budget) < budget.decibels + _CLOSE:
                    break
        if best:
            return tried[best]
        if subset:
            return replace(result, missed=result.misses(budget))
        if limit < math.inf:
            result = max(tried.items(), key=lambda item: (bool(item[0]), item[1].kept(budget)))[1]
            missed = f"no layer can be int8 with a budget of {budget}"
        elif self.every:
            missed = "each layer that can be int8 spoils an output"
        else:
            missed = f"no layer is faster in int8 {self.nets.times}; --all makes them int8 anyway"
        return replace(result, missed=missed)

    def _measured(self, chosen: Collection[str]) -> Quantized:
        """Return the net with these layers in int8, with its measured noise, times and sizes."""
        nets = self.nets
        subset = {name: scales for name, scales in self.scales.items() if name in chosen}
        groups = nets.compare(subset, nets.held, range(len(nets.feeds)), worker=nets.device)
        worst, graph = groups[0], nets.graph(subset)
        forms = {layer.name: form_of(layer) for layer in graph if layer.name in chosen}
        final = tuple(
            replace(row, form=forms[row.layer][0], bits=forms[row.layer][1])
            if row.layer in forms
            else replace(row, reason=row.reason or self._reason(row))
            for row in self.rows.values()
        )
        notes = [*self.notes]
        if on_cpu := [layer.name for layer in graph if layer.name in chosen and crashes_gpus(layer)]:
            notes.append(f"on GPUs the CPU computes {len(on_cpu)} of the Gemms: {CRASH_OF_GPUS}")
        if worst.decibels < _POOR and chosen:
            layer = max(chosen, key=lambda name: self.rows[name].noise)
            poor = f"an output is only {worst.decibels:.1f} dB from the float net; '{layer}' makes the most noise"
            notes.append(f"{poor}: --budget or --keep leaves layers float")
        runner = nets.runner(subset, nets.device)
        return Quantized(
            graph,
            final,
            worst.decibels,
            decibels(max(group.most_noise for group in groups)),
            worst.top1,
            min((group.least_top1 for group in groups if group.least_top1 is not None), default=None),
            len(nets.feeds),
            self._seconds(runner, chosen),
            (nets.bin.stat().st_size, runner.bin.stat().st_size),
            nets.times,
            tuple(notes),
        )

    def _seconds(self, runner: NcnnRunner, chosen: Collection[str]) -> tuple[float, float]:
        """Return the seconds of the float net, and of the runner's net with these layers in int8."""
        nets = self.nets
        if not nets.is_timed:
            before = min(nets.float.time(nets.feeds[0], nets.outputs, 0.1))
            return before, before - sum(a - b for a, b in (self.rows[name].seconds for name in chosen))
        floats = NcnnRunner(nets.param, nets.bin, worker=nets.device)
        time_int8, time_float = (partial(net.time, nets.feeds[0], nets.outputs) for net in (runner, floats))
        latency = in_turns(time_int8, time_float, _NET_SECONDS)
        for _ in range(_RETRIES):
            if latency.ratio > _MAX_SLOWDOWN and not self.every:  # the machine may have been busy
                latency = min(latency, in_turns(time_int8, time_float, _NET_SECONDS), key=lambda each: each.ratio)
        return latency.other / 1e3, latency.other / 1e3 * latency.ratio

    def _reason(self, row: Row) -> str:
        """Return why a layer stays float that has a form in int8."""
        before, after = row.seconds
        if math.isnan(after) and not self.every:
            return f"its int8 kernel was not measured for {self.nets.where}"
        if not self.nets.is_faster(row) and not self.every:
            return f"int8 saves little time {self.nets.times}: {before * 1e3:.3g} ms -> {after * 1e3:.3g} ms"
        return f"the budget has no room for its noise: {decibels(row.noise):.1f} dB alone"


def quantize_net(
    param: Path,
    bin: Path,
    feeds: Sequence[Mapping[str, Feed]],
    options: Options = Options(),
    *,
    release: int = NEWEST,
    given: Mapping[str, Scales] | None = None,
) -> Quantized:
    """Return the int8 form of a float net; `feeds` are the samples.

    Layers whose int8 form needs a newer ncnn than `release` stay float. `given` are scales of a quantised model: then
    no layer is left out. Raises UsageError for data or names that do not fit.
    """
    net = read_net(param, bin).graph
    for blob in net.inputs:
        blob.shape, blob.batch = feeds[0][blob.name].mat
    infer_graph(net)
    earlier = None if options.like is None else forms_of(read_graph(options.like))
    rows = _rows(net, options.keep, earlier)
    candidates = _candidates(rows, rows if given is None else given)
    few = _MIN_SAMPLES if options.budget == Budget() or given is not None else _MIN_SAMPLES_FOR_BUDGET
    notes = [] if len(feeds) >= few else [f"{len(feeds)} samples are few; give {few} or more, as different as in use"]
    with ExitStack() as stack:
        nets = _Nets(param, bin, feeds, Path(stack.enter_context(temporary_folder())), options.on, stack)
        used = [feeds[i] for i in range(len(feeds)) if i not in nets.held or len(nets.held) == len(feeds)]
        read = [x for x in net if x.name in candidates and (has_static_scale(x) or x.type == "Gemm")]
        observed = observe(net, nets.float, read, used)
        notes += _notes(observed, used, {layer.name for layer in read if layer.inputs[0] in net.inputs})
        if given is not None:
            scales = {name: given[name] for name in candidates}
        else:
            listed = {} if options.table is None else read_table(options.table, net)
            whole = options.weights == "int8"
            scales = {x: _scales(observed.get(x), options.method, listed.get(x), whole) for x in candidates}
            scales = nets.with_sums(scales if options.weights else nets.whole_if_too_new(scales, release), used)
        for name in scales.keys() & (earlier or {}).keys():
            whole, winograd = (earlier or {})[name]
            scales[name] = replace(scales[name], whole=whole, winograd=winograd)
        layers = _Layers(nets, net, rows, scales, notes, options.every or earlier is not None)
        layers.drop_too_new(release)
        layers.add_noise()
        layers.add_inputs(observed)
        one_form = given is not None or options.weights is not None
        layers.add_times(None if earlier is not None else _forms(net, layers.scales, one_form=one_form))
        if given is None:
            layers.drop_noisy()
        return layers.within(options.budget)


def _candidates(rows: Mapping[str, Row], names: Collection[str]) -> list[str]:
    """Return those of the layers that may become int8. Raises UsageError if there is none."""
    candidates = [name for name, row in rows.items() if not row.reason and name in names]
    if not candidates:
        reason = next((row.reason for row in rows.values()), "it has no convolution and no product")
        raise UsageError(f"no layer of the net can be int8: {reason}")
    return candidates


def _rows(net: Graph, keep: Collection[str], earlier: Collection[str] | None) -> dict[str, Row]:
    """Return a row for each layer with an int8 form, and with a reason for other layers that compute products."""
    if unknown := set(keep) - {layer.name for layer in net}:
        raise UsageError(f"there is no layer '{min(unknown)}' to keep")
    rows = {}
    for layer in net:
        reason = "it was chosen to stay float" if layer.name in keep else obstacle(layer)
        if layer.type in _PRODUCTS or not reason:
            if earlier is not None and layer.name not in earlier:
                reason = reason or "it is float in the earlier net"
            rows[layer.name] = Row(layer.name, layer.type, reason=reason)
    return rows


_PRODUCTS = ("Convolution", "ConvolutionDepthWise", "InnerProduct", "Gemm", "MatMul", "Deconvolution", "LSTM", "GRU")


def _forms(graph: Graph, scales: Mapping[str, Scales], *, one_form: bool) -> dict[str, Scales]:
    """Return forms that may be faster: a 3x3 without winograd, and one scale in place of blocks unless `one_form`."""
    layers = [layer for layer in graph if layer.name in scales]
    forms = {layer.name: replace(scales[layer.name], winograd=False) for layer in layers if may_use_winograd(layer)}
    blocks = [layer.name for layer in layers if layer.type in ("Gemm", "MultiHeadAttention") and not one_form]
    return forms | {name: replace(scales[name], whole=True) for name in blocks if not scales[name].whole}


def _scales(blob: Observed | None, method: str, listed: Scales | None, whole: bool) -> Scales:
    """Return the scales of a layer from its input's statistics; scales `listed` in a table take precedence."""
    scales = Scales(1.0) if blob is None else Scales(LEVELS / (blob.threshold(method) * blob.margin), blob.means)
    if listed is not None:
        scales = replace(scales, input=listed.input, rows=listed.rows, parts=listed.parts)
    return replace(scales, whole=whole)


def _notes(
    observed: Mapping[str, Observed], samples: Sequence[Mapping[str, Feed]], first_layers: Collection[str]
) -> list[str]:
    """Return warnings about data that is constant, or looks like pixels for a model of normalised numbers."""
    notes = []
    inside = [blob for name, blob in observed.items() if name not in first_layers]
    pixels = any(name in first_layers and blob.low >= 0 and 64 < blob.high <= 255 for name, blob in observed.items())
    loudness = np.median([blob.largest for blob in inside] or [0.0])
    saturated = max((blob.share_above(0.99 * blob.largest) for blob in inside), default=0)
    if pixels and (loudness > _LOUD or saturated > _SATURATED):
        loud = f"makes numbers of {loudness:.0f} in the net"
        symptom = loud if loudness > _LOUD else f"{saturated:.0%} of a layer's inputs are equal"
        notes.append(
            f"the data looks like pixels of 0..255, and {symptom}: if the model wants normalised numbers, give these, "
            "or say how with --image NAME:mean=...:std=..."
        )
    if constant := [name for name, blob in observed.items() if blob.low == blob.high]:
        notes.append(f"the data gives '{constant[0]}' only the number {observed[constant[0]].low + 0.0:g}")
    first = samples[0]
    if len(samples) > 1 and all(
        np.array_equal(feed.array, other[name].array) for other in samples[1:] for name, feed in first.items()
    ):
        notes.append("all samples are equal")
    return notes


def _noise(ratio: float) -> float:
    """Return the noise power for a signal-to-noise ratio in dB."""
    return float(min(10 ** (-ratio / 10), _INFINITE_NOISE))


def _sum_with_noise(noise: float, curvature: float) -> float:
    """Return the sum t of layers' noise powers for which the net's noise, t + curvature * t * t, reaches a limit.

    The second term corrects the sum after the last measured net: loud noise saturates, and layers round inputs that
    earlier layers have changed differently.
    """
    return noise if math.isinf(noise) else 2 * noise / (1 + math.sqrt(max(1 + 4 * curvature * noise, 0.0)))


def _allowed_noise(result: Quantized, budget: Budget) -> float:
    """Return the noise power that would keep the budget which a net misses."""
    noise = _noise(result.decibels)
    if budget.top1:
        return noise * _TOP1_STEP
    margin = min(10 ** ((result.kept(budget) - result.decibels) / 10), 1.0) if noise < _INFINITE_NOISE else 1.0
    return float(margin * 10 ** (-budget.decibels / 10))
