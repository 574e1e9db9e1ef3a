"""ncnn-check.toml: the models to check, their conversions, and the limits for the costs of their nets."""

import difflib
import glob
import math
import os
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from onnx2ncnn_opt.api.options import BLOB_NAMES, ConvertOptions
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.runtime.targets import MODES, check_modes
from onnx2ncnn_opt.system import split_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_FILE = "ncnn-check.toml"
DEFAULT_BASELINE = "ncnn-baseline"
PLACEHOLDERS = {
    "onnx": "the model",
    "out": "the prefix of the files to write",
    "stem": "the model's name in its folder",
}
_SUFFIXES = (".onnx", ".pt2")


@dataclass(frozen=True)
class Thresholds:
    """The limits for a model to pass.

    `accuracy` is the largest error of an output by mode, relative to its largest value; modes without a limit pass as
    `verify` decides. `sqnr`, in decibels, and `top1`, a share of rows, are the least agreement with the model over the
    data; they replace `accuracy` unless it is explicit. The other limits are factors of the baseline's cost, infinite
    for no limit.
    """

    accuracy: Mapping[str, float] = field(default_factory=dict)
    sqnr: float | None = None
    top1: float | None = None
    layers: float = 1.0
    size: float = 1.01
    latency: float = 1.2
    memory: float = 1.1


@dataclass(frozen=True)
class Model:
    """One model to check; paths are absolute.

    `name` is the path relative to the configuration, with "/" and without suffix. `convert` is the converter's command
    in words, empty for this package's own; `version` is a command that prints the converter's version. `data` has
    samples for `sqnr` and `top1`, in a format of `quantize`. `net` is the path of the .param to judge, None for the
    file that the converter writes to {out}. Empty `modes` mean the target's. `timeout` is in seconds, for the converter
    and for each run of the model or the net.
    """

    name: str
    path: Path
    convert: tuple[str, ...] = ()
    version: tuple[str, ...] = ()
    net: Path | None = None
    shapes: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    blob_names: str = BLOB_NAMES[0]
    inputs: tuple[Path, ...] = ()
    data: Path | None = None
    seeds: tuple[int, ...] = (0,)
    on: str | None = None
    modes: tuple[str, ...] = ()
    timeout: float = 300.0
    thresholds: Thresholds = Thresholds()

    @property
    def stem(self) -> str:
        """The model's name in its folder, without suffix."""
        return self.name.rpartition("/")[2]

    @property
    def options(self) -> ConvertOptions:
        """The options of this package's own `convert`."""
        return ConvertOptions(shapes=self.shapes, values=self.values, blob_names=self.blob_names)


@dataclass(frozen=True)
class Config:
    """The models to check, sorted by name, and the folder of the baseline."""

    file: Path
    baseline: Path
    models: tuple[Model, ...]

    def chosen(self, names: Sequence[str] = (), shard: tuple[int, int] = (1, 1)) -> "Config":
        """Return the configuration with only the i-th of n shares of the models that match one of the patterns."""
        for pattern in names:
            if not any(fnmatchcase(model.name, pattern) for model in self.models):
                existing = ", ".join(model.name for model in self.models)
                raise UsageError(f"{self.file}: no model is called '{pattern}'; there are {existing}")
        matching = [m for m in self.models if not names or any(fnmatchcase(m.name, pattern) for pattern in names)]
        return replace(self, models=tuple(matching[shard[0] - 1 :: shard[1]]))

    def everywhere(self, *, on: str | None = None, modes: Sequence[str] = ()) -> "Config":
        """Return the configuration with another device or other modes for all models."""
        changes: dict[str, Any] = ({"on": on} if on else {}) | ({"modes": check_modes(modes)} if modes else {})
        return replace(self, models=tuple(replace(model, **changes) for model in self.models))


def parse_shard(text: str) -> tuple[int, int]:
    """Return i and n of a shard "i/n"; i counts from 1."""
    first, _, count = text.partition("/")
    if first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count):
        return int(first), int(count)
    raise UsageError(f"a shard is i/n, the i-th of n parts, as 1/4 to 4/4; not '{text}'")


