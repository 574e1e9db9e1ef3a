"""LinearAttention and CausalConvWithState: operators that pass a state from one step, or run, to the next."""

from typing import Any

from onnx2ncnn_opt.ir.codes import BinaryOp, UnaryOp
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.binary import binary, number
from onnx2ncnn_opt.onnx.lower.functional.concat import concat
from onnx2ncnn_opt.onnx.lower.functional.conv import conv
from onnx2ncnn_opt.onnx.lower.functional.crop import crop, split
from onnx2ncnn_opt.onnx.lower.functional.matmul import matmul
from onnx2ncnn_opt.onnx.lower.functional.pad import pad
from onnx2ncnn_opt.onnx.lower.functional.views import transposed
from onnx2ncnn_opt.onnx.lower.functional.window import ConvAttributes
from onnx2ncnn_opt.onnx.lower.memory_budget import MOST_STEPS
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Tensor, Value


@onnx_op("CausalConvWithState", since=27, batch=0)
def causal_conv_with_state(
    im: ImportContext,
    x: Tensor,
    weight: Value,
    bias: Value | None = None,
    past_state: Value | None = None,
    *,
    activation: str = "none",
) -> tuple[Value | None, ...]:
    """ConvolutionDepthWise1D after a Concat with the past, or Padding."""
    if activation not in ("none", "silu", "swish"):
        raise im.invalid(f"activation {activation} is not known")
    channels, length = x.shape[1], weight.shape[-1]
    if x.rank != 3 or not isinstance(channels, int) or not isinstance(length, int):
        raise im.refuse(f"operands of shapes {list(x.shape)} and {list(weight.shape)}", "bind sizes with --shape")
    if length == 1:
        if im.is_used(1):
            reason = "a state of no elements, and ncnn has no empty tensors"
            raise im.refuse(reason, "use Conv, since a kernel of one element has no state")
        padded: Value = x
    elif past_state is None:
        padded = pad(im, x, pads=(0, 0, length - 1, 0, 0, 0))
    else:
        padded = concat(im, past_state, x, axis=2)
    padded = im.tensor(padded)
    y = conv(im, padded, weight, bias, attrs=ConvAttributes(group=channels))
    state = crop(im, padded, 2, 1 - length, -233) if im.is_used(1) else None
    return y if activation == "none" else im.unary(y, "Swish"), state


@onnx_op("LinearAttention", since=27)
def linear_attention(
    im: ImportContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Value | None = None,
    decay: Value | None = None,
    beta: Value | None = None,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Value, ...]:
    """Unrolled steps: MatMuls for a key's part of the state, for the update, and for the query."""
    rules = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}
    if rules.get(update_rule) != (decay is not None, beta is not None):
        raise im.refuse(f"update_rule {update_rule} with these operands", "give decay and beta as the rule needs them")
    batch, *sizes = query.shape
    steps, width = im.fixed(sizes, "a dynamic number of steps")
    if steps > MOST_STEPS:
        reason = f"{steps} steps one after the other, more than {MOST_STEPS}"
        raise im.refuse(reason, "feed the sequence in shorter parts")
    if kv_num_heads < 1 or q_num_heads % kv_num_heads or width % q_num_heads:
        raise im.invalid(f"{q_num_heads} heads of {width} elements, which share {kv_num_heads} of keys")
    shared, size = q_num_heads // kv_num_heads, width // q_num_heads

    def each_step(x: Value | None, rows: int) -> list[Any]:
        """Split [batch, steps, heads * rows * columns] into [batch, heads, rows, columns] for each step."""
        if x is None:
            return [None] * steps
        columns = x.shape[-1]
        heads = 1 if columns == 1 else kv_num_heads
        if x.rank != 3 or not isinstance(columns, int) or columns % (heads * rows):
            raise im.invalid(f"an operand of shape {list(x.shape)} for {kv_num_heads} heads")
        parts = split(im, im.tensor(x), 1, (1,) * steps)
        return [im.reshape(part, (batch, heads, rows, columns // (heads * rows))) for part in parts]

    factor, state, results = scale or size**-0.5, past_state, []
    operands = (each_step(x, rows) for x, rows in ((query, shared), (key, 1), (value, 1), (decay, 1), (beta, 1)))
    for q, k, v, gate, rate in zip(*operands, strict=True):
        if state is not None and gate is not None:
            state = binary(im, BinaryOp.MUL, state, im.apply(transposed(gate), UnaryOp.EXP))
        if state is not None and rate is not None:
            v = binary(im, BinaryOp.SUB, v, matmul(im, k, state))
        if rate is not None:
            v = binary(im, BinaryOp.MUL, v, rate)
        update = matmul(im, transposed(k), v)
        state = update if state is None else binary(im, BinaryOp.ADD, state, update)
        y = matmul(im, q, state)
        results.append(im.reshape(y, (batch, 1, q_num_heads * y.shape[-1])))
    assert state is not None
    return binary(im, BinaryOp.MUL, concat(im, *results, axis=1), number(factor)), state
