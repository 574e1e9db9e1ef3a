"""Convert ONNX models exported from PyTorch to optimised ncnn nets, and prove that they compute the same."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.version import __version__

if TYPE_CHECKING:
    from onnx2ncnn_opt.api.bisect import bisect as bisect
    from onnx2ncnn_opt.api.bisect import bisect_passes as bisect_passes
    from onnx2ncnn_opt.api.convert import convert as convert
    from onnx2ncnn_opt.api.diff import diff as diff
    from onnx2ncnn_opt.api.inspect import inspect as inspect
    from onnx2ncnn_opt.api.lower import Conversion as Conversion
    from onnx2ncnn_opt.api.lower import Files as Files
    from onnx2ncnn_opt.api.optimize import Optimized as Optimized
    from onnx2ncnn_opt.api.optimize import optimize as optimize
    from onnx2ncnn_opt.api.options import ConvertOptions as ConvertOptions
    from onnx2ncnn_opt.api.quantize import Quantization as Quantization
    from onnx2ncnn_opt.api.quantize import quantize as quantize
    from onnx2ncnn_opt.api.report import Report as Report
    from onnx2ncnn_opt.api.report import make_report as make_report
    from onnx2ncnn_opt.api.verify import verify as verify
    from onnx2ncnn_opt.param.files import NetFiles as NetFiles
    from onnx2ncnn_opt.progress import listening as listening
    from onnx2ncnn_opt.regression.run import check as check
    from onnx2ncnn_opt.runtime.net import Net as Net
    from onnx2ncnn_opt.verification.options import Verification as Verification

# The public names by module.
_NAMES = {
    "api.bisect": ("bisect", "bisect_passes"),
    "api.convert": ("convert",),
    "api.diff": ("diff",),
    "api.inspect": ("inspect",),
    "api.lower": ("Conversion", "Files"),
    "api.optimize": ("Optimized", "optimize"),
    "api.options": ("ConvertOptions",),
    "api.quantize": ("Quantization", "quantize"),
    "api.report": ("Report", "make_report"),
    "api.verify": ("verify",),
    "param.files": ("NetFiles",),
    "progress": ("listening",),
    "regression.run": ("check",),
    "runtime.net": ("Net",),
    "verification.options": ("Verification",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Import a module at the first access: the command line's `--help` needs none of them."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
