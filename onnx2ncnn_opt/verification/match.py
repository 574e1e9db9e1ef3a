"""Pairs of a net's blobs with the model's inputs and outputs, for nets of any converter."""

import re
from collections.abc import Callable, Mapping, Sequence

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.manifest import Entry, Manifest
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.slots import Slot, check_fed

_NUMBERED = re.compile(r"(?:in|out)(\d+)")


def manifest_slots(kind: str, names: Sequence[str], entries: Sequence[Entry]) -> list[Slot]:
    """Return the manifest's entries for the model's inputs or outputs (`kind`), in the model's order.

    Raises UsageError if the manifest is that of another model.
    """
    known = {entry.name: Slot.of(entry) for entry in entries}
    if set(known) != set(names):
        raise UsageError(
            f"the manifest is that of another model: its {kind}s are {', '.join(known) or 'none'}, "
            f"those of the model {', '.join(names) or 'none'}"
        )
    return [known[name] for name in names]


def input_slots(manifest: Manifest | None, feeds: Mapping[str, Array], blobs: Sequence[str]) -> list[list[Slot]]:
    """Return the ways to feed the arrays to the net with these input blobs, the likeliest first.

    A manifest leaves one. Without it blobs are matched by name, pnnx's in0, in1, ... by number, the others by order.
    The batch is tried in three ways: its axis is 1 and dropped in most nets, kept in a few, and in new ones the Mat's
    batch.

    Raises UsageError if the manifest is that of another model, and VerificationError if a blob of the net would be left
    without a value, on which ncnn crashes.
    """
    if manifest is not None:
        ways = [[slot for slot in manifest_slots("input", list(feeds), manifest.inputs) if slot.blob in blobs]]
    else:
        pairs = pair(list(feeds), blobs, lambda name, blob: True)
        rules: tuple[Callable[[Array], bool], ...] = (
            lambda array: array.ndim > 4 or (array.ndim > 1 and array.shape[0] == 1),
            lambda array: array.ndim > 4,
            lambda array: array.ndim > 1,
        )
        ways = [
            [Slot(name, blob, 0 if is_batched(feeds[name]) else None) for name, blob in pairs.items()]
            for is_batched in rules
        ]
        ways = [way for number, way in enumerate(ways) if way not in ways[:number]]
    check_fed([slot.blob for slot in ways[0]], blobs, list(feeds))
    return ways


def pair(names: Sequence[str], blobs: Sequence[str], fits: Callable[[str, str], bool]) -> dict[str, str]:
    """Return a blob for every name, while there are enough of them.

    1. Equal names belong together.
    2. The others by number, if the blobs are in0, in1, ... or out0, out1, ... .
    3. The others in order, if they fit so; else as they fit, if there is just one way; else in order all the same.
    """
    pairs = {name: name for name in names if name in blobs}
    left, free = [name for name in names if name not in pairs], [blob for blob in blobs if blob not in pairs]
    numbers = {int(match[1]): blob for blob in free if (match := _NUMBERED.fullmatch(blob))}
    if len(numbers) == len(free):
        return pairs | {name: numbers[i] for i, name in enumerate(names) if name in left and i in numbers}
    in_order = dict(zip(left, free, strict=False))
    choices = {name: [blob for blob in free if fits(name, blob)] for name in left}
    only = {name: found[0] for name, found in choices.items() if len(found) == 1}
    if not all(fits(*both) for both in in_order.items()) and len(set(only.values())) == len(left):
        return pairs | only
    return pairs | in_order
