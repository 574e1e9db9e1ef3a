"""The whole pipeline keeps what random nets compute, and comes to an end at once on its own result."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.passes import PASSES, run
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from testing.random_layers import RandomNet
from tests.passes.test_fixtures import applied, compute

# Every folded layer rounds anew; nets of 16 layers whose values stay near 1 amplify that by far less than this.
_TOLERANCE = 1e-4
SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_outputs_stay(build: Callable[[], Graph], folder: Path, worker: NcnnWorker) -> None:
    """Optimise a net of one input, and compare all outputs with those before."""
    before, graph = build(), build()
    (source,) = before.inputs
    assert source.shape is not None
    feeds = {source.name: np.random.default_rng(7).standard_normal(known(source.shape)).astype(np.float32)}
    expected = compute(before, feeds, folder / "net", worker)
    run(graph, check=True)
    assert [blob.name for blob in graph.outputs] == [blob.name for blob in before.outputs]
    for name, actual in compute(graph, feeds, folder / "net", worker).items():
        # Averages of windows that are padding alone are NaN, and exponentials may be infinite.
        numbers = expected[name][np.isfinite(expected[name])]
        allowed = _TOLERANCE * max(1.0, float(np.abs(numbers).max(initial=0.0)))
        np.testing.assert_allclose(actual, expected[name], rtol=0, atol=allowed, err_msg=name, strict=True)
    assert not applied(graph, PASSES)


@settings(SETTINGS, max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_outputs_stay(seed: int, tmp_path: Path, worker: NcnnWorker) -> None:
    check_outputs_stay(lambda: RandomNet(seed, cnn=True).graph, tmp_path, worker)
