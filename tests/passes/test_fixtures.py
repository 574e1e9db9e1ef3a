"""Every case of fixtures/passes: text, graph rules, names, the real runtime before and after, and a second run."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from onnx2ncnn_opt.ir.attention import caches
from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.releases import OLDEST, too_new
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.param.files import write_staged
from onnx2ncnn_opt.passes import PASSES
from onnx2ncnn_opt.passes import run as optimise
from onnx2ncnn_opt.passes.eliminate_orphaned_memorydata import eliminate_orphaned_memorydata
from onnx2ncnn_opt.rewrite.events import Applied, NearMiss
from onnx2ncnn_opt.rewrite.pipeline import run
from onnx2ncnn_opt.rewrite.rule import Pass
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from testing.machine import is_arm
from testing.pass_cases import FOLDER, Case, load, net_text, updated

BY_NAME = {p.name: p for p in PASSES}
CASES = [case for path in sorted(FOLDER.glob("*.md")) if path.stem != "README" for case in load(path)]

# Folding rounds every weight once more, and sums in another order: a few units in the last place of the largest term.
# An estimated quotient, or a function computed by vector code, is off by two of them.
_ROUNDING = 32 * float(np.finfo(np.float32).eps)
# ncnn's code for ARM estimates these with 8 bits, and doubles the bits once.
_ESTIMATED, _ESTIMATE = (UnaryOp.RSQRT, UnaryOp.RECIPROCAL), 2.0**-16


# Layers and their operators that give the same bits on each CPU. All others divide, or compute a function.
ROUGH: Mapping[str, Collection[int]] = {
    "BinaryOp": (BinaryOp.ADD, BinaryOp.SUB, BinaryOp.MUL, BinaryOp.MAX, BinaryOp.MIN, BinaryOp.RSUB),
    "UnaryOp": (UnaryOp.ABS, UnaryOp.NEG, UnaryOp.FLOOR, UnaryOp.CEIL, UnaryOp.SQUARE, UnaryOp.ROUND, UnaryOp.TRUNC),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nets")


def marked(case: Case) -> ParameterSet:
    """Return a case as a parameter; `-m "not rounded" --on qemu-x86_64:Nehalem` runs those of exact passes on SSE."""
    return pytest.param(case, id=str(case), marks=[] if BY_NAME[case.pass_name].exact else [pytest.mark.rounded])


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_case(case: Case, folder: Path, worker: NcnnWorker, request: pytest.FixtureRequest) -> None:
    rewrite = BY_NAME[case.pass_name]
    # A constant that was folded is dead, and would be an output of the written net.
    alone: list[Pass] = list(dict.fromkeys([rewrite, eliminate_orphaned_memorydata]))
    before = case.net()
    feeds = case.feeds(before)
    outputs = sorted(blob.name for blob in before.outputs)
    before_text = net_text(before)
    expected = compute(before, feeds, folder / "before", worker)
    rounding = rounding_of(before, worker)

    graph = case.net()
    events = run(graph, alone, check=True)
    happened = any(isinstance(e, Applied) and e.pass_name == rewrite.name for e in events)
    misses = [e for e in events if isinstance(e, NearMiss) and e.pass_name == rewrite.name]
    # The reason of the largest match is the one that a reader looks for.
    reasons = [e.reason for e in sorted(misses, key=lambda miss: -len(miss.layers))]
    after_text = net_text(graph)
    if request.config.getoption("--update-fixtures"):
        update(case, after_text if happened else None, reasons[0] if reasons else None)
        return

    if not case.is_unchanged:
        assert happened, f"nothing happened; near misses: {reasons}"
        assert after_text == case.blocks["after"]
    else:
        assert not happened, after_text
        assert after_text == before_text
        assert case.refusal in reasons if case.refusal is not None else not reasons, reasons
    if any(isinstance(e, Applied) for e in events):
        graph.check()
        after = compute(graph, feeds, folder / "after", worker)
        assert_same(after, expected, 0.0 if rewrite.exact else rounding, nan=case.may_be_nan)
        assert not rewrite.exact or rough(graph) == rough(case.net()), "an exact pass changes what CPUs only estimate"
        assert sorted(blob.name for blob in graph.outputs) == outputs
        assert not applied(graph, alone), "a second run changes the net again"

    everything = case.net()
    run(everything, PASSES, check=True)
    assert_same(compute(everything, feeds, folder / "all", worker), expected, rounding, nan=case.may_be_nan)
    assert sorted(blob.name for blob in everything.outputs) == outputs
    assert not applied(everything, PASSES), "a second run of the pipeline changes the net again"


def applied(graph: Graph, passes: Sequence[Pass]) -> list[Applied]:
    return [event for event in run(graph, passes) if isinstance(event, Applied)]


def compute(graph: Graph, feeds: Mapping[str, Array], stem: Path, worker: NcnnWorker) -> dict[str, Array]:
    """The outputs that the real runtime gives, by name, without caches, which only it can read."""
    opaque = caches(graph)
    param, bin = stem.with_suffix(".param"), stem.with_suffix(".bin")
    write_staged(graph, param, bin)
    return NcnnRunner(param, bin, exact=True, worker=worker).run(
        feeds, [blob.name for blob in graph.outputs if blob not in opaque]
    )


def rounding_of(graph: Graph, worker: NcnnWorker) -> float:
    """Return how much the outputs of a net and of the one before it may differ, as a share of the largest number."""
    estimated = any(layer.type == "UnaryOp" and layer["op_type"] in _ESTIMATED for layer in graph)
    return _ESTIMATE if estimated and is_arm(worker) else _ROUNDING


def assert_same(actual: dict[str, Array], expected: dict[str, Array], rounding: float, *, nan: bool = False) -> None:
    assert actual.keys() <= expected.keys()
    for name, reference in ((name, expected[name]) for name in actual):
        assert actual[name].shape == reference.shape
        same = (actual[name] == reference) | ((np.isnan(actual[name]) | nan) & np.isnan(reference))
        if rounding:
            finite = reference[np.isfinite(reference)]
            largest = max(float(np.abs(finite).max(initial=0)), 1.0)
            with np.errstate(invalid="ignore"):
                same |= np.abs(actual[name] - reference) <= rounding * largest
        assert same.all(), f"{name}: {actual[name][~same][:4]} instead of {reference[~same][:4]}"


def rough(graph: Graph) -> Counter[tuple[str, int, int]]:
    """Count the layers whose last bits differ between CPUs, which an emulated CPU does not show."""
    kinds = (
        (layer.type, layer["op_type"], layer.params.get("with_scalar", 0)) for layer in graph if layer.type in ROUGH
    )
    return Counter(kind for kind in kinds if kind[1] not in ROUGH[kind[0]])


def update(case: Case, after: str | None, refusal: str | None) -> None:
    path = FOLDER / f"{case.pass_name}.md"
    text = path.read_text(encoding="utf-8")
    section = f"## {case.title}\n{case.text}"
    assert text.count(section) == 1, f"two cases of {path.name} have the same title"
    end = "\n" if case.text.endswith("\n\n") else ""
    path.write_text(text.replace(section, f"## {case.title}\n{updated(case, after, refusal)}{end}"), encoding="utf-8")


def test_no_pass_makes_layers_that_an_old_release_lacks(thorough: bool) -> None:
    for case in CASES[:: 1 if thorough else 3]:
        graph = case.net()
        before = {too_new(layer, OLDEST) for layer in graph}
        optimise(graph, release=OLDEST)
        assert {too_new(layer, OLDEST) for layer in graph} <= {None, *before}, str(case)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_pass_has_positive_and_refused_cases(name: str) -> None:
    cases = load(FOLDER / f"{name}.md")  # as `--update-fixtures` has written them by now
    assert any(not case.is_unchanged for case in cases), "no case in which the pass applies"
    assert any(case.is_unchanged for case in cases), "no case in which the pass must refuse"


def test_every_file_is_of_a_pass() -> None:
    assert {case.pass_name for case in CASES} <= set(BY_NAME)
