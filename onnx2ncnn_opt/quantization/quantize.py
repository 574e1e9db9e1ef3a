"""The int8 form of a float net: calibrate, price, search, write, over one table of candidates.

Noise powers add up. So the noise of each layer alone in int8 is measured once, and sums predict the noise of several.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.cost import multiplications
from onnx2ncnn_opt.ir.detections import DETECTORS, after_boxes, decisive, sorts
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.int8 import CRASH_OF_GPUS, LEVELS, WITH_SCALE, crashes_gpus, may_use_winograd
from onnx2ncnn_opt.ir.releases import NEWEST, too_new
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.manifest import Int8Layer
from onnx2ncnn_opt.param.files import NetFiles, read_graph, read_net, write_net
from onnx2ncnn_opt.param.splits import list_layers
from onnx2ncnn_opt.precision.search import Form, Limit, choose
from onnx2ncnn_opt.progress import announce, counted
from onnx2ncnn_opt.quantization.centre import centre
from onnx2ncnn_opt.quantization.emit import Scales, form_of, forms_of, int8_form, obstacle, quantise
from onnx2ncnn_opt.quantization.observe import THRESHOLDS, Observed, observe
from onnx2ncnn_opt.runtime.base import Feed, Fetch
from onnx2ncnn_opt.runtime.latency import in_turns
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import LOCAL, find_target
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verification.sqnr import Agreement, decibels

WEIGHTS = ("int8", "block8")
_MIN_SAMPLES = 8  # fewer are not representative
_MIN_SAMPLES_FOR_BUDGET = 50  # to keep a budget on other data, too
_HELD_OUT = 5  # every fifth sample measures the noise, and does not calibrate
_MAX_SLOWDOWN, _RETRIES = 1.02, 2  # of the int8 net against the float net; more measurements if it is slower
_MIN_TURNS, _TURNS = 3, 15  # of each net
_RUNS_PER_TURN, _MAX_SECONDS = 5, 30.0  # the limit counts because a GPU compiles shaders in each turn
_NET_SECONDS = 0.5  # to time a float net and an int8 one
_POOR = 15.0  # decibels; an output with less is of little use
_LOUD = 100.0  # a larger median of layers' largest inputs hints at pixels in place of normalised numbers
_SATURATED = 0.3  # a larger share of a blob's numbers at its maximum hints at pixels too: ReLU6 saturates them
_MIN_GAIN = 0.1  # the share of a layer's measured time that int8, or another form of it, has to save
_CLOCK_STEP = 1e-9  # seconds
_ATTEMPTS = 12
_LAYER_WORK, _MAX_SAMPLES = 10**11, 64  # multiplications, and samples, to measure one layer's noise
_CACHE = 2**28  # bytes of the float net's outputs that are kept in memory
_CLOSE = 1.0  # decibels: the tolerance of a budget on other data
_INFINITE_NOISE, _SILENCE = 1e6, 200.0  # a power and decibels that stand for infinite ones
_MISSED = 1.12  # the error of a net with too little top-1: the next one has a fifth less noise
_PRODUCTS = ("Convolution", "ConvolutionDepthWise", "InnerProduct", "Gemm", "MatMul", "Deconvolution", "LSTM", "GRU")


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
    """The options of `api.quantize.quantize` for the net; raises UsageError for an unknown form of weights.

    `like` is the .param of an earlier int8 net, whose layers get the same forms.
    """

    keep: Collection[str] = ()  # layers that stay float
    budget: Budget = Budget()
    every: bool = False  # layers become int8 even if they get no faster
    weights: str | None = None  # one of WEIGHTS; None is blocks, and one scale only where that is faster
    like: str | os.PathLike[str] | None = None
    on: str | None = None  # the target for times, and for the noise of the final net

    def __post_init__(self) -> None:
        if self.weights not in (None, *WEIGHTS):
            forms = f"weights are {' or '.join(WEIGHTS)}, not {self.weights!r:.40}"
            raise UsageError(f"{forms}: ncnn has no fast kernels of others")


@dataclass(frozen=True)
class Quantized:
    """An int8 net, its layers, and its agreement with the float net.

    `decibels` is the signal-to-noise ratio of the worst output, measured with held-out samples if there are enough.
    `top1` is the share of rows with the same argmax, None if no output has rows of classes. `at_least` and
    `top1_at_least` are lower bounds for other data, with a probability of 95 %. `seconds` and `bytes` (of the .bin) are
    for the float and the int8 net; `times` names the device and the method. `missed` says which demand the net misses.
    """

    graph: Graph
    layers: tuple[Int8Layer, ...]
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


@dataclass
class Candidate:
    """A layer that computes products, with scales for int8. It stays float if there is a `reason`.

    `other` is a form that may be faster. The measurements are those of `Int8Layer`, NaN where unknown.
    """

    layer: Layer
    scales: Scales
    reason: str
    other: Scales | None = None
    largest: float = math.nan
    cut: float = math.nan
    noise: float = math.nan
    seconds: tuple[float, float] = (math.nan, math.nan)

    def row(self, form: str, bits: int, reason: str) -> Int8Layer:
        """Return the candidate as a row of the result."""
        found = {name: getattr(self, name) for name in ("largest", "cut", "noise", "seconds")}
        known = {name: value for name, value in found.items() if np.isfinite(value).all()}
        return Int8Layer(self.layer.name, self.layer.type, form, bits, **known, reason=reason)


def quantize_net(
    param: Path,
    bin: Path,
    feeds: Sequence[Mapping[str, Feed]],
    options: Options = Options(),
    *,
    release: int = NEWEST,
    given: Mapping[str, Scales | str] | None = None,
) -> Quantized:
    """Return the int8 form of a float net; `feeds` are the samples.

    Layers whose int8 form needs a newer ncnn than `release` stay float. `given` are the scales of a quantised model, or
    reasons why it has none: then layers stay int8 that spoil an output. Raises UsageError for data or names that do not
    fit.
    """
    with ExitStack() as stack:
        runs = Runs(NetFiles(param, bin), feeds, options, stack)
        candidates = calibrate(runs, release, given)
        price(runs, candidates, keeps_noisy=given is not None)
        return search(runs, candidates)


class Runs:
    """The float net and its int8 forms in ncnn: here for statistics, on a target for times and the final noise."""

    def __init__(
        self, files: NetFiles, feeds: Sequence[Mapping[str, Feed]], options: Options, stack: ExitStack
    ) -> None:
        (target := find_target(options.on)).require()
        self.options, self.notes = options, list[str]()
        self.every = options.every or options.like is not None  # layers become int8 even if they get no faster
        self.feeds, self.net, self.size = feeds, read_net(files.param, files.bin).graph, files.bin.stat().st_size
        self.folder = Path(stack.enter_context(temporary_folder()))
        self.worker: NcnnWorker = stack.enter_context(NcnnWorker())
        self.float = self.float_there = NcnnRunner(files.param, files.bin, worker=self.worker)
        if target != LOCAL:
            device = stack.enter_context(NcnnWorker(target))
            self.float_there = NcnnRunner(files.param, files.bin, worker=device)
        self.device = self.float_there.worker
        greeting = self.device.start().greeting
        self.machine = "Vulkan" if target.vulkan else greeting["machine"]
        self.where = " ".join(target.described(greeting, []).split())
        self.is_timed = target.patience == 1 and "llvmpipe" not in greeting.get("gpu", "")
        machine = f"on {self.where}" if target != LOCAL else "on this machine"
        if not self.is_timed and not self.every:
            raise UsageError(f"{self.where} has no times: make all layers int8 (--all), or those of a net (--like)")
        self.times = f"{machine}, one thread"
        self.outputs = self.float.output_names()
        # All nets go on with the float net's rows of a sort, because 8 bits exchange rows; its scores are compared.
        names, rows = list_layers(self.net).tops, {layer.output for layer in sorts(self.net)}
        self.rows = [names[blob] for blob in rows]
        deciding = rows.union(*(decisive(layer) for layer in self.net if layer.type in DETECTORS))
        boxes = {names[blob] for blob in after_boxes(self.net, but=sorts(self.net))}
        self.inner = [name for blob, name in names.items() if blob in deciding]
        self.compared = [name for name in self.outputs if name not in boxes]
        indices = range(len(feeds))
        self.held = indices[_HELD_OUT - 1 :: _HELD_OUT] if len(feeds) >= 2 * _MIN_SAMPLES else indices
        self.rest = [i for i in indices if i not in self.held]
        self._expected: dict[int, dict[str, Array]] = {}  # the float net's outputs by sample
        self._room = _CACHE

    def graph(self, scales: Mapping[str, Scales]) -> Graph:
        """Return the net with these layers in int8."""
        graph = self.net.copy()
        quantise(graph, scales)
        centre(graph, padded=self.machine != "Vulkan")
        return graph

    def written(self, graph: Graph, name: str, worker: NcnnWorker) -> NcnnRunner:
        """Write a net to files; return its runner."""
        files = NetFiles.at(self.folder / name)
        write_net(graph, files.param, files.bin)
        return NcnnRunner(files.param, files.bin, worker=worker)

    def _run(self, runner: NcnnRunner, index: int, expected: Mapping[str, Array] | None = None) -> dict[str, Array]:
        feeds = self.feeds[index]
        axis = 0 if any(axis is not None and array.shape[axis] > 1 for array, axis in feeds.values()) else None
        rows = {name: Feed(expected[name], axis) for name in self.rows} if expected else {}
        return runner.run({**feeds, **rows}, [Fetch(name, axis) for name in (*self.inner, *self.compared)])

    def agreements(self, runner: NcnnRunner, *groups: Collection[int]) -> list[Agreement]:
        """Return the agreement of an int8 net with the float net for each group of samples, the worst first."""
        agreements = [Agreement() for _ in groups]
        indices = sorted({index for group in groups for index in group})
        for index in indices:  # before the process loads the other net
            if self._room > 0 and index not in self._expected:
                self._expected[index] = self._run(self.float, index)
                self._room -= sum(array.nbytes for array in self._expected[index].values())
        for index in indices:
            expected = self._expected.get(index) or self._run(self.float, index)
            outputs = self._run(runner, index, expected)
            for agreement, group in zip(agreements, groups, strict=True):
                if index in group:
                    agreement.add(expected, outputs)
        return sorted(agreements, key=lambda agreement: agreement.noise, reverse=True)

    def noise_of(self, name: str, scales: Scales, layers: int) -> float:
        """Return the noise with one of some layers in int8, on as many held-out and other samples as are affordable."""
        affordable = _LAYER_WORK // (layers * (multiplications(self.net) or _LAYER_WORK))
        half = min(_MAX_SAMPLES, max(_MIN_SAMPLES, affordable)) // 2
        return self.noise({name: scales}, self.held[:half], [*self.held[:half], *self.rest[:half]])

    def noise(self, scales: Mapping[str, Scales], *groups: Collection[int]) -> float:
        """Return the noise with layers in int8, on the worst of groups of samples."""
        return self.agreements(self.written(self.graph(scales), "int8", self.worker), *groups)[0].noise

    def layer_times(
        self, layers: Sequence[Layer], nets: Sequence[Mapping[str, Scales]], turns: int
    ) -> tuple[Array, Array]:
        """Return the seconds of layers in float, and for each int8 net the ratios to them; NaN on an emulator.

        The nets run alternately in one process, and the median of the ratios over all turns counts: load slows down all
        nets of a turn alike, and each net is loaded to another place in memory.
        """
        if not self.is_timed:
            return np.full(len(layers), math.nan), np.full((len(nets), len(layers)), math.nan)
        tops = list_layers(self.net).tops
        firsts = [tops.get(layer.outputs[0]) for layer in self.net if layer.type != "Input" and layer.outputs]
        names = list(dict.fromkeys(filter(None, firsts)))
        columns = [names.index(tops[layer.outputs[0]]) for layer in layers]
        graphs = [self.written(self.graph(scales), f"timed{i}", self.device) for i, scales in enumerate(nets)]
        runners = [self.float_there, *graphs]
        times: list[Array] = []
        end = time.monotonic() + _MAX_SECONDS
        while len(times) < _MIN_TURNS or (len(times) < turns and time.monotonic() < end):
            turn = [runner.time_blobs(self.feeds[0], names, runs=_RUNS_PER_TURN).blobs for runner in runners]
            times.append(np.maximum(np.array(turn)[:, columns], _CLOCK_STEP))
        ratios = np.median([turn[1:] / turn[0] for turn in times], axis=0)
        return np.min([turn[0] for turn in times], axis=0), ratios

    def is_faster(self, seconds: tuple[float, float]) -> bool:
        """Return True if int8 saves so much of a layer's time that clock errors of 1 % change few decisions."""
        return seconds[1] < seconds[0] * (1 - _MIN_GAIN)

    def net_times(self, runner: NcnnRunner) -> tuple[float, float]:
        """Return the seconds of the float net and of an int8 net; a slow one that has to be fast is timed again."""
        time_int8, time_float = (partial(net.time, self.feeds[0], self.outputs) for net in (runner, self.float_there))
        latency = in_turns(time_int8, time_float, _NET_SECONDS)
        for _ in range(0 if self.every else _RETRIES):
            if latency.ratio > _MAX_SLOWDOWN:  # the machine may have been busy
                latency = min(latency, in_turns(time_int8, time_float, _NET_SECONDS), key=lambda each: each.ratio)
        return latency.other / 1e3, latency.other / 1e3 * latency.ratio


