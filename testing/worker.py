"""One ncnn process for all tests of a run; it starts when it is first needed, and again after a crash."""

from pathlib import Path

from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker

WORKER = NcnnWorker()


def listed(param: Path) -> tuple[list[str], list[str]]:
    """Return ncnn's lists of a net's inputs and outputs, which programs take by their places."""
    runner = NcnnRunner(param, param.with_suffix(".bin"), worker=WORKER)
    return runner.input_names(), runner.output_names()
