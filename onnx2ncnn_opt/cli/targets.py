"""Where commands write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from onnx2ncnn_opt.errors import UsageError


def check_targets(paths: Iterable[Path], sources: Mapping[str, Path]) -> None:
    """Find out before the work whether its result could be written, and would not overwrite what it is made from."""
    for path in paths:
        folder = path.parent
        if not folder.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"cannot write {path}: no permission to write into {folder.absolute()}")
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder")
        for what, source in sources.items():
            if path.exists() and path.samefile(source):
                raise UsageError(f"cannot write {path}: it is {what} itself")
