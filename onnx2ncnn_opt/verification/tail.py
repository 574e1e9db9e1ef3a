"""Comparison of a net's tail with the model: alone on the model's own values, and behind the net.

On ONNX Runtime's values for the cut, the tail must give the model's outputs. On values with many ties it must give the
outputs of the tail in ONNX Runtime. The net's values have rounding errors. So rows may swap places behind the net, and
boxes with scores near the threshold may come or go. Such rows are undecided; if errors as large as the net's move as
many, up to half of the rows may be, else 1 %.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import Error, RunError
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.edit.append import selection_model
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.compiled_tail import CompiledTail
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.tail import TailRunner
from onnx2ncnn_opt.tail.program import Port
from onnx2ncnn_opt.verdict.errors import DEFAULT, Tolerance, compare
from onnx2ncnn_opt.verdict.rows import undecided, wrong_selection
from onnx2ncnn_opt.verdict.rules import within
from onnx2ncnn_opt.verification.report import is_wrong

# The tail alone differs from ONNX Runtime only in the last bits of exp and of sums.
_TAIL_TOLERANCE = Tolerance(relative=2e-6, absolute=1e-6, slices=False)
_MAX_UNDECIDED, _MOST_UNDECIDED = 0.01, 0.5  # of the rows: without a reason, and if the net's errors move as many
_NOISES = 4  # sets of random errors as large as the net's
_MARGIN = 2  # the net may change twice as many rows as these errors
_LAST_BIT = 2.0**-23
_LEVELS = 16  # of values with many ties
Feeds = Mapping[str, Array]


class TailJudge:
    """The tail of a net; `names` are the model's outputs that it computes."""

    def __init__(self, runner: TailRunner) -> None:
        self._runner, self._program = runner, runner.program
        self.names = tuple(port.name for port in runner.program.outputs)
        # The axis of unknown size, if there is one: along it lie the rows.
        unknown = {p.name: [i for i, n in enumerate(p.shape) if not isinstance(n, int)] for p in runner.program.outputs}
        self._axes = {name: axes[0] if axes else None for name, axes in unknown.items()}
        self._ties: dict[str, str] | None = None
        self._feeds: list[Feeds] = []  # for the C++ header

    def judge(self, arrays: Feeds, reference: Feeds, values: Feeds) -> list[OutputReport]:
        """Return the reports of the tail's outputs for the net's `values` at the cut, and perhaps its own boxes.

        `arrays` are the model's inputs, `reference` are ONNX Runtime's values for the cut and all outputs.
        """
        if is_wrong(boxes := self.judge_boxes(arrays, reference, values)):
            return boxes
        try:
            feeds = self._runner.feeds(arrays, reference), self._runner.feeds(arrays, values)
            alone, behind = map(self._program.run, feeds)
            ties = self._on_ties(feeds[0])
        except Error as error:
            return [OutputReport(name, None, "refused", str(error)) for name in self.names]
        reports = []
        for name in self.names:
            problem = ties.get(name, "")
            if found := _difference(alone[name], reference[name]):  # the last bits of exp may decide rows
                problem = found if self._is_wrong(name, feeds[0], alone[name], reference[name]) else problem
            if problem:
                text = f"the tail itself is wrong: {problem}{self._first_wrong(feeds[0])}"
                reports.append(OutputReport(name, None, "mismatch", text, rule="limit"))
            else:
                moved = partial(self._count_moved, name, feeds[0], alone[name], feeds[1])
                reports.append(_report_behind(name, behind[name], reference[name], self._axes[name], moved))
        return reports

    def judge_boxes(self, arrays: Feeds, reference: Feeds, values: Feeds) -> list[OutputReport]:
        """Return the reports of boxes that the net selects: they have to be a selection from its own `values`."""
        program, reports = self._program, []
        for name in (name for name in self.names if name in values):
            [nms] = (node for node in program.nodes if node.operator == "NonMaxSuppression")
            ports = tuple(Port(x, "float32", ()) for x in nms.inputs[:2])
            inputs = replace(program, outputs=ports).run(self._runner.feeds(arrays, values))
            numbers = (program.constants[x].item() for x in nms.inputs[2:])
            problem = wrong_selection(values[name], *(inputs[x][0] for x in nms.inputs[:2]), *numbers)
            text = f"its boxes are not a selection from the net's values: {problem}" if problem else ""
            reports.append(OutputReport(name, None, "mismatch" if problem else "ok", text, rule="decided"))
        return reports

    def _is_wrong(self, name: str, feeds: Feeds, alone: Array, expected: Array) -> bool:
        """Return True if a tail that differs from the model moves more rows than the last bits of its values do."""
        if alone.shape != expected.shape:
            return True
        return undecided(alone, expected, self._axes[name])[0] > self._count_moved(name, feeds, alone, {})

    def _first_wrong(self, feeds: Feeds) -> str:
        """Return text with the first node whose outputs differ from ONNX Runtime's, or that there is none."""
        program = self._program
        names = [name for node in program.nodes for name in node.outputs if name and not node.guards]
        ports = tuple(Port(name, program.types[name], ()) for name in names)
        with closing(OrtRunner(self._runner.data, outputs=names, threads=None, once=True)) as session:
            actual, expected = replace(program, outputs=ports).run(feeds), session.run_any(feeds)
        pairs = ((node, name) for node in program.nodes for name in node.outputs if name in actual)
        wrong = next((node for node, name in pairs if _difference(actual[name], expected[name])), None)
        return f"; the first wrong node is {wrong}" if wrong else "; its nodes are right, so it is the wrong tail"

    def _count_moved(self, name: str, feeds: Feeds, alone: Array, values: Feeds | None) -> int:
        """Return how many rows of `alone` move if the cut has random errors as large as those of `values`.

        `alone` is the tail's output for the reference; ONNX Runtime's output here would excuse every wrong tail. Cut
        tensors without `values`, and results of functions, get errors of one bit of float32, because sigmoids of large
        numbers differ only in that bit. If `values` is None, the cut is exact.
        """
        moved = 0
        for seed in range(_NOISES):
            draw = np.random.default_rng(seed)
            noisy = dict(feeds)
            for cut in () if values is None else self._runner.tail.inputs:
                array = feeds[cut].astype(np.float64)
                if feeds[cut].dtype.kind != "f" or not array.size:
                    continue
                bound: Any = np.abs(array) * _LAST_BIT
                if values and cut in values:
                    error = np.abs(values[cut] - array)
                    bound = error.max(initial=0.0, where=np.isfinite(error))
                # The first set makes small numbers 0, because nets differ in their zeros too.
                errors = draw.uniform(-1, 1, array.shape) * bound if seed else -np.clip(array, -bound, bound)
                noisy[cut] = (array + errors).astype(feeds[cut].dtype)
            results = self._program.run(noisy, partial(_with_bit_errors, draw))
            moved = max(moved, undecided(results[name], alone, self._axes[name])[0])
        return moved

    def _on_ties(self, feeds: Feeds) -> Mapping[str, str]:
        """Return the error of each wrong output on values with many ties, computed once."""
        if self._ties is None:
            coarse = {**feeds, **{cut: _coarse(feeds[cut]) for cut in self._runner.tail.inputs}}
            actual = self._program.run(coarse)
            with closing(OrtRunner(self._runner.data, threads=None, once=True)) as session:
                expected = session.run_any(coarse)
            self._ties, self._feeds = {}, [feeds, coarse]
            for name in self.names:
                text = _difference(actual[name], expected[name])
                count = undecided(actual[name], expected[name], self._axes[name])[0]
                if text and count > self._count_moved(name, coarse, actual[name], None):
                    self._ties[name] = f"where numbers are equal, {text}"
        return self._ties

    def in_cpp(self, compiled: CompiledTail | None) -> tuple[str, list[str]]:
        """Run the C++ header on the first run's values; return its difference from NumPy, and notes."""
        if not self._feeds:
            return "", []
        try:
            if compiled is None:
                raise OSError("there is no C++ compiler")
            compiled.finish()
            for feeds in self._feeds:
                actual, expected = compiled.run(feeds), self._program.run(feeds)
                for name in self.names:
                    if problem := _difference(actual[name], expected[name]):
                        return f"{name}: {problem}".replace("ONNX Runtime", "NumPy"), []
        except RunError as error:
            return str(error), []
        except (OSError, TimeoutExpired) as error:
            return "", [f"the tail's C++ header did not run: {error}"]
        return "", [f"the tail's C++ header, compiled by {compiled.compiler}, gives the same numbers"]


