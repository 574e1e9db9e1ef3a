"""The error that fp16 makes at a net's outputs with masks on its layers, from runs of the net."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise, Reduction
from onnx2ncnn_opt.ir.cost import multiplications_of
from onnx2ncnn_opt.ir.dim import Dim, product, substituted
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import computes_in_half
from onnx2ncnn_opt.precision.fp16_run import Estimator, Walk
from onnx2ncnn_opt.precision.half_sums import Inner, of_function
from onnx2ncnn_opt.runtime.base import Array

_ELEMENT_COST = 4.0  # multiplications that take as long as an element that is computed and written

Masks = Mapping[Layer, Feature]
Measured: TypeAlias = Mapping[Blob, tuple[float, float]]  # errors of outputs, NaN if infinite, and largest values


def errors_of(walk: Walk, reference: Walk, left_out: Collection[Blob] = ()) -> Measured:
    """Return the errors of a run's outputs."""
    found: dict[Blob, tuple[float, float]] = {}
    for blob, expected in reference.outputs.items():
        if expected.dtype != np.float32 or not expected.size or blob in left_out:
            continue
        known = np.isfinite(expected)
        here, there = walk.outputs[blob][known], expected[known]
        size, error = (float(np.abs(each).max(initial=0.0)) for each in (there, here - there))
        if not np.isfinite(here).all():
            error = math.nan
        found[blob] = error, size
    return found


def relative_errors(several: Sequence[Measured]) -> dict[Blob, float]:
    """Return the error of each output in units of its largest value, both on average (root mean square) over inputs."""
    columns = [np.array([*measured.values()], np.float64).reshape(-1, 2) for measured in several]
    rows = np.sqrt(np.mean(np.square(columns), axis=0)).tolist()
    return {blob: error / (size or 1.0) for blob, (error, size) in zip(several[0], rows, strict=True)}


def largest_error(*several: Measured) -> float:
    """Return the largest of the `relative_errors`; NaN if one is not finite."""
    return float(np.max([*relative_errors(several).values()], initial=0.0))


class MaskJudge:
    """The error of a net in fp16 with masks, as the estimate says; on a device in `mixed`."""

    checked = "estimated for fp16"  # the place where the net runs, for people

    def __init__(self, estimator: Estimator, integers: Collection[Blob] = (), seed: int = 0) -> None:
        """Run the net in fp32; `seed` is that of the noise in fp16.

        Outputs that are `integers` do not count if they are places of numbers that count.
        """
        self.estimator, self.graph, self._seed = estimator, estimator.graph, seed
        self._left_out = integers if estimator.choices else ()
        self._errors: dict[tuple[int, ...], Measured] = {}  # by the masks of all layers
        self._last: tuple[tuple[int, ...], Walk] | None = None
        self._sizes = estimator.sizes()
        self.multiplications = {layer: self._number(multiplications_of(layer) or 0) for layer in self.graph}
        self.reference = estimator.run(sampled=True)  # in fp32

    def noise(self) -> dict[Layer, Inner]:
        """Return the errors that the arithmetic of layers makes with their present masks."""
        found: dict[Layer, Inner] = {}
        for layer in filter(computes_in_half, self.graph):
            function = of_function(layer)
            ways = self.reference.inner.get(layer) or [function]
            way = ways[-1 if layer["featmask"] & Feature.NO_WINOGRAD else 0]
            found[layer] = way._replace(relative=max(function.relative, way.relative))
        return found

    def walk(self) -> Walk:
        """Return the last run in fp16 if it had the masks that the layers have, or a new one."""
        key = self._key()
        if self._last is None or self._last[0] != key:
            self._last = key, self.estimator.run(self.noise(), rounded=True, seed=self._seed)
        return self._last[1]

    def error(self, masks: Masks = MappingProxyType({})) -> float:
        """Return the largest error of an output with masks added, see `largest_error`."""
        return largest_error(self.errors(masks))

    def errors(self, masks: Masks = MappingProxyType({})) -> Measured:
        """Return the errors of the outputs with masks added."""
        with self.added(masks):
            if self._key() not in self._errors:
                self._errors[self._key()] = self._measure()
            return self._errors[self._key()]

    def _measure(self) -> Measured:
        return self._measured(self.walk())

    def _measured(self, walk: Walk) -> Measured:
        return errors_of(walk, self.reference, self._left_out)

    def shares(self, powers: Array) -> tuple[dict[Layer, Array], dict[Layer, Array]]:
        """Divide powers of noise at the outputs among the layers, see `noise_shares`."""
        walk = self.walk()
        outputs = zip(self._measured(walk), powers.tolist(), strict=True)
        return noise_shares(self.graph, walk, self.reference, [*outputs])

    @contextmanager
    def added(self, masks: Masks) -> Iterator[None]:
        """Put masks on layers for a block."""
        with restored_masks(self.graph):
            for layer, features in masks.items():
                layer.params["featmask"] = layer["featmask"] | int(features)
            yield

    def _key(self) -> tuple[int, ...]:
        return tuple(layer["featmask"] for layer in self.graph)

    def cost(self, layer: Layer) -> float:
        """Return the cost of computing a layer in fp32, as multiplications."""
        elements = sum(product(blob.shape or ()) for blob in layer.outputs)
        return self.multiplications[layer] + _ELEMENT_COST * self._number(elements)

    def _number(self, dim: Dim) -> int:
        """Return a dimension at the sizes of the inputs; 1 if it is not known."""
        number = substituted(dim, self._sizes)
        return number if isinstance(number, int) else 1

    def price(self) -> float:
        """Return the share of the multiplications that the masks of layers keep from fp16 arithmetic."""
        masked = sum(count for layer, count in self.multiplications.items() if is_exact(layer))
        return masked / (sum(self.multiplications.values()) or 1.0)

    def rounding_share(self) -> Array:
        """Return the part of the power of noise at each output that rounding every blob to fp16 makes."""
        rounding = self._measured(self.estimator.run(rounded=True))
        shares = [
            (error / max(self.errors()[blob][0], error) if error else 0.0) for blob, (error, _) in rounding.items()
        ]
        return np.square(shares)

    def is_undecided(self, error: float) -> bool:
        """Return True if an error may change an index, because the two largest numbers differ by less."""
        for blob in self.estimator.choices:
            numbers = self.reference.outputs[blob]
            for layer in (user for user in blob.users if user.type == "Reduction"):
                axis = [each if each < 0 else each - len(blob.shape or numbers.shape) for each in layer["axes"]]
                if len(axis) != 1 or numbers.shape[axis[0]] < 2:
                    continue
                sign = -1 if layer["operation"] == Reduction.MIN else 1
                two = np.partition(sign * numbers, (-2, -1), axis[0]).take([-2, -1], axis[0])
                if np.diff(two, axis=axis[0]).min() < error * np.abs(numbers).max():
                    return True
        return False

    def integers_differ(self, integers: Collection[Blob]) -> bool:
        """Return True if an output of integers has others in fp16, both as the bits of floats and as values."""
        both = [
            (self.walk().outputs[blob], known) for blob, known in self.reference.outputs.items() if blob in integers
        ]
        return any(((a != b) & (a.view(np.int32) != b.view(np.int32))).any() for a, b in both)


