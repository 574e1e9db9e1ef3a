"""The content of a report about one net, computed in a child process, like the net's judgement."""

import pickle
from pathlib import Path

from onnx2ncnn_opt.api.report import make_report
from onnx2ncnn_opt.regression.judge import REQUEST, Request
from onnx2ncnn_opt.verification.options import Verification

RECORD = "record.pickle"


def main(folder: str) -> None:
    """Make a report about the net of the request in a folder, and write the record to the folder."""
    request: Request = pickle.loads(Path(folder, REQUEST).read_bytes())
    model = request.model
    verification = Verification(
        shapes=model.shapes,
        values=model.values,
        feeds=model.inputs[0] if model.inputs else None,
        seed=model.seeds[0] if model.seeds else 0,
        on=model.on,
        modes=model.modes,
    )
    report = make_report(model.path, request.param, request.bin, verification)
    Path(folder, RECORD).write_bytes(pickle.dumps(report.records[0]))
