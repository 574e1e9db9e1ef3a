"""Feature masks (parameter 31) that follow from the graph alone, for layers that need more than fp16.

A layer without fp16 storage needs its inputs in 32 bits, and ncnn does not convert them (`ir.features`). A Dropout of
scale 1 is a cast: ncnn converts its input to 32 bits, because it has no fp16 kernel on ARM, and its own mask keeps it
off the GPU. Everywhere else it costs nothing. But x86 has a bf16 kernel of Dropout: before layers without bf16 storage
the cast is a DeepCopy. The writer gives Splits of such blobs the mask of their readers (`param.splits`).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.attention import ATTENTION, operand_count
from onnx2ncnn_opt.ir.codes import BinaryOp, Eltwise, EpsMode, UnaryOp
from onnx2ncnn_opt.ir.dim import Dim
from onnx2ncnn_opt.ir.features import FP32, Device, Feature, MasksFor, features_of
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import HALF_WEIGHTS, INFINITE, LARGEST, SMALLEST, faulty_kernels, largest_number
from onnx2ncnn_opt.ir.ranges import Ranges
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.rewrite.edit import Names
from onnx2ncnn_opt.rewrite.integers import inexact_layers

# Their output has 32 bits on a CPU with all options: ncnn does not convert the data of a program or a file.
SOURCES = frozenset({"Input", "MemoryData"})
_EXP_LIMIT = 11.0  # exp(11.09) is 65504
# Infinity instead of a large constant changes only results that are infinite in fp16 anyway.
_HARMLESS = frozenset({BinaryOp.ADD, BinaryOp.SUB, BinaryOp.MAX, BinaryOp.MIN, BinaryOp.RSUB})
_CARRYING = frozenset({"Clip", "GridSample", "Interp", "Reduction"})


class Mask(NamedTuple):
    """Features to switch off for a layer, and why; `largest` is the largest value seen there, None without a run.

    `device` is the only kind of device that needs the mask, None if all do.
    """

    layer: str
    type: str
    features: Feature
    reason: str
    largest: float | None = None
    device: Device | None = None

    def joined(self, other: "Mask | None") -> "Mask":
        """Return the union with another mask of the same layer, if there is one."""
        if other is None:
            return self
        features, reason = self.features | other.features, f"{self.reason}; {other.reason}"
        device = self.device if self.device == other.device else None
        return self._replace(features=features, reason=reason, device=device)

    def __str__(self) -> str:
        seen = "" if self.largest is None else f" (largest value seen: {self.largest + 0:.3g})"
        return f"{self.type} '{self.layer}': {features_of(self.features)}: {self.reason}{seen}"


class _Proof(NamedTuple):
    layer: Layer
    features: Feature
    reason: str
    device: Device | None = None


def prove_masks(
    graph: Graph,
    *,
    integers: Collection[Blob] = (),
    wanted: MasksFor = True,
    minimum: Mapping[Dim, int] = MappingProxyType({}),
) -> dict[Layer, Mask]:
    """Return the masks of `wanted` devices that a graph needs for every input of its sizes; the first proof counts.

    `integers` are integer inputs and outputs; the graph itself shows which inputs are indices. `minimum` has the least
    values of sizes that the net is right for.
    """
    masks: dict[Layer, Mask] = {}
    for layer, features, reason, device in _proofs(graph, integers, minimum):
        if features & ~layer["featmask"] and is_wanted(device, wanted):
            masks.setdefault(layer, Mask(layer.name, layer.type, features, reason, None, device))
    return masks


def is_wanted(device: Device | None, wanted: MasksFor) -> bool:
    """Return whether `wanted` includes the masks of a kind of device; None stands for masks of all devices."""
    return bool(wanted) and (device is None or wanted is True or device == wanted)


def _proofs(graph: Graph, integers: Collection[Blob], minimum: Mapping[Dim, int]) -> Iterator[_Proof]:
    for layer, reason in inexact_layers(graph, integers):
        yield _Proof(layer, FP32 | Feature.NO_BF16_STORAGE, reason)
    ranges = Ranges()
    for layer in _differences_of_limits(graph, ranges):
        yield _Proof(layer, FP32, "it replaces infinity by the largest float32, so that a difference of two is 0")
    for layer in graph:
        for features, reason, device in faulty_kernels(layer, minimum):
            yield _Proof(layer, features, reason, device)
        if layer.type == "Softplus" and ranges.of(layer.input).high > _EXP_LIMIT:
            reason = f"exp of numbers above {_EXP_LIMIT:g} is infinite in fp16 on GPUs"
            yield _Proof(layer, Feature.NO_FP16_ARITHMETIC, reason, "vulkan")
        if layer.computes(BinaryOp.LOGADDEXP, scalar=True):
            reason = "it adds 1 to small numbers, and fp16 has few digits for the sum on GPUs"
            yield _Proof(layer, Feature.NO_FP16_ARITHMETIC, reason, "vulkan")
        if layer.type in HALF_WEIGHTS and (size := _largest_weight(layer)) > LARGEST:
            yield _Proof(layer, FP32, f"a weight is {size:.3g}, and fp16 ends at {LARGEST:g}")
        if _factor_of_zeros(layer) > LARGEST:
            reason = f"its eps of {layer['eps']:.3g} makes infinity of zeros in fp16 on GPUs"
            if layer.type == "InstanceNorm":
                yield _Proof(layer, FP32, reason)
            else:  # ARM computes the others in fp32
                yield _Proof(layer, Feature.NO_VULKAN, reason, "vulkan")
        yield from _own_numbers(layer, ranges)
        if abs(number := _written(layer, ranges)) > LARGEST:
            features = FP32 | Feature.NO_BF16_STORAGE if abs(number) >= INFINITE else FP32
            reason = f"it computes with {number:.3g}, which is infinite in fp16"
            yield from (_Proof(reader, features, reason) for reader in _readers_of_large(layer, number))


def _own_numbers(layer: Layer, ranges: Ranges) -> Iterator[_Proof]:
    """Yield the layers with infinite results from a large parameter, or a division by an eps that fp16 makes 0."""
    size = largest_number(layer)
    if size > LARGEST and not _may_be_infinite(layer, size, ranges):
        features = FP32 | Feature.NO_BF16_STORAGE if size >= INFINITE else FP32  # bf16 does not hold it either
        yield _Proof(layer, features, f"one of its numbers is {size:.3g}, which is infinite in fp16")
    if 0 < size < SMALLEST and layer.computes(BinaryOp.DIV):
        yield _Proof(layer, FP32, f"it divides by {size:.3g}, and fp16 has no number below 6e-08")
    is_sum = layer.computes(BinaryOp.ADD, BinaryOp.SUB)
    least = layer["min"] if layer.type == "Clip" else size if is_sum or layer.computes(BinaryOp.MAX) else 0.0
    if 0 < least < SMALLEST and (divisions := _undefined_at_0(layer.output)):
        verb = "is added" if is_sum else "is the least number"
        reason = f"{least:.3g} {verb} so that nothing is divided by 0, and fp16 has no number below 6e-08"
        yield from (_Proof(masked, FP32, reason) for masked in (layer, *divisions))


def added_inputs(graph: Graph) -> list[Blob]:
    """Return the graph inputs that are added to a Softmax's operand, or are the mask of an attention layer."""
    inputs: dict[Blob, None] = {}
    for layer in graph:
        added: tuple[Blob, ...] = ()
        if layer.type in ATTENTION and layer["attn_mask"]:
            added = (layer.inputs[operand_count(layer)],)
        elif layer.type == "Softmax" and (scores := layer.input.computed_by(BinaryOp.ADD)) is not None:
            added = scores.inputs
        sources = [blob for blob in map(unmoved, added) if blob.is_input]
        inputs |= dict.fromkeys(sources if len(sources) == 1 else ())
    return list(inputs)


