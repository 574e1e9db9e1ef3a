"""What was read and written again computes the same in ncnn, to the last bit."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from onnx2ncnn_opt.param.files import read_net, write_net
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from testing.runnable_nets import SHAPE, Net


@pytest.mark.parametrize("seed", range(120))
def test_a_written_net_computes_the_same(tmp_path: Path, worker: NcnnWorker, seed: int) -> None:
    net = Net(Random(seed))
    original = tmp_path / "original.param", tmp_path / "original.bin"
    original[0].write_bytes(net.text)
    original[1].write_bytes(net.weights)
    loaded = read_net(*original)
    assert loaded.trailing_bytes == 0
    loaded.graph.check()
    copy = tmp_path / "copy.param", tmp_path / "copy.bin"
    write_net(loaded.graph, *copy)
    assert copy[1].read_bytes() == net.weights

    before, after = (NcnnRunner(*paths, exact=True, worker=worker) for paths in (original, copy))
    assert before.input_names() == after.input_names() == [blob.name for blob in loaded.graph.inputs]
    assert sorted(before.output_names()) == sorted(after.output_names())
    assert sorted(after.output_names()) == sorted(blob.name for blob in loaded.graph.outputs)
    rng = np.random.default_rng(seed)
    outputs = [name for name in before.output_names() if name not in net.inputs]
    feeds = {name: rng.standard_normal(SHAPE, np.float32) for name in net.inputs}
    expected, found = before.run(feeds, outputs), after.run(feeds, outputs)
    for name in outputs:
        assert found[name].shape == expected[name].shape
        assert found[name].tobytes() == expected[name].tobytes(), name
