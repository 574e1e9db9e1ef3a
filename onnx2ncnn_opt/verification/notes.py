"""Notes on a model and its results, which do not depend on the net."""

from collections.abc import Iterator, Sequence
from textwrap import shorten

import numpy as np

from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verification.model_accuracy import Rounding
from onnx2ncnn_opt.verification.model_runs import Run

_MAX_PROBLEM = 100  # characters of an error in a note


def model_notes(model: LoadedModel, runs: Sequence[Run], rounding: Rounding) -> Iterator[str]:
    """Yield notes on unknown effects of rounding, and on NaN and infinity."""
    if rounding.unmoved:
        problem = shorten(rounding.unmoved, _MAX_PROBLEM, placeholder=" ...")
        yield f"the effect of rounding errors on the model is unknown: {problem}"
    for value in model.graph.initializers.values():
        tensor = value.const_value
        # A single infinity is a mask's fill value.
        if tensor is not None and tensor.dtype.is_floating_point() and tensor.size > 1:
            array = np.asarray(tensor.numpy())
            if not np.isfinite(array.astype(np.float32) if array.dtype.kind == "V" else array).all():
                yield f"the model's weight '{value.name}' is not finite: {_special_counts(array)}"
    for name in runs[0].reference:
        arrays = [run.reference[name] for run in runs]
        if len(runs) > 1 and all(array.dtype.kind == "f" and array.size for array in arrays):
            numbers = {float(extreme(array)) for array in arrays for extreme in (np.min, np.max)}
            if len(numbers) == 1:
                yield f"'{name}' is {numbers.pop() + 0:g} for all inputs tried, which proves little (weights of 0?)"
    floats = ((name, run) for run in reversed(runs) for name in run.reference if run.reference[name].dtype.kind == "f")
    if first := {name: run for name, run in floats if np.isnan(run.reference[name]).any()}:
        name, run = next(iter(first.items()))
        names = f"'{name}' and {len(first) - 1} more" if len(first) > 1 else f"'{name}'"
        counts = _special_counts(run.reference[name])
        where = f"for {names} ({run})" if str(run) else f"for {names}"
        yield f"the model gives NaN {where}: {counts}; NaN is not compared; --inputs gives other inputs"


def _special_counts(array: Array) -> str:
    """Return text with the numbers of NaN and of infinities in an array."""
    numbers = array.astype(np.float64)
    counts = {"NaN": np.isnan(numbers).sum(), "+inf": np.isposinf(numbers).sum(), "-inf": np.isneginf(numbers).sum()}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) + f" of {array.size}"