def unmoved(blob: Blob) -> Blob:
    """Return the blob that a chain of moves copied to this blob."""
    while blob.producer is not None and blob.producer.has(Trait.MOVES) and len(blob.producer.inputs) == 1:
        blob = blob.producer.input
    return blob


def _differences_of_limits(graph: Graph, ranges: Ranges) -> Iterator[Layer]:
    """Yield the layers from a Clip of infinities to the largest float32, through moves, to sums of two blobs."""
    limited: set[Blob] = set()
    for layer in graph:
        if layer.type == "Clip" and max(-layer["min"], layer["max"]) >= INFINITE:
            is_limited = ranges.of(layer.input).may_be_inf
        else:
            is_limited = (layer.has(Trait.MOVES) or layer.type == "Reduction") and not limited.isdisjoint(layer.inputs)
        if is_limited:
            limited.update(layer.outputs)
    sums = [layer for layer in graph if layer.computes(*_HARMLESS, scalar=False)]
    ends = [layer for layer in sums if not limited.isdisjoint(layer.inputs)]

    def before(layer: Layer) -> list[Layer]:
        return [blob.producer for blob in layer.inputs if blob in limited and blob.producer is not None]

    between = set(reached(ends, before))
    yield from (layer for layer in graph if layer in between)


def _factor_of_zeros(layer: Layer) -> float:
    """Return the factor by which a normalisation multiplies zeros, at least on GPUs; 0 for other layers."""
    if layer.type not in ("GroupNorm", "InstanceNorm", "Normalize") or layer["eps"] <= 0:
        return 0.0
    if layer["eps"] < SMALLEST:
        return math.inf
    limits_root = layer.type == "Normalize" and layer["eps_mode"] == EpsMode.MAX_ROOT
    return float(1 / layer["eps"] if limits_root else layer["eps"] ** -0.5)


