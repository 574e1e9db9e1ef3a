"""Comparison of a net's tail with the model, and of the boxes that a net selects with its own candidates.

The net is compared at the cut. So the tail runs on ONNX Runtime's values, and on values with many ties, and has to give
ONNX Runtime's outputs. NumPy's exp and sums have other last bits, which may decide about rows. So if outputs differ,
each node has to be right on ONNX Runtime's inputs of the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from subprocess import TimeoutExpired

import numpy as np

from onnx2ncnn_opt.errors import Error, RunError
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.cut.extract import nodes_between
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.compiled_tail import CompiledTail
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.tail import TailRunner
from onnx2ncnn_opt.tail.program import Node
from onnx2ncnn_opt.tail.table import Table, table_of
from onnx2ncnn_opt.verdict.errors import Tolerance, compare
from onnx2ncnn_opt.verdict.rows import judge_selection
from onnx2ncnn_opt.verdict.rules import within
from onnx2ncnn_opt.verification.model_accuracy import SAFETY
from onnx2ncnn_opt.verification.report import is_wrong, merged, missing

_TOLERANCE = Tolerance(relative=2e-6, absolute=1e-6, slices=False)
_LEVELS, _LARGE = 64, 128  # of values with many ties, and how many of these are above 1/2
_RUNS = 3  # of a node with errors
Feeds = Mapping[str, Array]


class TailJudge:
    """The tail of a net; `names` are the model's outputs that it computes."""

    def __init__(self, runner: TailRunner) -> None:
        self._runner, self._program = runner, runner.program
        self.names = [port.name for port in runner.program.outputs]
        self._known: list[tuple[Feeds, Feeds]] = []  # inputs and results of the first run, and with many ties

    def judge(self, arrays: Feeds, reference: Feeds) -> Sequence[OutputReport]:
        """Return the reports of the tail's outputs; on ties, too, in the first run.

        `arrays` are the model's inputs, `reference` are ONNX Runtime's values for the cut and all outputs.
        """
        try:
            feeds, is_first = self._runner.feeds(arrays, reference), not self._known
            reports = self._reports(feeds, reference)
            if not is_first:
                return reports
            coarse = {**feeds, **other_values({cut: feeds[cut] for cut in self._runner.tail.inputs})}
            with closing(OrtRunner(self._runner.data, threads=None, once=True)) as session:
                ties = self._reports(coarse, session.run_any(coarse), "where numbers are equal, ")
        except Error as error:
            return [OutputReport(name, None, "refused", str(error)) for name in self.names]
        return [merged(pair) for pair in zip(reports, ties, strict=True)]

    def _reports(self, feeds: Feeds, expected: Feeds, where: str = "") -> list[OutputReport]:
        """Run the tail; return its reports, with the first node that is wrong on ONNX Runtime's inputs."""
        program, wrong = self._program, list[Node]()
        results = program.run(feeds)
        self._known = [*self._known, (feeds, results)][:2]
        reports = _compared(results, expected)
        if not is_wrong(reports):
            return reports
        names = [name for node in program.nodes for name in node.outputs if name and not node.guards]
        with closing(OrtRunner(self._runner.data, outputs=names, threads=None, once=True)) as session:
            values = session.run_any(feeds)

        def checked(node: Node, inputs: Sequence[Array | None], results: list[Array]) -> list[Array]:
            """Compare the results of a node with ONNX Runtime's, and return these for the next nodes."""
            right = [values.get(name, result) for name, result in zip(node.outputs, results, strict=False)]
            own = [_defined(node, inputs[0], *pair) for pair in zip(results, right, strict=False)]
            differ = any(_report("", *pair).message for pair in zip(own, right, strict=True))
            if differ and not _is_rounding(node, inputs, own, right):
                wrong.append(node)
            return right

        with_right_nodes = _compared(program.run(feeds, checked), expected)
        what = f"the first wrong node is {wrong[0]}" if wrong else "its nodes are right, so it is the wrong tail"
        return [
            replace(row, message=f"the tail itself is wrong: {where}{row.message}; {what}") if row.message else row
            for row in (reports if wrong else with_right_nodes)
        ]

    def in_cpp(self, compiled: CompiledTail | None) -> tuple[str, list[str]]:
        """Run the C++ header on the first values; return its difference from NumPy, and notes."""
        if not self._known:
            return "", []
        try:
            if compiled is None:
                raise OSError("there is no C++ compiler")
            compiled.finish()
            for feeds, results in self._known:
                for row in _compared(compiled.run(feeds), results):
                    if row.message:
                        return f"{row.name}: {row.message}".replace("ONNX Runtime", "NumPy"), []
        except RunError as error:
            return str(error), []
        except (OSError, TimeoutExpired) as error:
            return "", [f"the tail's C++ header did not run: {error}"]
        return "", [f"the tail's C++ header, compiled by {compiled.compiler}, gives the same numbers"]


