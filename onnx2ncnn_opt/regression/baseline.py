"""The baseline: for each model a verified net, its costs, and the model's results at that time.

For a model called models/a the folder contains

    models/a.check.json       the record below, with the hashes of the other files
    models/a.ncnn.param       the net, and its .bin
    models/a.ncnn.json        its manifest, if the converter wrote one
    models/a.npz              inputs, and the outputs of ONNX Runtime for them
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.api.lower import Files
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.manifest import file_hash
from onnx2ncnn_opt.param.files import all_or_nothing
from onnx2ncnn_opt.runtime.base import Array

FORMAT = 1
AGAIN = "`check --record` writes it again"
_RECORD = ".check.json"
_KINDS = ("in", "out")


class Example(NamedTuple):
    """Inputs of a model by name, and its outputs for them."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


@dataclass(frozen=True)
class Record:
    """The content of NAME.check.json.

    `model` is the hash of the model's file. `converter` is its command, empty for this package's own. `versions` and
    `checked` describe the run that recorded it. The net has `layers` (without Splits), `types` (layers by type) and
    `size` (bytes of .param and .bin). `accuracy` is the largest relative error in each mode. `milliseconds` is a run on
    one thread; for a decoder, a step of one token after a prompt of 64, which takes `prefill`. `ratio` is the time
    relative to the replaced net. `memory` is in bytes. These four are None if they were not measured. `files` has
    hashes by file name. `examples` has the names of inputs and outputs, which NAME.npz stores as 0_in_0, 0_out_0, ...
    """

    model: str
    converter: tuple[str, ...]
    versions: Mapping[str, str]
    checked: str
    layers: int
    types: Mapping[str, int]
    size: int
    accuracy: Mapping[str, float | None]
    milliseconds: float | None = None
    prefill: float | None = None
    ratio: float | None = None
    memory: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    examples: Sequence[Mapping[str, Sequence[str]]] = ()


@dataclass(frozen=True)
class BaselineFiles:
    """The files of a baseline for one model."""

    folder: Path
    name: str

    @property
    def stem(self) -> Path:
        """The common path of all files, without suffixes, inside the folder even for a model in `..`."""
        return self.folder.joinpath(*("_up" if part == ".." else part for part in self.name.split("/")))

    def path(self, suffix: str) -> Path:
        """Return one of the files."""
        return self.stem.with_name(self.stem.name + suffix)

    @property
    def record(self) -> Path:
        """NAME.check.json; a model without it has no baseline."""
        return self.path(_RECORD)

    @property
    def net(self) -> Files:
        """The net and its manifest, which may be missing."""
        return Files.of(self.stem)

    @property
    def arrays(self) -> Path:
        """The examples."""
        return self.path(".npz")

    def read(self) -> Record | None:
        """Return the record, None if there is none; raises UsageError if it is broken or the files have changed."""
        if not self.record.is_file():
            return None
        try:
            data = json.loads(self.record.read_bytes())
            version = data.pop("format")
            if version != FORMAT:
                raise UsageError(f"{self.record}: baseline format {version}, but this version reads format {FORMAT}")
            record = Record(**data)
            for name, hash in record.files.items():
                path = self.record.with_name(name)
                if not path.is_file():
                    raise UsageError(f"{self.record}: the baseline is not complete: there is no {path}")
                if file_hash(path) != hash:
                    raise UsageError(f"{path} is not the file that was recorded (an LFS pointer, a merge?); {AGAIN}")
        except OSError as error:
            raise UsageError(f"{self.record}: cannot be read: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UsageError(f"{self.record}: not a baseline: {error}; {AGAIN}") from error
        return record

    def examples(self, record: Record) -> list[Example]:
        """Return the stored arrays; raises UsageError if they cannot be read."""
        try:
            with np.load(self.arrays, allow_pickle=False) as data:
                return [
                    Example(*({x: data[f"{number}_{kind}_{i}"] for i, x in enumerate(names[kind])} for kind in _KINDS))
                    for number, names in enumerate(record.examples)
                ]
        # MemoryError: a broken header may claim any size.
        except (OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, zipfile.BadZipFile) as error:
            raise UsageError(f"{self.arrays}: the examples cannot be read: {error}; {AGAIN}") from error

    def write(
        self, record: dict[str, Any], param: Path, bin: Path, further: Sequence[Path], examples: Sequence[Example]
    ) -> None:
        """Write a net and its record, all files or none; `record` lacks `files` and `examples`.

        `further` are the manifest and the tail, which may be missing.
        """
        net = self.net
        optional = (net.manifest, net.tail)
        sources = {net.param: param, net.bin: bin}
        sources |= {path: source for path, source in zip(optional, further, strict=False) if source.is_file()}
        try:
            self.record.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write {self.record}: {error.strerror}") from error
        with all_or_nothing(*sources, self.arrays, self.record) as (*staged, arrays, staged_json):
            for part, source in zip(staged, sources.values(), strict=True):
                part.write_bytes(source.read_bytes())
            with arrays.open("wb") as stream:
                np.savez(stream, **_numbered(examples))  # type: ignore[arg-type]  # no key is an option
            written = zip((*sources, self.arrays), (*staged, arrays), strict=True)
            hashes = {path.name: file_hash(part) for path, part in written}
            names = [dict(zip(_KINDS, map(list, example), strict=True)) for example in examples]
            complete = Record(**record, files=hashes, examples=names)
            staged_json.write_bytes(json.dumps({"format": FORMAT, **asdict(complete)}, indent=1).encode() + b"\n")
        for path in set(optional).difference(sources):
            with suppress(OSError):  # files of the replaced net
                path.unlink()


def _numbered(examples: Sequence[Example]) -> dict[str, Array]:
    """Return all arrays by numbered keys, because names of a model may be no file names."""
    return {
        f"{number}_{kind}_{i}": array
        for number, example in enumerate(examples)
        for kind, arrays in zip(_KINDS, example, strict=True)
        for i, array in enumerate(arrays.values())
    }


def recorded_names(folder: Path) -> list[str]:
    """Return the models' names in the baseline, in the form of `BaselineFiles.stem`."""
    return [path.relative_to(folder).as_posix().removesuffix(_RECORD) for path in sorted(folder.rglob(f"*{_RECORD}"))]
