"""The smallest set of feature masks with which a net stays within a budget in fp16, for any net, on a device or not.

Every layer is tried alone: all others compute in fp32 arithmetic, this one in fp16, and without winograd where ncnn has
it. Then the layers that cost most get their masks, as few as are enough, and of these the mildest.
"""

import math
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from onnx2ncnn_opt.errors import UsageError, VerificationError
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.param.files import read_net, write_net
from onnx2ncnn_opt.param.text import format_param
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask, prove_masks, put_masks
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.verification.estimate import Estimator, Walk
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.search_masks import FULL, MaskJudge, Masks, error_of, fewest_masks, find_masks
from onnx2ncnn_opt.verification.verify_net import net_feeds

_TIMES = 7
# Layers that compute nothing, as those that move their input: they need no mask.
_IDLE = SOURCES | {"Dropout", "Padding"}


@dataclass(frozen=True)
class Chosen:
    """A chosen mask."""

    mask: Mask
    alone: float  # the error of the net if only this layer has no mask
    seconds: float | None = None  # the cost of the mask in each run, if it can be measured


@dataclass(frozen=True)
class Mixed:
    """A net with masks: its errors `before` and `after` in fp16, in units of an output's largest value."""

    graph: Graph
    chosen: tuple[Chosen, ...]
    before: float
    after: float
    checked: str  # where they were measured
    seconds: float | None = None  # the time of a run with the masks, if it can be measured


class DeviceJudge(MaskJudge):
    """A net in fp16 on a device; the estimator and the worker have to be open. `folder` is for its files."""

    def __init__(self, estimator: Estimator, source: tuple[Path, Path], worker: NcnnWorker, folder: Path) -> None:
        super().__init__(estimator)
        self._source, self._worker, self._folder, self._count = source, worker, folder, 0
        self._names = write_net(self.graph, folder / "net.param", folder / "net.bin")
        self.checked = worker.checked(["fp16"])

    def _runner(self, masks: Masks) -> NcnnRunner:
        """Return the net with masks, as files; the casts to 32 bits have no weights."""
        copy = read_net(*self._source).graph
        positions = {position: masks[layer] for position, layer in enumerate(self.graph) if layer in masks}
        put_masks(copy, [(layer, positions[at]) for at, layer in enumerate(copy.layers) if at in positions])
        self._count += 1
        param, bin, timeout = self._folder / f"net{self._count}.param", self._folder / "net.bin", self.estimator.timeout
        param.write_text(format_param(copy))
        return NcnnRunner(param, bin, mode="fp16", worker=self._worker, threads=None, timeout=timeout)

    def _outputs(self, runner: NcnnRunner) -> dict[Blob, Array]:
        fetches = {blob: self.estimator.fetch(blob) for blob in self.estimator.compared}
        feeds = {self._names[blob]: feed for blob, feed in self.estimator.feeds.items()}
        results = runner.run(feeds, list(fetches.values()))
        return {blob: results[fetch.blob] for blob, fetch in fetches.items()}

    def error(self, masks: Masks = MappingProxyType({})) -> float:
        """Return the largest error as the estimate does, but measured."""
        return error_of(Walk(self._outputs(self._runner(masks))), self.reference)

    def seconds(self, masks: Masks) -> float | None:
        """Return the shortest of some runs, including the transfer of inputs and outputs."""
        if self._worker.target.patience > 1:  # an emulator's time says nothing
            return None
        runner = self._runner(masks)
        times = []
        for _ in range(_TIMES):
            start = time.perf_counter()
            self._outputs(runner)
            times.append(time.perf_counter() - start)
        return min(times)


