"""The manifest next to a net, if it is about this net and this model."""

from pathlib import Path

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.manifest import Manifest, file_hash, read_manifest


def manifest_beside(param: Path, model: Path) -> tuple[Manifest | None, str]:
    """Return NET.json for NET.param, and why it exists but is not used (empty if it is used, or does not exist).

    Another converter may have written the net later under the same name, or the model was exported again. So the
    manifest is about these two only if it has the model's hash and the net has its blobs.
    """
    path = param.with_suffix(".json")
    if path == param or not path.is_file() or not model.is_file():
        return None, ""
    try:
        manifest = read_manifest(path)
    except UsageError as error:
        return None, f"not used: {error}"
    if manifest.source.sha256 != file_hash(model):
        return None, f"{path} is not used: it was written for another model"
    # Enough to tell nets apart, and works for one that no parser would take.
    words = set(param.read_text(errors="replace").split())
    missing = [t.blob for t in (*manifest.inputs, *manifest.outputs) if t.blob not in words]
    if missing:
        return None, f"{path} is not used: {param} has no blob '{missing[0]}'"
    return manifest, ""
