"""No pass is there without a reason: real nets in which it finds something, or a sentence; and a net that shows it."""

from pathlib import Path

import pytest

from onnx2ncnn_opt.passes import PASSES
from onnx2ncnn_opt.rewrite.events import Applied
from onnx2ncnn_opt.rewrite.pipeline import run
from onnx2ncnn_opt.rewrite.rule import Pass
from testing.pass_cases import FOLDER, load_large

FIXTURES = Path(__file__).parents[2] / "fixtures"
# Of each pass, the numbers of nets and rewrites by source; `scripts.measure.passes count` writes it.
FIRINGS = {line.split("\t")[0]: line.split("\t")[1:] for line in (FIXTURES / "firings.tsv").read_text().splitlines()}


@pytest.mark.parametrize("p", PASSES, ids=lambda p: p.name)
def test_a_pass_applies_or_names_its_purpose(p: Pass, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-fixtures"):
        return  # a new pass is counted when its cases are there
    assert p.purpose or any(cell != "-" for cell in FIRINGS.get(p.name, ())), (
        "say purpose=..., or run `python -m scripts.measure.passes count`"
    )


@pytest.mark.parametrize("p", PASSES, ids=lambda p: p.name)
def test_a_pass_finds_something_in_the_net_that_is_made_for_it(p: Pass) -> None:
    large = load_large(FOLDER / f"{p.name}.md")
    assert large is not None, f"fixtures/passes/{p.name}.md has no block `large`"
    graph = large.net()
    assert [event for event in run(graph, [p], check=True) if isinstance(event, Applied)]
