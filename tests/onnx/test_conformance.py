"""ONNX's own conformance suite: every case is right, or refused for the reason that stands in the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from testing import conformance


def test_every_case_is_as_in_the_table() -> None:
    outcomes = conformance.run(conformance.collect())
    assert not conformance.differences(outcomes)
    known = conformance.read_table()
    assert not known or set(known) == set(outcomes)
    assert sum(outcome.kind == "right" for outcome in outcomes.values()) > 1000


@pytest.mark.parametrize(
    ("actual", "reference"),
    [
        (np.float32([1, 2]), np.float32([1, 2.001])),
        (np.float32([1, np.nan]), np.float32([1, 2])),
        (np.float32([1, np.inf]), np.float32([1, 2e38])),
        (np.float32([[1, 2]]), np.float32([1, 2])),
        (np.float32([1, 2]), np.int64([1, 3])),
        (np.float32([1, 2]), np.float16([1, 2.05])),
    ],
)
def test_what_is_wrong_is_seen(actual: Any, reference: Any) -> None:
    assert conformance.difference(actual, reference)
    assert not conformance.difference(actual, actual)


def test_numbers_and_bits_of_integers_are_both_right() -> None:
    integers = np.int64([1, -2, 0])
    assert not conformance.difference(integers.astype(np.float32), integers)
    assert not conformance.difference(integers.astype(np.int32).view(np.float32), integers)
