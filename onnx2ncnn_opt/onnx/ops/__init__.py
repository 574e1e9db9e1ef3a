"""The operator families. A family is imported when an operator is looked up that none before it has."""

from importlib import import_module

from onnx2ncnn_opt.onnx import registry
from onnx2ncnn_opt.onnx.fold.bounds import FOLDED_ONLY, Bound
from onnx2ncnn_opt.onnx.registry import OnnxOp, Traits

# The families that most models need come first. Each has all versions of its operators.
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
    """See `registry`."""
    _load(domain, name)
    return registry.traits_of(domain, name, opset)


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