def read_config(path: Path) -> Config:
    """Read and check the file; raises UsageError that names a wrong key and its possible values."""
    try:
        data = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        advice = 'it needs a line such as models = ["*.onnx"] (docs/ci.md)'
        raise UsageError(f"{path}: cannot be read: {error.strerror}; {advice}") from error
    except (ValueError, RecursionError) as error:  # TOML's error, text that is not UTF-8, absurd nesting
        raise UsageError(f"{path}: not TOML: {error}") from error
    return _ConfigReader(path.absolute()).config(data)


class _Key(NamedTuple):
    """The valid values of a key: a predicate, and a description for errors."""

    is_valid: Callable[[Any], bool]
    description: str


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_shapes(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(sizes, list) and all(isinstance(size, (int, str)) and size is not True for size in sizes)
        for sizes in value.values()
    )


def _is_accuracy(value: Any) -> bool:
    if isinstance(value, dict):
        return all(mode in MODES and _is_number(limit) for mode, limit in value.items())
    return _is_number(value)


_TEXT = _Key(_is_text, "a text")
_COMMAND = _Key(_is_text, "a command, as it would be typed")
_FACTOR = _Key(_is_number, "a factor of what the baseline has, as 1.1; inf for no limit")
_TABLE = _Key(lambda value: isinstance(value, dict), "a table")

_MODEL_KEYS = {
    "convert": _COMMAND,
    "version": _COMMAND,
    "net": _TEXT,
    "shapes": _Key(_is_shapes, "a table of lists of sizes by the inputs' names"),
    "values": _TABLE,
    "blob_names": _Key(lambda value: value in BLOB_NAMES, " or ".join(BLOB_NAMES)),
    "data": _TEXT,
    "inputs": _Key(lambda value: _is_text(value) or _is_texts(value), "the path of an .npz file, or a list of them"),
    "seeds": _Key(
        lambda value: isinstance(value, list) and bool(value) and all(type(v) is int and v >= 0 for v in value),
        "a list of whole numbers",
    ),
    "on": _TEXT,
    "modes": _Key(_is_texts, f"a list of {', '.join(MODES)}"),
    "timeout": _Key(lambda value: _is_number(value) and value > 0, "a number of seconds"),
    "thresholds": _TABLE,
}
_THRESHOLD_KEYS = {
    "accuracy": _Key(_is_accuracy, f"a number for fp32, or a table with numbers for {', '.join(MODES)}"),
    "sqnr": _Key(_is_number, "a number of decibels"),
    "top1": _Key(lambda value: _is_number(value) and value <= 1, "a share of rows, as 0.99"),
    **dict.fromkeys(("layers", "size", "latency", "memory"), _FACTOR),
}
_FILE_KEYS = {
    "models": _Key(_is_texts, "a list of paths or patterns, as models/**/*.onnx"),
    "baseline": _TEXT,
    "model": _TABLE,
    **_MODEL_KEYS,
}