def calibrate(runs: Runs, release: int, given: Mapping[str, Scales | str] | None) -> dict[str, Candidate]:
    """Return the table of candidates, with the scales that are `given`, or those of their inputs in the float net.

    Of the THRESHOLDS of inputs, those count with which the net, all candidates in int8, makes less noise.
    A 3x3 has another form without winograd. A Gemm or attention with blocks has one with a single scale.
    """
    net, feeds, options = runs.net, runs.feeds, runs.options
    for blob in net.inputs:
        blob.shape, blob.batch = feeds[0][blob.name].mat
    infer_graph(net)
    earlier = None if options.like is None else forms_of(read_graph(options.like))
    few = _MIN_SAMPLES if options.budget == Budget() or given is not None else _MIN_SAMPLES_FOR_BUDGET
    if len(feeds) < few:
        runs.notes.append(f"{len(feeds)} samples are few; give {few} or more, as different as in use")
    table = _candidates(net, options.keep, earlier, given)
    candidates = _int8(table)
    samples = [feeds[i] for i in runs.rest or runs.held]
    layers = [each.layer for each in candidates.values()]
    read = [layer for layer in layers if layer.type in WITH_SCALE or layer.type == "Gemm"]
    observed = observe(net, runs.float, read, samples)
    runs.notes += _notes(observed, samples, {layer.name for layer in read if layer.inputs[0] in net.inputs})
    if given is None:
        ways = [_scales(layers, observed, threshold, options.weights, release) for threshold in THRESHOLDS]
        best = min(ways, key=lambda scales: runs.noise(scales, runs.held, range(len(feeds))))
        for name, scales in best.items():
            candidates[name].scales = scales
    for name, each in candidates.items():
        layer, stats = each.layer, observed.get(name)
        if earlier is not None:
            each.scales = replace(each.scales, whole=earlier[name][0], winograd=earlier[name][1])
        elif may_use_winograd(layer):
            each.other = replace(each.scales, winograd=False)
        elif layer.type in ("Gemm", "MultiHeadAttention") and given is None and options.weights is None:
            each.other = None if each.scales.whole else replace(each.scales, whole=True)
        each.reason = _too_new(layer, each.scales, release)
        if stats is not None:
            cut = stats.share_above(LEVELS / each.scales.input) if layer.type in WITH_SCALE else 0.0
            each.largest, each.cut = stats.largest, cut
    _int8(table)
    return table


