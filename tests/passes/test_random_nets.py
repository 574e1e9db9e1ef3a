"""The whole pipeline keeps what random nets compute, and comes to an end at once on its own result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testing.random_cnn import CnnBuilder, Step

from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.passes import PASSES, run
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
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
        assert actual.shape == expected[name].shape
        error = np.abs(actual - expected[name]).max()
        assert error <= _TOLERANCE * max(1.0, float(np.abs(expected[name]).max())), name
    assert not applied(graph, PASSES)


_numbers = st.integers(0, 15)


@settings(SETTINGS, max_examples=150)
@given(
    steps=st.lists(st.tuples(st.integers(0, 19), _numbers, _numbers), min_size=1, max_size=14),
    outputs=st.lists(_numbers, max_size=2),
    seed=st.integers(0, 1000),
)
def test_outputs_stay(steps: list[Step], outputs: list[int], seed: int, tmp_path: Path, worker: NcnnWorker) -> None:
    check_outputs_stay(lambda: CnnBuilder(seed).build(steps, outputs), tmp_path, worker)
