from __future__ import annotations

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, rewrite

_RANKS = {"Pooling1D": 2, "Pooling": 3, "Pooling3D": 4}
_PADS = ("pad_left", "pad_right", "pad_top", "pad_bottom", "pad_front", "pad_behind")


def _is_pointwise(pool: Layer) -> bool:
    """Return one element in, the same element out, everywhere."""
    assert pool.spec is not None
    params = [name for name in pool.spec.by_name if name.startswith(("kernel_", "stride_"))]
    pads = [name for name in _PADS if name in pool.spec.by_name]
    return all(pool[name] == 1 for name in params) and not any(pool[name] for name in pads)


@rewrite(
    op(_RANKS, "pool", where=_is_pointwise, global_pooling=0, adaptive_pooling=0)("x"),
    exact=True,
    purpose="nets of other converters and searched architectures",
)
def eliminate_pooling1x1(pool: Layer, x: Blob) -> Blob:
    """x ── Pooling (kernel 1, stride 1, no padding) ──   ⇒   x ──

    Pooling takes blobs of any rank and makes 3-D blobs of them, so the rank of x must be the layer's own.
    """
    known_shape(x, _RANKS[pool.type])
    return x
