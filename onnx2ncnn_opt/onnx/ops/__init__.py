"""The operator families, imported lazily in order until one has the requested operator."""

from importlib import import_module

from onnx2ncnn_opt.onnx.registry import OPS, OnnxOp, Traits

# The families that most models need come first. Each has all versions of its operators.
_FAMILIES = (
    *("activation", "shape", "window", "elementwise", "matrix", "reduction", "normalization"),
    *("gather", "pad_slice", "division", "resize", "logic", "recurrent"),
    *("sampling", "scatter", "topk", "detections", "attention", "control"),
    *("lists", "quantization", "spectral", "fused"),
)

FOLDED_ONLY = frozenset({"Constant", "NonZero", "Shape", "Size"})  # operators that fold, and have no importer


def find(domain: str, name: str, opset: int) -> OnnxOp | None:
    """Return the newest importer for an operator at an opset; plug-ins come first. None if there is none."""
    return max(_versions(domain, name, opset), key=lambda op: (op.is_foreign, op.since), default=None)


def traits_of(domain: str, name: str, opset: int) -> Traits:
    """Return the traits of an operator; the defaults if it has no importer."""
    op = find(domain, name, opset) or find(domain, name, 2**31)  # ONNX Runtime takes some operators of later opsets
    return Traits() if op is None else op.traits


def folds(domain: str, name: str, opset: int) -> bool:
    """Return `Traits.folds` of an operator; plug-ins cannot change it."""
    if domain:
        return False
    versions = [op for op in _versions("", name, opset) if not op.is_foreign]
    return versions[-1].traits.folds if versions else name in FOLDED_ONLY


def all_ops() -> tuple[OnnxOp, ...]:
    """Return every importer, by domain, name and version."""
    for family in _FAMILIES:
        _load(family)
    return tuple(op for key in sorted(OPS) for op in OPS[key])


def _versions(domain: str, name: str, opset: int) -> list[OnnxOp]:
    """Return the importers of an operator up to an opset; import families until one has the operator."""
    key = ("" if domain == "ai.onnx" else domain, name)
    for family in _FAMILIES:
        if any(not op.is_foreign for op in OPS.get(key, ())) or (not domain and name in FOLDED_ONLY):
            break
        _load(family)
    return [op for op in OPS.get(key, ()) if op.since <= opset]


def _load(family: str) -> None:
    import_module(f"{__name__}.{family}")
