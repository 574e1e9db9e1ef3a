"""The metadata.yaml that ultralytics' package reads next to a net (the option `client`)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from onnx2ncnn_opt.errors import Unsupported, UnsupportedError, UsageError
from onnx2ncnn_opt.onnx.edit.append import literal
from onnx2ncnn_opt.onnx.walk import Port

METADATA = "metadata.yaml"
# Entries that are Python literals, where the others are text, and entries that the package needs, with their types.
_LITERALS = ("stride", "batch", "channels", "imgsz", "names", "kpt_shape", "kpt_names", "args", "end2end")
_NEEDED = {"task": (str,), "stride": (int,), "names": (dict, list), "kpt_shape": (list, tuple)}
_NO_TAIL = "ultralytics runs the net alone: export detectors without nms and with end2end=False; it chooses the boxes"


@contextmanager
def for_ultralytics(metadata: Mapping[str, str]) -> Iterator[None]:
    """Raise UsageError for a model of another exporter; change the advice if the block refuses nodes."""
    _entries(metadata)
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError([Unsupported(x.node, x.operator, x.reason) for x in error.nodes], _NO_TAIL) from None


def ultralytics_yaml(metadata: Mapping[str, str], inputs: Sequence[Port], outputs: Sequence[Port]) -> str:
    """Return metadata.yaml: the model's entries, with the sizes of the net.

    The package feeds a picture as a Mat of three dims, and stacks the Mats of an output. Raises UsageError for nets
    and sizes that do not fit.
    """
    entries, shape = _entries(metadata), inputs[0].shape if len(inputs) == 1 else ()
    axes = {port.batch_axis for port in (*inputs, *outputs)}
    if len(shape) != 4 or axes != {0} or (isinstance(shape[0], int) and shape[0] != 1):
        raise UsageError("client: ultralytics feeds one picture, [1, channels, height, width]; export it with batch=1")
    stride, (height, width) = entries["stride"], shape[2:]
    is_free = height != width and all(str(size).isidentifier() for size in (height, width))
    if isinstance(height, int) and isinstance(width, int) and height % stride == width % stride == 0:
        entries["imgsz"] = [height, width]
    elif not is_free:
        raise UsageError(f"client: ultralytics feeds no {height} x {width}; give multiples of {stride}, or no sizes")
    entries["args"] = {**entries["args"], "dynamic": is_free}
    return "".join(f"{_yaml(key)}: {_yaml(value)}\n" for key, value in entries.items())


def _entries(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries with their types; raise UsageError if ultralytics has not exported the model."""
    entries = {key: literal(text) if key in _LITERALS else text for key, text in metadata.items()}
    needed = [key for key in _NEEDED if key != "kpt_shape" or entries.get("task") == "pose"]
    if missing := [key for key in needed if not (isinstance(x := entries.get(key), _NEEDED[key]) and x)]:
        how = "take the file that ultralytics' YOLO(...).export(format='onnx') writes"
        raise UsageError(f"client: the model's metadata lacks {', '.join(missing)}; {how}")
    return {**entries, "args": args if isinstance(args := entries.get("args"), dict) else {}}


def _yaml(value: Any) -> str:
    """Return a value in YAML, which is JSON except that keys may be integers."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_yaml(key)}: {_yaml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False, default=str)
