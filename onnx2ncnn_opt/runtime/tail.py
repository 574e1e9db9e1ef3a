"""Running the tail of a net, the model's nodes after the net, in NumPy."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.manifest import Manifest, TailFile, size_input, tail_path
from onnx2ncnn_opt.onnx.read.given import parsed_size
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.slots import sizes_of


class TailRunner:
    """The tail that a manifest describes, from the bytes of its file; UsageError if they do not belong together."""

    def __init__(self, manifest: Manifest, tail: TailFile, data: bytes, where: str = "the tail") -> None:
        if hashlib.sha256(data).hexdigest() != tail.sha256:
            raise UsageError(f"{where} is not the tail of this net; convert the model again")
        from onnx2ncnn_opt.tail.reader import read_tail  # imports onnx, which other nets do without

        self.tail, self.data, self.program, self._manifest = tail, data, read_tail(data), manifest
        net = {entry.name for entry in manifest.outputs}
        arrays = {entry.name for entry in tail.arrays}
        read, made = ({port.name for port in ports} for ports in (self.program.inputs, self.program.outputs))
        unknown = read - {*tail.inputs, *arrays, *map(size_input, tail.sizes)} | set(tail.inputs) - net
        unknown |= {entry.name for entry in tail.outputs} - made - net - arrays
        if unknown:
            raise UsageError(f"{where} and the manifest differ about '{min(unknown)}'; convert the model again")

    def run(self, arrays: Mapping[str, Array], values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the model's outputs for its inputs `arrays` and the net's outputs `values`, all by ONNX names.

        Raises RunError if a node cannot be computed, and UsageError if a dynamic size is unknown.
        """
        results = {**arrays, **values, **self.program.run(self.feeds(arrays, values))}
        return {entry.name: results[entry.name] for entry in self.tail.outputs}

    def feeds(self, arrays: Mapping[str, Array], values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the inputs of the tail."""
        sizes = sizes_of(self._manifest.model_inputs, arrays)
        feeds = {name: values[name] for name in self.tail.inputs}
        feeds |= {entry.name: arrays[entry.name] for entry in self.tail.arrays}
        for text in self.tail.sizes:
            size = parsed_size(text, sizes)
            if not isinstance(size, int):
                raise UsageError(f"the tail needs the size {text}, which no input has")
            feeds[size_input(text)] = np.array([size], np.int64)
        return feeds


def tail_of(param: Path, manifest: Manifest | None, data: bytes | None = None) -> TailRunner | None:
    """Return the tail of a net, from `data` or from the file next to the net; None if the net has none.

    Raises UsageError if the file is missing or belongs to another net.
    """
    if manifest is None or manifest.tail is None:
        return None
    path = tail_path(param)
    if data is not None:
        return TailRunner(manifest, manifest.tail, data)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"the tail of {param} cannot be read: {path}: {error.strerror}") from error
    return TailRunner(manifest, manifest.tail, data, str(path))
