"""Lazy imports of modules that other packages import, and that this one does not use.

onnx_ir imports sympy for symbolic sizes. This package does not need it (`ir/dim.py`), and importing sympy takes as long
as all other imports together. The others have text formats, protobuf in Python, and NumPy's docstrings.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

_NAMES = frozenset(
    (
        *("sympy", "onnx_ir._symbolic_shapes", "onnx.gen_proto", "onnx.utils", "packaging.version"),
        *(f"google.protobuf.{name}" for name in ("json_format", "text_format", "internal.python_message")),
        "numpy._core._add_newdocs",
    )
)


class _Finder:
    """Finds the modules of `_NAMES`, and defers their execution to the first access."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _NAMES else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


_FINDER = _Finder()


def defer_imports() -> None:
    """Import the modules of `_NAMES` lazily from now on in this process."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
