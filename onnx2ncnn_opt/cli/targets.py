"""The files and folders that commands write to."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from onnx2ncnn_opt.errors import UsageError


def is_folder(prefix: str) -> bool:
    """Return True if -o is a folder: an existing one, or a path that ends with a separator."""
    return prefix.endswith(os.sep) or Path(prefix).is_dir()


def stem_of(model: Path) -> str:
    """Return the name of a model without its ending."""
    return model.name.removesuffix(".onnx").removesuffix(".pt2")


def client_prefix(model: Path, prefix: str | None) -> Path:
    """Return the prefix in a client's folder, which is -o or in -o; ultralytics knows a net by the folder's name."""
    folder = Path(prefix or model.parent)
    return (folder if folder.name.endswith("_ncnn_model") else folder / f"{stem_of(model)}_ncnn_model") / "model"


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def check_prefix(prefix: str, endings: tuple[str, ...]) -> None:
    """Raise UsageError if -o is the name of a file with one of these endings, or -."""
    if prefix.endswith(endings):
        raise UsageError(f"-o takes a prefix, not '{prefix}': '-o net' writes net{endings[0]} and its companions")
    if prefix == "-":
        raise UsageError("a net is several files, which standard output cannot take; -o takes a prefix")


def targets(sources: Iterable[Path], prefix_of: Callable[[Path], Path], option: str | None) -> dict[Path, Path]:
    """Return the prefix of each source; UsageError if two have the same. `option` is the value of -o."""
    prefixes: dict[Path, Path] = {}
    for source in sources:
        if source in prefixes:
            raise UsageError(f"{source} is given twice")
        path = prefix_of(source)
        others = [other for other, other_path in prefixes.items() if other_path == path]
        if others and option is not None and not is_folder(option):
            raise UsageError(f"-o {option} is one prefix for several nets; give a folder that is there")
        if others:
            raise UsageError(f"{others[0]} and {source} would both be written to {path}")
        prefixes[source] = path
    return prefixes


def check_targets(paths: Iterable[Path], sources: Mapping[str, Path]) -> None:
    """Raise UsageError before the work if a result cannot be written, or would overwrite a source; make its folder."""
    from onnx2ncnn_opt.param.files import is_special

    for path in paths:
        if is_special(path) and os.access(path, os.W_OK):
            continue
        folder = (path.resolve() if path.is_symlink() else path).parent
        if not folder.exists() and folder.parent.is_dir():
            try:
                folder.mkdir()
            except OSError as error:
                raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from error
            click.get_current_context().call_on_close(partial(_remove_empty, folder))
        if not folder.is_dir():
            missing = folder if folder.parent.is_dir() else folder.parent
            raise UsageError(f"cannot write {path}: there is no folder {missing}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"cannot write {path}: no permission to write into {folder.absolute()}")
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder")
        for what, source in sources.items():
            if path.exists() and path.samefile(source):
                raise UsageError(f"cannot write {path}: it is {what} itself")


def written(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return those files that exist, as entries of the JSON."""
    return [{"path": str(path), "bytes": path.stat().st_size} for path in paths if path.is_file()]
