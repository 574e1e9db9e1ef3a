"""Fused operators of com.microsoft, which ONNX Runtime's optimiser writes."""

from typing import Any

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import shape_text
from onnx2ncnn_opt.onnx import items
from onnx2ncnn_opt.onnx.items import NodeView
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.activation import clip
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.conv import conv
from onnx2ncnn_opt.onnx.lower.functional.crop import crop
from onnx2ncnn_opt.onnx.lower.functional.gather import gather
from onnx2ncnn_opt.onnx.lower.functional.logic import equal
from onnx2ncnn_opt.onnx.lower.functional.matmul import ProductAttributes, gemm, matmul
from onnx2ncnn_opt.onnx.lower.functional.norm import layer_norm, normal, rms_norm
from onnx2ncnn_opt.onnx.lower.functional.reduce import reduce
from onnx2ncnn_opt.onnx.lower.functional.window import ConvAttributes
from onnx2ncnn_opt.onnx.registry import MICROSOFT, onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Operand, Tensor, Value


@onnx_op("Gelu", domain=MICROSOFT, axes="each", errors="one")
def gelu(im: ImportContext, x: Tensor) -> Tensor:
    """GELU."""
    return im.unary(x, "GELU")


@onnx_op("BiasGelu", domain=MICROSOFT, axes="each", errors="one")
def bias_gelu(im: ImportContext, x: Tensor, b: Value) -> Tensor:
    """BinaryOp add and GELU."""
    return im.unary(binary(im, BinaryOp.ADD, x, b), "GELU")


@onnx_op("FastGelu", domain=MICROSOFT, axes="each", errors="one")
def fast_gelu(im: ImportContext, x: Tensor, b: Value | None = None) -> Tensor:
    """GELU with tanh."""
    return im.unary(x if b is None else binary(im, BinaryOp.ADD, x, b), "GELU", fast_gelu=1)


@onnx_op("QuickGelu", domain=MICROSOFT, axes="each", errors="one")
def quick_gelu(im: ImportContext, x: Tensor, *, alpha: float = 1.702) -> Value:
    """x * Sigmoid(alpha * x)."""
    return binary(im, BinaryOp.MUL, x, im.unary(binary(im, BinaryOp.MUL, x, number(alpha)), "Sigmoid"))


def _skipped(node: NodeView) -> int:
    """Apply the rule of normalised sums: elementwise, except that items must not be along the last axis."""
    axis = items.elementwise(node)
    items.require(axis != len(node.shape(0)) - 1)
    return axis


@onnx_op("SkipLayerNormalization", domain=MICROSOFT, axes="same", items=_skipped, errors="input")
def skip_layer_norm(
    im: ImportContext,
    x: Tensor,
    skip: Value,
    gamma: Value,
    beta: Value | None = None,
    b: Value | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Value | None, ...]:
    """BinaryOp add and LayerNorm."""
    total = _sum(im, x, skip, b)
    return *layer_norm(im, total, gamma, beta, epsilon=epsilon), total


def _embedded(node: NodeView) -> int:
    """Apply the rule of embeddings: words, segments, masks and positions have items."""
    operands = 0, 1, 7, 8
    node.only(*operands)
    items.require({node.axis(i) for i in operands} <= {0, None})
    return 0


_TABLES = {0: 2, 1: 4, 8: 3}  # of words, segments and positions


@onnx_op("EmbedLayerNormalization", domain=MICROSOFT, integers=True, indexes=_TABLES, items=_embedded, errors="input")
def embed_layer_norm(
    im: ImportContext,
    input_ids: Operand,
    segment_ids: Operand | None,
    word_embedding: Value,
    position_embedding: Value,
    segment_embedding: Value | None,
    gamma: Value,
    beta: Value,
    mask: Value | None = None,
    position_ids: Operand | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
) -> tuple[Value | None, ...]:
    """Embeds of words, positions and segments, BinaryOps add, and LayerNorm."""
    total: Value = gather(im, word_embedding, input_ids)
    if position_ids is not None:
        positions = gather(im, position_embedding, position_ids)
    else:
        rows, length = position_embedding.shape[0], input_ids.shape[1]
        im.demand(rows - length, 0)  # the table has a row for each position
        positions = (
            Constant(position_embedding.array[:length])
            if isinstance(position_embedding, Constant) and isinstance(length, int)
            else crop(im, im.tensor(position_embedding), 0, 0, length)
        )
    total = binary(im, BinaryOp.ADD, total, positions)
    if segment_ids is not None and segment_embedding is not None:
        total = binary(im, BinaryOp.ADD, total, gather(im, segment_embedding, segment_ids))
    lengths = None
    if im.is_used(1):
        if mask is None:
            raise im.refuse("its mask_index is used without a mask", "give it a mask")
        lengths = reduce(im, equal(im, mask, number(1)), "ReduceSum", (1,), 0)
    return normal(im, "LayerNorm", total, gamma, beta, 2, epsilon), lengths, total


