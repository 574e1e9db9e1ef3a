import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._constants import is_constant, per_channel, per_column
from onnx2ncnn_opt.passes._fold import linear, offsets_of, slice_affine
from onnx2ncnn_opt.passes._gemm import columns_of_b, offset_per_column, require_constant_b, scaled_b, with_c
from onnx2ncnn_opt.passes._linear import LINEAR
from onnx2ncnn_opt.passes._views import step_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, known_shape, layer_pass, require

_AFFINE = op("BinaryOp", op_type=LINEAR)
_TRANSPOSE = op("Permute", order_type=1)


@layer_pass(
    op(("BatchNorm", "Scale", "BinaryOp"), where=lambda layer: layer.type != "BinaryOp" or _AFFINE.fits(layer)),
    exact=False,
    purpose="normalisation over a batch before linear layers, and a factor that an activation leaves (QuickGELU)",
)
def fuse_affine_before_gemm(affine: Layer) -> Replacement | None:
    """x ── BatchNorm, Scale, BinaryOp (constant) ── Gemm (constant B) ──   ⇒   x ── Gemm (constant B) ──

    Folds a factor and an offset per column of A into all Gemms that read it, also transposed; a number passes any view.
    """
    users = affine.output.users
    is_scalar = bool(affine.get("with_scalar"))
    views = users if len(users) == 1 and (step_of(users[0]) if is_scalar else _TRANSPOSE.fits(users[0])) else ()
    users = views[0].output.users if views else users
    constants = [blob for blob in affine.inputs if is_constant(blob)]
    if not users or any(user.type != "Gemm" for user in users) or len(affine.inputs) - len(constants) != 1:
        return None
    (x,) = (blob for blob in affine.inputs if blob not in constants)
    if not is_scalar:
        require(known_shape(x, 2) == affine.output.shape, f"'{affine.name}' broadcasts '{x.name}'")
    moved = [view.having(inputs=[x], outputs=[Blob(f"{x.name}_t")]) for view in views]
    source = moved[0].output if moved else x
    constant = constants[0].producer if constants else None
    gemms = {gemm: _with_affine(gemm, affine, constant, bool(gemm["transA"]) != bool(views), source) for gemm in users}
    return Replacement((affine, *views, *users), takes=gemms, added=[*zip(moved, views, strict=True)])


def _with_affine(gemm: Layer, affine: Layer, constant: Layer | None, outermost: bool, source: Blob) -> Layer:
    """Return the Gemm of `source`, with the affine layer before it folded; `outermost` says where its columns lie."""
    require_constant_b(gemm)
    count = gemm["constantK"]
    if affine.type == "BinaryOp":
        scale, shift = linear(affine, count, constant, per_channel if outermost else per_column)
    else:
        require(outermost, f"'{affine.name}' scales the rows of '{affine.output.name}', not its columns")
        scale, shift = slice_affine(affine, count)
    b = {"B_data": scaled_b(gemm, scale, rows=True)} if (scale != 1).any() else {}
    if not shift.any():
        return gemm.having(inputs=[source], weights=b)
    columns = columns_of_b(gemm)
    c = offsets_of(columns * shift, offset_per_column(gemm), lambda: np.abs(columns * scale).sum(axis=1))
    return with_c(gemm.having(inputs=[source]), c, **b)
