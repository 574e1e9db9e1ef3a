"""ONNX's own conformance suite: a case is right, or refused for the reason that stands in the table.

Every fifth case runs, or all with --thorough. test_tail_operators.py, the next file, needs the same cases, which take
seconds to make.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from testing import conformance
from testing.arrays import difference

PARTS = 48  # tests that several processes share


@pytest.mark.parametrize("part", range(PARTS))
def test_cases_are_as_in_the_table(part: int, thorough: bool) -> None:
    some = conformance.collect()[:: 1 if thorough else 5]
    assert conformance.differences(conformance.run(some[part::PARTS])) == []


def test_the_table_has_all_cases_of_its_version() -> None:
    known, names = set(conformance.read_table()), {case.name for case in conformance.collect()}
    assert known == names or conformance.table_version() != onnx.__version__
    assert len(known & names) > 0.9 * len(known)
    assert sum(line.split("\t")[1] == "right" for line in conformance.read_table().values()) > 1000


def test_another_version_of_onnx_hides_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "conformance.tsv"
    table.write_text(f"{conformance.HEADER}1.0\nabs\tright\t\nadd\trefused\tno\n")
    monkeypatch.setattr(conformance, "TABLE", table)
    right, wrong = conformance.Outcome("right"), conformance.Outcome("WRONG", "bits")
    assert conformance.differences({"abs": right, "new": right}) == []
    [changed, bad] = conformance.differences({"abs": right, "add": right, "new": wrong})
    assert changed.startswith("add\tright")
    assert "onnx 1.0" in changed
    assert bad.startswith("new\tWRONG")


@pytest.mark.parametrize(
    ("actual", "reference"),
    [
        (np.array([1, 2], np.float32), np.array([1, 2.001], np.float32)),
        (np.array([1, np.nan], np.float32), np.array([1, 2], np.float32)),
        (np.array([1, np.inf], np.float32), np.array([1, 2e38], np.float32)),
        (np.array([[1, 2]], np.float32), np.array([1, 2], np.float32)),
        (np.array([1, 2], np.float32), np.array([1, 3], np.int64)),
        (np.array([1, 2], np.float32), np.array([1, 2.05], np.float16)),
    ],
)
def test_wrong_outcomes_are_detected(actual: Any, reference: Any) -> None:
    assert difference(actual, reference)
    assert not difference(actual, actual)


def test_numbers_and_bits_of_integers_are_both_right() -> None:
    integers = np.array([1, -2, 0], np.int64)
    assert not difference(integers.astype(np.float32), integers)
    assert not difference(integers.astype(np.int32).view(np.float32), integers)
