"""Take an ONNX model exported from PyTorch straight to an optimised ncnn model, and prove that it computes the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.convert import Conversion, Files, convert
    from onnx2ncnn_opt.runtime.net import Net

__version__ = "0.1.0"

__all__ = ["Conversion", "Files", "Net", "__version__", "convert"]


def __getattr__(name: str) -> Any:
    """Load the converter when it is first asked for: the command line's `--help` needs none of it."""
    if name == "Net":
        from onnx2ncnn_opt.runtime import net

        return net.Net
    if name in __all__:
        from onnx2ncnn_opt.api import convert as api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
