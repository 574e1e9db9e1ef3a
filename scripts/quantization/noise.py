"""The scores of nets and quantised models on the data of scripts.quantization.train, and how far they agree."""

from pathlib import Path

import numpy as np

from onnx2ncnn_opt.runtime.base import Array, Feed, all_there
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.runtime.ort import OrtRunner


def scores(net: Path, data: Array) -> Array:
    """Return the scores [samples, classes] of a net or model with one input and one output."""
    if net.suffix == ".onnx":
        model = OrtRunner(net)
        [name] = model.input_names()
        return np.concatenate([next(iter(model.run({name: x[None]}).values())) for x in data])
    runner = NcnnRunner(net, net.with_suffix(".bin"), threads=1)
    [blob] = runner.input_names()
    each = (all_there(runner.extract({blob: Feed(x[None], 0)}), net) for x in data)
    return np.stack([next(iter(run.values())).reshape(-1) for run in each])


def sqnr(actual: Array, reference: Array) -> float:
    """Return the power of the reference in that of the error, in dB."""
    noise = np.square(actual.astype(np.float64) - reference).sum()
    return float(10 * np.log10(np.square(reference.astype(np.float64)).sum() / noise)) if noise else np.inf


def agreement(actual: Array, reference: Array) -> float:
    """Return the share of samples with the same largest score."""
    return float((actual.argmax(1) == reference.argmax(1)).mean())
