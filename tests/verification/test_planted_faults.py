"""A sample of scripts/fuzz/faults.py: none of the serious faults is missed."""

from pathlib import Path

import numpy as np

from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from testing import present
from testing.exports import ROOT, refilled
from testing.faults import BROKEN, Campaign, models

DETECTOR = ("detector.ts", refilled(ROOT / "fixtures" / "models" / "detector.ts.onnx"))


def test_serious_faults_are_caught(worker: NcnnWorker) -> None:
    nets = [(name, model) for name, model in models() if name in ("guarded log", "clipped", "norms", "table")]
    planted = list(Campaign(worker, seed=5).run(nets))
    assert len(planted) > 20
    assert not [fault for fault in planted if fault.outcome == "SERIOUS"]
    assert sum(fault.outcome == "caught" for fault in planted) > 15


def test_the_faulty_layer_is_named(worker: NcnnWorker) -> None:
    planted = list(Campaign(worker, seed=2, most=6, bisects=True).run([DETECTOR]))
    caught = [fault for fault in planted if fault.outcome == "caught"]
    assert len(caught) >= 4
    assert {fault.named for fault in caught} <= {"named", "one of several"}


def test_a_fault_of_the_file_is_named(worker: NcnnWorker, tmp_path: Path) -> None:
    campaign = Campaign(worker, bisects=True)
    subject = present(campaign.subject(*DETECTOR, tmp_path))
    for kind in BROKEN:
        planted = present(campaign.fault(subject, tmp_path, kind, 0, np.random.default_rng(1)))
        assert (planted.outcome, planted.named) == ("caught", "named")
