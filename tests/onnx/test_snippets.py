"""PyTorch's constructs as its exporters write them: each is right, or refused as the table says."""

from __future__ import annotations

import re

import pytest

from testing import snippets as run_snippets


@pytest.mark.parametrize("variant", run_snippets.VARIANTS)
def test_every_construct_is_as_in_the_table(variant: str) -> None:
    assert run_snippets.rows_of(variant) == [line for line in run_snippets.table() if line.split("\t")[1] == variant]


def test_the_fixtures_are_small_and_of_no_place_and_nothing_is_wrong() -> None:
    outcomes = [line.split("\t")[2] for line in run_snippets.table()]
    assert set(outcomes) == {"right", "refused"}
    assert outcomes.count("right") > 1000
    for variant in run_snippets.VARIANTS:
        models = (model.SerializeToString() for _, model in run_snippets.kept(variant))
        assert not any(re.search(rb"/(home|root|work|tmp|usr|site-packages)/", model) for model in models)
    assert sum(path.stat().st_size for path in run_snippets.FIXTURES.iterdir()) < 1_500_000
