"""The last steps before a graph is written: check the release, store weights in 16 bits, set feature masks."""

from collections.abc import Collection
from typing import get_args

from onnx2ncnn_opt.errors import Unsupported, UnsupportedError, UsageError
from onnx2ncnn_opt.ir.features import Device, MasksFor
from onnx2ncnn_opt.ir.graph import Blob, Graph
from onnx2ncnn_opt.ir.releases import too_new
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.param.storage import Storage, own_storage, plan_storage
from onnx2ncnn_opt.rewrite.prove_masks import Mask, prove_masks, put_masks


def finish(
    graph: Graph,
    *,
    encoding: Encoding | None = None,
    keeps_storage: bool = False,
    masks: MasksFor = True,
    integers: Collection[Blob] = (),
) -> tuple[Storage | None, tuple[Mask, ...]]:
    """Store weights in 16 bits, and set the masks that the graph proves; return the storage plan and the masks.

    `encoding` is the format of the weights. Without it, `keeps_storage` gives 16 bits again to weights that passes
    computed only from 16-bit weights. `integers` are blobs that hold integers for the caller. Raises UsageError for an
    unknown device in `masks`.
    """
    if not isinstance(masks, bool) and masks not in get_args(Device):
        raise UsageError(f"masks have to be True, False, {' or '.join(map(repr, get_args(Device)))}, not {masks!r:.80}")
    plan = plan_storage(graph, encoding) if encoding else own_storage(graph) if keeps_storage else None
    if plan:
        plan.apply()
    proved = prove_masks(graph, integers=integers, wanted=masks)
    put_masks(graph, ((layer, mask.features) for layer, mask in proved.items()))
    return plan, tuple(proved.values())


def require_release(graph: Graph, release: int) -> None:
    """Raise UnsupportedError if an ncnn release lacks layers of the graph; the error names all of them."""
    nodes = [
        Unsupported(", ".join(layer.origin) or layer.name, layer.type, reason)
        for layer in graph
        if (reason := too_new(layer, release)) is not None
    ]
    if nodes:
        raise UnsupportedError(nodes)
