"""The int8 form of a float net: which layers, by what they cost in accuracy and save in time on this machine.

Noise adds: each layer alone in int8 is measured at the outputs, and the powers of chosen layers are summed. So a short
run for each layer is enough to choose.
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
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.cost import multiplications
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.int8 import CRASH_OF_GPUS, LEVELS, crashes_gpus, may_use_winograd
from onnx2ncnn_opt.ir.releases import NEWEST, too_new
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.param.files import read_graph, read_net, write_net
from onnx2ncnn_opt.param.splits import list_layers
from onnx2ncnn_opt.progress import announce, counted
from onnx2ncnn_opt.quantization.centre import centre
from onnx2ncnn_opt.quantization.emit import Scales, form_of, forms_of, has_static_scale, needs_sums, obstacle, quantise
from onnx2ncnn_opt.quantization.kernels import time_in_int8
from onnx2ncnn_opt.quantization.observe import Observed, add_sums, largest_sums, observe
from onnx2ncnn_opt.quantization.table import read_table
from onnx2ncnn_opt.runtime.base import Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import LOCAL, find_target
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verification.agreement import Agreement, decibels
from onnx2ncnn_opt.verification.knapsack import cheapest
from onnx2ncnn_opt.verification.latency import in_turns

Array = NDArray[Any]
WEIGHTS = ("int8", "block8")
FEW = 8  # samples that each layer alone is measured with; fewer are too few to trust
_FEW_FOR_BUDGETS = 50  # to keep a budget on other data, too
_HELD = 5  # every so many samples one is kept to measure with
_SLOWER, _AGAIN = 1.02, 2  # of the float net's time, and measurements more if the net takes longer
_LEAST_TURNS, _TURNS, _MOST_TURNS = 3, 15, 60  # of each net; most where 15 do not decide
_RUNS, _SECONDS = 5, 30.0  # in a turn, and after which there are no more turns: a GPU compiles shaders in each
_OF_NETS = 0.5  # seconds to time a float net and an int8 one
_ERRORS = 4  # of a median: median deviations by the root of the turns
_POOR = 15.0  # decibels, below which an output is of little use
_LOUD = 100.0  # a median of layers' largest inputs that hints at pixels in place of normalised numbers
_SATURATED = 0.3  # of a blob's numbers at its largest one hint at pixels too, as ReLU6 cuts them off
_GAIN = 0.1  # of a layer's time that int8, or another form of it, has to save by the clock
_KNOWN_GAIN = 0.03  # the same by the table of kernels, which has no noise
_SHORTEST = 1e-9  # seconds that the clock can tell
_ATTEMPTS = 12
_WORK, _MOST = 10**11, 64  # multiplications to measure each layer alone, if these are FEW samples or more; their most
_MEMORY = 2**28  # bytes of the float net's outputs
_CLOSE = 1.0  # decibels within which a budget is kept on other data, and above which layers are left float
_LESS, _NEXT = 0.7, 0.95  # of the noise of a net that misses top-1, and of the room for it, in the next attempt
_ALL_NOISE = 1e6  # a share of noise that is as good as infinite, and can be added up


@dataclass(frozen=True)
class Budget:
    """The least agreement with the float net: a ratio of signal to noise in dB, or a share of equal largest entries.

    The ratio has to hold within 1 dB on `other_data` as well.
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
            if text.lower().endswith("db"):
                return cls(decibels=float(text[:-2]))
            if text.startswith("top1=") and 0 < float(text[5:]) <= 1:
                return cls(top1=float(text[5:]))
        except ValueError:
            pass
        raise UsageError(f"a budget is 40dB or top1=0.99, not {text!r:.40}")


@dataclass(frozen=True)
class Row:
    """A layer: its largest input, the share of it that is cut off, what it costs alone, its times, why it is float.

    `noise` is the noise's power at the outputs as a share of their own, `seconds` are those of float and int8. `form`
    and `bits` say how the weights are stored.
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
    """A net of int8, its layers, and how far it is from the float net.

    `decibels` is the ratio of signal to noise of the worst output over samples that the scales do not come from where
    there are enough, `top1` the share of rows with the same largest entry, None if no output has rows of classes.
    `at_least` and `top1_at_least` are those of other data with a probability of 95 %. `seconds` are those of a run in
    float and in int8, and `times` says whose they are. `bytes` are those of the .bin. `missed` says what keeps the net
    from being what was asked for.
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
        """Return the largest budget of this kind in dB that the net keeps."""
        return min(self.decibels, self.at_least + _CLOSE) if budget.other_data else self.decibels

    def misses(self, budget: Budget) -> str:
        """Return in words how the net misses a budget; empty if it keeps it."""
        if self.kept(budget) < budget.decibels:
            return f"{self.decibels:.1f} dB, {self.at_least:.1f} dB or more on other data, the budget is {budget}"
        if budget.top1 and (self.top1 is None or self.top1 < budget.top1):
            found = "no output has rows of classes" if self.top1 is None else f"{self.top1:.1%} of rows agree"
            return f"{found}, the budget is {budget.top1:.1%}"
        return ""