def boxes_of(manifest: Manifest | None, model: LoadedModel) -> Table | None:
    """Return the table from which the nodes after a net's candidates select, in the net itself; None for other nets."""
    items = {entry.name: entry for entry in (manifest.candidates if manifest else ())}
    names = [entry.name for entry in (manifest.model_outputs if manifest else ()) if entry.boxes]
    return table_of(nodes_between(model, items, names)) if items else None


def judge_boxes(table: Table, values: Feeds, boxes: Mapping[str, Array | Failure]) -> list[OutputReport]:
    """Return the reports of a net's `boxes`: they have to be a selection from its own `values`."""
    corners, scores, *others = table.run(values)
    reports = []
    for name, rows in boxes.items():
        if isinstance(rows, Failure):
            report = missing(name, "", rows)
        elif table.shape and rows.shape != table.shape:
            report = OutputReport(name, None, "shape", f"its shape is {rows.shape}, the model's {table.shape}")
        else:
            status, text = judge_selection(rows, corners, scores, table.most, table.iou, table.conf, *others)
            report = OutputReport(name, None, status, text, rule="decided")
        reports.append(report)
    return reports


def other_values(values: Feeds) -> dict[str, Array]:
    """Return other probabilities, 256 of them above 1/4 in few rows and columns, and moved numbers; many are equal.

    Nets with random weights, for example, give all candidates the same score, perhaps below the limit.
    """
    draw, others = np.random.default_rng(0), dict[str, Array](values)
    for name, array in values.items():
        if array.dtype.kind == "f" and array.size:
            numbers, is_share = draw.random(array.shape), 0 <= array.min() <= array.max() <= 1
            if is_share:
                numbers += sum(np.ix_(*map(draw.random, array.shape)))
                numbers = 2.0 ** (-numbers.argsort(None)[::-1].argsort().reshape(array.shape) / _LARGE)
            numbers = np.rint(numbers * _LEVELS) / _LEVELS
            others[name] = (numbers if is_share else array * (1 + numbers / 8)).astype(array.dtype)
    return others


def _compared(actual: Feeds, expected: Feeds) -> list[OutputReport]:
    return [_report(name, array, expected[name]) for name, array in actual.items()]


def _report(name: str, actual: Array, expected: Array) -> OutputReport:
    """Return the report of an array that has ONNX Runtime's type and shape, too."""
    kinds = [f"{array.dtype} {list(array.shape)}" for array in (actual, expected)]
    if kinds[0] != kinds[1]:
        return OutputReport(name, None, "shape", f"it is {kinds[0]}, ONNX Runtime's {kinds[1]}")
    return within(_TOLERANCE, actual, expected).report(name, None)


def _is_rounding(node: Node, inputs: Sequence[Array | None], results: list[Array], right: list[Array]) -> bool:
    """Return True if results differ by at most `SAFETY` times what errors in the last bits of the inputs make.

    ONNX Runtime adds up float32, NumPy float64. That shows where terms cancel, as in the determinant of a matrix.
    """
    draw, spreads = np.random.default_rng(0), [np.zeros(each.shape) for each in results]
    for _ in range(_RUNS):
        moved = [
            x if x is None or x.dtype.kind != "f" else x + draw.choice([-1, 1], x.shape).astype(x.dtype) * np.spacing(x)
            for x in inputs
        ]
        for spread, new, old in zip(spreads, node.op.run(moved, node.attributes), results, strict=True):
            if new.shape == old.shape and old.dtype.kind == "f":
                np.maximum(spread, SAFETY * np.abs(new - old), out=spread)
    compared = zip(results, right, spreads, strict=True)
    return all(own.shape == known.shape and compare(own, known, _TOLERANCE, move).ok for own, known, move in compared)


def _defined(node: Node, x: Array | None, result: Array, right: Array) -> Array:
    """Return a result, with ONNX Runtime's integers in place of those that ONNX does not define, of a Cast."""
    if node.operator != "Cast" or x is None or x.dtype.kind != "f" or result.dtype.kind not in "iu":
        return result
    limits = np.iinfo(result.dtype)
    return np.where((x > limits.min - 1.0) & (x < limits.max + 1.0), result, right)
