"""The operator families. A family is imported when an operator is looked up that none before it has."""

from __future__ import annotations

from importlib import import_module

from onnx2ncnn_opt.onnx import registry
from onnx2ncnn_opt.onnx.fold.bounds import FOLDED_ONLY, Bound
from onnx2ncnn_opt.onnx.registry import OnnxOp, Traits

# What most models need comes first. Each has all versions of its operators.
_FAMILIES = (
    *("activation", "shape", "convolution", "elementwise", "matrix", "reduction", "pooling", "normalization"),
    *("gather", "pad_slice", "division", "resize", "power", "logic", "recurrent"),
    *("sampling", "scatter", "arg", "attention", "bitwise", "control", "linear_attention"),
    *("lists", "quantization", "spectral", "topk", "fused"),
)


def find(domain: str, name: str, opset: int) -> OnnxOp | None:
    """See `registry`."""
    _load(domain, name)
    return registry.find(domain, name, opset)


def traits_of(domain: str, name: str, opset: int) -> Traits:
    """Return the traits of an operator, those of none if it has no importer."""
    op = find(domain, name, opset)
    return Traits() if op is None else op.traits


def fold_bound(domain: str, name: str, opset: int) -> Bound | None:
    """See `registry`."""
    _load(domain, name)
    return registry.fold_bound(domain, name, opset)


def all_ops() -> tuple[OnnxOp, ...]:
    """See `registry`."""
    _load("", "")
    return registry.all_ops()


def _load(domain: str, name: str) -> None:
    """Import families until one has the operator, or none is left."""
    for family in _FAMILIES:
        if registry.is_known(domain, name) or (not domain and name in FOLDED_ONLY):
            return
        import_module(f"{__name__}.{family}")
