"""The Python interface for verification: compare any net with its ONNX model."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.errors import UsageError, check_options
from onnx2ncnn_opt.manifest import Manifest, file_hash, mixture, read_manifest
from onnx2ncnn_opt.onnx.edit.append import converted_model
from onnx2ncnn_opt.param.files import PathLike, bin_beside, read_graph
from onnx2ncnn_opt.param.param_bin import is_param_bin
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.report import VerifyReport


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


def manifest_beside(param: Path, model: Path) -> tuple[Manifest | None, str]:
    """Return the manifest NET.json of NET.param or NET.param.bin, and a note if the file exists but is not used.

    A manifest must have the model's hash, and the net must have its blobs: another converter may have replaced the net,
    or the model was exported again.
    """
    path = bin_beside(param).with_suffix(".json")
    if path == param or not path.is_file() or not model.is_file():
        return None, ""
    try:
        manifest = read_manifest(path)
    except UsageError as error:
        return None, f"not used: {error}"
    if manifest.source.sha256 != file_hash(model):
        return None, f"{path} is not used: it was written for another model"
    data = param.read_bytes()
    words = set(data.decode(errors="replace").split())  # no parser, because the net may be broken
    if is_param_bin(data):
        words = {blob.name for layer in read_graph(param) for blob in layer.outputs}
    missing = [t.blob for t in (*manifest.inputs, *manifest.outputs) if t.blob not in words]
    if missing:
        return None, f"{path} is not used: {param} has no blob '{missing[0]}'"
    return manifest, ""
