"""What was read and written again, as text and in binary, computes the same in ncnn, to the last bit."""

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
    original, text = ((tmp_path / f"{stem}.param", tmp_path / f"{stem}.bin") for stem in ("original", "text"))
    binary, again = ((tmp_path / f"{stem}.param.bin", tmp_path / f"{stem}.bin") for stem in ("binary", "again"))
    original[0].write_bytes(net.text)
    original[1].write_bytes(net.weights)
    loaded = read_net(*original)
    assert loaded.trailing_bytes == 0
    loaded.graph.check()
    write_net(loaded.graph, *text)
    assert text[1].read_bytes() == net.weights
    indexes = {blob.name: index for blob, index in write_net(loaded.graph, *binary, binary=True).items()}
    from_binary = read_net(*binary)
    assert from_binary.is_binary
    kept = write_net(from_binary.graph, *again, binary=True)
    assert {blob.name for blob in kept} == set(kept.values())

    before, after = (NcnnRunner(*paths, exact=True, worker=worker) for paths in (original, text))
    assert before.input_names() == after.input_names() == [blob.name for blob in loaded.graph.inputs]
    assert sorted(before.output_names()) == sorted(after.output_names())
    assert sorted(after.output_names()) == sorted(blob.name for blob in loaded.graph.outputs)
    rng = np.random.default_rng(seed)
    outputs = [name for name in before.output_names() if name not in net.inputs]
    feeds = {name: rng.standard_normal(SHAPE, np.float32) for name in net.inputs}
    expected = before.run(feeds, outputs)
    for paths, names in ((text, {name: name for name in indexes}), (binary, indexes), (again, indexes)):
        runner = NcnnRunner(*paths, exact=True, worker=worker)
        assert runner.input_names() == [names[name] for name in before.input_names()]
        found = runner.run({names[name]: array for name, array in feeds.items()}, [names[name] for name in outputs])
        for name in outputs:
            assert found[names[name]].shape == expected[name].shape
            assert found[names[name]].tobytes() == expected[name].tobytes(), name
