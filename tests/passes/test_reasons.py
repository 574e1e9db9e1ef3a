"""No pass is there without a reason: real nets in which it finds something, or a sentence; and a net that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx2ncnn_opt.passes import PASSES
from onnx2ncnn_opt.rewrite.events import Applied
from onnx2ncnn_opt.rewrite.pipeline import run
from onnx2ncnn_opt.rewrite.rule import Pass
from testing.pass_cases import load

FIXTURES = Path(__file__).parents[2] / "fixtures"
NETS = {case.title: case for case in load(FIXTURES / "pass_nets.md")}
# Of each pass, the numbers of nets and rewrites in fixtures/models; `scripts.measure.passes count` writes it.
FIRINGS = dict(line.split("\t")[:2] for line in (FIXTURES / "firings.tsv").read_text().splitlines()[1:])


@pytest.mark.parametrize("p", PASSES, ids=lambda p: p.name)
def test_a_pass_finds_something_in_models_or_says_what_it_is_for(p: Pass) -> None:
    assert p.purpose or FIRINGS.get(p.name, "-") != "-", (
        "say purpose=..., or run `python -m scripts.measure.passes count`"
    )


@pytest.mark.parametrize("p", PASSES, ids=lambda p: p.name)
def test_a_pass_finds_something_in_the_net_that_is_made_for_it(p: Pass) -> None:
    assert p.name in NETS, "fixtures/pass_nets.md has no net for it"
    graph = NETS[p.name].net()
    assert [event for event in run(graph, [p], check=True) if isinstance(event, Applied)]


def test_every_net_is_of_a_pass() -> None:
    assert set(NETS) <= {p.name for p in PASSES}
