"""Times of two nets in ncnn, run alternately, so that other work on the machine slows both alike."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.outputs import Latency
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.latency import in_turns
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner

NetPaths = tuple[Path, Path]


def compare(first: NetPaths, second: NetPaths, shapes: Mapping[str, Sequence[int]], seconds: float) -> Latency | None:
    """Time the second net relative to the first, on inputs of these shapes; None if ncnn does not run a net.

    Both run with one thread and ncnn's default options.
    """
    rng = np.random.default_rng(0)
    # A vector may be indexes, of which 0 is always one.
    feeds: dict[str, Array] = {
        name: np.zeros(shape, np.int32) if len(shape) == 1 else rng.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }
    try:
        with NcnnRunner(*second, mode="fp16") as net, NcnnRunner(*first, mode="fp16") as other:
            time, time_other = (partial(each.time, feeds, each.output_names()) for each in (net, other))
            return in_turns(time, time_other, seconds)
    except RunError:
        return None
