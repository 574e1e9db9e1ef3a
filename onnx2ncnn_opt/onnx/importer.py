"""Import of an ONNX graph into an ncnn graph: whole, of one item of a batch, or up to a tail."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import onnx_ir

from onnx2ncnn_opt.errors import UnsupportedError, UsageError
from onnx2ncnn_opt.ir.cut import computed_from
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.onnx.custom import CustomOp
from onnx2ncnn_opt.onnx.items import Batch
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.tail.partition import split
from onnx2ncnn_opt.onnx.walk import Import, Imported

_Start: TypeAlias = Callable[..., Import]  # takes the model, and the batch axes of its inputs


def import_model(
    model: LoadedModel,
    *,
    batch_axes: Mapping[str, int | None] | None = None,
    types: Mapping[str, LayerSpec] = LAYERS,
    custom: Sequence[CustomOp] = (),
    tail: str = "never",
) -> Imported:
    """Map a loaded model to ncnn layers, and optimise only where that costs no layer.

    `batch_axes` fixes for inputs by name which axis is the Mat's batch count (None: no axis); `onnx.batch` infers the
    others. `types` is the graph's table of layers. `custom` operators become layers of their own. Unless `tail` is
    "never", nodes that ncnn cannot express may move to a tail, with "auto" also nodes of many layers; the model's graph
    then ends before them. Raises UnsupportedError with all other such nodes. Raises UsageError for unknown inputs in
    `batch_axes` and unknown operators in `custom`.
    """

    requested = batch_axes or {}
    if unknown := set(requested) - {info.name for info in model.net_inputs}:
        names = ", ".join(info.name for info in model.inputs)
        raise UsageError(f"no input is called '{min(unknown)}'; the inputs are {names}")
    start = partial(Import, types=types, custom=custom, is_short=tail == "auto")
    whole = _attempted(start, model, requested)
    net, single = _net_of(start, whole)
    if net is not None:
        return net
    if tail == "never" or whole.is_broken:
        raise whole.error()
    try:
        # The tail needs only nodes that the import of one item refuses.
        tail_part, nodes = split(model, (single or whole).refusals, whole.values, whole.error)
    except UnsupportedError:
        if not (single or whole).is_limited:
            raise
        return import_model(model, batch_axes=requested, types=types, custom=custom, tail="only-needed")
    head = tail_part.without(model)
    if whole.model is not model or not whole.drop(nodes, head, {}):
        whole = _attempted(start, head, requested)
    net, _ = _net_of(start, whole, single, nodes)
    if net is None:
        raise whole.error()
    return net._replace(tail=tail_part)


def _attempted(start: _Start, model: LoadedModel, requested: Mapping[str, int | None]) -> Import:
    """Import the model, again with equal sizes as long as operators demand that dynamic dimensions are equal."""
    axes = {info.name: requested[info.name] for info in model.net_inputs if info.name in requested}
    whole = start(model, axes)
    demanded = whole.attempt()
    return _attempted(start, model.bound(demanded), requested) if demanded else whole


def _net_of(
    start: _Start, whole: Import, single: Import | None = None, nodes: Collection[onnx_ir.Node] = ()
) -> tuple[Imported | None, Import | None]:
    """Return the net, of one item if the batch is free; and the import of one item if that refused nodes.

    The argument `single` is the import of one item from before `nodes` moved to a tail.
    """
    net, batch = whole.imported(), whole.free_batch()
    if batch is None:
        return net, None
    bound, inputs = whole.model.bound({batch.name: 1}), {**whole.requested_axes, **batch.inputs}
    outputs = {name: output.axis for name, output in batch.outputs.items()}
    if single is None or not single.drop(nodes, bound, outputs) or single.requested_axes != inputs:
        single = start(bound, inputs, output_axes=outputs)
        if single.attempt():
            return net, None
    one = single.imported()
    if one is None:
        return net, single
    return _with_batch(one, whole.model, batch) or net, None


def _with_batch(one: Imported, model: LoadedModel, batch: Batch) -> Imported | None:
    """Return the net of one item as the net of any batch, which ncnn runs item by item; None if the nets differ."""
    # In the net, too, an output has to depend on inputs that have items exactly if it has items.
    reached = computed_from(one.graph, [port.blob for port in one.inputs if port.name in batch.inputs])
    if any((port.blob in reached) != (batch.outputs[port.name].axis is not None) for port in one.outputs):
        return None
    if any(blob.batch != 1 for blob in reached):  # a layer turns an axis into a batch, and a Mat has only one batch
        return None
    shapes = {info.name: info.shape for info in model.inputs}
    return one._replace(
        inputs=tuple(port._replace(shape=shapes[port.name]) for port in one.inputs),
        outputs=tuple(port._replace(shape=batch.outputs[port.name].shape) for port in one.outputs),
    )
