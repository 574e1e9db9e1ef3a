"""The content of a report about one net, computed in a child process, like the net's judgement."""

from onnx2ncnn_opt.api.report import make_report
from onnx2ncnn_opt.regression.judge import Request
from onnx2ncnn_opt.report.record import NetRecord
from onnx2ncnn_opt.verification.options import Verification


def look(request: Request) -> NetRecord:
    """Return the record of a report about the net of a request."""
    model = request.model
    verification = Verification(
        shapes=model.shapes,
        values=model.values,
        feeds=model.inputs[0] if model.inputs else None,
        seed=model.seeds[0] if model.seeds else 0,
        on=model.on,
        modes=model.modes,
    )
    return make_report(model.path, request.param, request.bin, verification).records[0]
