"""A few hundred of the random nets that scripts/fuzz_optimize.py runs by the thousand."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from onnx2ncnn_opt.runtime.ncnn import NcnnWorker


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "fuzz_optimize.py"
    spec = importlib.util.spec_from_file_location("fuzz_optimize", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def worker() -> Iterator[NcnnWorker]:
    with NcnnWorker() as worker:
        yield worker


@pytest.mark.parametrize("part", range(8))
def test_outputs_stay_and_a_second_run_changes_nothing(
    fuzz: ModuleType, worker: NcnnWorker, tmp_path: Path, part: int
) -> None:
    ends = {number: fuzz.trial(number, 1, tmp_path, worker) for number in range(part * 30, part * 30 + 30)}
    assert {number: end for number, end in ends.items() if not end.startswith(("same", "ill-conditioned"))} == {}
