"""The walk through a model, node by node: constants fold, views stay lazy until a layer needs a layout."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import onnx_ir

from onnx2ncnn_opt.errors import GraphError, ShapeError, Unsupported, UsageError, plugged
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, named, shape_text, substituted
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.int8 import PRODUCTS, imported_int8
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.ir.view import MAX_DIMS, View
from onnx2ncnn_opt.onnx.arguments import call
from onnx2ncnn_opt.onnx.batch import batch_axes, batch_axis
from onnx2ncnn_opt.onnx.custom import CustomOp, import_custom, numbered
from onnx2ncnn_opt.onnx.cut.extract import label
from onnx2ncnn_opt.onnx.cut.partition import INDICES, MANY_LAYERS, PICKS, Readers
from onnx2ncnn_opt.onnx.cut.refusals import Refusals
from onnx2ncnn_opt.onnx.edit.append import RANDOM
from onnx2ncnn_opt.onnx.edit.quantized import INT8, Int8
from onnx2ncnn_opt.onnx.fold.inferred import inferred_outputs
from onnx2ncnn_opt.onnx.folding import folded
from onnx2ncnn_opt.onnx.items import ItemRule
from onnx2ncnn_opt.onnx.lower.builder import Results
from onnx2ncnn_opt.onnx.lower.checks import Invalid, Refusal, ShapeMismatch
from onnx2ncnn_opt.onnx.lower.context import ImportContext, MissingOperand
from onnx2ncnn_opt.onnx.lower.functional.symbolic_tensor import computed
from onnx2ncnn_opt.onnx.lower.functional.table import LOOKUPS, tabulated
from onnx2ncnn_opt.onnx.lower.layout import Layout, output_layout, plain_dims
from onnx2ncnn_opt.onnx.lower.memory_budget import MemoryBudget, check_results, check_size
from onnx2ncnn_opt.onnx.lower.tensors import TensorBuilder
from onnx2ncnn_opt.onnx.ops import find, folds, traits_of
from onnx2ncnn_opt.onnx.read.binding import LengthInfo
from onnx2ncnn_opt.onnx.read.caches import past_lengths
from onnx2ncnn_opt.onnx.read.given import listed_sizes, solved
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.onnx.read.schema import schema_error
from onnx2ncnn_opt.onnx.read.structure import attributes_of, names_of, read_values
from onnx2ncnn_opt.onnx.registry import OnnxOp, qualified
from onnx2ncnn_opt.onnx.value import (
    Constant,
    Item,
    NodeItems,
    Operand,
    SymbolicTensor,
    Tensor,
    TensorSequence,
    element_type,
)
from onnx2ncnn_opt.progress import counted

MOST_INLINED = 20_000  # nodes of all loops; larger nets are useless

# Advice for operators that ncnn lacks, by domain.
_ADVICE = {"": "", "ai.onnx.preview": "", "ai.onnx.ml": ": run it in ONNX Runtime, and export the neural network alone"}


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


class Walk(ImportContext):
    """The walk through a model, which makes layers of its nodes."""

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
        self.refusals = Refusals()
        self.values: dict[str, Item | None] = {}  # None: computed by a node that was refused
        self.is_limited = False  # a node was refused because it would be many layers
        self.is_broken = False  # a node breaks its operator's definition, so no tail computes it either
        self._mismatch = ""  # the message for the first node that does not accept the sizes given by the caller
        self._custom = {(op.domain, op.name): op for op in numbered(custom, model.graph)}
        self._kept: dict[str, str] = {}  # see `Imported`
        self._output_axes = output_axes or {}
        self._is_short = is_short
        self._most = math.inf  # limit of the graph's layers while a node is imported
        # Arguments of `Batch.add_node` for each node, if a dimension is dynamic.
        self._records: list[tuple[onnx_ir.Node, ItemRule | None, NodeItems, NodeItems]] = []
        self._is_dynamic = any(isinstance(size, Sym) for info in model.net_inputs for size in info.shape)
        self._made: dict[onnx_ir.Node, list[Layer]] = {}  # the layers of a node
        lengths = past_lengths(model.net_inputs)
        self._inner, self._outer = (lengths.inner, lengths.outer) if lengths else ({}, {})
        # Symbols are 1 or more; the past may have no rows.
        self._sums = {str(lengths.total): lengths.total - 1} if lengths else {}
        self._inlined = 0  # nodes of all loops

    def attempt(self) -> Mapping[str, Dim]:
        """Import every node, then the outputs; or return other sizes of dynamic dimensions that an operator demands."""
        self._inputs = self._append_inputs()
        constants = _initializers(self.model.graph)
        self.values.update(constants)
        self._budget = MemoryBudget(constant.array for constant in constants.values())
        try:
            for node in counted(self.model.graph, "making layers of the operators", "nodes"):
                self._import(node)
        except _Equal as demanded:
            return demanded.sizes
        if self._is_short:
            self._refuse_indices()
        self._outputs = self._append_outputs()
        if self._mismatch:
            raise UsageError(self._mismatch)
        return {}

    def _append_inputs(self) -> tuple[Port, ...]:
        is_valid = all(schema_error(node, self.opset) is None for node in self.model.graph.all_nodes())
        self._inferred, ports = batch_axes(self.model) if is_valid else {}, []
        for info in self.model.net_inputs:
            dtype, batch = info.dtype.numpy(), batch_axis(info, self.requested_axes, self._inferred)
            layout = Layout.plain(len(info.shape), batch)
            if len(layout.dims) > MAX_DIMS or 0 in info.shape:
                problem = "is empty" if 0 in info.shape else "has more than four axes besides the batch"
                reason = f"shape {shape_text(info.shape)} {problem}, and ncnn has no such tensors"
                hint = "" if 0 in info.shape else "let the model take fewer axes, and reshape them inside"
                self._lose(info.name, "graph input", Refusal(reason, hint))
                self.refusals.tainted.add(info.name)
                self.values[info.name] = None
                continue
            view = View.of(named(info.shape, self._inner), *layout)
            blob = self.input(info.name, view)
            self.values[info.name] = Tensor(blob, view, dtype)
            length = (info.ids, info.past) if isinstance(info, LengthInfo) else None
            ports.append(Port(info.name, blob, info.shape, dtype, batch, element_type(dtype), length))
        return tuple(ports)

    def _append_outputs(self) -> tuple[Port, ...]:
        """Append the outputs, except those of refused nodes."""
        ports = []
        for info in self.model.outputs:
            value = self.values[info.name]
            if value is None:
                continue
            self._label = info.name
            try:
                if isinstance(value, TensorSequence):
                    raise Refusal("it is a sequence, and ncnn has tensors only")
                x = self.tensor(value)
                chosen = output_layout(x, self._output_axes.get(info.name), partial(self.cost, x))
                if chosen is None:
                    reason = f"shape {shape_text(x.shape)} has more than four axes besides the batch"
                    raise Refusal(reason, "squeeze or reshape it in the model")
                layout, batch = chosen
                blob = self.in_layout(x, layout).blob
            except Refusal as refusal:
                self._lose(info.name, "graph output", refusal)
                continue
            if blob.is_input or blob.is_output or (blob.made_by("MemoryData") and blob.users):
                blob = self.layer("Noop", blob)
            self._rename(blob, info.name)
            self.graph.add_output(blob)
            dtype = x.dtype if info.dtype is onnx_ir.DataType.UNDEFINED else info.dtype.numpy()
            shape = named(x.shape, self._outer)
            ports.append(Port(info.name, blob, shape, dtype, batch, element_type(x.dtype)))
        return tuple(ports)

    def _import(self, node: onnx_ir.Node) -> None:
        self._label, self.node = label(node), node
        # The layers of a node of which others read only the shape are removed.
        is_measured = {reader.op_type for reader in self.readers()} == {"Shape"}
        is_limited = self._is_short and node.op_type in PICKS and not is_measured
        self._most = len(self.graph) + MANY_LAYERS if is_limited else math.inf
        start = len(self.graph)
        for name, result in zip(names_of(node.outputs), self._results(node), strict=True):
            if name:
                self.values[name] = result
                self._name_blob(result, name)
        self._made[node] = [*islice(reversed(self.graph), len(self.graph) - start)]
        self._most = math.inf

    def _results(self, node: onnx_ir.Node) -> NodeItems:
        """Return the results of a node; of a refused one, stand-ins for these."""
        names, count = names_of(node.inputs), len(self.refusals.unsupported)
        operands = [self.values[name] if name else None for name in names]
        is_complete = all(operand is not None for name, operand in zip(names, operands, strict=True) if name)
        results = self._attempt(node, operands if is_complete else None)
        if INT8 in node.meta and results and isinstance(results[0], Tensor):
            self._make_int8(results[0].blob.producer, node.meta[INT8])
        is_refused = len(self.refusals.unsupported) > count
        if is_refused and node.graph is self.model.graph:
            self.refusals.nodes.add(node)
        if is_refused or self.refusals.is_tainted(read_values(node)):
            self.refusals.tainted.update(filter(None, names_of(node.outputs)))
        if not is_complete:
            return results
        if is_refused:
            results = self._stand_ins(node, operands)
        is_valid = not is_refused or (not node.domain and schema_error(node, self.opset) is None)
        if self._is_dynamic and is_valid:
            rule = traits_of(node.domain, node.op_type, self.model.opsets.get(node.domain, 1)).items
            self._records.append((node, rule, operands, results))
        return results

    def _attempt(self, node: onnx_ir.Node, operands: list[Item | None] | None) -> NodeItems:
        """Return the results of a node; None for each, and a refusal, if ncnn cannot express it."""
        try:
            if operands is not None:
                results = self._computed(node, operands)
                check_results(node, results)
                return results
            # An operand is missing because its producer was refused: unless this node would fold, it needs an importer.
            if not folds(node.domain, node.op_type, self.opset) and (node.domain, node.op_type) not in self._custom:
                self._importer(node)
        except MissingOperand:
            pass
        except Refusal as refusal:
            sizes = solved((substituted(a, self._outer), substituted(b, self._outer)) for a, b in refusal.equal)
            if sizes:
                raise _Equal(sizes) from None
            self._refuse(node, refusal.reason, refusal.hint)
            self._note_fault(node, refusal)
        except (ShapeError, GraphError) as error:
            self._refuse(node, str(error))
        except MemoryError:
            self._refuse(node, "it takes more memory than there is")
        return [None] * len(node.outputs)

    def _refuse(self, node: onnx_ir.Node, reason: str, hint: str = "") -> None:
        operator = qualified(node.domain, node.op_type)
        self.refusals.unsupported.append(Unsupported(label(node), operator, reason, hint))

    def _lose(self, name: str, kind: str, refusal: Refusal) -> None:
        """Refuse an input or output."""
        self.refusals.unsupported.append(Unsupported(name, kind, refusal.reason, refusal.hint))
        self.refusals.lost.add(name)

    def _note_fault(self, node: onnx_ir.Node, refusal: Refusal) -> None:
        """Note a node that is wrong in any runtime, unless it depends on a refused one."""
        if self.refusals.is_tainted(node.inputs):
            return
        self.is_broken |= isinstance(refusal, (Invalid, ShapeMismatch)) and not refusal.equal
        if isinstance(refusal, ShapeMismatch) and self.model.given and not self._mismatch:
            given, (a, b) = self.model.given.items(), refusal.sizes
            shapes = " ".join(f"{name}:{listed_sizes(sizes)}" for name, sizes in given)
            is_odd = any(isinstance(n, int) and n % 32 for _, sizes in given if len(sizes) == 4 for n in sizes[2:])
            advice = "; many nets want multiples of 32" if is_odd else ""
            gets = f"{node.op_type} {self._label} gets {a} and {b}"
            self._mismatch = f"the model does not accept {shapes}: {gets}{advice}"

    def _computed(self, node: onnx_ir.Node, operands: list[Item | None]) -> NodeItems:
        """Return the results of a node: folded, of a custom layer, or of its importer."""
        problem = schema_error(node, self.opset)
        if problem is not None:
            raise Refusal(problem)
        check_size(node, self.opset, operands)
        results = folded(self, node, operands, self._budget)
        if results is not None:
            return results
        request = self._custom.get((node.domain, node.op_type))
        if request is not None:
            return import_custom(self, request, node, operands)
        op = self._importer(node)
        data, indices = [*operands, None, None][:2]
        if node.op_type in LOOKUPS and not node.domain and isinstance(data, Operand) and isinstance(indices, Tensor):
            axis = attributes_of(node).get("axis", 0) % max(data.rank, 1)
            operands = [*(tabulated(self, data, self.values, axis) or operands)]
            if operands[1] is None:
                return operands[:1]
        if not op.is_foreign:
            return call(self, op, node, operands)
        importer = f"the importer of {op.qualified_name} of the plug-in {op.function.__module__}"
        with plugged(f"{importer}, for node '{self._label}',", Refusal, MissingOperand, ShapeError, GraphError):
            results = call(self, op, node, operands)
            for result in results:
                if result is not None and not isinstance(result, Item):
                    raise TypeError(f"a {type(result).__name__} is not a result of an importer")
            return results

    def _importer(self, node: onnx_ir.Node) -> OnnxOp:
        op = find(node.domain, node.op_type, self.model.opsets.get(node.domain, 1))
        if op is None:
            advice = _ADVICE.get(node.domain, ", but --custom makes it a layer of your own (docs/plugins.md)")
            if node.op_type in RANDOM and node.graph is self.model.graph:
                advice = ", but --noise-inputs makes it an input"
            raise Refusal(schema_error(node, self.opset) or f"ncnn has no equivalent of this operator{advice}")
        return op

    def _stand_ins(self, node: onnx_ir.Node, operands: NodeItems) -> NodeItems:
        """Return tensors in place of a refused node's results; None if the shape is unknown."""
        results: list[Item | None] = [None] * len(node.outputs)
        for i, inferred in enumerate(inferred_outputs(node, operands, self.model.opsets)):
            if inferred is not None and (name := node.outputs[i].name):
                shape, dtype = inferred
                view = View.of(shape, plain_dims(shape))
                blob = self.input(self._names.take(f"{name}_stand_in"), view)
                results[i] = Tensor(blob, view, dtype)
        return results

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

    def _name_blob(self, value: Item | None, name: str) -> None:
        """Name a node's result blob after the node's output."""
        if not isinstance(value, Tensor) or value.blob.producer is None or value.blob.producer.type == "Input":
            return
        is_output = any(info.name == name for info in self.model.outputs)
        if value.blob.name.startswith(f"{self._label}_out") and not is_output:
            self._rename(value.blob, self._names.take(name))

    def _rename(self, blob: Blob, name: str) -> None:
        self._names.release(blob.name)
        self._names.add(name)
        blob.name = name

    def tensor(self, x: Operand) -> Tensor:
        """See `ImportContext`."""
        return computed(self, x) if isinstance(x, SymbolicTensor) else TensorBuilder.tensor(self, x)

    def inlined(self, graph: onnx_ir.Graph, *operands: Item, iterations: int | None = None) -> tuple[Item, ...]:
        """See `ImportContext`."""
        if len(graph.inputs) != len(operands):
            raise Refusal(f"its subgraph has {len(graph.inputs)} inputs, but ONNX gives it {len(operands)}")
        outer, refused = dict(self.values), len(self.refusals.unsupported)
        state = self._label, self.node
        self.values.update(_initializers(graph))
        self.values.update((value.name or "", x) for value, x in zip(graph.inputs, operands, strict=True))
        self._inlined += 1
        for node in graph:
            self._import(node)
            self._inlined += 1
        results = [self.values.get(value.name or "") for value in graph.outputs]
        self.values = outer  # the names of a subgraph end with it
        self._label, self.node = state
        done = tuple(x for x in results if x is not None)
        if len(done) < len(results) or (iterations is not None and len(self.refusals.unsupported) > refused):
            raise MissingOperand
        if self._inlined > MOST_INLINED:
            count = "its iterations" if iterations is None else f"its {iterations} iterations"
            reason = f"{count} of {len(graph)} nodes are too many: loops may have {MOST_INLINED} in all"
            raise self.refuse(reason, "export the loop with fewer iterations")
        return done

    @cached_property
    def _readers(self) -> Readers:
        return Readers(self.model.graph, lambda node: node.op_type in ("Shape", "Size"))

    def _append(self, layer: Layer, results: Results) -> tuple[Blob, ...]:
        if len(self.graph) >= self._most and self.node in self._readers.movable:
            self.is_limited = True
            raise self.refuse(f"it would be more than {MANY_LAYERS} layers")
        if layer.spec is not None and "kernel_w" in layer.spec.by_name:  # a window fits, even if only shapes read it
            for size in results[0][0] or ():
                self.demand(size, 1)
        within = [(shape and tuple(map(self.within_limits, shape)), batch) for shape, batch in results]
        return super()._append(layer, within)

    def _refuse_indices(self) -> None:
        """Refuse nodes that compute indices if a tail can have them, and is needed anyway or saves many layers."""
        for node in self.model.graph:
            if node.op_type in INDICES and self._made[node] and node in self._readers.movable - self.refusals.nodes:
                picks = [user for user in self._readers.after([node]) if user.op_type in PICKS]
                count = sum(len(self._made[pick]) for pick in picks)
                reason = f"with the nodes that pick by its indices it would be {count} layers"
                if any(layer.type == "DetectionOutput" for layer in self._made[node]):  # then no net needs a tail
                    reason = "in a tail, equal numbers keep their order" if self.refusals.nodes else ""
                elif count <= 2 * MANY_LAYERS:
                    continue
                if reason:
                    self.is_limited = True
                    self._refuse(node, reason)
                    self.refusals.nodes.add(node)


def _initializers(graph: onnx_ir.Graph) -> dict[str, Constant]:
    values = graph.initializers.items()
    return {name: Constant(value.const_value.numpy()) for name, value in values if value.const_value is not None}
