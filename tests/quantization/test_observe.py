"""Statistics of blobs over samples, from the real ncnn."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.param.files import write_net
from onnx2ncnn_opt.quantization.observe import THRESHOLDS, Observed, observe
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from testing.param_text import layer, net
from testing.pass_cases import fill_weights

RNG = np.random.default_rng(3)


def test_statistics_of_blobs(tmp_path: Path) -> None:
    graph = net("Input in 0 1 x", "ReLU r 1 1 x b", "Convolution l 1 1 b y 0=4 1=1 6=12")
    fill_weights(graph)
    write_net(graph, tmp_path / "net.param", tmp_path / "net.bin")
    arrays = [RNG.standard_normal((3, 5, 5)).astype(np.float32) * 10.0**scale for scale in (0, -3, 2, 1)]
    both = []
    for ordered in (arrays, arrays[::-1]):
        with NcnnRunner(tmp_path / "net.param", tmp_path / "net.bin") as runner:
            samples = [{"x": Feed(array.astype(np.float32))} for array in ordered]
            both.append(observe(graph, runner, [layer(graph, "l")], samples)["l"])
    found, again = both
    rectified = np.maximum(np.stack(arrays), 0)
    assert (found.low, found.high) == (0, rectified.max())
    assert found.means is not None
    np.testing.assert_allclose(found.means, rectified.mean(axis=(0, 2, 3)), rtol=1e-5)
    assert found.counts.sum() == rectified.size
    np.testing.assert_array_equal(found.counts, again.counts)
    np.testing.assert_array_equal(found.means, again.means)


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_thresholds_of_numbers_without_outliers(threshold: Callable[[Observed], float]) -> None:
    found = Observed()
    found.add(RNG.uniform(-1, 1, 100_000).astype(np.float32))
    assert 0.9 < threshold(found) <= found.largest


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_thresholds_cut_outliers(threshold: Callable[[Observed], float]) -> None:
    found = Observed()
    numbers = RNG.standard_normal(1_000_000).astype(np.float32)
    numbers[0] = 60
    found.add(numbers)
    assert 2 < threshold(found) < 45
    assert 0 < found.share_above(threshold(found)) < 0.05


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_thresholds_of_zeros(threshold: Callable[[Observed], float]) -> None:
    found = Observed()
    found.add(np.zeros(10, np.float32))
    assert threshold(found) == 1


@pytest.mark.parametrize(("largest", "margin"), [([1, 2, 4, 3] * 5, 1), (range(1, 21), 1.1), ([2], 1.5), ([0, 0], 1)])
def test_ranges_of_few_samples_are_wider(largest: Sequence[int], margin: float) -> None:
    found = Observed()
    for number in largest:
        found.add(np.array([number, -0.5 * number], np.float32))
    assert found.margin == pytest.approx(margin)
