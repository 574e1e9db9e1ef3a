"""A sample of scripts/fuzz/faults.py: none of the serious faults is missed."""

from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.options import Verification
from testing import present
from testing.exports import ROOT, refilled
from testing.faults import BROKEN, Campaign, models
from testing.models import write_model

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


TWO_MASKS = """(float[2,6,8] q, float[2,8,6] k, float[2,6,8] v, int64[6] mask) => (float[2,6,8] y)
    <float zero = {0}, float low = {-3.4028235e38}> {
    keep = Cast<to = 9>(mask) padding = Where(keep, zero, low) both = Where(window, padding, low)
    s = MatMul(q, k) m = Add(s, both) p = Softmax<axis = -1>(m) y = MatMul(p, v) }"""


@pytest.mark.parametrize("is_given", [False, True])
def test_a_fault_in_hidden_rows_is_caught(worker: NcnnWorker, tmp_path: Path, is_given: bool) -> None:
    """A higher fill of one mask changes only rows that both masks hide: they are uniform no more."""
    at, rng = np.arange(6), np.random.default_rng(1)
    model = write_model(tmp_path, TWO_MASKS, window=abs(at[:, None] - at) <= 1)
    conversion = lower(model)
    files = conversion.save(tmp_path / "net")
    feeds = {
        name: rng.standard_normal(shape) for name, shape in {"q": (2, 6, 8), "k": (2, 8, 6), "v": (2, 6, 8)}.items()
    }
    given = {name: array.astype(np.float32) for name, array in feeds.items()} | {"mask": np.array([1, 0, 0, 0, 0, 0])}
    how = Verification(feeds=given if is_given else None)

    def is_right() -> bool:
        return verify_net(model, files.param, files.bin, how, manifest=conversion.manifest(), worker=worker).ok

    assert is_right()
    text = files.param.read_text(encoding="utf-8")
    (fill,) = (line for line in text.splitlines() if "padding_1" in line.split()[1:2])
    changed = fill.removesuffix("2=-3e4") + "2=-1e4"
    assert changed != fill + "2=-1e4", text
    files.param.write_text(text.replace(fill, changed), encoding="utf-8")
    assert not is_right()
