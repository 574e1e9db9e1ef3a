"""A sample of scripts/plant_faults.py: none of the serious faults is missed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from plant_faults import campaign, models

from onnx2ncnn_opt.runtime.ncnn import NcnnWorker


def test_serious_faults_are_caught() -> None:
    nets = [(name, model) for name, model in models() if name in ("guarded log", "clipped", "norms", "table")]
    with NcnnWorker() as worker:
        planted = list(campaign(iter(nets), each=1, seed=5, worker=worker))
    assert len(planted) > 20
    assert not [fault for fault in planted if fault.outcome == "SERIOUS"]
    assert sum(fault.outcome == "caught" for fault in planted) > 15
