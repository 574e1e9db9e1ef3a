"""Nets on disk: a .param and its .bin, read together and written together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from onnx2ncnn_opt.errors import ParamError, UsageError
from onnx2ncnn_opt.ir.graph import Blob, Graph, check_blob_counts
from onnx2ncnn_opt.param.binary import load_weights, open_bin, write_weights
from onnx2ncnn_opt.param.connect import DroppedSplit
from onnx2ncnn_opt.param.splits import list_layers
from onnx2ncnn_opt.param.text import format_listing, parse_param

PathLike = str | os.PathLike[str]

_MAX_PARAM_BYTES = 1 << 28


@dataclass(frozen=True)
class LoadedNet:
    """A net read from disk: its graph, the Splits that were not needed, and the bytes behind the last weight."""

    graph: Graph
    dropped_splits: tuple[DroppedSplit, ...]
    trailing_bytes: int


def read_net(param_path: PathLike, bin_path: PathLike) -> LoadedNet:
    """Read a net; its weights are views into the mapped .bin. Raises ParamError and BinError."""
    parsed = parse_param(_read_text(param_path), file=os.fspath(param_path))
    trailing = load_weights(parsed.graph, open_bin(bin_path), file=os.fspath(bin_path))
    return LoadedNet(parsed.graph, parsed.dropped_splits, trailing)


def _read_text(path: PathLike) -> bytes:
    try:
        size = os.path.getsize(path)
        if size > _MAX_PARAM_BYTES:
            raise ParamError(f"{os.fspath(path)}: {size} bytes are too many for a .param file")
        return Path(path).read_bytes()
    except OSError as error:
        raise ParamError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error


def write_net(graph: Graph, param_path: PathLike, bin_path: PathLike) -> Mapping[Blob, str]:
    """Write a net, both files or neither; returns the names that its inputs and outputs have in the file.

    The names differ from the blobs' own only where ncnn could not read those. Raises GraphError for a graph that the
    format cannot hold, and UsageError where the files cannot be written.
    """
    with all_or_nothing(param_path, bin_path) as (param_draft, bin_draft):
        return write_drafts(graph, param_draft, bin_draft)


def write_drafts(graph: Graph, param_draft: Path, bin_draft: Path) -> Mapping[Blob, str]:
    """As `write_net`, straight into these files; for a caller who has more files to bring in place with them."""
    for layer in graph:
        check_blob_counts(layer)
    listing = list_layers(graph)
    param_draft.write_bytes(format_listing(listing).encode())
    with bin_draft.open("wb") as stream:
        write_weights(graph, stream)
    return listing.names


@contextmanager
def all_or_nothing(*paths: PathLike) -> Iterator[tuple[Path, ...]]:
    """Temporary files to write, which take their places only when the block has ended without an error."""
    targets = [Path(path) for path in paths]
    drafts = tuple(target.with_name(f".{target.name}.{os.getpid()}.part") for target in targets)
    try:
        yield drafts
        for draft, target in zip(drafts, targets, strict=True):
            os.replace(draft, target)
    except OSError as error:
        raise UsageError(f"cannot write {' and '.join(map(str, targets))}: {error.strerror}") from error
    finally:
        for draft in drafts:
            with suppress(OSError):
                draft.unlink()