class _Nets:
    """A float net in files, and int8 forms of it."""

    def __init__(
        self, param: Path, bin: Path, feeds: Sequence[Mapping[str, Feed]], folder: Path, on: str | None, stack: Any
    ) -> None:
        target = find_target(on)
        target.require()
        self.param, self.bin, self.feeds, self.folder = param, bin, feeds, folder
        self.worker: NcnnWorker = stack.enter_context(NcnnWorker())
        self.float = NcnnRunner(param, bin, worker=self.worker)
        self.there = self.worker if target == LOCAL else stack.enter_context(NcnnWorker(target))
        greeting = self.there.start().greeting
        self.machine = "Vulkan" if target.vulkan else greeting["machine"]
        self.where = " ".join(target.described(greeting, []).split())
        is_emulated = target.patience > 1 or "llvmpipe" in greeting.get("gpu", "")
        self.is_timed = not is_emulated
        machine = f"on {self.where}" if target != LOCAL else "on this machine"
        self.times = f"{machine}, one thread" if self.is_timed else f"by a table of kernels for {self.where}"
        self.outputs = self.float.output_names()
        self.held = range(_HELD - 1, len(feeds), _HELD) if len(feeds) >= 2 * FEW else range(len(feeds))
        self._expected: dict[int, dict[str, Array]] = {}
        self._bytes = 0  # of these outputs

    def is_faster(self, row: Row) -> bool:
        """Return True if int8 saves enough of a layer's time: a clock that is 1 % off changes few decisions."""
        return row.seconds[1] < row.seconds[0] * (1 - (_GAIN if self.is_timed else _KNOWN_GAIN))

    def graph(self, scales: Mapping[str, Scales]) -> Graph:
        """Return the net with these layers in int8."""
        graph = read_net(self.param, self.bin).graph
        quantise(graph, scales)
        centre(graph, padded=self.machine != "Vulkan")
        return graph

    def runner(self, scales: Mapping[str, Scales], worker: NcnnWorker | None = None, name: str = "int8") -> NcnnRunner:
        """Return the net with these layers in int8, ready to run."""
        param, bin = self.folder / f"{name}.param", self.folder / f"{name}.bin"
        write_net(self.graph(scales), param, bin)
        return NcnnRunner(param, bin, worker=worker or self.worker)

    def with_sums(self, scales: Mapping[str, Scales], samples: Collection[Mapping[str, Feed]]) -> dict[str, Scales]:
        """Return scales with the largest sums of the layers whose weights do not bound them."""
        graph = read_net(self.param, self.bin).graph
        layers = [layer for layer in graph if layer.name in scales and needs_sums(layer)]
        if not layers:
            return dict(scales)
        outputs = add_sums(graph, layers)
        param, bin = self.folder / "sums.param", self.folder / "sums.bin"
        write_net(graph, param, bin)
        found = largest_sums(NcnnRunner(param, bin, worker=self.worker), outputs, samples)
        sums = {
            name: replace(scales[name], largest_sum=largest * scales[name].input) for name, largest in found.items()
        }
        return {**scales, **sums}

    def expected(self, index: int) -> dict[str, Array]:
        """Return the float net's outputs for a sample."""
        if index in self._expected:
            return self._expected[index]
        outputs = self._run(self.float, index)
        self._bytes += sum(array.nbytes for array in outputs.values())
        if self._bytes <= _MEMORY:
            self._expected[index] = outputs
        return outputs

    def _run(self, runner: NcnnRunner, index: int) -> dict[str, Array]:
        feeds = self.feeds[index]
        axis = 0 if any(axis is not None and array.shape[axis] > 1 for array, axis in feeds.values()) else None
        return runner.run(feeds, [Fetch(name, axis) for name in self.outputs])

    def compare(
        self, scales: Mapping[str, Scales], *groups: Collection[int], worker: NcnnWorker | None = None
    ) -> list[Agreement]:
        """Return how a net with these layers in int8, there, agrees with the float net here; the worst group first."""
        runner = self.runner(scales, worker)
        found = [Agreement() for _ in groups]
        for index in sorted({index for group in groups for index in group}):
            outputs = self._run(runner, index)
            for agreement, group in zip(found, groups, strict=True):
                if index in group:
                    agreement.add(self.expected(index), outputs)
        return sorted(found, key=lambda each: each.noise, reverse=True)


