"""Modules that commands import and hardly ever use, loaded only when somebody asks them for something.

onnx_ir imports sympy for arithmetic with symbolic sizes, which this package does itself; that import would take as long
as all others together. onnx imports its formats of text and its tools, protobuf what it is without its extension,
importlib.metadata what sends mail and unpacks archives, and numpy its docstrings and ctypes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader

_NAMES = frozenset(
    (
        *("sympy", "onnx_ir._symbolic_shapes"),
        *("google.protobuf.json_format", "google.protobuf.text_format", "google.protobuf.internal.python_message"),
        *("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars"),
        *("numpy._core._internal", "onnx_ir.schemas", "onnx_ir.tape", "packaging.version"),
        *("bz2", "concurrent.futures", "csv", "ctypes", "difflib", "ipaddress", "lzma", "pickle", "random"),
        *("calendar", "socket", "tempfile", "tokenize"),
        *(
            "onnx.checker",
            "onnx.compose",
            "onnx.gen_proto",
            "onnx.parser",
            "onnx.printer",
            "onnx.utils",
            "onnx.version_converter",
        ),
    )
)


class _Later:
    """Makes modules that wait for their `loader`."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Waiting


class _Waiting(ModuleType):
    """A module that runs when somebody asks it for something.

    One of `importlib.util.LazyLoader` runs when a second module imports it, too.
    """

    def __getattribute__(self, name: str) -> Any:
        spec = ModuleType.__getattribute__(self, "__spec__")
        if name == "__spec__":
            return spec
        if name == "__module__":  # which modules do not have, as onnx_ir asks of all that it exports
            raise AttributeError(name)
        with _LOCK:
            if isinstance(spec.loader, _Later):
                spec.loader = spec.loader.loader
                spec.loader.exec_module(self)
                self.__class__ = ModuleType  # type: ignore[assignment]
        return ModuleType.__getattribute__(self, name)


_LOCK = RLock()


class _Finder:
    """Finds these modules where they are, and lets them wait."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _NAMES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)  # type: ignore[assignment]  # to inherit from Loader would import much
        return spec


_FINDER = _Finder()


def defer_imports() -> None:
    """From now on in this process."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
