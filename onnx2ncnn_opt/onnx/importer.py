"""Import of an ONNX graph into an ncnn graph: constants fold, views stay lazy until a layer needs a layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx_ir

from onnx2ncnn_opt.errors import GraphError, ShapeError, Unsupported, UnsupportedError, UsageError, plugged
from onnx2ncnn_opt.ir.cut import computed_from, drop_unused
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, named, shape_text
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.int8 import PRODUCTS, imported_int8
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.ir.view import MAX_DIMS, View
from onnx2ncnn_opt.onnx.arguments import attributes_of, call
from onnx2ncnn_opt.onnx.batch import batch_axes, dynamic_batches
from onnx2ncnn_opt.onnx.custom import CustomOp, import_custom, numbered
from onnx2ncnn_opt.onnx.fold import sizes
from onnx2ncnn_opt.onnx.fold.evaluate import CannotFold, TooLarge, evaluate_node
from onnx2ncnn_opt.onnx.fold.inferred import inferred_outputs
from onnx2ncnn_opt.onnx.fold.sizes.cells import Known, map_cells
from onnx2ncnn_opt.onnx.items import Batch, ItemRule
from onnx2ncnn_opt.onnx.lower.builder import Builder, Invalid, Refusal, Results, ShapeMismatch
from onnx2ncnn_opt.onnx.lower.context import ImportContext, MissingOperand
from onnx2ncnn_opt.onnx.lower.functional.symbolic_tensor import computed
from onnx2ncnn_opt.onnx.lower.layout import Layout, first_batch, plain_dims
from onnx2ncnn_opt.onnx.lower.memory_budget import MemoryBudget, check_results, check_size
from onnx2ncnn_opt.onnx.ops import find, folds, traits_of
from onnx2ncnn_opt.onnx.read.binding import InputInfo, LengthInfo
from onnx2ncnn_opt.onnx.read.caches import past_lengths
from onnx2ncnn_opt.onnx.read.given import listed_sizes, solved
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.read.quantized import INT8, Int8
from onnx2ncnn_opt.onnx.read.schema import schema_error
from onnx2ncnn_opt.onnx.read.structure import nodes_of, read_values
from onnx2ncnn_opt.onnx.registry import OnnxOp, qualified
from onnx2ncnn_opt.onnx.tail.extract import Tail, label
from onnx2ncnn_opt.onnx.tail.partition import INDICES, MANY_LAYERS, PICKS, ImportState, Readers, split
from onnx2ncnn_opt.onnx.value import Constant, Item, SymbolicTensor, Tensor, TensorSequence, element_type, held_as_float
from onnx2ncnn_opt.progress import counted

MOST_INLINED = 20_000  # nodes of all loops; larger nets are useless

# Advice for operators that ncnn lacks, by domain.
_ADVICE = {"": "", "ai.onnx.preview": "", "ai.onnx.ml": ": run it in ONNX Runtime, and export the neural network alone"}


_Start: TypeAlias = "Callable[..., _Import]"  # takes the model, and the batch axes of its inputs


@dataclass(eq=False)
class _Equal(Exception):
    """Raised during the import: operators demand these `sizes` of dynamic dimensions."""

    sizes: Mapping[str, Dim]


class Port(NamedTuple):
    """One input or output of the model: its ONNX name, shape and type, and its blob in the net."""

    name: str
    blob: Blob
    shape: Shape
    dtype: np.dtype[np.generic]
    batch_axis: int | None  # the ONNX axis that is the Mat's batch count; None if all axes are dims
    element: str  # the type of the Mat's elements
    length: tuple[str, str] | None = None  # see the manifest's `Entry`

    @property
    def free_batch(self) -> str | None:
        """The name of a dynamic batch that the net is independent of; None if there is none."""
        size = None if self.batch_axis is None else self.shape[self.batch_axis]
        return str(size) if isinstance(size, Sym) and self.blob.batch == 1 else None


class Imported(NamedTuple):
    """The ncnn graph of a model, and its inputs and outputs in ONNX order.

    `model` is the imported model, or its part before the `tail`.
    """

    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    custom: tuple[CustomOp, ...]
    minimum: Mapping[Dim, int]  # dynamic dimensions below which the net differs (see `ImportContext.demand`)
    kept: Mapping[str, str]  # the reason why a quantised product is float in the net, by its layer; "" if it is int8
    model: LoadedModel
    tail: Tail | None = None


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
    start = partial(_Import, types=types, custom=custom, is_short=tail == "auto")
    whole = _attempted(start, model, requested)
    net, single = _net_of(start, whole)
    if net is not None:
        return net
    if tail == "never" or whole.is_broken:
        raise whole.error()
    try:
        tail_part, nodes = split(model, whole.state(single))
    except UnsupportedError:
        if not (single or whole).is_limited:
            raise
        return import_model(model, batch_axes=requested, types=types, custom=custom, tail="only-needed")
    head = tail_part.without(model)
    if whole.model is not model or not whole.leave(nodes, head, {}):
        whole = _attempted(start, head, requested)
    net, _ = _net_of(start, whole, single, nodes)
    if net is None:
        raise whole.error()
    return net._replace(tail=tail_part)


def _attempted(start: _Start, model: LoadedModel, requested: Mapping[str, int | None]) -> _Import:
    """Import the model, again with equal sizes as long as operators demand that dynamic dimensions are equal."""
    axes = {info.name: requested[info.name] for info in model.net_inputs if info.name in requested}
    whole = start(model, axes)
    demanded = whole.attempt()
    return _attempted(start, model.bound(demanded), requested) if demanded else whole


def _net_of(
    start: _Start, whole: _Import, single: _Import | None = None, nodes: Collection[onnx_ir.Node] = ()
) -> tuple[Imported | None, _Import | None]:
    """Return the net, of one item if the batch is free; and the import of one item if that refused nodes.

    The argument `single` is the import of one item from before `nodes` moved to a tail.
    """
    net, batch = whole.imported(), whole.free_batch()
    if batch is None:
        return net, None
    bound, inputs = whole.model.bound({batch.name: 1}), {**whole.requested_axes, **batch.inputs}
    outputs = {name: output.axis for name, output in batch.outputs.items()}
    if single is None or not single.leave(nodes, bound, outputs) or single.requested_axes != inputs:
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


class _Import(ImportContext):
    """The import of one model, node by node."""

    def __init__(
        self,
        model: LoadedModel,
        batch_axes: Mapping[str, int | None],
        types: Mapping[str, LayerSpec],
        custom: Sequence[CustomOp],
        output_axes: Mapping[str, int | None] | None = None,
        *,
        is_short: bool = False,
    ) -> None:
        """With `is_short`, refuse nodes that would be many layers if a tail can have them."""
        super().__init__(model, types)
        self.requested_axes = batch_axes
        self.is_limited = False  # such a node was refused
        self.is_broken = False  # a node breaks its operator's definition, so no tail computes it either
        self._output_axes = output_axes or {}
        self._is_short = is_short
        self._most = math.inf  # limit of the graph's layers while a node is imported
        # Arguments of `Batch.add_node` for each node, if a dimension is dynamic.
        self._records: list[tuple[onnx_ir.Node, ItemRule | None, Sequence[Item | None], Sequence[Item | None]]] = []
        self._is_dynamic = any(isinstance(size, Sym) for info in model.net_inputs for size in info.shape)
        self._custom = {(op.domain, op.name): op for op in numbered(custom, model.graph)}
        self._values: dict[str, Item | None] = {}  # None: computed by a node that was refused
        self._refused: list[Unsupported] = []
        self._tainted: set[str] = set()  # values that depend on a refused node
        self._refused_nodes: set[onnx_ir.Node] = set()
        self._lost: set[str] = set()  # inputs and outputs that no Mat can hold
        self._made: dict[onnx_ir.Node | None, list[Layer]] = {}  # the layers of a node (None: outputs), last first
        self._bounding: set[onnx_ir.Node | None] = set()  # nodes that demand a minimum
        lengths = past_lengths(model.net_inputs)
        self._inner, self._outer = (lengths.inner, lengths.outer) if lengths else ({}, {})
        # Symbols are 1 or more; the past may have no rows.
        self._sums = {str(lengths.total): lengths.total - 1} if lengths else {}
        self._kept: dict[str, str] = {}
        self._mismatch = ""  # the message for the first node that does not accept the sizes given by the caller
        self._inlined = 0  # nodes of all loops

    def _inputs(self) -> tuple[Port, ...]:
        self._preferred, ports = batch_axes(self.model), []
        for info in self.model.net_inputs:
            dtype, batch = info.dtype.numpy(), self._batch_axis(info)
            layout = Layout.plain(len(info.shape), batch)
            self._label = info.name
            if len(layout.dims) > MAX_DIMS or 0 in info.shape:
                problem = "is empty" if 0 in info.shape else "has more than four axes besides the batch"
                reason = f"shape {shape_text(info.shape)} {problem}, and ncnn has no such tensors"
                hint = "" if 0 in info.shape else "let the model take fewer axes, and reshape them inside"
                self._refused.append(Unsupported(info.name, "graph input", reason, hint))
                self._values[info.name] = None
                self._tainted.add(info.name)
                self._lost.add(info.name)
                continue
            view = View.of(named(info.shape, self._inner), *layout)
            blob = self.input(info.name, view)
            self._values[info.name] = Tensor(blob, view, dtype)
            length = (info.ids, info.past) if isinstance(info, LengthInfo) else None
            ports.append(Port(info.name, blob, info.shape, dtype, batch, element_type(dtype), length))
        return tuple(ports)

    def _batch_axis(self, info: InputInfo) -> int | None:
        """Return the axis of an input that is the Mat's batch: requested, inferred, or a first axis of size 1."""
        rank = len(info.shape)
        if info.name in self.requested_axes:
            axis = self.requested_axes[info.name]
            if axis is not None and not -rank <= axis < rank:
                raise UsageError(f"input '{info.name}' has no axis {axis}: its rank is {rank}")
            return None if axis is None else axis % rank
        return self._preferred.get(info.name, first_batch(info.shape))

    def _outputs(self) -> tuple[Port, ...]:
        ports = []
        for info in self.model.outputs:
            value = self._values[info.name]
            if value is None:  # its producer was refused
                continue
            self._label = info.name
            try:
                if isinstance(value, TensorSequence):
                    raise Refusal("it is a sequence, and ncnn has tensors only")
                x = self.tensor(value)
                layout, batch = self._output_layout(x, self._output_axes.get(info.name))
                blob = self.in_layout(x, layout).blob
            except Refusal as refusal:
                self._refused.append(Unsupported(info.name, "graph output", refusal.reason, refusal.hint))
                self._lost.add(info.name)
                continue
            if blob.is_input or blob.is_output or (blob.producer and blob.producer.type == "MemoryData" and blob.users):
                blob = self.layer("Noop", blob)
            self._rename(blob, info.name)
            self.graph.add_output(blob)
            dtype = x.dtype if info.dtype is onnx_ir.DataType.UNDEFINED else info.dtype.numpy()
            shape = named(x.shape, self._outer)
            ports.append(Port(info.name, blob, shape, dtype, batch, element_type(x.dtype)))
        return tuple(ports)

    def _output_layout(self, x: Tensor, requested: int | None = None) -> tuple[Layout, int | None]:
        """Return the layout in which an output leaves the net, and its batch axis: as requested, else the cheapest."""
        one = [axis for axis in range(x.rank) if x.shape[axis] == 1]
        batches: list[int | None] = [*(a for a in one if a == 0 and x.rank > 1), None, *(a for a in one if a != 0)]
        if x.batch_axis is not None and x.rank > 1:  # a Mat needs a dim in addition to its batch
            batches = [x.batch_axis, *batches]
        if x.rank > MAX_DIMS:  # one axis has to be the batch
            batches += [axis for axis, size in enumerate(x.shape) if isinstance(size, int)]
        layouts = [(Layout.plain(x.rank, batch), batch) for batch in (batches if requested is None else [requested])]
        options = [(layout, batch) for layout, batch in layouts if len(layout.dims) <= MAX_DIMS]
        if not options:
            reason = f"shape {shape_text(x.shape)} has more than four axes besides the batch"
            raise self.refuse(reason, "squeeze or reshape it in the model")
        return min(options, key=lambda option: self.cost(x, option[0]))

    def _rename(self, blob: Blob, name: str) -> None:
        self._names.release(blob.name)
        self._names.add(name)
        blob.name = name

    def attempt(self) -> Mapping[str, Dim]:
        """Import every node, then the outputs; or return other sizes of dynamic dimensions that an operator demands."""
        self._ports = self._inputs()
        constants = _initializers(self.model.graph)
        self._values.update(constants)
        self._budget = MemoryBudget(constant.array for constant in constants.values())
        try:
            for node in counted(self.model.graph, "making layers of the operators", "nodes"):
                self._import(node)
        except _Equal as demanded:
            return demanded.sizes
        if self._is_short:
            self._refuse_indices()
        with self._recorded(None):
            self._ends = self._outputs()
        if self._mismatch:
            raise UsageError(self._mismatch)
        return {}

    def imported(self) -> Imported | None:
        """Return the net; None if nodes were refused."""
        if self._refused:
            return None
        # No blob may be empty: a window is not larger than its axis, a slice has an element.
        self._minimum = {named((size,), self._outer)[0]: least for size, least in self._minimum.items()}
        shapes = [blob.shape or () for layer in self.graph for blob in layer.outputs]
        dynamic = {size for shape in shapes for size in named(shape, self._outer) if isinstance(size, Sym)}
        for size in sorted(dynamic, key=lambda size: (len(size.names()), str(size))):
            self.demand(size, 1)
        drop_unused(self.graph)  # layers that only shapes or refused branches read; ONNX Runtime checks the shapes, too
        custom = tuple(self._custom.values())
        return Imported(self.graph, self._ports, self._ends, custom, self._minimum, self._kept, self.model)

    def error(self) -> UnsupportedError:
        """Return the error with all refused nodes."""
        return UnsupportedError(self._refused, *self._cut_advice())

    def state(self, one: _Import | None) -> ImportState:
        """Return the result for `split`. A tail needs only nodes that the import of `one` item refuses."""
        source = one or self
        return ImportState(source._refused, self.error, self._values, source._refused_nodes, source._lost)

    def leave(self, nodes: Collection[onnx_ir.Node], model: LoadedModel, output_axes: Mapping[str, int | None]) -> bool:
        """Turn into the import of the model without these nodes; return False if other nodes' layers depend on them."""
        left, nodes = {info.name for info in model.net_inputs}, set(nodes)
        dropped = [port.blob.producer for port in self._ports if port.name not in left]
        if not self._refused_nodes <= nodes or not self._bounding.isdisjoint({None, *nodes}):
            return False
        self.graph.outputs = ()
        layers = (layer for node in reversed(self._made) if node is None or node in nodes for layer in self._made[node])
        for layer in filter(None, (*layers, *dropped)):
            if any(blob.uses for blob in layer.outputs):
                return False
            self.graph.remove(layer)
            self._names.release(*(blob.name for blob in layer.outputs))
        caches: tuple[dict[Any, Blob], ...] = self._layouts, self._memory, self._ones
        for cache in caches:
            for key in [key for key, blob in cache.items() if blob.producer and blob.producer.graph is None]:
                del cache[key]
        named = {blob.name: blob for layer in self.graph for blob in layer.outputs}
        for info in model.outputs:
            x, blob = self._values[info.name], named.get(info.name)
            if blob is None or not isinstance(x, Tensor) or blob.producer is None:
                continue
            if blob is not x.blob:
                return False
            if not blob.is_input:  # `_outputs` names it again
                self._rename(blob, self._names.take(f"{blob.producer.traced[0]}_out"))
        removed = {inner for node in nodes for inner in nodes_of(node)}
        self._records = [record for record in self._records if record[0] not in removed]
        self._ports = tuple(port for port in self._ports if port.name in left)
        self._open_inputs = [blob for blob in self._open_inputs if blob.producer and blob.producer.graph]
        self.requested_axes = {name: axis for name, axis in self.requested_axes.items() if name in left}
        self.model, self._refused, self._output_axes = model, [], output_axes
        self._ends = self._outputs()
        return True

    def free_batch(self) -> Batch | None:
        """Return a dynamic batch whose items stay apart in the whole model, so the net need not know its size."""
        outputs = {info.name: self._values.get(info.name) for info in self.model.outputs}
        for batch in dynamic_batches(self.model, self.requested_axes, self._preferred):
            for port in self._ports:
                x = self._values[port.name]
                assert isinstance(x, Tensor)
                batch.add_input(x)
            for record in self._records:
                batch.add_node(*record)
            if batch.is_free(outputs, self._minimum, is_refused=bool(self._refused)):
                return batch
        return None

    def tensor(self, x: Tensor | Constant | SymbolicTensor) -> Tensor:
        """See `ImportContext`."""
        return computed(self, x) if isinstance(x, SymbolicTensor) else Builder.tensor(self, x)

    @contextmanager
    def _recorded(self, node: onnx_ir.Node | None) -> Iterator[None]:
        start, minimum = len(self.graph), dict(self._minimum)
        yield
        self._made[node] = [*islice(reversed(self.graph), len(self.graph) - start)]
        if self._minimum != minimum:
            self._bounding.add(node)

    def _import(self, node: onnx_ir.Node) -> None:
        outputs = _names(node.outputs)
        self._label, self.node = node.name or next(filter(None, outputs), node.op_type), node
        self._most = len(self.graph) + MANY_LAYERS if self._is_short and node.op_type in PICKS else math.inf
        with self._recorded(node):
            for name, result in zip(outputs, self._imported(node, outputs), strict=True):
                if name:
                    self._values[name] = result
                    self._name_blob(result, name)
        self._most = math.inf

    def _imported(self, node: onnx_ir.Node, outputs: Sequence[str]) -> Sequence[Item | None]:
        refused, names = len(self._refused), _names(node.inputs)
        operands = [self._values[name] if name else None for name in names]
        poisoned = any(name and self._values[name] is None for name in names)
        results = self._attempt(node, None if poisoned else operands)
        if INT8 in node.meta and results and isinstance(results[0], Tensor):
            self._make_int8(results[0].blob.producer, node.meta[INT8])
        is_refused = len(self._refused) > refused
        if is_refused and node.graph is self.model.graph:
            self._refused_nodes.add(node)
        if is_refused or not self._tainted.isdisjoint(_read_names(node)):
            self._tainted.update(filter(None, outputs))
        if is_refused and not poisoned:
            results = self._stand_ins(node, operands)
        is_valid = not is_refused or (not node.domain and schema_error(node, self.opset) is None)
        if self._is_dynamic and is_valid and not poisoned:
            rule = traits_of(node.domain, node.op_type, self.model.opsets.get(node.domain, 1)).items
            self._records.append((node, rule, operands, results))
        return results

    @cached_property
    def _readers(self) -> Readers:
        return Readers(self.model.graph, lambda node: node.op_type in ("Shape", "Size"))

    def _refuse_indices(self) -> None:
        """Refuse nodes that compute indices if the nodes that read these are many layers, and a tail can have all."""
        for node in self.model.graph:
            if node.op_type in INDICES and self._made[node] and node in self._readers.movable:
                picks = [user for user in self._readers.after([node]) if user.op_type in PICKS]
                count = sum(len(self._made[pick]) for pick in picks)
                if count > 2 * MANY_LAYERS and node not in self._refused_nodes:
                    self._label, self.is_limited = label(node), True
                    self._refuse(node, f"with the nodes that pick by its indices it would be {count} layers")
                    self._refused_nodes.add(node)

    def _append(self, layer: Layer, results: Results) -> tuple[Blob, ...]:
        if len(self.graph) >= self._most and self.node in self._readers.movable:
            self.is_limited = True
            raise self.refuse(f"it would be more than {MANY_LAYERS} layers")
        return super()._append(layer, results)

    def _make_int8(self, layer: Layer | None, product: Int8) -> None:
        """Turn the layer of a product into int8 if ncnn has such a layer; its weights are multiples of the scales."""
        while layer is not None and layer.type not in PRODUCTS and layer.inputs and layer.traced == (self._label,):
            layer = layer.inputs[0].producer
        if layer is None or layer.traced != (self._label,) or not layer.weights:
            return
        converted, reason = imported_int8(layer, product.scales, product.input_scale, is_positive=product.is_positive)
        self._kept[layer.name] = product.reason or reason
        if converted is not None and not product.reason:
            layer.params, layer.weights = converted.params, converted.weights

    def _attempt(self, node: onnx_ir.Node, operands: list[Item | None] | None) -> Sequence[Item | None]:
        """Return the results of a node; None for each, and a refusal, if ncnn cannot express it."""
        try:
            if operands is not None:
                results = self._results(node, operands)
                check_results(node, results)
                return results
            # An operand is missing because its producer was refused: unless this node would fold, it needs an importer.
            if not folds(node.domain, node.op_type, self.opset) and (node.domain, node.op_type) not in self._custom:
                self._importer(node)
        except MissingOperand:
            pass
        except Refusal as refusal:
            sizes = solved((named((a,), self._outer)[0], named((b,), self._outer)[0]) for a, b in refusal.equal)
            if sizes:
                raise _Equal(sizes) from None
            self._refuse(node, refusal.reason, refusal.hint)
            is_clean = self._tainted.isdisjoint(_names(node.inputs))
            self.is_broken |= is_clean and isinstance(refusal, (Invalid, ShapeMismatch)) and not refusal.equal
            if isinstance(refusal, ShapeMismatch) and self.model.given and is_clean:
                self._mismatch = self._mismatch or self._does_not_accept(node, refusal)
        except (ShapeError, GraphError) as error:
            self._refuse(node, str(error))
        except MemoryError:
            self._refuse(node, "it takes more memory than there is")
        return [None] * len(node.outputs)

    def _does_not_accept(self, node: onnx_ir.Node, mismatch: ShapeMismatch) -> str:
        given, (a, b) = self.model.given.items(), mismatch.sizes
        shapes = " ".join(f"{name}:{listed_sizes(sizes)}" for name, sizes in given)
        is_odd = any(isinstance(n, int) and n % 32 for _, sizes in given if len(sizes) == 4 for n in sizes[2:])
        advice = "; many nets want multiples of 32" if is_odd else ""
        return f"the model does not accept {shapes}: {node.op_type} {self._label} gets {a} and {b}{advice}"

    def _refuse(self, node: onnx_ir.Node, reason: str, hint: str = "") -> None:
        self._refused.append(Unsupported(self._label, qualified(node.domain, node.op_type), reason, hint))

    def _stand_ins(self, node: onnx_ir.Node, operands: Sequence[Item | None]) -> Sequence[Item | None]:
        """Return tensors in place of a refused node's results; None if the shape is unknown."""
        results: list[Item | None] = [None] * len(node.outputs)
        for i, inferred in enumerate(inferred_outputs(node, operands, self.model.opsets)):
            if inferred is not None and (name := node.outputs[i].name):
                shape, dtype = inferred
                view = View.of(shape, plain_dims(shape))
                blob = self.input(self._names.take(f"{name}_stand_in"), view)
                results[i] = Tensor(blob, view, held_as_float(dtype))
        return results

    def _cut_advice(self) -> tuple[str, Sequence[str]]:
        """Return advice on converting the nodes before the refused ones, and where to cut; empty if each has a hint."""
        sound = [node for node in self.model.graph if self._tainted.isdisjoint(_names(node.outputs))]
        tainted = set(self.model.graph).difference(sound)
        needed = {info.name for info in self.model.outputs}.union(*map(_read_names, tainted)) - {""}
        values = [(name, self._values[name]) for node in sound for name in _names(node.outputs) if name in needed]
        cut = [(name, x) for name, x in values if isinstance(x, Tensor)]
        if not cut or all(node.hint for node in self._refused):
            return "", ()
        try:
            for self._label, x in cut:
                self._output_layout(x)
        except Refusal:
            return "", ()
        has_nms = any(node.operator == "NonMaxSuppression" for node in self._refused)
        export = "export the model without NMS, or " if has_nms else ""
        names, count = [name for name, _ in cut], len(self.model.graph)
        part = f"convert the {len(sound)} of {count} nodes before them with --outputs {','.join(names)}"
        return f"{export}{part} and do the rest outside ncnn", names

    def _importer(self, node: onnx_ir.Node) -> OnnxOp:
        op = find(node.domain, node.op_type, self.model.opsets.get(node.domain, 1))
        if op is None:
            advice = _ADVICE.get(node.domain, ", but --custom makes it a layer of your own (docs/plugins.md)")
            raise Refusal(f"ncnn has no equivalent of this operator{advice}")
        return op

    def _results(self, node: onnx_ir.Node, operands: list[Item | None]) -> Sequence[Item | None]:
        problem = None if node.domain else schema_error(node, self.opset)
        if problem is not None:
            raise Refusal(problem)
        shaped = operands[0] if node.op_type in ("Shape", "Size") and not node.domain else None
        if shaped is not None and not isinstance(shaped, TensorSequence):
            attributes = attributes_of(node)
            if node.op_type == "Size":
                return [sizes.size_of(shaped.shape)]
            return [sizes.shape_of(shaped.shape, attributes.get("start", 0), attributes.get("end"))]
        check_size(node, self.opset, operands)
        folded = self._fold(node, operands)
        if folded is not None:
            return folded
        request = self._custom.get((node.domain, node.op_type))
        if request is not None:
            return import_custom(self, request, node, operands)
        op = self._importer(node)
        if not op.is_foreign:
            return call(self, op, node, operands)
        importer = f"the importer of {op.qualified_name} of the plug-in {op.function.__module__}"
        with plugged(f"{importer}, for node '{self._label}',", Refusal, MissingOperand, ShapeError, GraphError):
            results = call(self, op, node, operands)
            for result in results:
                if not isinstance(result, (Tensor, Constant, SymbolicTensor, TensorSequence, NoneType)):
                    raise TypeError(f"a {type(result).__name__} is not a result of an importer")
            return results

    def _fold(self, node: onnx_ir.Node, operands: list[Item | None]) -> Sequence[Item | None] | None:
        if any(isinstance(operand, (Tensor, TensorSequence)) for operand in operands):
            return None
        inputs = [operand if isinstance(operand, (Constant, SymbolicTensor)) else None for operand in operands]
        if any(isinstance(operand, SymbolicTensor) for operand in inputs):
            result = None if node.domain else sizes.evaluate(node.op_type, inputs, attributes_of(node))
            if result is None and (node.domain, node.op_type) == ("", "Div"):
                result = self._quotient(*inputs)
            if isinstance(result, SymbolicTensor) and result.cells.dtype == object:
                result = replace(result, cells=map_cells(self.without_quotients, result.cells))
            return None if result is None else [result]
        if not folds(node.domain, node.op_type, self.opset):
            return None
        arrays = [operand.array if isinstance(operand, Constant) else None for operand in inputs]
        try:
            results = evaluate_node(node, arrays, self.opset)
        except TooLarge as error:
            raise Refusal(str(error), "export the model without it, or bind a smaller size with --shape") from None
        except CannotFold:
            return None
        self._budget.take(results)
        return [Constant(array) for array in results]

    def _quotient(self, a: Known | None, b: Known | None) -> Known | None:
        """Return a // b, as ONNX divides sizes from 0 on; demand that they are. None for other operands."""
        cells = list(a.cells.flat) if isinstance(a, SymbolicTensor) and a.dtype.kind in "iu" else []
        if not cells or not all("#" not in str(cell) and self.try_demand(cell, 0) for cell in cells):
            return None
        rest = sizes.evaluate("Mod", [a, b], {})
        whole = sizes.evaluate("Sub", [a, rest], {}) if rest is not None else None
        return None if whole is None else sizes.evaluate("Div", [whole, b], {})

    def inlined(self, graph: onnx_ir.Graph, *operands: Item, iterations: int | None = None) -> tuple[Item, ...]:
        """See `ImportContext`."""
        if len(graph.inputs) != len(operands):
            raise Refusal(f"its subgraph has {len(graph.inputs)} inputs, but ONNX gives it {len(operands)}")
        outer, refused = dict(self._values), len(self._refused)
        state = self._label, self.node
        self._values.update(_initializers(graph))
        self._values.update((value.name or "", x) for value, x in zip(graph.inputs, operands, strict=True))
        self._inlined += 1
        for node in graph:
            self._import(node)
            self._inlined += 1
        results = [self._values.get(value.name or "") for value in graph.outputs]
        self._values = outer  # the names of a subgraph end with it
        self._label, self.node = state
        done = tuple(x for x in results if x is not None)
        if len(done) < len(results) or (iterations is not None and len(self._refused) > refused):
            raise MissingOperand
        if self._inlined > MOST_INLINED:
            count = "its iterations" if iterations is None else f"its {iterations} iterations"
            reason = f"{count} of {len(graph)} nodes are too many: loops may have {MOST_INLINED} in all"
            raise self.refuse(reason, "export the loop with fewer iterations")
        return done

    def _name_blob(self, value: Item | None, name: str) -> None:
        """Name a node's result blob after the node's output."""
        if not isinstance(value, Tensor) or value.blob.producer is None or value.blob.producer.type == "Input":
            return
        is_output = any(info.name == name for info in self.model.outputs)
        if value.blob.name.startswith(f"{self._label}_out") and not is_output:
            self._rename(value.blob, self._names.take(name))


def _initializers(graph: onnx_ir.Graph) -> dict[str, Constant]:
    values = graph.initializers.items()
    return {name: Constant(value.const_value.numpy()) for name, value in values if value.const_value is not None}


def _names(values: Iterable[onnx_ir.Value | None]) -> list[str]:
    """Return the names of values, empty for absent ones."""
    return ["" if value is None else value.name or "" for value in values]


def _read_names(node: onnx_ir.Node) -> set[str]:
    return {*_names(read_values(node))}