def choose_masks(judge: MaskJudge, *, budget: float) -> Mixed:
    """Put the masks on a net that its graph proves, and the fewest that keep it within a budget.

    Raises VerificationError if no masks are enough.
    """
    before, masks = judge.error(), prove_masks(judge.graph)
    alone: dict[Layer, float] = {}
    if not judge.error({layer: mask.features for layer, mask in masks.items()}) <= budget:
        masks, alone = _chosen(judge, masks, budget)
    features = {layer: mask.features for layer, mask in masks.items()}
    after = judge.error(features) if masks else before
    seconds = judge.seconds(features)
    chosen = []
    for layer, mask in masks.items():
        cost = None
        if seconds is not None:
            announce(f"the time of {layer.type} '{layer.name}'")
            without = judge.seconds({each: mask for each, mask in features.items() if each is not layer})
            cost = None if without is None else seconds - without
        chosen.append(Chosen(mask, alone.get(layer, math.nan), cost))
    put_masks(judge.graph, features.items())
    return Mixed(judge.graph, tuple(chosen), before, after, judge.checked, seconds)


def _chosen(
    judge: MaskJudge, proved: Mapping[Layer, Mask], budget: float
) -> tuple[dict[Layer, Mask], dict[Layer, float]]:
    """Return the masks that keep a net within a budget, and the error of each layer that computes alone in fp16."""
    needed, _ = find_masks(judge.estimator, budget=math.inf)
    for layer, mask in proved.items():
        needed[layer] = mask._replace(features=mask.features | (needed.get(layer, mask).features))
    fixed = {layer: mask.features for layer, mask in needed.items()}
    busy = [layer for layer in judge.graph if not layer.has(Trait.MOVES) and layer.type not in _IDLE]
    layers = [layer for layer in busy if layer not in fixed]
    everything: dict[Layer, Feature] = {**dict.fromkeys(layers, FULL), **fixed}
    least = judge.error(everything)
    if not least <= budget:
        what = "NaN or infinite" if math.isnan(least) else f"off by {least:.1e} of the largest value"
        raise VerificationError(
            f"no masks keep the net within {budget:.1e}: with all of them an output is {what}; "
            "compute it in fp32 on devices, or give a larger --budget"
        )
    alone: dict[Layer, float] = {}
    for number, layer in enumerate(layers, 1):
        announce(f"{layer.type} '{layer.name}' alone in fp16 ({number} of {len(layers)})")
        error = judge.error({each: features for each, features in everything.items() if each is not layer})
        alone[layer] = math.inf if math.isnan(error) else error
    order = sorted(layers, key=lambda layer: alone[layer], reverse=True)
    masks = dict(needed)
    for layer, features in fewest_masks(judge, order, target=budget, full=FULL, fixed=fixed).items():
        reason = f"alone in fp16 it costs {alone[layer]:.1e} of the largest value of an output"
        masks[layer] = Mask(layer.name, layer.type, features, reason, judge.reference.largest_of(layer.outputs))
    return masks, alone


def mixed(
    model: Path,
    param: Path,
    bin: Path,
    *,
    budget: float = 1e-2,
    manifest: Manifest | None = None,
    verification: Verification = Verification(),
) -> Mixed:
    """Return the net with the smallest set of masks that keeps every output within `budget` in fp16.

    `budget` is in units of an output's largest value in fp32. Masks that the net has stay. Without a device to run `on`
    fp16 is estimated. Nothing is written.

    Raises VerificationError if fp32 is wrong or no masks are enough, and the errors of `verify_net` and `optimize`.
    """
    if not budget > 0:
        raise UsageError(f"the budget has to be above 0, not {budget:g}")
    target = find_target(verification.on)
    target.require()
    announce("the net against ONNX Runtime in fp32")
    given = net_feeds(model, param, bin, verification, manifest=manifest)
    net = read_net(param, bin)
    arrays = {net.names[blob]: feed for blob, feed in given.items()}
    for blob, feed in arrays.items():
        blob.shape, blob.batch = feed.mat
    infer_graph(net.graph)
    with ExitStack() as stack:
        estimator = stack.enter_context(Estimator(net.graph, arrays, timeout=verification.timeout))
        announce("the net in fp32")
        if verification.on is None:
            return choose_masks(MaskJudge(estimator), budget=budget)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-"))
        worker = stack.enter_context(NcnnWorker(target))
        return choose_masks(DeviceJudge(estimator, (param, bin), worker, Path(folder)), budget=budget)
