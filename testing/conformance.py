"""ONNX's own conformance suite: its cases, and the outcome of each in the real ncnn."""

import contextlib
import io
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.errors import CrashError, Error, RunError, UnsupportedError
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.net import as_output
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import Slot, sizes_of
from onnx2ncnn_opt.runtime.tail import TailRunner
from testing.arrays import RELATIVE, first_difference
from testing.compared import way, written
from testing.worker import WORKER

TABLE = Path(__file__).parents[1] / "fixtures" / "conformance.tsv"
HEADER = "case\toutcome\twith onnx "
BAD = ("WRONG", "CRASH", "TRACEBACK")


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the outputs that ONNX's suite expects."""

    name: str
    model: onnx.ModelProto
    feeds: Mapping[str, Any]
    expected: Sequence[Any]
    tolerance: float = 0.0
    """The tolerance of the suite for its own data, as a share of each number."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case, and the reason."""

    kind: str
    reason: str = ""

    @property
    def is_bad(self) -> bool:
        """True if the outcome is never allowed."""
        return self.kind.isupper()


@cache
def collect() -> list[Case]:
    """Return all cases of the suite in both variants."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the suite divides by zero on purpose
        tests = collect_testcases(None)
    cases = []
    for test in tests:
        assert test.model is not None
        assert test.data_sets is not None
        inputs, outputs = test.data_sets[0]
        names = [value.name for value in test.model.graph.input]
        feeds = dict(zip(names, map(_array, inputs), strict=False))
        expected = [_array(output) for output in outputs]
        plain = Case(test.name.removeprefix("test_"), test.model, feeds, expected, test.rtol)
        cases += [plain, *with_initializers(plain)]
    return sorted(cases, key=lambda case: case.name)


def _array(data: Any) -> Any:
    """Return data of the suite as an array.

    The suite writes element types that numpy does not have as TensorProto, scalars as such, sequences as lists.
    """
    if isinstance(data, onnx.TensorProto):
        return numpy_helper.to_array(data)
    return np.asarray(data) if isinstance(data, np.generic) else data


def with_initializers(case: Case) -> Iterator[Case]:
    """Yield the case with its integer inputs, and floats after the first, as initializers; nothing without any."""
    floats = [name for name, array in case.feeds.items() if isinstance(array, np.ndarray) and array.dtype.kind in "fV"]
    fixed = [
        name
        for name, array in case.feeds.items()
        if isinstance(array, np.ndarray) and (array.dtype.kind in "iub" or name in floats[1:])
    ]
    if not fixed:
        return
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    inputs = [value for value in model.graph.input if value.name not in fixed]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(numpy_helper.from_array(case.feeds[name], name) for name in fixed)
    feeds = {name: array for name, array in case.feeds.items() if name not in fixed}
    yield replace(case, name=f"{case.name} (constants)", model=model, feeds=feeds)


@dataclass(frozen=True)
class Harness:
    """Converts and runs cases."""

    worker: NcnnWorker = WORKER

    def judge(self, case: Case, *, optimize: bool = True) -> Outcome:
        """Convert, run and compare one case."""
        converted = attempt(case.model, optimize=optimize)
        return converted if isinstance(converted, Outcome) else self.compare(converted, case.feeds, references(case))

    def compare(
        self, conversion: Conversion, feeds: Mapping[str, Any], references: Iterable[tuple[Sequence[Any], float]]
    ) -> Outcome:
        """Run the net; right if it agrees with one of the references, each outputs and a tolerance."""
        try:
            actual = self.run(conversion, feeds)
        except CrashError as error:
            return Outcome("CRASH", str(error))
        except Error as error:
            return Outcome("WRONG", str(error))
        except Exception:
            return Outcome("TRACEBACK", _last_lines())
        differences = []
        for reference, tolerance in references:
            differences.append(first_difference(actual, reference, tolerance))
            if not differences[-1]:
                return Outcome("right", "" if len(differences) == 1 else "as the suite says, not as ONNX Runtime")
        return Outcome("WRONG", " / ".join(differences))

    def run(self, conversion: Conversion, feeds: Mapping[str, Any]) -> list[Array | None]:
        """Return the outputs in the model's order; None for a cache, whose layout only ncnn knows."""
        files, manifest = written(conversion)
        runner = NcnnRunner(files.param, files.bin, timeout=60, worker=self.worker)
        results = runner.extract(*way(manifest, feeds))
        arrays: list[Array] = []
        for entry in manifest.outputs:
            result = results[entry.blob]
            if isinstance(result, Failure):
                raise (CrashError if result.crashed else RunError)(result.reason)
            arrays.append(result)
        if conversion.tail is None:
            return [None if e.cache else array for e, array in zip(manifest.outputs, arrays, strict=True)]
        assert manifest.tail is not None
        sizes = sizes_of(manifest.inputs, feeds)
        values = {e.name: as_output(e, Slot.of(e), a, sizes) for e, a in zip(manifest.outputs, arrays, strict=True)}
        return list(TailRunner(manifest, manifest.tail, conversion.tail.data).run(feeds, values).values())


def attempt(model: onnx.ModelProto, *, optimize: bool = True) -> Conversion | Outcome:
    """Return the conversion, or the outcome if it failed."""
    try:
        return lower(model, optimize=optimize)
    except UnsupportedError as error:
        return Outcome("refused", "; ".join(dict.fromkeys(f"{n.operator}: {n.reason}" for n in error.nodes)))
    except Error as error:
        return Outcome("refused", str(error))
    except Exception:  # what must never happen is what this script is there to find
        return Outcome("TRACEBACK", _last_lines())


def _last_lines() -> str:
    return " | ".join(line.strip() for line in traceback.format_exc().strip().splitlines()[-3:])


def references(case: Case) -> Iterator[tuple[Sequence[Any], float]]:
    """Return ONNX Runtime's outputs, if it takes the model, and the suite's, each with its tolerance."""
    try:
        results = OrtRunner(case.model.SerializeToString()).run(case.feeds)
        yield list(results.values()), RELATIVE
    except RunError:
        pass
    yield case.expected, max(case.tolerance, RELATIVE)


def rows(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the lines of the table."""
    return [f"{name}\t{outcome.kind}\t{short(outcome.reason)}" for name, outcome in sorted(outcomes.items())]


def short(reason: str) -> str:
    """Return a reason in one line of the table."""
    text = " ".join(reason.split())
    return text if len(text) <= 160 else text[:157] + "..."


def read_table() -> dict[str, str]:
    """Return the table's lines by case."""
    _, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    return {line.split("\t")[0]: line for line in lines}


def table_version() -> str:
    """Return the version of onnx that the table was written with."""
    return TABLE.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix(HEADER)


def write_table(outcomes: Mapping[str, Outcome]) -> None:
    """Write the table of the installed onnx."""
    TABLE.write_text("\n".join([HEADER + onnx.__version__, *rows(outcomes)]) + "\n", encoding="utf-8")


def differences(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the lines that are bad, or not as in the table.

    Another version of onnx than the table's may have cases that are not in it; these may be right or refused.
    """
    known, is_whole = read_table(), table_version() == onnx.__version__
    return [
        f"{line}  [{known.get(name, 'not in the table')}, written with onnx {table_version()}]"
        for name, line in ((line.split("\t")[0], line) for line in rows(outcomes))
        if line.split("\t")[1] in BAD or (known.get(name) != line and (is_whole or name in known))
    ]


def run(cases: Iterable[Case]) -> dict[str, Outcome]:
    """Return the outcome of every case."""
    harness = Harness()
    return {case.name: harness.judge(case) for case in cases}
