"""Convert ONNX models exported from PyTorch to optimised ncnn nets, and prove that they compute the same."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.version import __version__

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.bisect import bisect, bisect_passes
    from onnx2ncnn_opt.api.convert import convert
    from onnx2ncnn_opt.api.diff import diff
    from onnx2ncnn_opt.api.inspect import inspect
    from onnx2ncnn_opt.api.lower import Conversion, Files
    from onnx2ncnn_opt.api.optimize import optimize
    from onnx2ncnn_opt.api.optimized import Optimized
    from onnx2ncnn_opt.api.quantize import Quantization, quantize
    from onnx2ncnn_opt.api.report import Report, make_report
    from onnx2ncnn_opt.api.verify import verify
    from onnx2ncnn_opt.param.files import NetFiles
    from onnx2ncnn_opt.progress import listening
    from onnx2ncnn_opt.regression.run import check
    from onnx2ncnn_opt.runtime.net import Net
    from onnx2ncnn_opt.verification.options import Verification

__all__ = [
    "Conversion",
    "Files",
    "Net",
    "NetFiles",
    "Optimized",
    "Quantization",
    "Report",
    "Verification",
    "__version__",
]
__all__ += ["bisect", "bisect_passes", "check", "convert", "diff", "inspect", "listening", "make_report", "optimize"]
__all__ += ["quantize", "verify"]

_MODULES = {
    "Conversion": "api.lower",
    "Files": "api.lower",
    "Net": "runtime.net",
    "NetFiles": "param.files",
    "Optimized": "api.optimized",
    "Quantization": "api.quantize",
    "Report": "api.report",
    "Verification": "verification.options",
    "bisect": "api.bisect",
    "bisect_passes": "api.bisect",
    "check": "regression.run",
    "convert": "api.convert",
    "diff": "api.diff",
    "inspect": "api.inspect",
    "listening": "progress",
    "make_report": "api.report",
    "optimize": "api.optimize",
    "quantize": "api.quantize",
    "verify": "api.verify",
}


def __getattr__(name: str) -> Any:
    """Import a module at the first access: the command line's `--help` needs none of them."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