def is_exact(layer: Layer) -> bool:
    """Return True if a layer's masks keep it from fp16 arithmetic."""
    return bool(layer["featmask"] & (Feature.NO_FP16_ARITHMETIC | Feature.NO_FP16_STORAGE))


@contextmanager
def restored_masks(graph: Graph) -> Iterator[None]:
    """Restore the masks of all layers at the end of the block."""
    before = {layer: layer.params.get("featmask") for layer in graph}
    try:
        yield
    finally:
        for layer, mask in before.items():
            layer.params.pop("featmask", None)
            if mask is not None:
                layer.params["featmask"] = mask


def noise_shares(
    graph: Graph, walk: Walk, reference: Walk, outputs: Sequence[tuple[Blob, float]]
) -> tuple[dict[Layer, Array], dict[Layer, Array]]:
    """Divide the noise of a walk among the layers of a graph; `outputs` are blobs with the power of their noise.

    The error of a blob has two sources: its layer's own arithmetic, whose size is known, and the errors of its inputs.
    So the power of the noise at an output is divided from the last layer to the first, from samples of all blobs. The
    first result are powers of a layer's arithmetic, the second ones those of rounding what it writes.
    """
    squares = {blob: _mean_square(sample) for blob, sample in reference.samples.items()}
    # An output is not known before its own errors, but with them.
    gone = {blob: sum(walk.errors[blob]) if blob in walk.outputs else 0.0 for blob in walk.errors}
    with np.errstate(invalid="ignore"):  # infinity less infinity, as in masks, is left out of the mean
        came = {
            blob: max(_mean_square(sample - reference.samples[blob]) - gone[blob], 0.0)
            for blob, sample in walk.samples.items()
        }
    total = np.array([power for _, power in outputs])
    arriving: dict[Blob, Array] = {}
    for (blob, _), row in zip(outputs, np.diag(total), strict=True):
        arriving[blob] = arriving.get(blob, 0.0) + row
    found: dict[Layer, Array] = {}
    rounding: dict[Layer, Array] = {}
    for layer in reversed(list(graph)):
        powers = [arriving.pop(blob) for blob in layer.outputs if blob in arriving]
        if not powers:
            continue
        power = np.sum(powers, axis=0)
        known = [blob for blob in layer.outputs if blob in came]
        own, rounded = (sum(walk.errors[blob][at] for blob in known if walk.errors[blob]) for at in range(2))
        inputs = {blob: came[blob] + sum(walk.errors[blob]) for blob in layer.inputs if blob in came}
        inputs = {blob: square for blob, square in inputs.items() if square}
        error = own + rounded + (sum(came[blob] for blob in known) if inputs else 0.0)  # or all of it begins here
        if error:
            found[layer], rounding[layer] = power * (own / error), power * (rounded / error)
            power = power * max(1.0 - (own + rounded) / error, 0.0)
        if not layer.computes(BinaryOp.ADD, BinaryOp.SUB, BinaryOp.RSUB, Eltwise.SUM) and layer.type != "Concat":
            inputs = {blob: square / (squares[blob] or 1.0) for blob, square in inputs.items()}
        for blob, part in inputs.items():
            arriving[blob] = arriving.get(blob, 0.0) + power * (part / sum(inputs.values()))
    return found, rounding


def _mean_square(numbers: Array) -> float:
    """Return the mean square of the finite numbers."""
    squares = np.square(numbers, dtype=np.float64)
    return float(squares.mean(where=np.isfinite(squares))) if np.isfinite(squares).any() else 0.0