def _int8(table: Mapping[str, Candidate]) -> dict[str, Candidate]:
    """Return the candidates that may become int8. Raises UsageError if there are none."""
    found = {name: each for name, each in table.items() if not each.reason}
    if not found:
        reason = next((each.reason for each in table.values()), "it has no convolution and no product")
        raise UsageError(f"no layer of the net can be int8: {reason}")
    return found


def _candidates(
    net: Graph, keep: Collection[str], earlier: Collection[str] | None, given: Mapping[str, Scales | str] | None
) -> dict[str, Candidate]:
    """Return a candidate for each layer with an int8 form, or that computes products: then with a reason."""
    if unknown := set(keep) - {layer.name for layer in net}:
        raise UsageError(f"there is no layer '{min(unknown)}' to keep")
    candidates = {}
    for layer in net:
        scales = Scales(1.0) if given is None else given.get(layer.name, "the model does not quantise it")
        reason = obstacle(layer)
        if layer.type in _PRODUCTS or not reason:
            if layer.name in keep:
                reason = "it was chosen to stay float"
            elif earlier is not None and layer.name not in earlier:
                reason = reason or "it is float in the earlier net"
            elif isinstance(scales, str):
                reason = reason or scales
            candidates[layer.name] = Candidate(layer, scales if isinstance(scales, Scales) else Scales(1.0), reason)
    return candidates