def quantize_net(  # noqa: PLR0913
    param: Path,
    bin: Path,
    feeds: Sequence[Mapping[str, Feed]],
    *,
    method: str = "mse",
    keep: Collection[str] = (),
    budget: Budget = Budget(),
    every: bool = False,
    weights: str | None = None,
    on: str | None = None,
    release: int = NEWEST,
    given: Mapping[str, Scales] | None = None,
    table: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
) -> Quantized:
    """Return the int8 form of a float net.

    `feeds` are the samples, `method` one of `thresholds.METHODS`, `keep` names layers that stay float. With `every`
    layers are int8 even if they are no faster on this machine. `weights` of WEIGHTS are the form of a Gemm and of
    attention; by default blocks, and one scale only where that is faster. Times, and the whole net's noise, are those
    `on` a target; an emulated one cannot be timed, and a table of kernels decides. A layer whose form is newer
    than `release` of ncnn stays float. `given` are scales, as of a quantised model: then no layer is left out. A
    `table` of ncnn2table has the scales of the layers that are in it. `like` is the .param of an earlier int8 net: its
    layers become int8, in its forms, and no time decides.
    Raises UsageError for data or names that do not fit.
    """
    net = read_net(param, bin).graph
    for blob in net.inputs:
        blob.shape, blob.batch = feeds[0][blob.name].mat
    infer_graph(net)
    by_name, earlier = {layer.name: layer for layer in net}, None if like is None else forms_of(read_graph(like))
    rows, every = _rows(net, keep, earlier), every or earlier is not None
    candidates = _candidates(rows, given)
    few = FEW if budget == Budget() or given is not None else _FEW_FOR_BUDGETS
    notes = [] if len(feeds) >= few else [f"{len(feeds)} samples are few; give {few} or more, as different as in use"]
    with ExitStack() as stack:
        nets = _Nets(param, bin, feeds, Path(stack.enter_context(temporary_folder())), on, stack)
        used = [feeds[i] for i in range(len(feeds)) if i not in nets.held or len(nets.held) == len(feeds)]
        read = [by_name[name] for name in candidates if has_static_scale(by_name[name]) or by_name[name].type == "Gemm"]
        seen = observe(net, nets.float, read, used)
        notes += _notes(seen, used, {layer.name for layer in read if layer.inputs[0] in net.inputs})
        if given is None:
            known, whole = {} if table is None else read_table(table, net), weights == "int8"
            scales = {name: _scales(seen.get(name), method, known.get(name), whole) for name in candidates}
            for layer in nets.graph(scales) if weights is None else ():
                if layer.name in scales and too_new(layer, release):
                    scales[layer.name] = replace(scales[layer.name], whole=True)
        scales = dict(given) if given is not None else nets.with_sums(scales, used)
        scales |= _in_forms(scales, earlier or {})
        for layer in nets.graph(scales):
            if layer.name in scales:
                rows[layer.name] = replace(rows[layer.name], reason=too_new(layer, release) or "")
        candidates = _candidates(rows, given)
        scales = {name: scales[name] for name in candidates}
        half = min(_MOST, max(FEW, _WORK // (len(candidates) * (multiplications(net) or _WORK)))) // 2
        held, rest = nets.held[:half], [i for i in range(len(feeds)) if i not in nets.held][:half]
        groups = [held, [*held, *rest]]
        for name in counted(candidates, "ncnn runs the net with one layer in int8", "layers"):
            rows[name] = replace(rows[name], noise=nets.compare({name: scales[name]}, *groups)[0].noise)
            if name in seen:
                cut = seen[name].share_above(LEVELS / scales[name].input) if has_static_scale(by_name[name]) else 0.0
                rows[name] = replace(rows[name], largest=seen[name].largest, cut=cut)
        announce("timing the layers in float and in int8")
        others = None if earlier is not None else _forms(net, scales, weights if given is None else "int8")
        rows, scales = _timed(nets, net, rows, scales, others, groups)
        for row in rows.values() if given is None else ():
            if (alone := decibels(row.noise)) < _POOR:
                rows[row.layer] = replace(row, reason=f"it alone spoils an output: {alone:.1f} dB are left")
        chosen = {name for name in candidates if not rows[name].reason and (every or nets.is_faster(rows[name]))}
        return _within(nets, rows, scales, chosen, budget, notes, every)


def _candidates(rows: Mapping[str, Row], given: Collection[str] | None) -> list[str]:
    """Return the layers that may become int8. Raises UsageError if there is none."""
    found = [name for name, row in rows.items() if not row.reason and (given is None or name in given)]
    if not found:
        why = next((row.reason for row in rows.values()), "it has no convolution and no product")
        raise UsageError(f"no layer of the net can be int8: {why}")
    return found


def _rows(net: Graph, keep: Collection[str], earlier: Collection[str] | None) -> dict[str, Row]:
    """Return the layers that have an int8 form, and others that compute products, with the reasons."""
    if unknown := set(keep) - {layer.name for layer in net}:
        raise UsageError(f"there is no layer '{min(unknown)}' to keep")
    rows = {}
    for layer in net:
        reason = "it was to stay float" if layer.name in keep else obstacle(layer)
        if layer.type in _COUNTED or not reason:
            is_other = earlier is not None and layer.name not in earlier and not reason
            rows[layer.name] = Row(layer.name, layer.type, reason="it is float in the earlier net" * is_other or reason)
    return rows


_COUNTED = ("Convolution", "ConvolutionDepthWise", "InnerProduct", "Gemm", "MatMul", "Deconvolution", "LSTM", "GRU")


def _forms(graph: Graph, scales: Mapping[str, Scales], weights: str | None) -> dict[str, Scales]:
    """Return other forms of layers that may be faster: a 3x3 without winograd, and one scale if `weights` is free."""
    layers = [layer for layer in graph if layer.name in scales]
    forms = {layer.name: replace(scales[layer.name], winograd=False) for layer in layers if may_use_winograd(layer)}
    blocks = [layer.name for layer in layers if layer.type in ("Gemm", "MultiHeadAttention")] if weights is None else []
    return forms | {name: replace(scales[name], whole=True) for name in blocks if not scales[name].whole}


def _in_forms(scales: Mapping[str, Scales], forms: Mapping[str, tuple[bool, bool]]) -> dict[str, Scales]:
    """Return the scales of layers in the forms of `forms_of`."""
    both = ((name, *forms[name]) for name in scales if name in forms)
    return {name: replace(scales[name], whole=whole, winograd=winograd) for name, whole, winograd in both}


def _scales(seen: Observed | None, method: str, known: Scales | None, whole: bool) -> Scales:
    """Return the scales of a layer whose input was `seen`, with those that a table knows."""
    found = Scales(1.0) if seen is None else Scales(LEVELS / (seen.threshold(method) * seen.margin), seen.means)
    if known is not None:
        found = replace(found, input=known.input, rows=known.rows, parts=known.parts)
    return replace(found, whole=whole)


def _notes(
    seen: Mapping[str, Observed], samples: Sequence[Mapping[str, Feed]], first_layers: Collection[str]
) -> list[str]:
    """Return warnings about data that is constant, or looks like pixels for a model of normalised numbers."""
    notes = []
    inside = [blob.largest for name, blob in seen.items() if name not in first_layers]
    pixels = [blob for name, blob in seen.items() if name in first_layers and blob.low >= 0 and 64 < blob.high <= 255]
    saturated = max(
        (seen[name].share_above(0.99 * seen[name].largest) for name in seen.keys() - first_layers), default=0
    )
    if pixels and inside and (np.median(inside) > _LOUD or saturated > _SATURATED):
        loud = f"makes numbers of {np.median(inside):.0f} in the net"
        what = loud if np.median(inside) > _LOUD else f"{saturated:.0%} of a layer's inputs are equal"
        notes.append(
            f"the data looks like pixels of 0..255, and {what}: if the model wants normalised numbers, give these, or "
            "say how with --image NAME:mean=...:std=..."
        )
    if constant := [name for name, blob in seen.items() if blob.low == blob.high]:
        notes.append(f"the data gives '{constant[0]}' nothing but the number {seen[constant[0]].low + 0.0:g}")
    first = samples[0]
    if len(samples) > 1 and all(
        np.array_equal(feed.array, other[name].array) for other in samples[1:] for name, feed in first.items()
    ):
        notes.append("all samples are equal")
    return notes


def _timed(
    nets: _Nets,
    graph: Graph,
    rows: dict[str, Row],
    scales: dict[str, Scales],
    forms: Mapping[str, Scales] | None,
    samples: Sequence[Collection[int]],
) -> tuple[dict[str, Row], dict[str, Scales]]:
    """Return the rows with the times of their layers, and the scales with those of `forms` that are clearly faster.

    One scale counts only where blocks are no faster than float. The nets take turns in one process, and the medians of
    the turns' ratios count: the machine slows down each net of a turn alike, and each is loaded to another place in
    memory. A layer of one form counts as in the faster net: winograd of its neighbours leaves less in the caches. If
    `forms` is None, no time decides, and few turns are enough.
    """
    tops = {
        line.layer.name: line.tops[0]
        for line in list_layers(graph).lines
        if line.layer is not None and line.layer.type != "Input" and line.tops
    }
    layers = [layer for layer in graph if layer.name in scales]
    names = list(dict.fromkeys(tops.values()))
    at = [names.index(tops[layer.name]) for layer in layers]
    others = forms or {}
    each = [scales, {**scales, **others}] if others else [scales]
    runners = [NcnnRunner(nets.param, nets.bin, worker=nets.there)] if nets.is_timed else [nets.float]
    if nets.is_timed:
        runners += [nets.runner(some, nets.there, f"timed{i}") for i, some in enumerate(each)]
    turns: list[Array] = []
    most, end = _TURNS, time.monotonic() + _SECONDS
    while len(turns) < _LEAST_TURNS or (forms is not None and len(turns) < most and time.monotonic() < end):
        found = [runner.time_blobs(nets.feeds[0], names, runs=_RUNS) for runner in runners]
        turns.append(np.maximum(np.array([times.blobs for times in found])[:, at], _SHORTEST))
        shares = [[*turn[1:] / turn[0], *turn[2:] / turn[1:2]] for turn in turns]  # of float, and of the other form
        median = np.median(shares, axis=0)
        error = np.median(np.abs(np.array(shares) - median), axis=0) * _ERRORS / math.sqrt(len(turns))
        most = _MOST_TURNS if (np.abs(median - 1 + _GAIN) < error).any() else _TURNS
    chosen = dict(scales)
    for i, layer in enumerate(layers):
        name, least = layer.name, float(min(turn[0, i] for turn in turns))
        known = [time_in_int8(nets.machine, layer, whole=some[name].whole) or math.nan for some in each]
        ratios = median[: len(each), i].tolist() if nets.is_timed else known
        ratio = ratios[0] if name in others else min(ratios)
        rows[name] = replace(rows[name], seconds=(least, least * ratio))
        if name not in others or not ratios[1] < ratio * (1 - _GAIN):
            continue
        row = replace(rows[name], seconds=(least, least * ratios[1]))
        if not others[name].whole:
            chosen[name], rows[name] = others[name], row
        elif nets.is_faster(row) and not nets.is_faster(rows[name]):
            noise = nets.compare({name: others[name]}, *samples)[0].noise
            chosen[name], rows[name] = others[name], replace(row, noise=noise)
    return rows, chosen


def _within(
    nets: _Nets,
    rows: dict[str, Row],
    scales: Mapping[str, Scales],
    chosen: set[str],
    budget: Budget,
    notes: list[str],
    every: bool,
) -> Quantized:
    """Leave out the layers that make most noise for the time they save, until the measured net keeps the budget.

    Powers of noise add up, but for a bend that the last measured net tells: loud noise grows no further, and numbers
    that earlier layers have moved are rounded in another way. A sum t becomes t + bend * t * t.
    """
    powers = {name: min(rows[name].noise, _ALL_NOISE) for name in rows if name in chosen}
    saved = {name: 1.0 if every else max(rows[name].seconds[0] - rows[name].seconds[1], 1e-9) for name in chosen}
    bend, room = 0.0, math.inf
    tried: dict[frozenset[str], Quantized] = {}
    best: frozenset[str] = frozenset()
    for _ in range(_ATTEMPTS):
        steps = [(power / saved[name], name, True, 0.0) for name, power in powers.items()]
        most = room if math.isinf(room) else 2 * room / (1 + math.sqrt(max(1 + 4 * bend * room, 0.0)))
        floats = cheapest(powers, steps, lambda name, _: saved[name], most)
        some = frozenset(powers).difference(floats)
        if some in tried:
            break
        total = sum(powers[name] for name in some)
        result = tried[some] = _measured(nets, rows, scales, some, notes, every)
        noise = min(10 ** (-result.decibels / 10), _ALL_NOISE)
        if not some:
            break
        bend = (noise - total) / (total**2 or 1.0)
        if result.misses(budget):
            other = min(10 ** ((result.kept(budget) - result.decibels) / 10), 1.0) if noise < _ALL_NOISE else 1.0
            room = _NEXT * min(noise * _LESS if budget.top1 else other * 10 ** (-budget.decibels / 10), room)
        elif not every and result.seconds[1] > _SLOWER * result.seconds[0]:
            least = min(some, key=saved.__getitem__)
            del powers[least]
            rows[least] = replace(rows[least], reason="the whole net is no faster with it in int8")
        else:
            best = max(best, some, key=lambda names: sum(saved[name] for name in names))
            if room == math.inf or budget.top1 or result.kept(budget) < budget.decibels + _CLOSE:
                break
    if best:
        return tried[best]
    if some:
        return replace(result, missed=result.misses(budget))
    if room < math.inf:
        nearest = max(tried.items(), key=lambda item: (bool(item[0]), item[1].kept(budget)))[1]
        return replace(nearest, missed=f"no layer can be int8 with a budget of {budget}")
    slow = f"no layer is faster in int8 {nets.times}; --all makes them int8 all the same"
    return replace(result, missed="each layer that can be int8 spoils an output" if every else slow)


def _measured(
    nets: _Nets,
    rows: Mapping[str, Row],
    scales: Mapping[str, Scales],
    chosen: Collection[str],
    notes: Sequence[str],
    every: bool,
) -> Quantized:
    """Return the net with these layers in int8, with what it costs and saves."""
    some = {name: scales[name] for name in scales if name in chosen}
    groups = nets.compare(some, nets.held, range(len(nets.feeds)), worker=nets.there)
    found, shares = groups[0], [each.least_top1 for each in groups if each.least_top1 is not None]
    graph = nets.graph(some)
    forms = {layer.name: form_of(layer) for layer in graph if layer.name in chosen}
    final = tuple(
        replace(row, form=forms[row.layer][0], bits=forms[row.layer][1])
        if row.layer in forms
        else replace(row, reason=row.reason or _why(nets, row, every))
        for row in rows.values()
    )
    if on_cpu := [layer.name for layer in graph if layer.name in chosen and crashes_gpus(layer)]:
        notes = [*notes, f"on GPUs the CPU computes {len(on_cpu)} of the Gemms: {CRASH_OF_GPUS}"]
    runner = nets.runner(some, nets.there)
    if nets.is_timed:
        floats = NcnnRunner(nets.param, nets.bin, worker=nets.there)
        net, other = (partial(each.time, nets.feeds[0], nets.outputs) for each in (runner, floats))
        timed = in_turns(net, other, _OF_NETS)
        for _ in range(_AGAIN):
            if timed.ratio > _SLOWER and not every:  # it may have been the machine
                timed = min(timed, in_turns(net, other, _OF_NETS), key=lambda each: each.ratio)
        before, after = timed.other / 1e3, timed.other / 1e3 * timed.ratio
    else:
        before = min(nets.float.time(nets.feeds[0], nets.outputs, 0.1))
        after = before - sum(a - b for a, b in (rows[name].seconds for name in chosen))
    if found.decibels < _POOR and chosen:
        worst = max(chosen, key=lambda name: rows[name].noise)
        poor = f"an output is only {found.decibels:.1f} dB from the float net; '{worst}' makes the most noise"
        notes = [*notes, f"{poor}: --budget or --keep leaves layers float"]
    sizes = (nets.bin.stat().st_size, runner.bin.stat().st_size)
    accuracy = found.decibels, decibels(max(each.most_noise for each in groups)), found.top1, min(shares, default=None)
    return Quantized(graph, final, *accuracy, len(nets.feeds), (before, after), sizes, nets.times, tuple(notes))


def _why(nets: _Nets, row: Row, every: bool) -> str:
    before, after = row.seconds
    if math.isnan(after) and not every:
        return f"nobody has measured its int8 kernel for {nets.where}"
    if not nets.is_faster(row) and not every:
        return f"int8 saves little time {nets.times}: {before * 1e3:.3g} ms -> {after * 1e3:.3g} ms"
    return f"the budget has no room for its noise: {decibels(row.noise):.1f} dB alone"