def selector_of(manifest: Manifest | None, source: Path | bytes) -> TailRunner | None:
    """Return the nodes behind the candidates of boxes as a tail; None for a net that selects none."""
    if manifest is None or manifest.tail is None or not manifest.candidates:
        return None
    data = selection_model(source, [entry.name for entry in manifest.candidates])
    return TailRunner(manifest, replace(manifest.tail, sha256=hashlib.sha256(data).hexdigest()), data)


def _report_behind(
    name: str, behind: Array, expected: Array, axis: int | None, moved: Callable[[], int]
) -> OutputReport:
    """Return the report of an output of a right tail behind the net; `moved` counts rows that such errors move."""
    count, total = undecided(behind, expected, axis)
    if not count:
        return within(DEFAULT, behind, expected).report(name, None)
    if count > _MAX_UNDECIDED * total and count > _MARGIN * (rows := moved()):
        text = f"{count} of {total} rows differ; errors as large as the net's move {rows}"
        return OutputReport(name, None, "mismatch", text, rule="decided")
    text = f"{count} of {total} rows are undecided: rounding errors of the net decide them"
    return OutputReport(name, None, "ok" if count <= _MOST_UNDECIDED * total else "unproven", text, rule="decided")


def _with_bit_errors(draw: np.random.Generator, array: Array, inputs: Array | None) -> Array:
    """Add errors up to a bit of float32 to results, the same for equal inputs; integers stay where Cast is defined."""
    if inputs is not None and inputs.dtype.kind == "f" and array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        is_inside = (inputs > limits.min - 1.0) & (inputs < limits.max + 1.0)
        return np.where(is_inside, array, draw.integers(0, 2, array.shape)).astype(array.dtype)
    if array.dtype.kind != "f" or (inputs is not None and inputs.dtype != array.dtype):
        return array
    errors = draw.uniform(-1, 1, array.shape)
    if inputs is not None and inputs.shape == array.shape:
        errors = np.sin(inputs.astype(np.float32).view(np.int32) * draw.uniform(1, 2))
    return np.asarray(array + errors * array * _LAST_BIT, array.dtype)


def _coarse(array: Array) -> Array:
    """Round an array to a few levels; numbers in 0..1, which may be scores, are scaled so that the largest is 1."""
    if array.dtype.kind != "f" or not np.isfinite(array).all():
        return array
    is_score = (array >= 0) & (array <= 1)
    best = float(array[is_score].max(initial=0.0)) or 1.0
    step = float(np.abs(array).max(initial=0.0)) / _LEVELS or 1.0
    levels = np.where(is_score, np.rint(array / best * _LEVELS) / _LEVELS, np.rint(array / step) * step)
    return np.asarray(levels.astype(array.dtype))


def _difference(actual: Array, expected: Array) -> str:
    """Return text with the difference of an output from ONNX Runtime's; empty if there is none."""
    if actual.dtype != expected.dtype:
        return f"its type is {actual.dtype}, ONNX Runtime's {expected.dtype}"
    if actual.shape != expected.shape:
        return f"its shape is {list(actual.shape)}, ONNX Runtime's {list(expected.shape)}"
    if actual.dtype.kind in "iub":
        wrong = int((actual != expected).sum())
        return f"{wrong} of {actual.size} integers differ" if wrong else ""
    return compare(actual.astype(np.float32), expected, _TAIL_TOLERANCE).problem
