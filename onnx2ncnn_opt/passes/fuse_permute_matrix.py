"""`fuse_permute_*`, `fuse_gemm_permute`: fold transpositions into the flags of matrix products."""

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Reorder
from onnx2ncnn_opt.passes._gemm import require_constant_b
from onnx2ncnn_opt.passes._views import end_of, shortest, steps_of, view_layers
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite

# order_type 1 swaps the last two axes for any rank, and does not change a vector.
_SWAP = op("Permute", "permute", order_type=1)
GEMM = op("Gemm", "gemm", output_N1M=0, output_elempack=0)


@rewrite(
    GEMM(_SWAP("x")),
    GEMM(_SWAP("x"), "other"),
    GEMM("other", _SWAP("x")),
    GEMM(_SWAP("x"), "other", "c"),
    GEMM("other", _SWAP("x"), "c"),
    exact=False,
    purpose="one blob less; Gemm reads transposed operands at the same cost",
)
def fuse_permute_gemm(x: Blob, permute: Layer, gemm: Layer) -> Layer:
    """x ── Permute ── Gemm ──   ⇒   x ── Gemm (transA or transB) ──"""
    known_shape(x, 2)
    position = gemm.inputs.index(permute.output)
    dynamic = [name for name in "AB" if not gemm[f"constant{name}"]]
    require(position < len(dynamic), f"'{permute.output.name}' is added, not multiplied")
    require(gemm["quantize_term"] == 0, f"Gemm '{gemm.name}' is quantised")
    flag = f"trans{dynamic[position]}"
    inputs = [x if blob is permute.output else blob for blob in gemm.inputs]
    require(gemm.inputs.count(permute.output) == 1, f"'{permute.output.name}' is used twice")
    new = gemm.having(inputs=inputs)
    new.params[flag] = 1 - gemm[flag]
    return new


@rewrite(
    GEMM(op("Reshape", "view")(op("Permute", "permute")("x"))),
    exact=False,
    purpose="transformers with convolutions of images between linear layers (SegFormer, PVT)",
)
def fuse_permute_reshape_gemm(x: Blob, permute: Layer, view: Layer, gemm: Layer) -> list[Layer]:
    """x ── Permute (channels last) ── Reshape ── Gemm ──   ⇒   x ── Reshape (pixels last) ── Gemm (transA) ──"""
    require_constant_b(gemm)
    known_shape(view.output, 2)
    before = steps_of([permute, view])
    steps = shortest(known_shape(x), (*before, Reorder((1, 0)))) if len(before) == 2 else None
    require(steps is not None and len(steps) < 2, f"the columns of '{view.output.name}' do not lie in '{x.name}'")
    views = view_layers(x, steps or (), like=[view])
    return [*views, gemm.having(inputs=[end_of(x, views)], transA=1 - gemm["transA"]).without_defaults()]


@rewrite(_SWAP(GEMM), exact=False, purpose="MLP-Mixer and models with channels last; one blob less")
def fuse_gemm_permute(gemm: Layer) -> Layer:
    """x ── Gemm ── Permute ──   ⇒   x ── Gemm (output_transpose) ──"""
    known_shape(gemm.output, 2)
    require(gemm["quantize_term"] == 0, f"Gemm '{gemm.name}' is quantised")
    return gemm.having(output_transpose=1 - gemm["output_transpose"])