def price(runs: Runs, table: Mapping[str, Candidate], *, keeps_noisy: bool) -> None:
    """Measure the noise of each candidate alone, and its time in float and in int8; take its faster form.

    A single scale is taken only if blocks are no faster than float. A layer with one form takes its time from the
    faster net, because winograd of its neighbours evicts caches. A layer that alone spoils an output stays float,
    unless the net `keeps_noisy` ones.
    """
    candidates = _int8(table)
    for name, each in counted([*candidates.items()], "ncnn runs the net with one layer in int8", "layers"):
        each.noise = runs.noise_of(name, each.scales, len(candidates))
    announce("timing the layers in float and in int8")
    first = {name: each.scales for name, each in candidates.items()}
    others = {name: each.other for name, each in candidates.items() if each.other}
    nets = [first, first | others] if others else [first]
    turns = _TURNS if others or not runs.every else _MIN_TURNS
    floats, ratios = runs.layer_times([each.layer for each in candidates.values()], nets, turns)
    for name, before, factors in zip(candidates, floats.tolist(), ratios.T.tolist(), strict=True):
        each, other = candidates[name], others.get(name)
        each.seconds = (before, before * (min(factors) if other is None else factors[0]))
        faster = (before, before * factors[-1])
        is_better = faster[1] < each.seconds[1] * (1 - _MIN_GAIN)
        if other and is_better and (not other.whole or runs.is_faster(faster) > runs.is_faster(each.seconds)):
            each.scales, each.seconds = other, faster
            each.noise = runs.noise_of(name, other, len(candidates)) if other.whole else each.noise
        if not keeps_noisy and (alone := decibels(each.noise)) < _POOR:
            each.reason = f"it alone spoils an output: {alone:.1f} dB are left"


