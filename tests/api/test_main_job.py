"""The command and the function do the same work: they write the same files.

Every third small model is converted by both, or all with --thorough.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt import Verification, convert, optimize
from onnx2ncnn_opt.errors import RunError, VerificationError
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from testing import present
from testing.command import run
from testing.exports import MODELS, SMALL, sampled, save_refilled
from testing.models import write_model

VERIFIED = ["attention.ts", "inverted.tsbn", "residual-batch.dyn", "siamese.ts", "temporal.dyn", "unet-hw.ts"]


def contents(prefix: Path) -> dict[str, bytes]:
    return {end: Path(f"{prefix}.ncnn.{end}").read_bytes() for end in ("param", "bin", "json")}


@pytest.mark.parametrize("model", sampled(MODELS, SMALL[::3]))
def test_the_same_files_without_verification(model: Path, tmp_path: Path) -> None:
    filled = save_refilled(model.stem, tmp_path)
    assert run(tmp_path, "convert", "model.onnx", "-o", "a", "--no-verify", "--quiet").code == 0
    convert(filled, tmp_path / "b", verification=None)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("name", VERIFIED)
def test_the_same_files_with_masks_and_tied_sizes(name: str, tmp_path: Path, worker: NcnnWorker) -> None:
    model = Path(f"fixtures/models/{name}.onnx").absolute()
    assert run(tmp_path, "convert", str(model), "-o", "a", "--quiet").code == 0
    from_file = convert(model, tmp_path / "b", worker=worker)
    assert present(from_file.report).ok
    from_bytes = convert(model.read_bytes(), worker=worker)
    from_bytes.save(tmp_path / "c")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "c")


def test_a_worker_that_dies_while_fp16_is_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the OOM killer: no net without the masks that it needs."""
    walk, graph = NcnnRunner.walk, "(float[1,3,16,16] x) => (float[1,1,16,16] y) <float[1] e = {1e-6}> {"
    graph += "c = Conv<pads = [1,1,1,1]>(x, w) s = Mul(c, c) m = ReduceMean<axes = [1]>(s) d = Add(m, e) y = Log(d) }"
    weights: Any = np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(np.float32) * 200
    model = write_model(tmp_path, graph, opset=17, w=weights)
    found = convert(model, tmp_path / "a")
    assert found.masks

    def killed(self: NcnnRunner, *arguments: Any, **options: Any) -> None:
        self.worker.start().process.kill()
        walk(self, *arguments, **options)

    monkeypatch.setattr(NcnnRunner, "walk", killed)
    assert present(optimize(tmp_path / "a.ncnn.param", prefix=tmp_path / "b", masks=False).report).ok
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for job in (partial(convert, model), partial(optimize, tmp_path / "b.param")):
        with pytest.raises(RunError, match="the masks of the net are unknown: ncnn crashed with SIGKILL"):
            job(prefix=tmp_path / "a")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_wrong_net_is_not_saved(tmp_path: Path, worker: NcnnWorker) -> None:
    strict = Verification(rtol=0.0, atol=0.0)
    model = Path("fixtures/models/residual.ts.onnx")
    conversion = convert(model, tmp_path / "a", verification=strict, worker=worker)
    assert not present(conversion.report).ok
    with pytest.raises(VerificationError, match="outputs differ from ONNX Runtime's"):
        conversion.save(tmp_path / "b")
    assert not list(tmp_path.iterdir())
    convert(model, tmp_path / "c", verification=strict, keep_failed=True, worker=worker)
    assert contents(tmp_path / "c")


def test_optimize_writes_the_files_of_the_command(tmp_path: Path) -> None:
    files = convert("fixtures/models/inverted.tsbn.onnx", tmp_path / "net", optimize=False, verification=None)
    assert files.report is None
    net = tmp_path / "net.ncnn.param"
    assert run(tmp_path, "optimize", "net.ncnn.param", "-o", "a", "--quiet").code == 0
    assert present(optimize(net, prefix=tmp_path / "b").report).ok
    for end in ("param", "bin"):
        assert (tmp_path / f"a.{end}").read_bytes() == (tmp_path / f"b.{end}").read_bytes()