def _written(layer: Layer, ranges: Ranges) -> float:
    """Return the largest number that a layer writes, as masks of scores do; 0 if it may never write it."""
    if layer.type == "MemoryData":
        numbers = layer.weights["data"]
        low, high = (f(initial=0.0, where=np.isfinite(numbers)) for f in (numbers.min, numbers.max))
        return float(low if -low > high else high)
    if layer.type == "Eltwise":
        return float(max(layer["coeffs"], key=abs, default=0.0))
    if not layer.computes(*_HARMLESS, BinaryOp.MUL, scalar=True):
        return 0.0
    number, x = float(layer["b"]), ranges.of(layer.input)
    if layer.computes(BinaryOp.MUL):
        return number if _may_be_0(layer.input, ranges) and (x.is_integer or abs(number) >= INFINITE) else 0.0
    is_limit = layer.computes(BinaryOp.MAX, BinaryOp.MIN)
    return number if not is_limit or (x.may_be_inf and not layer.input.is_input) else 0.0  # as of a mask's logarithm


def _readers_of_large(layer: Layer, number: float) -> Iterator[Layer]:
    """Yield a layer and those that its large number reaches, up to a limit or a layer that computes something else."""

    def is_limited(user: Layer) -> bool:
        if user.type == "Clip":
            return bool(abs(user["min" if number < 0 else "max"]) <= LARGEST)
        return user.computes(BinaryOp.MAX if number < 0 else BinaryOp.MIN, scalar=True) and abs(user["b"]) <= LARGEST

    def carried(blob: Blob) -> Iterator[Blob]:
        yield from (out for user in blob.users if _carries(user, blob) and not is_limited(user) for out in user.outputs)

    users = (user for blob in reached(layer.outputs, carried) for user in blob.users)
    yield from (each for each in (layer, *users) if each.type not in SOURCES and not is_limited(each))


def _carries(layer: Layer, blob: Blob) -> bool:
    """Return True if a layer moves the numbers of a blob, adds them up, or multiplies them by a number or a mask."""
    computes = layer.computes(*_HARMLESS, BinaryOp.MUL, BinaryOp.DIV, UnaryOp.NEG, UnaryOp.ABS, Eltwise.SUM)
    return computes or layer.has(Trait.MOVES) or (layer.type in _CARRYING and blob is layer.inputs[0])


def _may_be_infinite(layer: Layer, size: float, ranges: Ranges) -> bool:
    """Return True if replacing the layer's largest parameter by infinity changes only infinite results."""
    if layer.type != "BinaryOp" or layer["op_type"] in _HARMLESS:
        return layer.type == "BinaryOp"
    return size >= INFINITE and not (layer["op_type"] == BinaryOp.MUL and _may_be_0(layer.input, ranges))


