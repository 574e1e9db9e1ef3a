"""Modules that commands import and hardly ever use, loaded only when somebody asks them for something.

onnx_ir imports sympy for arithmetic with symbolic sizes, which this package does itself; that import would take as long
as all others together. onnx imports its formats of text and its tools, protobuf what it is without its extension,
importlib.metadata what sends mail, and numpy its docstrings and ctypes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

_NAMES = frozenset(
    (
        *("sympy", "onnx_ir._symbolic_shapes"),
        *("google.protobuf.json_format", "google.protobuf.text_format", "google.protobuf.internal.python_message"),
        *("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars", "numpy._core._internal"),
        *("socket", "csv", "concurrent.futures", "packaging.version"),
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


class _Finder(MetaPathFinder):
    """Finds these modules where they are, and lets them wait."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _NAMES else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


_FINDER = _Finder()


def defer_imports() -> None:
    """From now on in this process."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
