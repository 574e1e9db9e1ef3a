"""Comparison of the blobs inside a net with the values inside its model, in any order of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onnx2ncnn_opt.errors import CrashError, RunError
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.ort import OrtRunner, read_model
from onnx2ncnn_opt.verification.alignment import aligned, same_range
from onnx2ncnn_opt.verification.tolerance import Difference, Tolerance


@dataclass(frozen=True)
class Verdict:
    """The verdict on a blob; `value` is the model's name of it, `difference` its distance from that value.

    A blob that is "reordered" has the value's numbers in an order that no permutation of the value's axes gives.
    """

    status: Literal["right", "reordered", "wrong", "unknown"]
    message: str = ""
    value: str | None = None
    difference: Difference | None = None


UNKNOWN = Verdict("unknown", "the model has no such value")


def model_values(
    model: Path | bytes, feeds: Mapping[str, Array], values: Mapping[str, Array], timeout: float
) -> dict[str, Array]:
    """Return ONNX Runtime's value of every node of the model's graph, and its inputs; `values` are bound inputs."""
    proto = read_model(model)

    def computed(names: Sequence[str]) -> dict[str, Array]:
        """Return the values of these names, without values that cannot be an output, such as a sequence."""
        try:
            runner = OrtRunner(model, outputs=names, values=values, timeout=timeout)
            try:
                return runner.run_any(feeds)
            finally:
                runner.close()
        except CrashError:
            raise
        except RunError:
            if len(names) == 1:
                return {}
            half = len(names) // 2
            return {**computed(names[:half]), **computed(names[half:])}

    names = dict.fromkeys(name for node in proto.graph.node for name in node.output if name)
    return {**feeds, **computed(list(names))}


def by_size(values: Mapping[str, Array]) -> dict[int, list[str]]:
    """Return the names of values by their number of elements."""
    found: dict[int, list[str]] = {}
    for name, array in values.items():
        found.setdefault(array.size, []).append(name)
    return found


def value_name(blob: str, names: Mapping[str, str]) -> str | None:
    """Return the model's name of a blob, from `names` or the same; None for a number, which is no name in a model."""
    name = names.get(blob, blob)
    return name if blob in names or not name.isdigit() else None


def judge(
    result: Array | Failure,
    named: str | None,
    values: Mapping[str, Array],
    sizes: Mapping[int, Sequence[str]],
    tolerance: Tolerance,
) -> Verdict:
    """Compare a blob with the model's value of that name, or else with any value that has the same numbers.

    `sizes` are the names `by_size`.
    """
    value = None if named is None else values.get(named)
    if isinstance(result, Failure):
        return Verdict("wrong", result.reason, None if value is None else named)
    if value is not None:
        if value.size != result.size:
            return Verdict("wrong", f"its shape is {list(result.shape[1:])}, the model's {list(value.shape)}", named)
        return as_verdict(aligned(result, value, tolerance)[0], named)
    found = same_numbers(result, values, sizes, tolerance)
    return as_verdict(found[2], found[0]) if found else UNKNOWN


def same_numbers(
    array: Array, values: Mapping[str, Array], sizes: Mapping[int, Sequence[str]], tolerance: Tolerance
) -> tuple[str, tuple[int, ...], Difference] | None:
    """Return the first value with an array's numbers, the order of its axes, and its distance from the array."""
    for name in sizes.get(array.size, ()):
        if same_range(array, values[name], tolerance):
            difference, axes = aligned(array, values[name], tolerance)
            if difference.ok:
                return name, axes, difference
    return None


def as_verdict(difference: Difference, value: str | None) -> Verdict:
    """Return the verdict for a difference from a value of the model."""
    message = difference.special or difference.excess
    return Verdict("right" if difference.ok else "wrong", message, value, difference)
