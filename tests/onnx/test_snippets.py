"""PyTorch's constructs as its exporters write them: each is right, or refused as the table says.

Each construct runs as one of the exporters writes it, in turn; as all of them write it with --thorough.
"""

import re

import pytest

from testing import snippets

PARTS = 12  # tests that several processes share


IN_TURN = [
    pytest.param(variant, part, marks=() if part % len(snippets.VARIANTS) == turn else pytest.mark.thorough)
    for turn, variant in enumerate(snippets.VARIANTS)
    for part in range(PARTS)
]


@pytest.mark.parametrize(("variant", "part"), IN_TURN)
def test_every_construct_is_as_in_the_table(variant: str, part: int) -> None:
    lines = [line for line in snippets.table() if line.split("\t")[1] == variant]
    assert snippets.rows_of(variant, part, PARTS) == lines[part::PARTS]


def test_the_fixtures_are_small_and_name_no_path_and_nothing_is_wrong() -> None:
    outcomes = [line.split("\t")[2] for line in snippets.table()]
    assert set(outcomes) == {"right", "refused"}
    assert outcomes.count("right") > 1000
    for variant in snippets.VARIANTS:
        models = (model.SerializeToString() for _, model in snippets.kept(variant))
        assert not any(re.search(rb"/(home|root|work|tmp|usr|site-packages)/", model) for model in models)
    assert sum(path.stat().st_size for path in snippets.FIXTURES.iterdir()) < 1_500_000
