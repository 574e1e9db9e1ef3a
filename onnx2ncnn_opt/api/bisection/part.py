"""The smallest part of a model and its net that is wrong on its own."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from onnx2ncnn_opt.api.bisection.minimal_pair import Counterpart, Pair, PairFiles, Part, write_pair
from onnx2ncnn_opt.api.bisection.search import FirstWrong
from onnx2ncnn_opt.api.bisection.wrong_net import WrongNet, as_integers
from onnx2ncnn_opt.errors import ModelError, RunError, UsageError, VerificationError
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.outputs import Status
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.slots import Slot
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verdict.blobs import aligned, natural, nearest, squeezed
from onnx2ncnn_opt.verdict.errors import Tolerance
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.options import Verification


def write_smallest_part(net: WrongNet, first: FirstWrong, folder: Path) -> Pair | None:
    """Write the smallest part of the net that is wrong on its own to a folder; return None if there is none."""
    announce("looking for the smallest part that is wrong")
    tolerance = replace(net.tolerance(exact=False), slices=False)
    ends = (blob for layer in (first.end.producer, *first.path) if layer for blob in layer.outputs)
    order = {layer: number for number, layer in enumerate(net.graph)}
    for end in ends:
        if first.run.verdicts[end].status == "right" or end.producer is None or first.end.producer is None:
            continue
        counterpart = _counterpart(net, end, first, tolerance)
        if counterpart is None or order[end.producer] < order[first.end.producer]:
            continue
        for is_whole in (False, True):
            starts = _starts(net, end, first, tolerance, is_whole=is_whole)
            pair = _written(net, folder, Part(starts, end.name, counterpart), first)
            if pair is not None:
                return pair
        return None
    return None


def _starts(
    net: WrongNet, end: Blob, first: FirstWrong, tolerance: Tolerance, *, is_whole: bool
) -> dict[str, Counterpart]:
    """Return the blobs where a part starts: the nearest right blobs before `end`, or with `is_whole` the inputs."""
    starts: dict[str, Counterpart] = {}
    pending, seen = [end], {end}
    verdicts = first.run.verdicts
    while pending:
        blob = pending.pop()
        is_start = blob.is_input or (blob is not end and not is_whole and verdicts[blob].status == "right")
        if is_start and (counterpart := _counterpart(net, blob, first, tolerance)):
            starts[blob.name] = counterpart
        elif blob.producer is not None:
            pending += [before for before in blob.producer.inputs if before not in seen]
            seen.update(blob.producer.inputs)
    return starts


def _counterpart(net: WrongNet, blob: Blob, first: FirstWrong, tolerance: Tolerance) -> Counterpart | None:
    """Return the model's value that a blob should equal; None if it is unknown."""
    run = first.run
    if blob.is_input:
        slot = next((slot for slot in run.way if slot.blob == blob.name), None)
        return None if slot is None else _fed_counterpart(slot, net.feeds[slot.name])
    verdict, result = run.verdicts[blob], run.results.get(blob.name)
    right = result if verdict.status == "right" else run.expected.get(blob)
    name = net.names.get(blob.name, verdict.value or blob.name)
    value = net.reference.values.get(name)
    if blob.is_output and blob.name in net.names and value is not None and value.size:
        return _output_counterpart(net, blob, value, result)
    if isinstance(right, np.ndarray):
        return _of_right_numbers(net, right, name, tolerance)
    if value is None or not value.size:
        return None
    if isinstance(result, np.ndarray) and result.size == value.size:
        return Counterpart(name, nearest(result, value), result.shape, as_integers(result).dtype == np.int32)
    return Counterpart(name, natural(value), _unbatched(value), False)


def _of_right_numbers(net: WrongNet, right: Array, name: str, tolerance: Tolerance) -> Counterpart | None:
    """Return the model's value that equals a right blob: the value called `name`, or any other."""
    if right.dtype not in (np.float32, np.int32):
        return None
    numbers = as_integers(right)
    value = net.reference.values.get(name)
    if value is not None and value.size == right.size:
        difference, axes = aligned(numbers, value, tolerance)
        if difference.ok:
            return Counterpart(name, axes, right.shape, numbers.dtype == np.int32)
    match = net.reference.same_numbers(numbers, tolerance)
    return Counterpart(match[0], match[1], right.shape, numbers.dtype == np.int32) if match else None


def _output_counterpart(net: WrongNet, blob: Blob, value: Array, result: Array | Failure | None) -> Counterpart:
    """Return the model's value of an output; blob and value must have the same order of axes."""
    entry = next((e for e in net.manifest.outputs if e.blob == blob.name), None) if net.manifest else None
    if entry is not None:
        counterpart = _fed_counterpart(Slot.of(entry), value)
        return replace(counterpart, integer=entry.element == "int32")
    name = net.names[blob.name]
    if isinstance(result, np.ndarray) and squeezed(result.shape) == squeezed(value.shape):
        return Counterpart(name, natural(value), result.shape, as_integers(result).dtype == np.int32)
    return Counterpart(name, natural(value), _unbatched(value), False)


def _written(net: WrongNet, folder: Path, part: Part, first: FirstWrong) -> Pair | None:
    """Write the files of a part; return None if the part is right, or has another fault than the net."""
    with temporary_folder() as name:
        staged = PairFiles.at(Path(name))
        try:
            manifest, inputs, _, _ = write_pair(staged, net, part)
            how = Verification(
                feeds=inputs, on=net.verification.on, modes=(net.mode,), timeout=net.verification.timeout
            )
            files = (staged.model, staged.param, staged.bin)
            report = verify_net(*files, how, manifest=manifest, worker=net.worker)
        except (ModelError, RunError, UsageError, VerificationError):
            return None
    result = first.run.results.get(part.end)
    kinds: tuple[Status, ...] = ("mismatch", "nan") if isinstance(result, np.ndarray) else ("missing", "crashed")
    if isinstance(result, np.ndarray) and result.shape != part.counterpart.shape:
        kinds = ("shape",)
    if report.outputs[0].status not in kinds:
        return None
    written = PairFiles.at(folder)
    _, _, nodes, layers = write_pair(written, net, part)
    return Pair(written, nodes, layers, report)


def _fed_counterpart(slot: Slot, array: Array) -> Counterpart:
    """Return the counterpart of an input or output of the net; `array` is the model's value."""
    order = list(range(array.ndim))
    if slot.batch_axis is not None:
        order.insert(0, order.pop(slot.batch_axis))
    shape = (*(() if slot.batch_axis is not None else (1,)), *(array.shape[axis] for axis in order)) or (1, 1)
    kept = [axis for axis in order if array.shape[axis] != 1]
    return Counterpart(slot.name, tuple(sorted(kept).index(axis) for axis in kept), shape, array.dtype.kind in "iub")


def _unbatched(value: Array) -> tuple[int, ...]:
    """Return the shape of a blob for a value: a batch of 1, then the value's sizes other than 1."""
    return (1, *(squeezed(value.shape) or (1,)))
