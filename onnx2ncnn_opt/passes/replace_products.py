"""`replace_*_with_gemm`, `replace_gemm_with_innerproduct`: the fastest form of a product.

A product with a constant may be a Gemm, or an InnerProduct of the rows of a matrix. The
limits come from measurements (docs/measurements.md): beyond them, one layer was fastest at every size.
"""

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import Dim, product
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.ir.weight import Array, Weight
from onnx2ncnn_opt.passes._constants import constant_array, stored
from onnx2ncnn_opt.passes._fold import require_no_activation, require_own_weights
from onnx2ncnn_opt.passes._gemm import linear_of, new_gemm
from onnx2ncnn_opt.passes._views import steps_of, view_layers
from onnx2ncnn_opt.rewrite.pattern import const, op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

# InnerProduct reads the weights row by row: the fastest layer for up to 4 rows.
_FEW_ROWS = 4
# InnerProduct works on packs of 8 rows. It is 1.3 to 3.7 times slower than Gemm for other numbers of rows.
_MANY_ROWS, _PACK = 16, 8


def _is_of_matrix(layer: Layer) -> bool:
    """Return True if a layer's input is one matrix, or has an unknown shape."""
    x = layer.inputs[0]
    return x.shape is None or (len(x.shape) == 2 and x.batch == 1)


def _rows(layer: Layer) -> Dim | None:
    """Return the number of rows of a layer's input; None if it is not one matrix."""
    shape = layer.inputs[0].shape
    return shape[0] if shape is not None and _is_of_matrix(layer) else None


def _has_uneven_rows(layer: Layer) -> bool:
    rows = _rows(layer)
    return isinstance(rows, int) and rows >= _MANY_ROWS and rows % _PACK != 0


def _has_few_rows(layer: Layer) -> bool:
    rows = _rows(layer)
    return isinstance(rows, int) and rows <= _FEW_ROWS


@rewrite(
    op("InnerProduct", "product", _has_uneven_rows)("x"),
    exact=False,
    purpose="transformers in nets of onnx2ncnn, and written by hand",
)
def replace_innerproduct_with_gemm(x: Blob, product: Layer) -> Layer:
    """x ── InnerProduct (many rows) ──   ⇒   x ── Gemm (constant B) ──"""
    _, inputs = known_shape(x, 2)
    require_own_weights(product)
    require_no_activation(product)
    n = product["num_output"]
    k = product["weight_data_size"] // n
    require(inputs == k, f"'{x.name}' is not multiplied row by row")
    bias = product.weights["bias_data"] if product["bias_term"] else None
    return new_gemm(product, x, n, k, product.weights.stored("weight_data"), bias)


@rewrite(op("Gemm", "gemm", _has_few_rows)("x"), exact=False, purpose="tokens that come one by one")
def replace_gemm_with_innerproduct(x: Blob, gemm: Layer) -> Layer:
    """x ── Gemm (constant B, up to 4 rows) ──   ⇒   x ── InnerProduct ──"""
    _, inputs = known_shape(x, 2)
    linear = linear_of(gemm)
    n, k = linear.weight.shape
    require(inputs == k, f"the rows of '{x.name}' do not have {k} elements")
    is_same = gemm["transB"] and gemm["alpha"] == 1
    weights: dict[str, Array | Weight] = {
        "weight_data": gemm.weights.stored("B_data") if is_same else stored(gemm, "B_data", linear.weight).reshape(-1)
    }
    has_bias = bool(linear.bias.any())
    if has_bias:
        weights["bias_data"] = stored(gemm, "C_data", linear.bias)
    params = {"num_output": n, "bias_term": int(has_bias), "weight_data_size": n * k}
    return Layer("InnerProduct", gemm.name, [x], (), params, weights)


@rewrite(
    op("Reshape", "rows")(
        op("BinaryOp", "times", op_type=BinaryOp.MUL, with_scalar=0)(op("Reshape", "view")("x"), const("constant"))
    ),
    exact=False,
    purpose="sines of coordinates, as in DINOv3; numbers before it fold into the Gemm",
)
def replace_outer_product_with_gemm(x: Blob, view: Layer, constant: Layer, times: Layer, rows: Layer) -> list[Layer]:
    """x ── Reshape (.., 1) ── BinaryOp mul (a row) ── Reshape ──   ⇒   x ── Reshape (.., 1) ── Gemm ── Reshape ──"""
    row, shape = constant_array(constant), known_shape(view.output)
    fits = shape[-1] == 1 and row.ndim == len(shape) and row.size == row.shape[-1]
    require(fits and len(steps_of([view, rows])) == 2, f"'{times.name}' is no product of a column and a row")
    column = view_layers(x, (Regroup((product(shape), 1)),), like=[view])
    gemm = new_gemm(times, column[-1].output, row.size, 1, stored(times, "B_data", row).reshape(-1), None)
    gemm.outputs = (Blob(f"{times.output.name}_rows", (product(shape), row.size), x.batch),)
    return [*column, gemm, *view_layers(gemm.output, (Regroup(rows.output.known_shape),), like=[rows])]
