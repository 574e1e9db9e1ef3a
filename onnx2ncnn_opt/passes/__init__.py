"""The passes, each in a file of its name, and the pipeline: one tuple, in the order of their attempts.

The order matters if two passes match the same layer. Passes that remove layers come first, because the remaining layers
become neighbours. Expanded activations and normalisations are fused before other passes fold their parts. Constants
are folded into weights before the rest of them becomes layers. Attention is fused after that, without scales and
offsets between its layers, and before passes transpose its matrix products. Equal layers are merged late, because
patterns need blobs with one use. Then layers without kernels are replaced, and dead layers go last. The pipeline runs
to a fixpoint, so no pass requires that another one ran before.
"""

import difflib
from collections.abc import Collection, Sequence
from functools import partial
from importlib import import_module

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.releases import NEWEST, too_new
from onnx2ncnn_opt.rewrite import pipeline
from onnx2ncnn_opt.rewrite.events import Event
from onnx2ncnn_opt.rewrite.rule import Pass

# An entry is a module, with all its passes in the order of their definitions, or one pass of a module.
_ORDER = (
    "eliminate_split",
    "eliminate_noop",
    "eliminate_identity",
    "eliminate_dropout",
    "fuse_recurrent",
    "eliminate_pooling1x1",
    "fold_views",
    "fuse_memorydata_view",
    "shrink_memorydata",
    "fuse_reduction_reduction",
    "eliminate_reshape_after_reduction",
    "eliminate_reshape_before_binaryop",
    "eliminate_reshape_before_innerproduct",
    "replace_reduction_with_global_pooling",
    "replace_convolution_with_innerproduct",
    "replace_products.replace_outer_product_with_gemm",
    "replace_products.replace_innerproduct_with_gemm",
    "replace_concat_with_views",
    "replace_slice_with_crop",
    "fuse_crop_slice",
    "eliminate_slice_concat",
    "move_crop_before_concat",
    "fuse_crop_crop",
    "fuse_convolution_crop",
    "move_sum_before_concat",
    "fuse_memorydata_binaryop",
    "fuse_binaryop_binaryop",
    "fuse_reduction_mul",
    "replace_binaryop_with_clip",
    "fuse_clip",
    "replace_prelu_with_leaky_relu",
    "fuse_swish",
    "fuse_quickgelu",
    "fuse_mish",
    "fuse_softplus",
    "fuse_hardsigmoid",
    "fuse_hardswish",
    "fuse_gelu",
    "eliminate_tile_before_binaryop",
    "fuse_layernorm",
    "fuse_rmsnorm",
    "fuse_normalize",
    "fuse_groupnorm",
    "fuse_norm_affine",
    "fuse_padding_convolution",
    "eliminate_padding_taps",
    "fuse_affine",
    "fuse_parallel_convolutions",
    "fuse_affine_before",
    "fuse_affine_before_gemm",
    "move_convolution_after_pooling",
    "move_convolution_before_interp",
    "fuse_activation",
    "fuse_masks",
    "move_tile_after_concat",
    "fuse_rotaryembed",
    "move_nan_check_after_attention",
    "fuse_binaryop_eltwise",
    "fuse_binaryop_scale",
    "move_sums_after_scores",
    "fuse_sdpa",
    "eliminate_tile_before_sdpa",
    "fuse_partial_rotaryembed",
    "replace_rotaryembed2d",
    "limit_mask_fill",
    "fuse_kv_cache",
    "move_views",
    "fuse_multiheadattention",
    "fuse_gemm_views",
    "fuse_parallel_gemms",
    "move_crop_up",
    "move_views_before_slice",
    "fuse_permute_matrix",
    "fuse_convolution_convolution",
    "replace_products.replace_gemm_with_innerproduct",
    "merge_equal_layers",
    "replace_convolution1d",
    "replace_convolution3d",
    "replace_deconvolution3d",
    "replace_dilated_convolution",
    "replace_convolution_with_pixelshuffle",
    "eliminate_orphaned_memorydata",
)


def _load(entry: str) -> list[Pass]:
    module, _, name = entry.partition(".")
    members = vars(import_module(f"{__name__}.{module}"))
    return [p for p in members.values() if isinstance(p, Pass) and name in ("", p.name)]


PASSES: tuple[Pass, ...] = tuple(p for entry in _ORDER for p in _load(entry))


def select(skip: Collection[str], passes: Sequence[Pass] = PASSES) -> tuple[Pass, ...]:
    """Return the passes except those named in `skip`; UsageError for an unknown name."""
    names = {p.name: p for p in passes}
    for unknown in sorted(set(skip) - set(names)):
        close = difflib.get_close_matches(unknown, list(names), n=1)
        hint = f"did you mean {close[0]}?" if close else "`onnx2ncnn-opt passes` lists them"
        raise UsageError(f"there is no pass called {unknown}; {hint}")
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
    """Optimise a graph in place; return the rewrites, then the near misses with their reasons.

    `skip` names passes to leave out; UsageError for one that does not exist. No rewrite adds a layer that the ncnn
    `release` lacks. See `pipeline.run` for the other arguments.
    """
    selected = select(skip, passes)
    return pipeline.run(graph, selected, limit=limit, check=check, veto=partial(too_new, release=release))
