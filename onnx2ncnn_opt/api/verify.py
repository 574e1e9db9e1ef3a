"""The Python interface for verification: compare any net with its ONNX model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.errors import check_options
from onnx2ncnn_opt.manifest import Manifest, mixture, read_manifest
from onnx2ncnn_opt.onnx.edit.append import converted_model
from onnx2ncnn_opt.param.files import PathLike, bin_beside
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.model_runs import manifest_beside
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.report import VerifyReport

if TYPE_CHECKING:
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker


def verify(
    model: Any,
    param: PathLike,
    bin: PathLike | None = None,
    verification: Verification = Verification(),
    *,
    manifest: Manifest | PathLike | None = None,
    worker: NcnnWorker | None = None,
) -> VerifyReport:
    """Compare a net of any converter with its model in ONNX Runtime.

    `model` is as for `convert`, without `inputs`. `bin` is NET.bin by default. `manifest` says how arrays go in and
    out; the default is NET.json, if it belongs to the model and the net. Without one, blobs are matched by name or
    order. `worker` is an ncnn process to reuse.

    Raises UsageError, ModelError, RunError and VerificationError like `verify_net`.
    """
    check_options(param=param, bin=bin)
    net_manifest, note = manifest_for(model, param, manifest)
    source, files = converted_model(model, net_manifest), (Path(param), Path(bin or bin_beside(param)))
    note = note or mixture(net_manifest, *files)
    report = verify_net(source, *files, verification, manifest=net_manifest, worker=worker)
    return replace(report, notes=(note, *report.notes)) if note else report


def manifest_for(model: Any, param: PathLike, manifest: Manifest | PathLike | None) -> tuple[Manifest | None, str]:
    """Return the given manifest or the one next to the net, and the reason why the latter is not used, else "".

    Raises UsageError if the given one is broken.
    """
    if isinstance(manifest, Manifest):
        return manifest, ""
    check_options(manifest=manifest)
    if manifest is not None:
        return read_manifest(Path(manifest)), ""
    return manifest_beside(Path(param), Path(model)) if isinstance(model, (str, os.PathLike)) else (None, "")
