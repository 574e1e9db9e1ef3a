"""Random chains of operators in the real runtime: movement alone gives ONNX Runtime's bits, arithmetic its numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.api import convert

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from conformance import Case, Harness, first_difference
from random_chains import ARITHMETIC, ASSORTED, IMAGES, MOVEMENT, VIEWS, Step, open_model, random_model

from onnx2ncnn_opt.errors import RunError, UnsupportedError
from onnx2ncnn_opt.runtime.ort import OrtRunner

CHAINS = 120
"""Of each kind; thousands were run when this was written."""


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with Harness() as harness:
        yield harness


@pytest.mark.parametrize("optimize", [False, True], ids=["plain", "optimized"])
@pytest.mark.parametrize("steps", [VIEWS, MOVEMENT], ids=["views", "movement"])
def test_movement_keeps_every_bit(steps: tuple[Step, ...], optimize: bool, harness: Harness) -> None:
    for seed in range(CHAINS):
        model, feeds = random_model(seed, steps, length=8)
        reference = OrtRunner(model.SerializeToString()).run(feeds)
        outputs = harness.run(convert(model, optimize=optimize), feeds)
        for name, output in zip(reference, outputs, strict=True):
            np.testing.assert_array_equal(output.reshape(reference[name].shape), reference[name], f"seed {seed}")


@pytest.mark.parametrize("optimize", [False, True], ids=["plain", "optimized"])
@pytest.mark.parametrize("steps", [ARITHMETIC, ASSORTED, IMAGES], ids=["arithmetic", "assorted", "images"])
def test_arithmetic(steps: tuple[Step, ...], optimize: bool, harness: Harness) -> None:
    for seed in range(CHAINS):
        model, feeds = random_model(seed, steps, length=8)
        reference = list(OrtRunner(model.SerializeToString()).run(feeds).values())
        outcome = harness.judge(Case(str(seed), model, feeds, reference), optimize=optimize)
        assert outcome.kind == "right", f"seed {seed}: {outcome.kind} {outcome.reason}"


def test_open_sizes(harness: Harness) -> None:
    right = 0
    for seed in range(2 * CHAINS):
        model, shapes = open_model(seed, length=6)
        rng = np.random.default_rng(seed)
        try:
            runner = OrtRunner(model.SerializeToString())
            runs = [
                ({"x": x}, runner.run({"x": x})) for x in (rng.standard_normal(s).astype(np.float32) for s in shapes)
            ]
        except RunError:
            continue  # sizes that met in the first shape do not in the second
        try:
            conversion = convert(model)
        except UnsupportedError:
            continue
        for feeds, reference in runs:
            difference = first_difference(harness.run(conversion, feeds), list(reference.values()))
            assert not difference, f"seed {seed}: {difference}"
        right += 1
    assert right > CHAINS // 2


def test_a_wrong_number_would_be_seen() -> None:
    reference = np.float32([[1, 2, 3]])
    assert not first_difference([reference], [reference])
    assert first_difference([reference + np.float32([0, 0, 1e-3])], [reference])
    assert first_difference([reference.T], [reference])
    assert first_difference([np.float32([[1, 2, np.nan]])], [reference])