class _ConfigReader:
    """A reader of the parsed file; its errors name the place of a wrong value."""

    def __init__(self, file: Path) -> None:
        self.file, self.folder = file, file.parent

    def config(self, data: Mapping[str, Any]) -> Config:
        self.check(data, _FILE_KEYS, "")
        if "models" not in data:
            raise UsageError(f'{self.file}: models is missing, as in models = ["models/*.onnx"]')
        own = data.get("model", {})
        for name, table in own.items():
            self.require(isinstance(table, dict), f"model.{name}", "a table")
            self.check(table, _MODEL_KEYS, f"model.{name}.")
        paths = self.paths(data["models"])
        for name in own:
            if name not in paths:
                raise UsageError(f"{self.file}: there is no model '{name}'{_suggestion(name, paths)}")
        common = {key: value for key, value in data.items() if key in _MODEL_KEYS}
        models = [self.model(name, path, common, own.get(name, {})) for name, path in sorted(paths.items())]
        return Config(self.file, self.absolute(data.get("baseline", DEFAULT_BASELINE)), tuple(models))

    def paths(self, patterns: Sequence[str]) -> dict[str, Path]:
        paths: dict[str, Path] = {}
        for pattern in patterns:
            full = os.path.join(self.folder, pattern)
            # A plain path is listed even if the file is missing: then only this model fails.
            files = sorted(glob.glob(full, recursive=True)) if glob.has_magic(pattern) else [full]
            if not files:
                raise UsageError(f"{self.file}: no file fits the pattern '{pattern}' of models")
            for file in files:
                path = Path(os.path.normpath(file))
                name = self.name(path)
                for suffix in _SUFFIXES:
                    name = name.removesuffix(suffix)
                if paths.setdefault(name, path) != path:
                    raise UsageError(f"{self.file}: {paths[name]} and {path} would have one name; rename one of them")
        return paths

    def name(self, path: Path) -> str:
        try:
            return Path(os.path.relpath(path, self.folder)).as_posix()
        except ValueError:  # another drive of Windows
            return path.as_posix().replace(":", "").lstrip("/")

    def model(self, name: str, path: Path, common: Mapping[str, Any], own: Mapping[str, Any]) -> Model:
        keys, where = {**common, **own}, f"model.{name}."
        stem = {"stem": name.rpartition("/")[2]}
        readers: Mapping[str, Callable[[Any], Any]] = {
            "convert": lambda text: self.command(text, f"{where}convert", tuple(PLACEHOLDERS)),
            "version": lambda text: self.command(text, f"{where}version", ()),
            "net": lambda text: self.absolute(self.filled(text, f"{where}net", stem)),
            "inputs": lambda paths: tuple(map(self.absolute, [paths] if isinstance(paths, str) else paths)),
            "data": self.absolute,
            "seeds": lambda seeds: tuple(dict.fromkeys(seeds)),
            "modes": check_modes,
            "timeout": float,
        }
        fields = {key: readers[key](value) if key in readers else value for key, value in keys.items()}
        limits = {**common.get("thresholds", {}), **own.get("thresholds", {})}
        accuracy = limits.pop("accuracy", {})
        by_mode = dict(accuracy) if isinstance(accuracy, dict) else {"fp32": accuracy}
        fields["thresholds"] = Thresholds(by_mode, **{key: float(value) for key, value in limits.items()})
        return Model(name, path, **fields)

    def command(self, text: str, where: str, fields: Sequence[str]) -> tuple[str, ...]:
        try:
            words = split_command(text)
        except ValueError as error:
            raise UsageError(f"{self.file}: {where} is not a command: {error}") from error
        for word in words:
            self.filled(word, where, dict.fromkeys(fields, ""))
        return words

    def filled(self, text: str, where: str, values: Mapping[str, str]) -> str:
        try:
            if any(form or conversion for _, _, form, conversion in string.Formatter().parse(text)):
                raise ValueError
            return text.format(**values)
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            existing = ", ".join(f"{{{key}}} ({PLACEHOLDERS[key]})" for key in values) or "none"
            raise UsageError(
                f"{self.file}: {where}: '{text}' has a placeholder that does not exist; there are {existing}, "
                f"and {{{{ and }}}} are braces"
            ) from error

    def absolute(self, path: str) -> Path:
        return Path(os.path.normpath(self.folder / path))

    def check(self, table: Mapping[str, Any], keys: Mapping[str, _Key], where: str) -> None:
        for name, value in table.items():
            if name not in keys:
                raise UsageError(f"{self.file}: there is no key '{where}{name}'{_suggestion(name, keys)}")
            is_nan = isinstance(value, float) and math.isnan(value)
            self.require(keys[name].is_valid(value) and not is_nan, f"{where}{name}", keys[name].description)
            if name == "thresholds":
                self.check(value, _THRESHOLD_KEYS, f"{where}thresholds.")

    def require(self, is_valid: bool, where: str, description: str) -> None:
        if not is_valid:
            raise UsageError(f"{self.file}: {where} has to be {description}")


def _suggestion(name: str, names: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; there are {', '.join(names)}"
