"""Reading and writing nets: a .param together with its .bin."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path

from onnx2ncnn_opt.errors import ParamError, UsageError
from onnx2ncnn_opt.ir.graph import Blob, Graph, check_blob_counts
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.param.binary import load_weights, open_bin, write_weights
from onnx2ncnn_opt.param.connect import ParsedNet
from onnx2ncnn_opt.param.param_bin import format_param_bin, is_param_bin, named_by_index, parse_param_bin
from onnx2ncnn_opt.param.splits import Listing, list_layers
from onnx2ncnn_opt.param.text import format_listing, parse_param

PathLike = str | os.PathLike[str]

_MAX_PARAM_BYTES = 1 << 28


@dataclass(frozen=True)
class NetFiles:
    """The two files of a net."""

    param: Path
    bin: Path

    @classmethod
    def at(cls, prefix: PathLike, *, binary: bool = False) -> NetFiles:
        """Return PREFIX.param (or PREFIX.param.bin) and PREFIX.bin."""
        base = os.fspath(prefix)
        return cls(Path(f"{base}.param.bin" if binary else f"{base}.param"), Path(f"{base}.bin"))


def read_net(param_path: PathLike, bin_path: PathLike, types: Mapping[str, LayerSpec] = LAYERS) -> ParsedNet:
    """Read a net whose .param is text or binary; its weights are views into the mapped .bin.

    `types` is the table of layers, custom layers with weights included. Raises ParamError and BinError.
    """
    parsed = _parse(param_path, types)
    trailing = load_weights(parsed.graph, open_bin(bin_path), file=os.fspath(bin_path))
    return parsed._replace(trailing_bytes=trailing)


def read_graph(param_path: PathLike, types: Mapping[str, LayerSpec] = LAYERS) -> Graph:
    """Read a net without its weights, from a .param that is text or binary. Raises ParamError."""
    return _parse(param_path, types).graph


def bin_beside(param: PathLike) -> Path:
    """Return NET.bin for NET.param or NET.param.bin."""
    path = Path(param)
    return path.with_name(path.name.removesuffix(".bin").removesuffix(".param") + ".bin")


def _parse(path: PathLike, types: Mapping[str, LayerSpec]) -> ParsedNet:
    file = os.fspath(path)
    try:
        size = os.path.getsize(path)
        if size > _MAX_PARAM_BYTES:
            raise ParamError(f"{file}: {size} bytes are too many for a .param file")
        data = Path(path).read_bytes()
    except OSError as error:
        raise ParamError(f"{file}: cannot be read: {error.strerror}") from error
    is_binary = is_param_bin(data)
    parsed = (parse_param_bin if is_binary else parse_param)(data, file=file, types=types)
    return parsed._replace(is_binary=is_binary)


def write_net(graph: Graph, param_path: PathLike, bin_path: PathLike, *, binary: bool = False) -> Mapping[Blob, str]:
    """Write a net, both files or neither; returns the names that its inputs and outputs have in the file.

    A name differs from the blob's only if ncnn cannot read the blob's name; in a `binary` .param names are indexes.
    Raises GraphError for a graph that the format cannot hold, and UsageError if the files cannot be written.
    """
    with all_or_nothing(param_path, bin_path) as (param_staged, bin_staged):
        return write_staged(graph, param_staged, bin_staged, binary=binary)


def write_staged(graph: Graph, param_staged: Path, bin_staged: Path, *, binary: bool = False) -> Mapping[Blob, str]:
    """Write a net like `write_net`, but into staged files: the caller renames them, together with further files."""
    listing = write_param(graph, param_staged, binary=binary)
    with bin_staged.open("wb") as stream:
        write_weights(graph, stream)
    return named_by_index(listing) if binary else listing.names


def write_param(graph: Graph, param: Path, *, binary: bool = False) -> Listing:
    """Write only the .param, without staging; return its lines."""
    for layer in graph:
        check_blob_counts(layer)
    listing = list_layers(graph)
    param.write_bytes(format_param_bin(listing) if binary else format_listing(listing).encode())
    return listing


@contextmanager
def all_or_nothing(*paths: PathLike) -> Iterator[tuple[Path, ...]]:
    """Yield temporary files to write; they are renamed only if the block ends without an error.

    The end of the process removes them too: an interrupt may come before the caller has entered the block.
    """
    targets = [Path(path) for path in paths]
    staged = tuple(target.with_name(f".{target.name}.{os.getpid()}.part") for target in targets)
    for target in targets:
        _clear_staged(target)
    clear = atexit.register(partial(_remove, staged))
    try:
        yield staged
        for part, target in zip(staged, targets, strict=True):
            os.replace(part, target)
    except OSError as error:
        raise UsageError(f"cannot write {' and '.join(map(str, targets))}: {error.strerror}") from error
    finally:
        clear()
        atexit.unregister(clear)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _clear_staged(target: Path) -> None:
    """Remove the temporary files of killed runs for the same target."""
    for part in target.parent.glob(f".{escape(target.name)}.*.part"):
        process = part.name.removeprefix(f".{target.name}.").removesuffix(".part")
        if process.isdigit() and not _is_alive(int(process)):
            _remove([part])


def _is_alive(process: int) -> bool:
    """Return True if the process exists, or on Windows, where `os.kill` would interrupt it."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True