def search(runs: Runs, table: Mapping[str, Candidate]) -> Quantized:
    """Return the net within the budget whose layers save most time: those with most noise for it stay float."""
    budget, forms = runs.options.budget, dict[str, tuple[Form, Form]]()
    for name, each in table.items():
        if not each.reason and (runs.every or runs.is_faster(each.seconds)):
            saved = 1.0 if runs.every else each.seconds[0] - each.seconds[1]
            forms[name] = Form(True, 0.0, min(each.noise, _INFINITE_NOISE)), Form(False, saved, 0.0)
    nets: dict[frozenset[str], Quantized] = {}

    def measure(choice: Mapping[str, Form]) -> float:
        chosen = _int8_of(choice)
        net = nets[chosen] = nets.get(chosen) or write(runs, table, chosen)
        if budget.decibels > -math.inf:
            return float(10 ** (-np.clip(net.kept(budget), -_SILENCE, _SILENCE) / 20))
        return _MISSED + 10 ** (-net.decibels / 20) if net.misses(budget) else 1.0  # less noise is nearer

    limit = Limit(10 ** (-budget.decibels / 20) if budget.decibels > -math.inf else 1.0)
    chosen = _int8_of(choose(forms, measure, [limit], _ATTEMPTS, caution=1.0).choice)
    net = nets[chosen]
    if chosen:
        return replace(net, missed=net.misses(budget))
    if missing := [net for names, net in nets.items() if names and net.misses(budget)]:
        net, missed = max(missing, key=lambda net: net.kept(budget)), f"no layer can be int8 with a budget of {budget}"
    elif runs.every:
        missed = "each layer that can be int8 spoils an output"
    else:
        missed = f"no layer is faster in int8 {runs.times}; --all makes them int8 anyway"
    return replace(net, missed=missed)


