"""The passes, each in a file of its name, and the pipeline: one tuple, in the order in which they take their turns.

The order matters where two passes want the same layer. What makes layers vanish comes first, since it brings others
together; expanded activations and normalisations are recognised before their parts are folded elsewhere; constants go
into weights before what is left of them becomes a layer. Attention comes after that, for scales and offsets are gone
from its way then, and before what turns matrix products around, which it would not recognise. Equal layers are merged
late: patterns want blobs with one use. Then layers without kernels become others, and dead layers go last. The pipeline
runs to a fixpoint, so that no pass depends on another having run before, only on who is asked first.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from functools import partial

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.releases import NEWEST, too_new
from onnx2ncnn_opt.passes import (
    fuse_gemm,
    fuse_layernorm,
    fuse_normalize,
    fuse_padding,
    fuse_permute_matrix,
    fuse_recurrent,
    fuse_sigmoid,
    replace_convolution_with_innerproduct,
    replace_products,
)
from onnx2ncnn_opt.passes.eliminate_dropout import eliminate_dropout
from onnx2ncnn_opt.passes.eliminate_flatten_after_global_pooling import eliminate_flatten_after_global_pooling
from onnx2ncnn_opt.passes.eliminate_flatten_after_innerproduct import eliminate_flatten_after_innerproduct
from onnx2ncnn_opt.passes.eliminate_identity import eliminate_identity
from onnx2ncnn_opt.passes.eliminate_nan_check_after_softmax import eliminate_nan_check_after_softmax
from onnx2ncnn_opt.passes.eliminate_noop import eliminate_noop
from onnx2ncnn_opt.passes.eliminate_orphaned_memorydata import eliminate_orphaned_memorydata
from onnx2ncnn_opt.passes.eliminate_padding_taps import eliminate_padding_taps
from onnx2ncnn_opt.passes.eliminate_pooling1x1 import eliminate_pooling1x1
from onnx2ncnn_opt.passes.eliminate_reshape_after_global_pooling import eliminate_reshape_after_global_pooling
from onnx2ncnn_opt.passes.eliminate_reshape_after_reduction import eliminate_reshape_after_reduction
from onnx2ncnn_opt.passes.eliminate_reshape_before_binaryop import eliminate_reshape_before_binaryop
from onnx2ncnn_opt.passes.eliminate_reshape_before_innerproduct import eliminate_reshape_before_innerproduct
from onnx2ncnn_opt.passes.eliminate_slice_concat import eliminate_slice_concat
from onnx2ncnn_opt.passes.eliminate_split import eliminate_split
from onnx2ncnn_opt.passes.eliminate_tile_before_binaryop import eliminate_tile_before_binaryop
from onnx2ncnn_opt.passes.eliminate_tile_before_sdpa import eliminate_tile_before_sdpa
from onnx2ncnn_opt.passes.fold_views import fold_views
from onnx2ncnn_opt.passes.fuse_activation import fuse_activation
from onnx2ncnn_opt.passes.fuse_affine import fuse_affine
from onnx2ncnn_opt.passes.fuse_affine_before import fuse_affine_before
from onnx2ncnn_opt.passes.fuse_binaryop_binaryop import fuse_binaryop_binaryop
from onnx2ncnn_opt.passes.fuse_binaryop_eltwise import fuse_binaryop_eltwise
from onnx2ncnn_opt.passes.fuse_binaryop_scale import fuse_binaryop_scale
from onnx2ncnn_opt.passes.fuse_clip import fuse_clip
from onnx2ncnn_opt.passes.fuse_concat_concat import fuse_concat_concat
from onnx2ncnn_opt.passes.fuse_convolution_convolution import fuse_convolution_convolution
from onnx2ncnn_opt.passes.fuse_crop_crop import fuse_crop_crop
from onnx2ncnn_opt.passes.fuse_crop_slice import fuse_crop_slice
from onnx2ncnn_opt.passes.fuse_gelu import fuse_fast_gelu, fuse_gelu
from onnx2ncnn_opt.passes.fuse_groupnorm import fuse_groupnorm
from onnx2ncnn_opt.passes.fuse_hardsigmoid import fuse_hardsigmoid
from onnx2ncnn_opt.passes.fuse_hardswish import fuse_hardswish
from onnx2ncnn_opt.passes.fuse_innerproduct_dropout import fuse_innerproduct_dropout
from onnx2ncnn_opt.passes.fuse_memorydata_binaryop import fuse_memorydata_binaryop
from onnx2ncnn_opt.passes.fuse_memorydata_view import fuse_memorydata_view
from onnx2ncnn_opt.passes.fuse_mish import fuse_mish
from onnx2ncnn_opt.passes.fuse_multiheadattention import fuse_multiheadattention
from onnx2ncnn_opt.passes.fuse_norm_affine import fuse_norm_affine
from onnx2ncnn_opt.passes.fuse_parallel_convolutions import fuse_parallel_convolutions
from onnx2ncnn_opt.passes.fuse_prelu import fuse_prelu
from onnx2ncnn_opt.passes.fuse_quickgelu import fuse_quickgelu
from onnx2ncnn_opt.passes.fuse_reduction_mul import fuse_reduction_mul
from onnx2ncnn_opt.passes.fuse_rmsnorm import fuse_rmsnorm
from onnx2ncnn_opt.passes.fuse_rotaryembed import fuse_rotaryembed
from onnx2ncnn_opt.passes.fuse_sdpa import fuse_sdpa, fuse_sdpa_scale
from onnx2ncnn_opt.passes.fuse_softmax import eliminate_shift_before_softmax, fuse_softmax
from onnx2ncnn_opt.passes.fuse_swish import fuse_swish
from onnx2ncnn_opt.passes.limit_mask_fill import limit_mask_fill
from onnx2ncnn_opt.passes.merge_equal_layers import merge_equal_layers
from onnx2ncnn_opt.passes.move_convolution_after_pooling import move_convolution_after_pooling
from onnx2ncnn_opt.passes.move_convolution_before_interp import move_convolution_before_interp
from onnx2ncnn_opt.passes.move_crop_before_concat import move_crop_before_concat
from onnx2ncnn_opt.passes.move_crop_up import move_crop_up
from onnx2ncnn_opt.passes.move_views import move_views
from onnx2ncnn_opt.passes.move_views_before_slice import move_views_before_slice
from onnx2ncnn_opt.passes.replace_binaryop_with_clip import replace_binaryop_with_clip
from onnx2ncnn_opt.passes.replace_convolution1d import replace_convolution1d
from onnx2ncnn_opt.passes.replace_convolution3d import replace_convolution3d
from onnx2ncnn_opt.passes.replace_convolution_with_pixelshuffle import replace_convolution_with_pixelshuffle
from onnx2ncnn_opt.passes.replace_deconvolution3d import replace_deconvolution3d
from onnx2ncnn_opt.passes.replace_dilated_convolution import replace_dilated_convolution
from onnx2ncnn_opt.passes.replace_prelu_with_leaky_relu import replace_prelu_with_leaky_relu
from onnx2ncnn_opt.passes.replace_reduction_with_global_pooling import replace_reduction_with_global_pooling
from onnx2ncnn_opt.passes.replace_slice_with_crop import replace_slice_with_crop
from onnx2ncnn_opt.passes.shrink_memorydata import shrink_memorydata
from onnx2ncnn_opt.rewrite import pipeline
from onnx2ncnn_opt.rewrite.events import Event
from onnx2ncnn_opt.rewrite.rule import Pass

PASSES: tuple[Pass, ...] = (
    eliminate_split,
    eliminate_noop,
    eliminate_identity,
    eliminate_dropout,
    *fuse_recurrent.PASSES,
    eliminate_pooling1x1,
    eliminate_flatten_after_global_pooling,
    eliminate_reshape_after_global_pooling,
    eliminate_flatten_after_innerproduct,
    fold_views,
    fuse_memorydata_view,
    shrink_memorydata,
    eliminate_reshape_before_binaryop,
    eliminate_reshape_before_innerproduct,
    eliminate_reshape_after_reduction,
    replace_reduction_with_global_pooling,
    *replace_convolution_with_innerproduct.PASSES,
    replace_products.replace_matmul_with_gemm,
    replace_products.replace_innerproduct_with_gemm,
    replace_slice_with_crop,
    fuse_crop_slice,
    eliminate_slice_concat,
    move_crop_before_concat,
    fuse_crop_crop,
    fuse_concat_concat,
    fuse_memorydata_binaryop,
    fuse_binaryop_binaryop,
    fuse_reduction_mul,
    replace_binaryop_with_clip,
    fuse_clip,
    fuse_prelu,
    replace_prelu_with_leaky_relu,
    *fuse_sigmoid.PASSES,
    fuse_swish,
    fuse_quickgelu,
    fuse_mish,
    fuse_hardsigmoid,
    fuse_hardswish,
    fuse_gelu,
    fuse_fast_gelu,
    eliminate_tile_before_binaryop,
    fuse_softmax,
    eliminate_shift_before_softmax,
    *fuse_layernorm.PASSES,
    fuse_rmsnorm,
    *fuse_normalize.PASSES,
    fuse_groupnorm,
    fuse_norm_affine,
    *fuse_padding.PASSES,
    eliminate_padding_taps,
    fuse_affine,
    fuse_parallel_convolutions,
    *fuse_gemm.PASSES,
    fuse_innerproduct_dropout,
    fuse_affine_before,
    move_convolution_after_pooling,
    move_convolution_before_interp,
    fuse_activation,
    fuse_rotaryembed,
    fuse_binaryop_eltwise,
    fuse_binaryop_scale,
    eliminate_nan_check_after_softmax,
    fuse_sdpa,
    fuse_sdpa_scale,
    eliminate_tile_before_sdpa,
    limit_mask_fill,
    move_views,
    fuse_multiheadattention,
    move_crop_up,
    move_views_before_slice,
    *fuse_permute_matrix.PASSES,
    fuse_convolution_convolution,
    replace_products.replace_gemm_with_innerproduct,
    merge_equal_layers,
    replace_convolution1d,
    replace_convolution3d,
    replace_deconvolution3d,
    replace_dilated_convolution,
    replace_convolution_with_pixelshuffle,
    replace_products.swap_gemm_operands,
    eliminate_orphaned_memorydata,
)


def select(skip: Collection[str], passes: Sequence[Pass] = PASSES) -> tuple[Pass, ...]:
    """Return the passes without those named in `skip`, or covering such a name; UsageError for a name that none has."""
    names = {name: p for p in passes for name in (p.name, *p.covers)}
    for unknown in sorted(set(skip) - set(names)):
        close = difflib.get_close_matches(unknown, list(names), n=1)
        meant = f"did you mean {close[0]}?" if close else "`onnx2ncnn-opt passes` lists them"
        raise UsageError(f"there is no pass called {unknown}; {meant}")
    skipped = {names[name] for name in skip}
    return tuple(p for p in passes if p not in skipped)


def run(
    graph: Graph,
    passes: Sequence[Pass] = PASSES,
    skip: Collection[str] = (),
    limit: int | None = None,
    check: bool = False,
    release: int = NEWEST,
) -> list[Event]:
    """Optimise a graph in place; returns what was done, then the near misses with their reasons.

    `skip` names passes to leave out; UsageError for one that does not exist. No rewrite makes a layer that the ncnn
    `release` does not have. See `pipeline.run` for the rest.
    """
    chosen = select(skip, passes)
    return pipeline.run(graph, chosen, limit=limit, check=check, veto=partial(too_new, release=release))
