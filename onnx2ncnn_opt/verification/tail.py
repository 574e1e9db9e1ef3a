"""The tail of a net against the model: alone on the model's own numbers, and behind the net.

On the numbers that ONNX Runtime computes for the cut, the tail has to give what the model gives, and on numbers with
many equal ones what ONNX Runtime gives for the tail. Behind the net, whose numbers have rounding errors, rows may swap
places, and a box may come or go whose score is nearly the threshold. Such rows are undecided; at most 1 % may be.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from subprocess import TimeoutExpired
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import Error, RunError
from onnx2ncnn_opt.onnx.tail.program import Port
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.compiled_tail import CompiledTail
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.tail import TailRunner
from onnx2ncnn_opt.verification.tolerance import DEFAULT, Tolerance, compare

# The tail and ONNX Runtime compute the same, except for the last bits of exp and of sums.
_OWN = Tolerance(relative=2e-6, absolute=1e-6, slices=False)
_MOST_UNDECIDED = 0.01  # of the rows
_NOISES, _ROOM = 4, 2  # sets of errors as large as the net's, and how many times the rows that these decide are left
_LAST_BIT = 2.0**-23
_LEVELS = 16  # of numbers of which many are equal
_MOST_ROWS = 2048  # that are compared with each other


class TailJudge:
    """The tail of a net; `names` are the outputs of the model that it computes."""

    def __init__(self, runner: TailRunner) -> None:
        self._runner = runner
        self.names = tuple(port.name for port in runner.program.outputs)
        self._ties: dict[str, str] | None = None
        self._feeds: list[dict[str, Array]] = []  # for the C++ header

    def judge(
        self, arrays: Mapping[str, Array], reference: Mapping[str, Array], values: Mapping[str, Array]
    ) -> list[OutputReport]:
        """Return the reports of the outputs behind a net that gives these `values` for the cut.

        `arrays` are the model's inputs, `reference` are ONNX Runtime's numbers for the cut and all outputs.
        """
        try:
            own, behind = self._runner.run(arrays, reference), self._runner.run(arrays, values)
            ties = self._on_ties(arrays, reference)
        except Error as error:
            return [OutputReport(name, None, "refused", str(error)) for name in self.names]
        return [self._report(name, own[name], behind[name], ties, arrays, reference, values) for name in self.names]

    def _report(
        self,
        name: str,
        own: Array,
        behind: Array,
        ties: Mapping[str, str],
        arrays: Mapping[str, Array],
        reference: Mapping[str, Array],
        values: Mapping[str, Array],
    ) -> OutputReport:
        expected = reference[name]
        problem = _difference(own, expected)
        if problem and own.shape == expected.shape:  # the last bits of exp may decide as well
            moved = self._moved(name, arrays, reference, own, {})
            problem = "" if undecided(own, expected)[0] <= moved else problem
        if problem := problem or ties.get(name, ""):
            where = self._first_wrong(arrays, reference)
            return OutputReport(name, None, "mismatch", f"the tail itself is wrong: {problem}{where}")
        count, total = undecided(behind, expected)
        if count:
            moved = 0
            if count > _MOST_UNDECIDED * total:
                moved = self._moved(name, arrays, reference, own, values)
                if count > _ROOM * moved:
                    text = f"{count} of {total} rows differ; errors as large as the net's move {moved}"
                    return OutputReport(name, None, "mismatch", text)
            text = f"{count} of {total} rows are undecided: rounding errors of the net decide them"
            return OutputReport(name, None, "unproven" if moved else "ok", text)
        difference = compare(behind, expected, DEFAULT)
        return OutputReport(name, None, "ok", "", difference.max_abs, difference.max_rel, difference.cosine)

    def _first_wrong(self, arrays: Mapping[str, Array], reference: Mapping[str, Array]) -> str:
        """Return in words the first node that does not give what ONNX Runtime gives; empty if all of them do."""
        program, feeds = self._runner.program, self._runner.feeds(arrays, reference)
        names = [name for node in program.nodes for name in node.outputs if name and not node.guards]
        ports = tuple(Port(name, program.types[name], ()) for name in names)
        session = OrtRunner(self._runner.data, outputs=names, threads=None, once=True)
        ours, theirs = replace(program, outputs=ports).run(feeds), session.run_any(feeds)
        session.close()
        pairs = ((node, name) for node in program.nodes for name in node.outputs if name in ours)
        wrong = next((node for node, name in pairs if _difference(ours[name], theirs[name])), None)
        return f"; the first node that is wrong is {wrong}" if wrong else "; its nodes are right, so it is another tail"

    def _moved(
        self,
        name: str,
        arrays: Mapping[str, Array],
        reference: Mapping[str, Array],
        own: Array,
        values: Mapping[str, Array] | None,
    ) -> int:
        """Return how many rows of `own` move if numbers of the cut are off by as much as these `values`; None: by none.

        `own` is what the tail gives for the reference. Numbers that are not among the values are off by a bit of
        float32, as are results of functions, because sigmoids of large numbers differ in nothing else. To compare with
        ONNX Runtime's output here would excuse every wrong tail.
        """
        moved = 0
        for seed in range(_NOISES):
            draw = np.random.default_rng(seed)
            noisy = dict(reference)
            for cut in () if values is None else self._runner.tail.inputs:
                array = reference[cut].astype(np.float64)
                if reference[cut].dtype.kind != "f" or not array.size:
                    continue
                most: Any = np.abs(array) * _LAST_BIT
                if values and cut in values:
                    error = np.abs(values[cut] - array)
                    most = error.max(initial=0.0, where=np.isfinite(error))
                # Two nets differ as well in which small numbers are 0.
                errors = draw.uniform(-1, 1, array.shape) * most if seed else -np.clip(array, -most, most)
                noisy[cut] = (array + errors).astype(reference[cut].dtype)
            results = self._runner.program.run(self._runner.feeds(arrays, noisy), partial(_off_by_bits, draw))
            moved = max(moved, undecided(results[name], own)[0])
        return moved

    def _on_ties(self, arrays: Mapping[str, Array], reference: Mapping[str, Array]) -> Mapping[str, str]:
        """Return what is wrong on numbers of which many are equal, by output; asked once."""
        if self._ties is None:
            coarse = {**reference, **{cut: _coarse(reference[cut]) for cut in self._runner.tail.inputs}}
            found = self._runner.run(arrays, coarse)
            session = OrtRunner(self._runner.data, threads=None, once=True)
            expected = session.run_any(self._runner.feeds(arrays, coarse))
            session.close()
            self._ties = {}
            for name in self.names:
                text = _difference(found[name], expected[name])
                count = undecided(found[name], expected[name])[0]
                if text and count > self._moved(name, arrays, coarse, found[name], None):
                    self._ties[name] = f"where numbers are equal, {text}"
            self._feeds = [self._runner.feeds(arrays, values) for values in (reference, coarse)]
        return self._ties

    def in_cpp(self, compiled: CompiledTail | None) -> tuple[str, list[str]]:
        """Return how the C++ header differs from NumPy on the numbers of the first run, and a note about it."""
        if not self._feeds:
            return "", []
        try:
            if compiled is None:
                raise OSError("there is no C++ compiler")
            compiled.finish()
            for feeds in self._feeds:
                found, expected = compiled.run(feeds), self._runner.program.run(feeds)
                for name in self.names:
                    if problem := _difference(found[name], expected[name]):
                        return f"{name}: {problem}".replace("ONNX Runtime", "NumPy"), []
        except RunError as error:
            return str(error), []
        except (OSError, TimeoutExpired) as error:
            return "", [f"the tail's C++ header did not run: {error}"]
        return "", [f"the tail's C++ header, compiled by {compiled.compiler}, gives the same numbers"]


def _off_by_bits(draw: np.random.Generator, array: Array, given: Array | None) -> Array:
    """Return results that are off by up to a bit of float32, those of equal inputs by the same; integers stay."""
    if array.dtype.kind != "f":
        return array
    errors = draw.uniform(-1, 1, array.shape)
    if given is not None and given.shape == array.shape:
        errors = np.sin(given.astype(np.float32).view(np.int32) * draw.uniform(1, 2))
    return np.asarray(array + errors * array * _LAST_BIT, array.dtype)


def _coarse(array: Array) -> Array:
    """Return an array with numbers of a few levels; those from 0 to 1, which may be scores, go up to 1."""
    if array.dtype.kind != "f" or not np.isfinite(array).all():
        return array
    is_score = (array >= 0) & (array <= 1)
    best = float(array[is_score].max(initial=0.0)) or 1.0
    step = float(np.abs(array).max(initial=0.0)) / _LEVELS or 1.0
    levels = np.where(is_score, np.rint(array / best * _LEVELS) / _LEVELS, np.rint(array / step) * step)
    return np.asarray(levels.astype(array.dtype))


def _difference(actual: Array, expected: Array) -> str:
    """Return in words how an output differs from what ONNX Runtime makes of the same numbers; empty if it does not."""
    if actual.dtype != expected.dtype:
        return f"its type is {actual.dtype}, ONNX Runtime's {expected.dtype}"
    if actual.shape != expected.shape:
        return f"its shape is {list(actual.shape)}, ONNX Runtime's {list(expected.shape)}"
    if actual.dtype.kind in "iub":
        wrong = int((actual != expected).sum())
        return f"{wrong} of {actual.size} integers differ" if wrong else ""
    difference = compare(actual.astype(np.float32), expected, _OWN)
    return difference.special or difference.excess


def undecided(actual: Array, expected: Array) -> tuple[int, int]:
    """Return how many rows of an output are not where they are expected, and of how many.

    Rows are those along the axis in which the shapes differ; else the last axis holds the columns of a row, of an
    output of three axes or more; else each number is a row. Rows agree that are equal up to the usual tolerance for
    each column. Example: of the rows a b c d, the rows b a c d have one, a x b c d one, and a b c one that is not.
    """
    if actual.ndim != expected.ndim or actual.dtype != expected.dtype:
        return 1, 1
    axes = [axis for axis, sizes in enumerate(zip(actual.shape, expected.shape, strict=True)) if sizes[0] != sizes[1]]
    if len(axes) > 1:
        return 1, 1
    ours, theirs = (_rows(array, axes[0] if axes else None) for array in (actual, expected))
    total = max(len(ours), len(theirs))
    allowed = _allowed(theirs)
    size = min(len(ours), len(theirs))
    places = np.full(len(ours), -1)
    same = _agree(ours[:size], theirs[:size], allowed)
    places[:size][same] = np.flatnonzero(same)
    left, free = np.flatnonzero(places < 0), np.setdiff1d(np.arange(len(theirs)), places)
    if len(left) <= _MOST_ROWS >= len(free):
        for row in left:
            fits = np.flatnonzero(_agree(ours[row], theirs[free], allowed))
            if fits.size:
                places[row] = free[fits[0]]
                free = np.delete(free, fits[0])
    return total - _longest_rise([int(place) for place in places if place >= 0]), total


def _rows(array: Array, axis: int | None) -> Array:
    if axis is not None:
        array = np.moveaxis(array, axis, 0)
        return array.reshape(len(array), math.prod(array.shape[1:]))
    columns = array.shape[-1] if array.ndim > 2 else 1
    return array.reshape(math.prod(array.shape[:-1]) if array.ndim > 2 else array.size, columns)


def _allowed(rows: Array) -> Array:
    """Return the error that each column may have."""
    if rows.dtype.kind != "f":
        return np.zeros(rows.shape[1])
    size = np.abs(rows.astype(np.float64))
    largest = np.where(np.isfinite(size), size, 0.0).max(axis=0, initial=0.0)
    return np.asarray(np.maximum(DEFAULT.relative * largest, DEFAULT.absolute))


def _agree(ours: Array, theirs: Array, allowed: Array) -> Array:
    """Return which rows agree in all columns."""
    if theirs.dtype.kind != "f":
        return np.asarray((ours == theirs).all(axis=-1))
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore"):
        close = (np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b))
    return np.asarray(close.all(axis=-1))


def _longest_rise(places: list[int]) -> int:
    """Return the length of the longest rising part of a sequence, with gaps."""
    ends: list[int] = []
    for place in places:
        at = bisect_left(ends, place)
        ends[at : at + 1] = [place]
    return len(ends)
