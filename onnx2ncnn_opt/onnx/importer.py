"""Import of an ONNX graph into an ncnn graph: whole, of one item of a batch, or up to a tail."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from onnx2ncnn_opt.errors import UnsupportedError, UsageError
from onnx2ncnn_opt.ir.cut import computed_from, drop_unused
from onnx2ncnn_opt.ir.dim import Dim, Sym, calls, named, substituted
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.ir.view import MAX_DIMS
from onnx2ncnn_opt.onnx.batch import dynamic_batches
from onnx2ncnn_opt.onnx.custom import CustomOp
from onnx2ncnn_opt.onnx.cut.extract import Tail, selecting
from onnx2ncnn_opt.onnx.cut.partition import split
from onnx2ncnn_opt.onnx.edit.masked import choose_by_masks
from onnx2ncnn_opt.onnx.items import Batch
from onnx2ncnn_opt.onnx.lower.functional.infinity import COMPARISONS
from onnx2ncnn_opt.onnx.lower.layout import output_layout
from onnx2ncnn_opt.onnx.ops import traits_of
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.read.structure import names_of
from onnx2ncnn_opt.onnx.value import Constant, Tensor
from onnx2ncnn_opt.onnx.walk import Port, Walk


class Imported(NamedTuple):
    """The ncnn graph of a model, and its inputs and outputs in ONNX order.

    `model` is the imported model, or its part before the `tail`.
    """

    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    custom: tuple[CustomOp, ...]
    minimum: Mapping[Dim, int]  # dynamic dimensions below which the net differs (see `ImportContext.demand`)
    cases: Collection[Dim]  # sizes that are above 0 for some dynamic dimensions only, see `Import._cases`
    kept: Mapping[str, str]  # the reason why a quantised product is float in the net, by its layer; "" if it is int8
    model: LoadedModel
    tail: Tail | None = None
    candidates: int = 0  # the last outputs: inner values from which the net selects rows


class Import(Walk):
    """The import of one model, and what can become of it: a net, the net of any batch, or a net without some nodes."""

    def error(self) -> UnsupportedError:
        """Return the error with all refused nodes."""
        outputs = {info.name for info in self.model.outputs}
        advice, cut = self.refusals.cut_advice(
            self.model.graph, outputs, self.values, lambda x: output_layout(x, None, partial(self.cost, x)) is not None
        )
        return UnsupportedError(self.refusals.unsupported, advice, cut)

    def imported(self) -> Imported | None:
        """Return the net; None if nodes were refused."""
        if self.refusals.unsupported:
            return None
        drop_unused(self.graph)
        self._minimum = {substituted(size, self._outer): least for size, least in self._minimum.items()}
        shapes = [blob.shape or () for layer in self.graph for blob in layer.outputs]  # no blob may be empty
        dynamic = {size for shape in shapes for size in named(shape, self._outer) if isinstance(size, Sym)}
        for size in sorted(dynamic, key=lambda size: (len(size.names()), str(size))):
            self.demand(size, 1)
        custom = tuple(self._custom.values())
        cases = sorted(set(self._cases(dynamic)), key=str)
        minimum = dict(sorted(self._minimum.items(), key=lambda demand: len(str(demand[0]))))  # programs say the first
        return Imported(self.graph, self._inputs, self._outputs, custom, minimum, cases, self._kept, self.model)

    def _cases(self, sizes: Collection[Dim]) -> Iterator[Dim]:
        """Yield sizes that, if they are above 0, often let the net compute otherwise than if they are not.

        They are remainders of divisions, differences of the operands of minima and maxima, tokens after the first one,
        and tokens beyond the window of a mask, which is a constant in a comparison or subtraction.
        """
        for call in chain.from_iterable(map(calls, sizes)):
            yield call.a - call.b * (call.a // call.b if call.operator == "//" else 1)
        shapes = (info.shape for info in self.model.net_inputs if len(info.shape) < MAX_DIMS)
        tokens = [size for shape in shapes for size in shape[1:] if isinstance(size, Sym)]
        nodes = (node for node in self.model.graph if node.op_type in COMPARISONS | {"Sub"})
        operands = (self.values.get(name) for node in nodes for name in names_of(node.inputs))
        numbers = (x for x in operands if isinstance(x, Constant) and x.dtype.kind == "i")
        for window in (0, *(x.scalar for x in numbers if x.scalar is not None)):
            yield from (size - abs(int(window)) - 1 for size in tokens)

    def free_batch(self) -> Batch | None:
        """Return a dynamic batch whose items stay apart in the whole model, so the net need not know its size."""
        outputs = {info.name: self.values.get(info.name) for info in self.model.outputs}
        for batch in dynamic_batches(self.model, self.requested_axes, self._inferred):
            for port in self._inputs:
                x = self.values[port.name]
                assert isinstance(x, Tensor)
                batch.add_input(x)
            for record in self._records:
                batch.add_node(*record)
            if batch.is_free(outputs, self._minimum, is_refused=bool(self.refusals.unsupported)):
                return batch
        return None


_Start: TypeAlias = Callable[..., Import]  # takes the model, and the batch axes of its inputs


def import_model(
    model: LoadedModel,
    *,
    batch_axes: Mapping[str, int | None] | None = None,
    output_axes: Mapping[str, int | None] | None = None,
    types: Mapping[str, LayerSpec] = LAYERS,
    custom: Sequence[CustomOp] = (),
    tail: str = "never",
    selects: bool = True,
) -> Imported:
    """Map a loaded model to ncnn layers, and optimise only where that costs no layer.

    `batch_axes` fixes for inputs by name which axis is the Mat's batch count (None: no axis); `onnx.batch` infers the
    others. `output_axes` does so for outputs; others leave in the cheapest layout. `types` is the graph's table of
    layers. `custom` operators become layers of their own. If it `selects`, the net itself may choose rows of
    NonMaxSuppression. Unless `tail` is "never", nodes that ncnn cannot express may move to a tail, with "auto" also
    nodes of many layers; the model's graph then ends before them. Raises UnsupportedError with all other such nodes.
    Raises UsageError for unknown inputs in `batch_axes` and unknown operators in `custom`.
    """

    requested = batch_axes or {}
    if unknown := set(requested) - {info.name for info in model.net_inputs}:
        names = ", ".join(info.name for info in model.inputs)
        raise UsageError(f"no input is called '{min(unknown)}'; the inputs are {names}")
    choose_by_masks(model.graph, lambda node: traits_of(node.domain, node.op_type, 2**31).axes == "each")
    start = partial(Import, types=types, custom=custom, is_short=tail == "auto", output_axes=output_axes)
    whole = _attempted(start, model, requested)
    net, single = _net_of(start, whole)
    if net is not None:
        return net
    inner = selecting(model, whole.values) if selects and not whole.is_broken else None
    chosen = _attempted(partial(start, is_short=False), inner, requested).imported() if inner else None
    if inner and chosen is not None:
        return chosen._replace(model=model, candidates=len(inner.outputs) - len(model.outputs))
    if tail == "never" or whole.is_broken:
        raise whole.error()
    try:
        # The tail needs only nodes that the import of one item refuses.
        tail_part = split(model, (single or whole).refusals, whole.values, whole.error)
    except UnsupportedError:
        if not (single or whole).is_limited:
            raise
        fixed: dict[str, Any] = {"batch_axes": requested, "output_axes": output_axes, "selects": False}
        return import_model(model, **fixed, types=types, custom=custom, tail="only-needed")
    head = _attempted(start, tail_part.without(model), requested)
    net, _ = _net_of(start, head)
    if net is None:
        raise head.error()
    return net._replace(tail=tail_part)


def _attempted(start: _Start, model: LoadedModel, requested: Mapping[str, int | None]) -> Import:
    """Import the model, again with equal sizes as long as operators demand that dynamic dimensions are equal."""
    axes = {info.name: requested[info.name] for info in model.net_inputs if info.name in requested}
    whole = start(model, axes)
    demanded = whole.attempt()
    return _attempted(start, model.bound(demanded), requested) if demanded else whole


def _net_of(start: _Start, whole: Import) -> tuple[Imported | None, Import | None]:
    """Return the net, of one item if the batch is free; and the import of one item if that refused nodes."""
    net, batch = whole.imported(), whole.free_batch()
    if batch is None:
        return net, None
    bound, inputs = whole.model.bound({batch.name: 1}), {**whole.requested_axes, **batch.inputs}
    outputs = {name: output.axis for name, output in batch.outputs.items()}
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
