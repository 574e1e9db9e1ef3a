"""The whole pipeline keeps what random nets compute, and comes to an end at once on its own result."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.param.files import write_net
from onnx2ncnn_opt.passes import run
from onnx2ncnn_opt.rewrite.events import Applied
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from testing.random_layers import IMAGE, RandomNet

# Every folded layer rounds anew; nets of 14 layers whose values stay near 1 amplify that by far less than this.
_TOLERANCE = 1e-4


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_outputs_stay(seed: int, worker: NcnnWorker) -> None:
    before = RandomNet(seed, cnn=True).graph
    names = [blob.name for blob in before.outputs]
    expected = compute(before, worker)
    graph = RandomNet(seed, cnn=True).graph
    run(graph, check=True)
    assert [blob.name for blob in graph.outputs] == names
    actual = compute(graph, worker)
    for name in names:
        # Averages of windows that are padding alone are NaN.
        allowed = _TOLERANCE * max(1.0, float(np.nanmax(np.abs(expected[name]), initial=0.0)))
        np.testing.assert_allclose(actual[name], expected[name], rtol=0, atol=allowed, err_msg=name)
    assert not [event for event in run(graph) if isinstance(event, Applied)]


def compute(graph: Graph, worker: NcnnWorker) -> dict[str, Array]:
    feed = np.random.default_rng(7).standard_normal(IMAGE).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        param, bin = Path(folder) / "net.param", Path(folder) / "net.bin"
        write_net(graph, param, bin)
        runner = NcnnRunner(param, bin, exact=True, worker=worker)
        return runner.run({"b0": feed}, [blob.name for blob in graph.outputs])
