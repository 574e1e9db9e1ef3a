from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.codes import Reduction
from onnx2ncnn_opt.ir.dim import product
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.ranges import Ranges
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.passes._constants import stored
from onnx2ncnn_opt.passes._gemm import Linear, linear_of, new_gemm
from onnx2ncnn_opt.passes._trace import Sizes, moved
from onnx2ncnn_opt.passes._views import chain_above, chain_below, end_of, private, view_layers
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, fixed_size, known_shape, layer_pass, needed, require

_SUM = op("Reduction", where=lambda layer: len(layer["axes"]) == 1, operation=Reduction.SUM, reduce_all=0, keepdims=0)
_MOST_ELEMENTS = 2**16  # to trace without a sum to save, because most products with views stay as they are
_MOST_WORK = 4  # times that of the old product, because blocks of the new matrix are zeros


class _Product(NamedTuple):
    """A blob made of the numbers of ``x @ weight.T + bias``: `elements` are their indexes."""

    elements: Array
    linear: Linear

    def times(self, linear: Linear) -> "_Product":
        """Return the product of each of the blob's rows with another matrix."""
        weight, bias = self.linear
        row, columns = np.divmod(self.elements, len(bias))
        require((row == row[..., :1]).all(), "a result depends on several rows")
        _, firsts, part = np.unique(columns[..., 0], return_index=True, return_inverse=True)
        parts, part = columns.reshape(-1, columns.shape[-1])[firsts], part.reshape(*row.shape[:-1], 1)
        require((columns == parts[part[..., 0]]).all(), "the parts of a row overlap")
        weight = (linear.weight @ weight[parts]).reshape(-1, weight.shape[1])
        bias, width = (bias[parts] @ linear.weight.T + linear.bias).reshape(-1), len(linear.bias)
        return _Product(row[..., :1] * len(bias) + part * width + np.arange(width), Linear(weight, bias))


@layer_pass(
    op("Gemm", where=lambda gemm: len(gemm.inputs) == 1), exact=False, purpose="gates of heads, as in WavLM; windows"
)
def fuse_gemm_views(gemm: Layer) -> Replacement | None:
    """x ── views ── Gemm ── views ── Reduction (sum) ──   ⇒   x ── Gemm ── views ──

    If each result depends on one row of x. The weights of parts of a row, such as heads, become blocks of a matrix.
    """
    above, below = private(chain_above(gemm.input)), chain_below(gemm.output)
    bottom = end_of(gemm.output, below)
    sums = tuple(user for user in bottom.users if bottom.uses == 1 and _SUM.fits(user))
    layers = (*above, gemm, *below, *sums)
    if len(layers) < 3 or not (above or sums):
        return None
    x, end, own = layers[0].input, layers[-1].output, linear_of(gemm)
    rows, width = product(known_shape(x)[:-1]), fixed_size(x, -1)
    sizes = Sizes(blob for layer in layers for blob in (*layer.inputs, *layer.outputs))
    count = sizes.number(rows) * width
    require(sums or count <= _MOST_ELEMENTS, f"'{x.name}' has too many elements to trace")
    made = _Product(np.arange(count).reshape(sizes.shape(x)), Linear(np.eye(width), np.zeros(width)))
    for layer in layers:
        if layer is gemm:
            made = made.times(own)
        elif layer in sums:
            made = made._replace(elements=np.moveaxis(made.elements, layer["axes"][0], -1))
            made = made.times(Linear(np.full((1, made.elements.shape[-1]), layer["coeff"]), np.zeros(1)))
            made = made._replace(elements=made.elements[..., 0])
        else:
            made = made._replace(elements=moved(layer, layer.output, made.elements, sizes))
    weight, bias = made.linear
    whole = Blob(f"{end.name}_rows", (rows, len(bias)), x.batch)
    steps = needed(sizes.views(whole, made.elements), f"'{end.name}' is no view of a product with '{x.name}'")
    flat = view_layers(x, (Regroup((rows, width)),) if x.shape != (rows, width) else (), like=layers[:1])
    if len(flat) + 1 + len(steps) >= len(layers):
        return None
    is_small = weight.size <= _MOST_WORK * own.weight.size * (width // own.weight.shape[1])
    require(is_small, f"the matrix for rows of '{x.name}' would be mostly zeros")
    require(own.weight.shape[1] == width or Ranges().of(x).is_finite, f"'{x.name}' may be NaN or infinite")
    b, c = stored(gemm, "B_data", weight).reshape(-1), stored(gemm, "C_data", bias) if bias.any() else None
    new = new_gemm(gemm, end_of(x, flat), len(bias), width, b, c)
    new.outputs = (whole,)
    views = view_layers(whole, steps, like=layers[-1:])
    return Replacement(
        layers, added=[(each, layers[0]) for each in (*flat, new, *views)], reads={end: end_of(whole, views)}
    )
