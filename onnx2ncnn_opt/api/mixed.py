"""The cheapest feature masks that keep a net within an error budget in fp16, measured on a device or estimated."""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from onnx2ncnn_opt.errors import VerificationError
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.param.files import read_net, write_net
from onnx2ncnn_opt.param.text import format_param
from onnx2ncnn_opt.precision.fp16_run import Estimator, Walk
from onnx2ncnn_opt.precision.mask_forms import FULL, MaskForms
from onnx2ncnn_opt.precision.mask_judge import MaskJudge, Masks, Measured, errors_of
from onnx2ncnn_opt.precision.masks import BUDGET, find_masks
from onnx2ncnn_opt.precision.search import EFFORTS, Limit
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.rewrite.prove_masks import SOURCES, Mask, prove_masks, put_masks
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker, Times
from onnx2ncnn_opt.runtime.targets import find_target
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verification.model import net_feeds
from onnx2ncnn_opt.verification.options import Verification

_MIN_SECONDS = 1e-7
# Layers that compute nothing need no mask; layers with Trait.MOVES are others.
_IDLE = SOURCES | {"Dropout", "Padding"}


@dataclass(frozen=True)
class Mixed:
    """A net with masks for a budget; `before` and `after` are its errors, relative to an output's largest value.

    Each mask has the additional time of its layer, and the net that of a run with the masks, None if not measured.
    """

    graph: Graph
    budget: float
    masks: tuple[tuple[Mask, float | None], ...]
    before: float
    after: float
    checked: str  # the device and mode of the measurement
    seconds: float | None


class DeviceJudge(MaskJudge):
    """A net in fp16 on a device; the estimator and the worker must be open. `folder` is for the net's files."""

    def __init__(self, estimator: Estimator, worker: NcnnWorker, folder: Path) -> None:
        super().__init__(estimator)
        self._worker, self._param, self._bin = worker, folder / "net.param", folder / "net.bin"
        names = write_net(self.graph, self._param, self._bin)
        self._feeds = {names[blob]: feed for blob, feed in estimator.feeds.items()}
        self.checked = worker.checked(["fp16"])

    def _runner(self) -> NcnnRunner:
        """Write the net with the masks of its layers; return its runner. The weights stay: added casts have none."""
        copy = self.graph.copy()
        put_masks(copy, [(layer, Feature(layer["featmask"])) for layer in copy.layers if layer["featmask"]])
        self._param.write_bytes(format_param(copy).encode())
        return NcnnRunner(
            self._param, self._bin, mode="fp16", worker=self._worker, threads=None, timeout=self.estimator.timeout
        )

    def _measure(self) -> Measured:
        fetches = {blob: self.estimator.fetch(blob) for blob in self.estimator.compared}
        results = self._runner().run(self._feeds, list(fetches.values()))
        return errors_of(Walk({blob: results[fetch.blob] for blob, fetch in fetches.items()}), self.reference)

    def layers(self) -> list[Layer]:
        """Return the layers that compute something."""
        return [layer for layer in self.graph if not layer.has(Trait.MOVES) and layer.type not in _IDLE]

    def cost(self, layer: Layer) -> float:
        """Return the additional seconds of a layer with a mask; the estimate's cost if the device has no times."""
        return self._seconds.get(layer) or super().cost(layer)

    @cached_property
    def _seconds(self) -> dict[Layer, float]:
        layers = self.layers()
        half, full = self.times({}), self.times(dict.fromkeys(layers, FULL))
        if half is None or full is None:
            return {}
        return {layer: max(b - a, _MIN_SECONDS) for layer, a, b in zip(layers, half.blobs, full.blobs, strict=True)}

    def times(self, masks: Masks) -> Times | None:
        """Return the times of the `layers` and of the whole net with masks added; None on an emulator."""
        if self._worker.target.patience > 1:
            return None
        names = [self.estimator.names[layer.outputs[0]] for layer in self.layers()]
        with self.added(masks):
            return self._runner().time_blobs(self._feeds, names)


def choose_masks(judge: MaskJudge, *, budget: float) -> Mixed:
    """Set the masks that the net's graph proves, and the cheapest others that keep the net within a budget.

    Raises VerificationError if no masks are enough.
    """

    def features() -> Masks:
        return {layer: mask.features for layer, mask in masks.items()}

    before, masks = judge.error(), prove_masks(judge.graph)
    after = judge.error(features())
    if not after <= budget:
        needed, _ = find_masks([judge.estimator], budget=math.inf)
        masks = needed | {layer: mask.joined(needed.get(layer)) for layer, mask in masks.items()}
        with judge.added(features()):
            forms = MaskForms([judge])
            plan = forms.choose([Limit(budget)], EFFORTS["thorough"][1])
        after = plan.error
        masks |= {layer: mask.joined(masks.get(layer)) for layer, mask in forms.masks_of(plan)}
    if not after <= budget:
        error = "NaN or infinite" if math.isnan(after) else f"off by {after:.1e} of the largest value"
        raise VerificationError(
            f"no masks keep the net within {budget:.1e}: with all of them an output is {error}; "
            "compute it in fp32 on devices, or give a larger --budget"
        )
    timed = judge.times(features()) if isinstance(judge, DeviceJudge) else None
    costs = tuple((mask, judge.cost(layer) if timed else None) for layer, mask in masks.items())
    put_masks(judge.graph, features().items())
    return Mixed(judge.graph, budget, costs, before, after, judge.checked, timed.whole if timed else None)


def mixed(
    model: Path,
    param: Path,
    bin: Path,
    *,
    manifest: Manifest | None = None,
    verification: Verification = Verification(),
) -> Mixed:
    """Return the net with the cheapest masks that keep every output within the budget of the verification in fp16.

    Existing masks stay. Without a device (`on`) the errors are estimated. No file is written.

    Raises VerificationError if fp32 is wrong or no masks are enough, and the errors of `verify_net` and `optimize`.
    """
    target = find_target(verification.on)
    target.require()
    announce("the net against ONNX Runtime in fp32")
    feeds_by_name = net_feeds(model, param, bin, verification, manifest=manifest)
    net = read_net(param, bin)
    feeds = {net.names[name]: feed for name, feed in feeds_by_name.items()}
    for blob, feed in feeds.items():
        blob.shape, blob.batch = feed.mat
    infer_graph(net.graph)
    with ExitStack() as stack:
        judge = MaskJudge(stack.enter_context(Estimator(net.graph, feeds, timeout=verification.timeout)))
        announce("the net in fp32")
        if verification.on is not None:
            worker = stack.enter_context(NcnnWorker(target))
            judge = DeviceJudge(judge.estimator, worker, Path(stack.enter_context(temporary_folder())))
        return choose_masks(judge, budget=verification.budget or BUDGET)
