"""Some of the random nets that scripts/fuzz/nets.py runs by the thousand."""

from pathlib import Path

import pytest

from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from testing import fuzz_nets


@pytest.mark.parametrize("part", range(2))
def test_outputs_stay_and_a_second_run_changes_nothing(worker: NcnnWorker, tmp_path: Path, part: int) -> None:
    ends = {number: fuzz_nets.trial(number, 1, tmp_path, worker) for number in range(part, 24, 2)}
    assert {number: end for number, end in ends.items() if not end.startswith(("same", "ill-conditioned"))} == {}
