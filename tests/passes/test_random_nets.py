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
from testing.random_cnn import CnnBuilder, Step

# Every folded layer rounds anew; nets of 14 layers whose values stay near 1 amplify that by far less than this.
_TOLERANCE = 1e-4


_numbers = st.integers(0, 15)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(st.tuples(st.integers(0, 19), _numbers, _numbers), min_size=1, max_size=14),
    outputs=st.lists(_numbers, max_size=2),
    seed=st.integers(0, 1000),
)
def test_outputs_stay(steps: list[Step], outputs: list[int], seed: int, worker: NcnnWorker) -> None:
    before = CnnBuilder(seed).build(steps, outputs)
    names = [blob.name for blob in before.outputs]
    expected = compute(before, worker)
    graph = CnnBuilder(seed).build(steps, outputs)
    run(graph, check=True)
    assert [blob.name for blob in graph.outputs] == names
    actual = compute(graph, worker)
    for name in names:
        assert actual[name].shape == expected[name].shape
        error = np.abs(actual[name] - expected[name]).max()
        assert error <= _TOLERANCE * max(1.0, float(np.abs(expected[name]).max())), name
    assert not [event for event in run(graph) if isinstance(event, Applied)]


def compute(graph: Graph, worker: NcnnWorker) -> dict[str, Array]:
    feed = np.random.default_rng(7).standard_normal((4, 5, 6)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        param, bin = Path(folder) / "net.param", Path(folder) / "net.bin"
        write_net(graph, param, bin)
        runner = NcnnRunner(param, bin, exact=True, worker=worker)
        return runner.run({"input_0_0": feed}, [blob.name for blob in graph.outputs])
