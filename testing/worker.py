"""One ncnn process for all tests of a run; it starts when it is first needed, and again after a crash."""

from onnx2ncnn_opt.runtime.ncnn import NcnnWorker

WORKER = NcnnWorker()
