import numpy as np

from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.passes._chain import Chain
from onnx2ncnn_opt.passes._constants import stored
from onnx2ncnn_opt.passes._fold import require_offsets_fold
from onnx2ncnn_opt.passes._gemm import Linear, columns_of_b, matrix_of, offset_per_column, require_constant_b, with_c
from onnx2ncnn_opt.passes._windows import is_pointwise
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite


def _gains(second: Layer) -> bool:
    """Return True if the product of a 1x1 convolution and the layer before has no more weights than both."""
    view = second.inputs[0].made_by("Reshape")
    first = (view or second).inputs[0].made_by("Convolution", "Gemm")
    if first is None or not is_pointwise(second):
        return False
    before = first["constantN"] * first["constantK"] if first.type == "Gemm" else first["weight_data_size"]
    outputs, both = second["num_output"], before + second["weight_data_size"]
    between = second["weight_data_size"] // outputs
    return bool(before // between * outputs <= both)


_SECOND = op("Convolution", "second", _gains)


@rewrite(
    _SECOND(op("Convolution", "first", activation_type=0)),
    _SECOND(op("Reshape", "view")(op("Gemm", "first", output_transpose=1, output_N1M=0))),
    exact=False,
    purpose="projections that follow each other, as in the heads of SegFormer",
)
def fuse_convolution_convolution(first: Layer, second: Layer, view: Layer | None = None) -> Layer | list[Layer]:
    """x ── Convolution, Gemm ── Convolution 1x1 ──   ⇒   x ── Convolution, Gemm ──

    If the product of their matrices has no more elements than both together.
    """
    before = matrix_of(first) if view is None else _matrix_of(first, view)
    after = matrix_of(second)
    weight = after.weight @ before.weight
    offset = after.weight @ before.bias
    bias = offset + after.bias
    require_offsets_fold(offset, after.bias, lambda: np.abs(weight).sum(axis=1))
    if view is None:
        params = {name: second[name] for name in ("num_output", "activation_type", "activation_params")}
        weights = {
            "weight_data": stored(first, "weight_data", weight).reshape(-1),
            "bias_data": stored(first, "bias_data", bias) if bias.any() else None,
        }
        new = first.having(weights=weights, bias_term=int(bias.any()), weight_data_size=weight.size, **params)
        return new.without_defaults()
    b = stored(first, "B_data", weight if first["transB"] else weight.T)
    product = with_c(first, bias, B_data=np.ascontiguousarray(b)).having(alpha=None, constantN=len(weight))
    chain = Chain(second)
    chain.activate(chain.reshape(chain.put(product, "product"), second.output.known_shape, "image"))
    return chain.result()


def _matrix_of(gemm: Layer, view: Layer) -> Linear:
    """Return the effect of a Gemm on each pixel if its result is reshaped to an image."""
    require_constant_b(gemm)
    rows, image = known_shape(gemm.output, 2), known_shape(view.output, 3)
    require(rows[0] == image[0], f"'{view.output.name}' has other channels than '{gemm.output.name}' has rows")
    return Linear(gemm["alpha"] * columns_of_b(gemm), gemm["alpha"] * offset_per_column(gemm))
