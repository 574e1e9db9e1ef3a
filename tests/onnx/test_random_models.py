"""A few of the random models that scripts/fuzz/models.py runs by the thousand; movement gives ONNX Runtime's bits."""

import numpy as np
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from testing.conformance import Harness
from testing.fuzz_models import Fuzzer, difference, guarded, moves
from testing.generators import GENERATORS
from testing.random_models import Step, build
from testing.random_steps import MOVEMENT, VIEWS, random_model

MODELS = {"any": 24, "cells": 8, "decisions": 14, "windows": 8}
CHAINS = 16
PARTS = 2  # tests that several processes share


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory, worker: NcnnWorker) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("nets"), worker)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", MODELS)
def test_models_are_right_or_refused(fuzzer: Fuzzer, kind: str, part: int) -> None:
    outcomes = {number: guarded(fuzzer, GENERATORS[kind](7, number)) for number in range(part, MODELS[kind], PARTS)}
    assert {number: outcome for number, outcome in outcomes.items() if outcome.is_bad} == {}
    assert sum(outcome.kind == "right" for outcome in outcomes.values()) > (0.5 if kind == "windows" else 0.7) * len(
        outcomes
    )


@pytest.mark.parametrize("steps", [VIEWS, MOVEMENT], ids=["views", "movement"])
def test_movement_keeps_every_bit(steps: tuple[Step, ...], harness: Harness) -> None:
    for seed in range(CHAINS):
        model = build(np.random.default_rng(seed), steps, length=8)
        for optimize in (False, True):
            outputs = harness.run(lower(model.proto(), optimize=optimize, tail="never"), model.feeds()[0])
            for (name, expected), output in zip(model.expected()[0].items(), outputs, strict=True):
                assert output is not None
                np.testing.assert_array_equal(output.reshape(expected.shape), expected, f"seed {seed}: {name}")


def test_a_wrong_number_would_be_seen() -> None:
    model = random_model(7, 1)
    for name, expected in model.expected()[0].items():
        wrong = expected + np.float32(np.abs(expected).max() / 100)
        assert difference(wrong, expected)
        assert not moves(model, 0, name, wrong)