def _may_be_0(blob: Blob, ranges: Ranges) -> bool:
    """Return whether an element can be 0; an integer plus a fraction cannot."""
    added = blob.computed_by(BinaryOp.ADD, scalar=True)
    has_fraction = added is not None and added["b"] % 1 and ranges.of(added.input).is_integer
    return not has_fraction and ranges.of(blob).has(0)


def _largest_weight(layer: Layer) -> float:
    """Return the largest weight, except numbers that mean infinity."""
    largest = 0.0
    for name, stored in layer.weights.stored_items():
        if stored.is_float and stored.data.dtype.kind == "f" and not name.endswith("bytes"):
            numbers = np.asarray(stored.array, np.float32)
            size = max(numbers.max(initial=0.0), -numbers.min(initial=0.0))  # float32, like the limit
            if not size < INFINITE:  # the copy may be large
                sizes = np.abs(numbers)
                size = sizes[sizes < INFINITE].max(initial=0.0)
            largest = max(largest, float(size))
    return largest


def _undefined_at_0(blob: Blob) -> list[Layer]:
    """Return the consumers of a blob that divide by it or take its logarithm, also through a square root."""
    layers: list[Layer] = []
    for user in blob.users:
        if _is_undefined_at_0(user, blob):
            layers.append(user)
        elif user.computes(UnaryOp.SQRT) and (divisions := _undefined_at_0(user.output)):
            layers += [user, *divisions]
    return layers


def _is_undefined_at_0(layer: Layer, blob: Blob) -> bool:
    if layer.computes(UnaryOp.RSQRT, UnaryOp.LOG, UnaryOp.RECIPROCAL) or layer.computes(BinaryOp.RDIV, scalar=True):
        return True
    if layer.type == "Log":
        return bool(layer["shift"] == 0)
    divides = layer.computes(BinaryOp.DIV, BinaryOp.RDIV, scalar=False)
    return divides and layer.inputs[layer["op_type"] == BinaryOp.DIV] is blob


def put_masks(graph: Graph, masks: Iterable[tuple[Layer, Feature]]) -> None:
    """Add masks to layers, and insert the casts to 32 bits that they need."""
    masked = {layer: layer["featmask"] | int(features) for layer, features in masks}
    for layer, mask in masked.items():
        layer.params["featmask"] = mask
    entries: dict[tuple[Blob, str], Blob] = {}
    names = Names(graph)
    for layer, mask in masked.items():
        if not mask & Feature.NO_FP16_STORAGE or layer.type in SOURCES:
            continue
        kind = "DeepCopy" if mask & Feature.NO_BF16_STORAGE else "Dropout"
        graph.set_inputs(layer, [_in_32_bits(graph, blob, kind, entries, names) for blob in layer.inputs])


def _in_32_bits(graph: Graph, blob: Blob, kind: str, entries: dict[tuple[Blob, str], Blob], names: Names) -> Blob:
    producer = blob.producer
    if producer is None or producer.type in SOURCES or producer["featmask"] & Feature.NO_FP16_STORAGE:
        if producer is not None and producer.type == "MemoryData":  # a GPU has it in 16 bits
            producer.params["featmask"] = producer["featmask"] | int(Feature.NO_VULKAN)
        return blob
    if producer.type in ("Dropout", "DeepCopy") and producer["featmask"] == Feature.NO_VULKAN:
        return blob
    before = producer.inputs[0].producer
    mask = before["featmask"] if before is not None else Feature(0)
    if producer.has(Trait.VIEW) and mask & Feature.NO_FP16_STORAGE and not producer["featmask"]:
        producer.params["featmask"] = mask  # it moves numbers of 32 bits, so that they need no cast
        return blob
    if (blob, kind) not in entries:
        name = f"{blob.name}_fp32"
        params = {"featmask": int(Feature.NO_VULKAN)}
        entry = Layer(kind, name, [blob], [Blob(name, blob.shape)], params, origin=producer.traced)
        names.give(entry, ())
        entries[blob, kind] = graph.add(entry, before=producer._next).output
    return entries[blob, kind]