@onnx_op("SkipSimplifiedLayerNormalization", domain=MICROSOFT, axes="same", items=_skipped)
def skip_rms_norm(
    im: ImportContext, x: Tensor, skip: Value, gamma: Value, b: Value | None = None, *, epsilon: float = 1e-12
) -> tuple[Value | None, ...]:
    """BinaryOp add and RMSNorm."""
    total = _sum(im, x, skip, b)
    return rms_norm(im, total, gamma, epsilon=epsilon), *_statistics(im), total


@onnx_op("SimplifiedLayerNormalization", domain=MICROSOFT, axes="same", items=items.from_axis(-1))
def simplified_layer_norm(
    im: ImportContext, x: Tensor, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Value | None, ...]:
    """RMSNorm."""
    return rms_norm(im, x, scale, axis=axis, epsilon=epsilon, stash_type=stash_type), *_statistics(im)[:1]


onnx_op("LayerNormalization", domain=MICROSOFT, axes="same", items=items.from_axis(-1), errors="input")(layer_norm)


def _sum(im: ImportContext, x: Tensor, skip: Value, b: Value | None) -> Tensor:
    total = binary(im, BinaryOp.ADD, x, skip)
    if total.shape != x.shape:
        reason = f"a skip of shape {shape_text(skip.shape)} for an input of shape {shape_text(x.shape)}"
        raise im.invalid(reason, zip(total.shape, x.shape, strict=False))
    return im.tensor(total if b is None else binary(im, BinaryOp.ADD, total, b))


def _statistics(im: ImportContext) -> tuple[None, None]:
    """Return None for outputs 1 and 2, which only training needs; raise Refusal if one is used."""
    if im.is_used(1) or im.is_used(2):
        reason = "its mean or deviation is used, and ncnn's layer gives neither"
        raise im.refuse(reason, "remove these outputs, which only training needs")
    return None, None


# Activation -> ncnn layer, and its parameters.
_ACTIVATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Relu": ("ReLU", ()),
    "Sigmoid": ("Sigmoid", ()),
    "Tanh": ("TanH", ()),
    "LeakyRelu": ("ReLU", ("slope",)),
    "HardSigmoid": ("HardSigmoid", ("alpha", "beta")),
    "Clip": ("Clip", ("min", "max")),
}


def _activated(im: ImportContext, x: Value, activation: str, params: tuple[float, ...]) -> Value:
    """Apply a fused operator's activation to its result."""
    if not activation:
        return x
    if activation not in _ACTIVATIONS:
        raise im.invalid(f"activation {activation} is not known")
    kind, names = _ACTIVATIONS[activation]
    if activation == "LeakyRelu":
        params = params or (0.01,)
    if len(params) < len(names):
        raise im.invalid(f"activation {activation} with {len(params)} parameters, not {len(names)}")
    if activation == "Clip":
        return clip(im, im.tensor(x), *params[:2])
    numbers: dict[str, Any] = dict(zip(names, params, strict=False))
    return im.unary(x, kind, **numbers)


@onnx_op("FusedConv", domain=MICROSOFT, batch=0)
def fused_conv(
    im: ImportContext,
    x: Tensor,
    w: Value,
    b: Value | None = None,
    z: Value | None = None,
    *,
    activation: str = "",
    activation_params: tuple[float, ...] = (),
    attrs: ConvAttributes,
) -> Value:
    """Conv, an addition, and an activation."""
    y: Value = conv(im, x, w, b, attrs=attrs)
    return _activated(im, y if z is None else binary(im, BinaryOp.ADD, y, z), activation, activation_params)


@onnx_op("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(
    im: ImportContext, a: Value, b: Value, *, attrs: ProductAttributes, transBatchA: int = 0, transBatchB: int = 0
) -> Value:
    """MatMul of transposed operands, times alpha."""
    if transBatchA or transBatchB:
        reason = "transBatchA or transBatchB is 1: only the last two axes are transposed"
        raise im.refuse(reason, "use a Transpose before it")
    product = matmul(im, *attrs.matrices(a, b))
    return product if attrs.alpha == 1 else binary(im, BinaryOp.MUL, product, number(attrs.alpha))


@onnx_op("FusedGemm", domain=MICROSOFT)
def fused_gemm(
    im: ImportContext,
    a: Value,
    b: Value,
    c: Value | None = None,
    *,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    attrs: ProductAttributes,
    beta: float = 1.0,
) -> Value:
    """Gemm and an activation."""
    product = gemm(im, a, b, c, attrs=attrs, beta=beta)
    params = tuple(value for value in (activation_alpha, activation_beta) if value is not None)
    if activation_gamma is not None:
        raise im.refuse(f"activation {activation} with gamma", "use an activation without gamma")
    return _activated(im, product, activation, params)
