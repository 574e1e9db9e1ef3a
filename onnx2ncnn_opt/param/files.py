"""Reading and writing nets: a .param together with its .bin."""

import atexit
import os
import signal
import threading
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
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass(frozen=True)
class NetFiles:
    """The two files of a net."""

    param: Path
    bin: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return tuple(vars(self).values())

    @classmethod
    def at(cls, prefix: PathLike, *, binary: bool = False) -> "NetFiles":
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
    """Yield temporary files to write; they are renamed in this order, and only if the block ends without an error.

    Links are followed. What is no regular file, such as /dev/null, is written into. The end of the process removes
    temporary files too: an interrupt may come before the caller has entered the block.
    """
    targets = [Path(path) if is_special(path) else Path(os.path.realpath(path)) for path in paths]
    parts = [path if is_special(path) else path.with_name(f".{path.name}.{os.getpid()}.part") for path in targets]
    staged = {part: target for part, target in zip(parts, targets, strict=True) if part != target}
    for target in staged.values():
        _clear_staged(target)
    clear = atexit.register(partial(_remove, staged))
    try:
        yield tuple(parts)
        with _signals_held():
            for part, target in staged.items():
                os.replace(part, target)
    except OSError as error:
        raise UsageError(f"cannot write {' and '.join(map(str, paths))}: {error.strerror}") from error
    finally:
        clear()
        atexit.unregister(clear)


def is_special(path: PathLike) -> bool:
    """Return True for a device, a pipe or the like."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let signals wait until the end of the block: some of the files would be a mixture of two nets."""
    is_main = threading.current_thread() is threading.main_thread()  # only there do handlers run
    handlers = {number: handler for number in _SIGNALS if is_main and (handler := signal.getsignal(number)) is not None}
    held: list[int] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: held.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


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
