"""Nets after the passes, without a run."""

from typing import Any

from onnx2ncnn_opt import Optimized, optimize
from onnx2ncnn_opt.param.files import PathLike


def apply_passes(param: PathLike, bin: PathLike, **options: Any) -> Optimized:
    """Read a net and run the passes on it; run no net."""
    return optimize(param, bin, verification=None, **options)