def _int8_of(choice: Mapping[str, Form]) -> frozenset[str]:
    return frozenset(name for name, form in choice.items() if form.value)


def write(runs: Runs, table: Mapping[str, Candidate], chosen: Collection[str]) -> Quantized:
    """Return the net with these layers in int8, with its noise, times and sizes, which are measured on the target."""
    notes = [*runs.notes]
    graph = runs.graph({name: table[name].scales for name in chosen})
    runner = runs.written(graph, "int8", runs.device)
    groups = runs.agreements(runner, runs.held, range(len(runs.feeds)))
    forms = {layer.name: form_of(layer) for layer in graph if layer.name in chosen}
    layers = tuple(
        each.row(*forms[name], "") if name in forms else each.row("", 0, each.reason or _reason(runs, each))
        for name, each in table.items()
    )
    if on_cpu := [layer.name for layer in graph if layer.name in chosen and crashes_gpus(layer)]:
        notes.append(f"on GPUs the CPU computes {len(on_cpu)} of the Gemms: {CRASH_OF_GPUS}")
    if groups[0].decibels < _POOR and chosen:
        layer = max(chosen, key=lambda name: table[name].noise)
        poor = f"an output is only {groups[0].decibels:.1f} dB from the float net; '{layer}' makes the most noise"
        notes.append(f"{poor}: --budget or --keep leaves layers float")
    before, after = runs.net_times(runner) if runs.is_timed else (math.nan, math.nan)
    if chosen and not runs.every and after > _MAX_SLOWDOWN * before:
        notes.append(f"the net is no faster in int8 {runs.times}")
    return Quantized(
        graph,
        layers,
        groups[0].decibels,
        decibels(max(group.most_noise for group in groups)),
        groups[0].top1,
        min((group.least_top1 for group in groups if group.least_top1 is not None), default=None),
        len(runs.feeds),
        (before, after),
        (runs.size, runner.bin.stat().st_size),
        runs.times,
        tuple(notes),
    )


def _reason(runs: Runs, each: Candidate) -> str:
    """Return why a layer stays float that has a form in int8."""
    if not runs.is_faster(each.seconds) and not runs.every:
        before, after = (f"{seconds * 1e3:.3g} ms" for seconds in each.seconds)
        return f"int8 is not {_MIN_GAIN:.0%} faster {runs.times}: {before} -> {after}"
    return f"the budget has no room for its noise: {decibels(each.noise):.1f} dB alone"


def _scales(
    layers: Iterable[Layer],
    observed: Mapping[str, Observed],
    threshold: Callable[[Observed], float],
    weights: str | None,
    release: int,
) -> dict[str, Scales]:
    """Return the scales of layers by name, from the statistics of their inputs."""
    found = {}
    for layer in layers:
        blob = observed.get(layer.name)
        scales = Scales(1.0) if blob is None else Scales(LEVELS / (threshold(blob) * blob.margin), blob.means)
        is_whole = weights == "int8" or (weights is None and bool(_too_new(layer, scales, release)))
        found[layer.name] = replace(scales, whole=is_whole)
    return found


def _too_new(layer: Layer, scales: Scales, release: int) -> str:
    """Return why a release of ncnn lacks a layer's form; empty if it does not."""
    return "" if release == NEWEST else too_new(int8_form(layer, scales), release) or ""


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
