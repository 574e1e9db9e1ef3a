"""Walks an ONNX graph and builds the ncnn graph: constants fold, views stay lazy, layers come when a form is needed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import onnx_ir

from onnx2ncnn_opt.errors import GraphError, ShapeError, Unsupported, UnsupportedError, UsageError
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, known, product
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer, check_layer
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.permute import order_type
from onnx2ncnn_opt.ir.shapes import infer_shapes
from onnx2ncnn_opt.ir.shapes.registry import AXES
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.ir.view import MAX_DIMS, Atom, Atoms, Dims, Regroup, Reorder, Shuffle, Step, View, flat, plan
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx import sizes
from onnx2ncnn_opt.onnx.batch import batch_axes
from onnx2ncnn_opt.onnx.binding import InputInfo
from onnx2ncnn_opt.onnx.custom import CustomOp, import_custom, numbered
from onnx2ncnn_opt.onnx.evaluate import CannotFold, can_fold, evaluate_node
from onnx2ncnn_opt.onnx.expressions import LONGEST_TEXT, SizeWriter, UntoldError
from onnx2ncnn_opt.onnx.form import Form
from onnx2ncnn_opt.onnx.load import LoadedModel
from onnx2ncnn_opt.onnx.names import Names
from onnx2ncnn_opt.onnx.registry import Input, OnnxOp, find
from onnx2ncnn_opt.onnx.schema import misfit
from onnx2ncnn_opt.onnx.value import (
    Constant,
    Formula,
    Ints,
    Item,
    Operand,
    Sizes,
    Tensor,
    Tensors,
    Value,
    held_as_float,
    is_float,
)

# The parameters that say the block and the mode of `Shuffle` layers.
_SHUFFLE_PARAMS = {
    "ShuffleChannel": ("group", ""),
    "PixelShuffle": ("upscale_factor", "mode"),
    "Reorg": ("stride", "mode"),
}

MOST_INLINED = 20_000  # nodes of all loops; a net of so many layers helps nobody


class Refusal(Exception):
    """Raised inside an importer: this node has no exact ncnn form."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


class Incomplete(Exception):
    """Raised inside an importer: a part of this node was refused already."""


@dataclass(frozen=True)
class Port:
    """One input or output of the model: its ONNX name, shape and type, and the blob that stands for it.

    `batch_axis` is the ONNX axis that is not among the Mat's dims but its batch count; None if the array goes as it is.
    """

    name: str
    blob: Blob
    shape: Shape
    dtype: np.dtype[np.generic]
    batch_axis: int | None


@dataclass(frozen=True)
class Imported:
    """The ncnn graph of a model, and its inputs and outputs in ONNX order."""

    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    custom: tuple[CustomOp, ...]


def import_model(
    model: LoadedModel,
    *,
    batch_axes: Mapping[str, int | None] | None = None,
    types: Mapping[str, LayerSpec] = LAYERS,
    custom: Sequence[CustomOp] = (),
) -> Imported:
    """Map a loaded model to ncnn layers, without optimising anything beyond what costs no layer.

    `batch_axes` says for inputs by name which axis is the Mat's batch count (None: no axis), where the analysis of
    `onnx.batch` is not to decide. `types` is the table of layers, which becomes the graph's.
    `custom` operators become layers of their own.

    Raises:
        UnsupportedError: with every node that ncnn cannot express, not only the first.
        UsageError: `batch_axes` names no input, or `custom` an operator that the model does not have.
    """
    return ImportContext(model, batch_axes or {}, types, custom).run()


class ImportContext:
    """What an operator's importer works with, called `im` there."""

    def __init__(
        self,
        model: LoadedModel,
        batch_axes: Mapping[str, int | None],
        types: Mapping[str, LayerSpec],
        custom: Sequence[CustomOp],
    ) -> None:
        self.graph = Graph(types)
        self._batch_axes = batch_axes
        self._model = model
        self._custom = {(op.domain, op.name): op for op in numbered(custom, model.graph)}
        self._values: dict[str, Item | None] = {}  # None: computed by a node that was refused
        self._refused: list[Unsupported] = []
        self._names = Names(v.name for v in (*model.inputs, *model.outputs))
        self._layer_names = Names()
        self._forms: dict[tuple[Blob, Step], Blob] = {}
        self._memory: dict[tuple[bytes, Shape], Blob] = {}
        self._ones: dict[Sym, Blob] = {}
        self._ports: tuple[Port, ...] = ()
        self._label = ""
        self._outputs_of_node = 0
        self._used_outputs: tuple[int, ...] = ()
        self._inlined = 0

    # ---- for importers: making layers and forms

    @property
    def opset(self) -> int:
        """The model's version of ONNX's own operators."""
        return self._model.opsets.get("", 1)

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from the front; refused where a tensor of `rank` has none of that number."""
        if not -rank <= axis < rank:
            raise self.refuse(f"axis {axis} of a tensor of rank {rank}")
        return axis % rank

    def axes(self, axes: Sequence[int], rank: int) -> list[int]:
        """Axes counted from the front, in the given order; refused where one is named twice."""
        result = [self.axis(axis, rank) for axis in axes]
        if len(set(result)) != len(result):
            raise self.refuse(f"axes {list(axes)} of a tensor of rank {rank}")
        return result

    @property
    def output_count(self) -> int:
        """How many outputs the node has."""
        return self._outputs_of_node

    def declared_shape(self, value: onnx_ir.Value) -> Shape | None:
        """The shape that the model declares for a value; None where it declares none in sizes of its inputs."""
        sizes: dict[str | None, Dim] = {}
        for source, info in zip(self._model.graph.inputs, self._model.inputs, strict=True):
            for dim, size in zip(source.shape or (), info.shape, strict=False):
                sizes.setdefault(None if isinstance(dim, int) else dim.value, size)
        sizes.pop(None, None)
        if value.shape is None:
            return None
        shape = [dim if isinstance(dim, int) else sizes.get(dim.value) for dim in value.shape]
        return tuple(size for size in shape if size is not None) if None not in shape else None

    def is_used(self, output: int) -> bool:
        """Whether the node has this output, and somebody reads it."""
        return output in self._used_outputs

    def refuse(self, reason: str, hint: str = "") -> Refusal:
        """The exception to raise where the node has no exact form: why, and what the user can do."""
        return Refusal(reason, hint)

    def layer(
        self, kind: str, /, *inputs: Blob, weights: Mapping[str, Array] | None = None, outputs: int = 1, **params: Any
    ) -> Blob:
        """Append a layer with one output; see `layers` for more."""
        return self.layers(kind, *inputs, weights=weights, outputs=outputs, **params)[0]

    def layers(
        self, kind: str, /, *inputs: Blob, weights: Mapping[str, Array] | None = None, outputs: int = 1, **params: Any
    ) -> tuple[Blob, ...]:
        """Append a layer and return its output blobs, with their shapes; parameters at their default are left out."""
        new = self._layer(kind, inputs, params, weights)
        for key in [key for key in new.params if _is_default(new, str(key))]:
            del new.params[key]
        return self._append(new, infer_shapes_of(new, outputs))

    def custom(
        self,
        kind: str,
        /,
        *inputs: Blob,
        results: Sequence[tuple[Shape | None, Dim]],
        params: Mapping[Any, Any],
        weights: Mapping[str, Array] | None = None,
    ) -> tuple[Blob, ...]:
        """Append a layer that ncnn does not have; `results` are shape and batch count of each of its outputs.

        `params` are by name where the type is declared (see docs/plugins.md), else by number; only a declared type can
        have weights.
        """
        return self._append(self._layer(kind, inputs, params, weights), results)

    def _layer(
        self, kind: str, inputs: Sequence[Blob], params: Mapping[Any, Any], weights: Mapping[str, Array] | None
    ) -> Layer:
        name = self._layer_names.new(self._label)
        floats = {key: self.f32(array) for key, array in (weights or {}).items()}
        return Layer(kind, name, inputs, (), params, floats, (self._label,), self.graph.types.get(kind))

    def _append(self, layer: Layer, results: Sequence[tuple[Shape | None, Dim]]) -> tuple[Blob, ...]:
        layer.outputs = tuple(Blob(self._names.new(f"{self._label}_out"), shape, batch) for shape, batch in results)
        check_layer(layer)
        self.graph.add(layer)
        return layer.outputs

    def mat(self, x: Value, dims: Sequence[Sequence[int]], batch: Sequence[int] = ()) -> Blob:
        """The tensor as a Mat whose dims, outermost first, hold these axes each, and whose batch the `batch` axes.

        Axes of size 1 may be left out; an empty group is a dim of size 1.
        """
        x = self.tensor(x)
        return self.formed(x, Form(tuple(map(tuple, dims)), tuple(batch))).blob

    def formed(self, x: Tensor, form: Form) -> Tensor:
        """The tensor in a form, by as few layers as possible; every form of a blob is made once."""
        return self.laid(x, *form.atoms(x.view))

    def cost(self, x: Tensor, form: Form) -> int:
        """How many layers it takes to bring the tensor into a form, those not counted that were made before."""
        return self._missing(x, *form.atoms(x.view))

    def _missing(self, x: Tensor, dims: Dims, batch: Atoms) -> int:
        blob: Blob | None = x.blob
        steps = plan(x.view, dims, batch)
        for done, step in enumerate(steps):
            blob = self._forms.get((blob, step)) if blob is not None else None
            if blob is None:
                return len(steps) - done
        return 0

    def laid(self, x: Tensor, dims: Dims, batch: Atoms) -> Tensor:
        """The tensor in a Mat of these dims and batch, said in the atoms of its view; see `formed` for axes."""
        blob = x.blob
        for step in plan(x.view, dims, batch):
            blob = self._step(blob, step)
        return Tensor(blob, View(batch, dims, x.view.axes), x.dtype)

    def channels(self, x: Value) -> Blob:
        """The tensor with axis 0 as batch and every other axis as a dim: what convolutions and poolings want."""
        if x.rank - 1 > MAX_DIMS or x.rank < 2:
            raise self.refuse(f"the operand has rank {x.rank}, ncnn takes rank 2 to 5 here")
        return self.mat(x, [[axis] for axis in range(1, x.rank)], [0])

    def tensor(self, x: Operand) -> Tensor:
        """The value as a tensor of the running net; a constant becomes MemoryData, a formula is calculated."""
        if isinstance(x, Tensor):
            return x
        if isinstance(x, Formula):
            from onnx2ncnn_opt.onnx.ops.formula import calculated  # which is made of operators

            return calculated(self, x)
        array = x.array
        kept = [axis for axis in range(array.ndim) if array.shape[axis] != 1]
        dims = [[axis] for axis in kept] if len(kept) <= MAX_DIMS else [kept]
        form = Form(tuple(map(tuple, dims)) or ((),))
        shape = tuple(int(np.prod([array.shape[a] for a in group], dtype=np.int64)) for group in form.dims)
        dtype = held_as_float(x.dtype) if x.dtype == np.bool_ else x.dtype
        return Tensor(self.memory(array.reshape(shape)), View.of(x.shape, form.dims), dtype)

    def memory(self, array: Array) -> Blob:
        """A constant as blob with the array's own shape (rank 1 to 4); equal constants share one."""
        if not array.size:
            raise self.refuse("a constant is empty, and ncnn has no empty tensors")
        data = self.i32(array) if np.issubdtype(array.dtype, np.integer) else self.f32(array)
        key = (data.dtype.char.encode() + data.tobytes(), tuple(data.shape))
        if key not in self._memory:
            params = dict(zip(AXES[data.ndim], data.shape, strict=True))
            label, self._label = self._label, f"{self._label}_const"
            name = self._layer_names.new(self._label)
            self._label = label
            blob = Blob(self._names.new(name), tuple(data.shape))
            self.graph.add(Layer("MemoryData", name, (), (blob,), params, {"data": data}, (self._label,)))
            self._memory[key] = blob
        return self._memory[key]

    def wrap(
        self,
        blob: Blob,
        shape: Shape,
        dims: Sequence[Sequence[int]],
        batch: Sequence[int] = (),
        dtype: Any = np.float32,
    ) -> Tensor:
        """A layer's output as the ONNX tensor of `shape`, whose axes are the Mat's dims and batch as given."""
        view = View.of(shape, dims, batch)
        mat = blob.shape, blob.batch
        expected = view.mat_shape, product(atom.size for atom in view.batch)
        if blob.shape is None or _differ((*blob.shape, blob.batch), (*expected[0], expected[1])):
            raise ShapeError(f"'{self._label}' gives {mat} in ncnn, but {expected} in ONNX")
        return Tensor(blob, view, np.dtype(dtype))

    def like(self, x: Tensor, blob: Blob) -> Tensor:
        """An elementwise layer's output: it lies as its operand does."""
        return Tensor(blob, x.view, x.dtype)

    def ones(self, size: Sym) -> Tensor:
        """A row of as many ones as an open size says."""
        if size not in self._ones:
            [text], others = self.stated([(size, 1)])
            one = self.memory(np.ones(1, np.float32))
            self._ones[size] = self.layer("Interp", one, *others, resize_type=1, size_expr=text)
        return self.wrap(self._ones[size], (size,), [[], [], [0]])

    def unary(self, x: Value, kind: str, /, weights: Mapping[str, Array] | None = None, **params: Any) -> Tensor:
        """An elementwise layer on the tensor in whatever form it is."""
        x = self.tensor(x)
        return self.like(x, self.layer(kind, x.blob, weights=weights, **params))

    def along(self, x: Value, axes: Sequence[int]) -> Tensor:
        """The tensor in a form in which each of these axes is a Mat dim of its own (see `View.dim_of`).

        Axes of size 1 are ignored.
        """
        lying = self.separated(x, axes)
        if lying is None:
            raise self.refuse(f"axes {list(axes)} of a rank {x.rank} tensor need more than four dims")
        return lying

    def separated(self, x: Value, axes: Sequence[int]) -> Tensor | None:
        """As `along`; None where that needs more than four dims."""
        x = self.tensor(x)
        wanted = [axis for axis in axes if x.view.axes[axis]]
        if all(x.view.dim_of(axis) is not None for axis in wanted):
            return x
        options = [
            (self._missing(x, dims, batch), order, dims, batch)
            for order, (dims, batch) in enumerate(_separations(x.view, wanted))
        ]
        if not options:
            return None
        _, _, dims, batch = min(options, key=lambda option: option[:2])
        return self.laid(x, dims, batch)

    def settled(self, x: Tensor) -> Tensor:
        """The tensor in its own order, with nothing left of what its axes were made of.

        For operands whose axes are made of factors that have nothing in common.
        """
        kept = [axis for axis, size in enumerate(x.shape) if size != 1]
        dims = [[axis] for axis in kept] if len(kept) <= MAX_DIMS else [kept]
        blob = self.mat(x, dims or [[]])
        return self.wrap(blob, x.shape, dims or [[]], dtype=x.dtype)

    def reshape(self, x: Value, shape: Shape) -> Value:
        """The tensor under another shape of the same size; a layer only where its factors do not regroup."""
        if isinstance(x, Constant):
            return Constant(x.array.reshape(known(shape)))
        view = x.view.reshape(shape)
        if view is not None:
            return x.viewed(view)
        kept = [axis for axis, size in enumerate(shape) if size != 1]
        dims = [[axis] for axis in kept] if len(kept) <= MAX_DIMS else [kept]
        return self.wrap(self._row_major(x, [shape[a] for a in kept]), shape, dims, dtype=x.dtype)

    def spread(self, array: Array, shape: Sequence[int]) -> Array:
        """The constant broadcast to a shape; refused where it does not broadcast so."""
        fits = zip(reversed(array.shape), reversed(shape), strict=False)
        if array.ndim > len(shape) or any(n not in (1, m) for n, m in fits):
            raise self.refuse(f"a constant of shape {list(array.shape)} does not broadcast to {list(shape)}")
        return np.broadcast_to(array, shape)

    def regrouped(self, blob: Blob, dims: Shape, batches: Mapping[str, Any] | None = None) -> Blob:
        """A Reshape layer; sizes that are not fixed are left open, or calculated from other blobs' sizes."""
        symbolic = [i for i, size in enumerate(dims) if isinstance(size, Sym)]
        if len(dims) > MAX_DIMS or len(symbolic) > 1:
            [text], others = self.stated([tuple(reversed(dims))], blob, whole_batch=bool(batches))
            return self.layer("Reshape", blob, *others, shape_expr=text, **(batches or {}))
        params: dict[str, Any] = {
            name: -1 if isinstance(size, Sym) else size for name, size in zip(AXES[len(dims)], dims, strict=True)
        }
        return self.layer("Reshape", blob, **params, **(batches or {}))

    def stated(
        self, lists: Sequence[Sequence[Dim]], blob: Blob | None = None, *, whole_batch: bool = False
    ) -> tuple[list[str], list[Blob]]:
        """Lists of sizes as ncnn's expressions, and the blobs in whose sizes they are said besides those of `blob`.

        A layer with these expressions takes `blob`, or one whose sizes say nothing, as its first input, and the others
        behind it. `whole_batch` is for a layer that sees a batch as a whole.
        """
        writer = SizeWriter(blob, self._sources, whole_batch=whole_batch)
        try:
            texts = [",".join(map(writer.text, listed)) for listed in lists]
        except UntoldError as error:
            raise self.refuse(
                f"the size {error} cannot be calculated from the inputs'", "bind it with --shape"
            ) from None
        if any(len(text) > LONGEST_TEXT for text in texts):
            raise self.refuse("its sizes take more than ncnn's 255 characters to say", "bind some with --shape")
        return texts, writer.others

    def _sources(self) -> Iterator[Blob]:
        """Blobs without a batch that together tell every open size: the inputs, their batches made dims."""
        for port in self._ports:
            blob, dims = port.blob, port.blob.shape
            assert dims is not None
            if not any(isinstance(size, Sym) for size in (*dims, blob.batch)):
                continue
            if blob.batch != 1:
                whole = (blob.batch, *dims)
                step = Regroup(whole if len(whole) <= MAX_DIMS else (blob.batch * dims[0], *dims[1:]), unbatch=True)
                blob = self._step(blob, step)
            yield blob

    def f32(self, array: Array) -> Array:
        """The constant as float32; refused where a finite number would overflow."""
        if array.dtype in (np.float32, np.int32):
            return array
        if array.dtype.kind not in "iub" and not is_float(array.dtype):
            raise self.refuse(f"a constant of type {array.dtype}")
        with np.errstate(over="ignore"):
            result = array.astype(np.float32)
        if not np.array_equal(np.isfinite(result), np.isfinite(array.astype(np.float64))):
            raise self.refuse("a constant does not fit into float32")
        return result

    def i32(self, array: Array) -> Array:
        """The constant as int32; refused where a number does not fit."""
        limits = np.iinfo(np.int32)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise self.refuse("an integer constant does not fit into int32")
        return array.astype(np.int32)

    def inlined(self, graph: onnx_ir.Graph, *operands: Item, trips: int | None = None) -> tuple[Item, ...]:
        """The outputs of a graph in an attribute for these inputs, its nodes imported in place of the node.

        `trips` is how often that is meant to happen, for the message that refuses a loop which comes to too much.
        Raises Incomplete where some of its nodes were refused.
        """
        outer, refused = dict(self._values), len(self._refused)
        state = self._label, self._outputs_of_node, self._used_outputs
        self._values.update((name, self._initializer(v)) for name, v in graph.initializers.items())
        self._values.update((value.name or "", x) for value, x in zip(graph.inputs, operands, strict=True))
        self._inlined += 1
        for node in graph:
            self._import(node)
            self._inlined += 1
        results = [self._values.get(value.name or "") for value in graph.outputs]
        self._values = outer  # the names of a subgraph end with it
        self._label, self._outputs_of_node, self._used_outputs = state
        done = tuple(x for x in results if x is not None)
        if len(done) < len(results) or len(self._refused) > refused:
            raise Incomplete
        if self._inlined > MOST_INLINED:
            count = "its trips" if trips is None else f"its {trips} trips"
            raise self.refuse(f"{count} of {len(graph)} nodes are too many: loops may have {MOST_INLINED} in all")
        return done

    # ---- the walk

    def run(self) -> Imported:
        """Import every node, then the outputs."""
        inputs = self._ports = self._inputs()
        self._values.update((name, self._initializer(v)) for name, v in self._model.graph.initializers.items())
        for node in self._model.graph:
            self._import(node)
        if self._refused:
            raise UnsupportedError(self._refused)
        outputs = self._outputs()
        self._prune()
        return Imported(self.graph, inputs, outputs, tuple(self._custom.values()))

    def _batch_axis(self, info: InputInfo, preferred: Mapping[str, int]) -> int | None:
        """The axis of an input that is the Mat's batch count: as told, else as the operators tell, else a first 1."""
        rank = len(info.shape)
        if info.name in self._batch_axes:
            axis = self._batch_axes[info.name]
            if axis is not None and not -rank <= axis < rank:
                raise UsageError(f"input '{info.name}' has no axis {axis}: its rank is {rank}")
            return None if axis is None else axis % rank
        if info.name not in preferred and rank > 1 and (info.shape[0] == 1 or rank > MAX_DIMS):
            return 0
        return preferred.get(info.name)

    def _inputs(self) -> tuple[Port, ...]:
        unknown = set(self._batch_axes) - {info.name for info in self._model.inputs}
        if unknown:
            names = ", ".join(info.name for info in self._model.inputs)
            raise UsageError(f"no input is called '{min(unknown)}'; the inputs are {names}")
        preferred = batch_axes(self._model)
        ports = []
        for info in self._model.inputs:
            rank, dtype = len(info.shape), info.dtype.numpy()
            batch = self._batch_axis(info, preferred)
            axes = [axis for axis in range(rank) if axis != batch]
            self._label = info.name
            if len(axes) > MAX_DIMS or 0 in info.shape:
                problem = "is empty" if 0 in info.shape else "has more than four axes besides the batch"
                reason = f"shape {_text(info.shape)} {problem}, and ncnn has no such tensors"
                self._refused.append(Unsupported(info.name, "graph input", reason))
                self._values[info.name] = None
                continue
            view = View.of(info.shape, [[axis] for axis in axes] or [[]], [] if batch is None else [batch])
            blob = Blob(info.name, view.mat_shape, product(atom.size for atom in view.batch))
            named = zip(AXES[len(view.dims)], view.mat_shape, strict=True)
            params = {name: size for name, size in named if isinstance(size, int)}
            self.graph.add(Layer("Input", self._layer_names.new(info.name), (), (blob,), params))
            self._values[info.name] = Tensor(blob, view, dtype)
            ports.append(Port(info.name, blob, info.shape, dtype, batch))
        return tuple(ports)

    @staticmethod
    def _initializer(value: onnx_ir.Value) -> Constant:
        assert value.const_value is not None
        return Constant(value.const_value.numpy())

    def _import(self, node: onnx_ir.Node) -> None:
        self._label, self._outputs_of_node = _node_name(node), len(node.outputs)
        self._used_outputs = tuple(
            i for i, value in enumerate(node.outputs) if value.name and (value.uses() or value.is_graph_output())
        )
        names = [value.name if value is not None else "" for value in node.inputs]
        operands = [self._values[name] if name else None for name in names]
        poisoned = any(name and self._values[name] is None for name in names)
        results: Sequence[Item | None] = [None] * len(node.outputs)
        try:
            if poisoned:
                # Whether a node that folds constants would have had any is not known any more.
                if not can_fold(node) and self._request(node) is None:
                    self._known(node)
            else:
                results = self._results(node, operands)
        except Incomplete:
            pass
        except Refusal as refusal:
            self._refuse(node, refusal.reason, refusal.hint)
        except (ShapeError, GraphError) as error:
            self._refuse(node, str(error))
        for value, result in zip(node.outputs, results, strict=True):
            if value.name:
                self._values[value.name] = result
                self._name_blob(result, value.name)

    def _refuse(self, node: onnx_ir.Node, reason: str, hint: str = "") -> None:
        operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        self._refused.append(Unsupported(self._label, operator, reason, hint))

    def _known(self, node: onnx_ir.Node) -> OnnxOp:
        op = find(node.domain, node.op_type, self._model.opsets.get(node.domain, 1))
        if op is None:
            raise Refusal("ncnn has no form of this operator", _cut_before(node))
        return op

    def _results(self, node: onnx_ir.Node, operands: list[Item | None]) -> Sequence[Item | None]:
        problem = None if node.domain else misfit(node, self.opset)
        if problem is not None:
            raise Refusal(problem)
        shaped = operands[0] if node.op_type in ("Shape", "Size") and not node.domain else None
        if shaped is not None and not isinstance(shaped, Tensors):
            attributes = _attributes(node)
            if node.op_type == "Size":
                return [sizes.size_of(shaped.shape)]
            return [sizes.shape_of(shaped.shape, attributes.get("start", 0), attributes.get("end"))]
        if not any(isinstance(operand, (Tensor, Tensors)) for operand in operands):
            folded = self._fold(node, operands)
            if folded is not None:
                return folded
        request = self._request(node)
        if request is not None:
            return import_custom(self, request, node, operands)
        return self._call(self._known(node), node, operands)

    def _request(self, node: onnx_ir.Node) -> CustomOp | None:
        return self._custom.get((node.domain, node.op_type))

    def _fold(self, node: onnx_ir.Node, operands: list[Item | None]) -> Sequence[Item | None] | None:
        known = [operand if isinstance(operand, (Constant, Formula)) else None for operand in operands]
        if any(isinstance(operand, Formula) for operand in known):
            result = None if node.domain else sizes.evaluate(node.op_type, known, _attributes(node))
            return None if result is None else [result]
        arrays = [operand.array if isinstance(operand, Constant) else None for operand in known]
        try:
            return [Constant(array) for array in evaluate_node(node, arrays, self._model.opsets)]
        except CannotFold:
            return None

    def _call(self, op: OnnxOp, node: onnx_ir.Node, operands: list[Item | None]) -> Sequence[Item | None]:
        arguments = self._arguments(op, operands)
        attributes = _attributes(node)
        for name in attributes:
            if name not in op.attributes:
                raise Refusal(f"attribute {name} is not known")
        for name, default in op.attributes.items():
            if default is inspect.Parameter.empty and name not in attributes:
                raise Refusal(f"attribute {name} is missing")
        result = op.function(self, *arguments, **attributes)
        results = list(result) if isinstance(result, tuple) else [result]
        if any(i >= len(results) for i in self._used_outputs):
            reason = f"output {node.outputs[self._used_outputs[-1]].name} is used, but ncnn cannot give it"
            raise Refusal(reason, "leave out what uses it with --outputs")
        return [results[i] if i < len(results) else None for i in range(len(node.outputs))]

    def _arguments(self, op: OnnxOp, operands: list[Item | None]) -> list[Any]:
        if len(operands) > len(op.inputs) and op.variadic is None:
            if any(operand is not None for operand in operands[len(op.inputs) :]):
                raise Refusal(f"it has {len(operands)} inputs, but takes {len(op.inputs)}")
            operands = operands[: len(op.inputs)]
        further = [Input("input", op.variadic, False)] * (len(operands) - len(op.inputs))
        missing = [None] * (len(op.inputs) - len(operands))
        return [
            self._argument(op, declared, operand)
            for declared, operand in zip((*op.inputs, *further), (*operands, *missing), strict=True)
        ]

    def _argument(self, op: OnnxOp, declared: Input, operand: Item | None) -> Any:
        if operand is None:
            if not declared.optional:
                raise Refusal(f"input {declared.name} is missing")
            return None
        if declared.type == Item:
            return operand
        if isinstance(operand, Tensors) or declared.type == Tensors:
            if declared.type != Tensors or not isinstance(operand, Tensors):
                raise Refusal(f"input {declared.name} is {'a' if isinstance(operand, Tensors) else 'no'} sequence")
            return operand
        if operand.dtype.kind == "c":
            raise Refusal(f"input {declared.name} is {operand.dtype}: ncnn has real numbers only")
        if declared.type in (Array, Ints, Sizes, Constant):
            if isinstance(operand, Tensor):
                raise Refusal(
                    f"input {declared.name} must be constant",
                    "it is calculated when the model runs; export the model with a fixed value for it",
                )
            if declared.type in (Ints, Sizes) and operand.dtype.kind not in "iu":
                raise Refusal(f"input {declared.name} is {operand.dtype}, not of integers")
            listed = operand.array.reshape(-1) if isinstance(operand, Constant) else sizes.sizes_of(operand)
            if listed is None or (isinstance(operand, Formula) and declared.type != Sizes):
                raise Refusal(f"input {declared.name} depends on a size that is not fixed", "bind it with --shape")
            if declared.type == Sizes:
                return tuple(size if isinstance(size, Sym) else int(size) for size in listed)
            if declared.type == Ints or isinstance(operand, Formula):
                return tuple(map(int, listed))
            return operand if declared.type == Constant else operand.array
        if not isinstance(operand, Constant) and not op.integers and not is_float(operand.dtype):
            raise Refusal(f"input {declared.name} is {operand.dtype}: ncnn calculates with floats only here")
        if declared.type == Tensor or (isinstance(operand, Formula) and Formula not in get_args(declared.type)):
            return self.tensor(operand)
        return operand

    # ---- the ends of the graph

    def _outputs(self) -> tuple[Port, ...]:
        ports = []
        for info in self._model.outputs:
            value = self._values[info.name]
            assert value is not None
            self._label = info.name
            try:
                if isinstance(value, Tensors):
                    raise Refusal("it is a sequence, and ncnn has tensors only")
                x = self.tensor(value)
                form, batch = self._output_form(x)
                blob = self.formed(x, form).blob
            except Refusal as refusal:
                unsupported = Unsupported(info.name, "graph output", refusal.reason, refusal.hint)
                raise UnsupportedError([unsupported]) from None
            if blob.is_input or blob.is_output or (blob.producer and blob.producer.type == "MemoryData" and blob.users):
                blob = self.layer("Noop", blob)
            self._rename(blob, info.name)
            self.graph.outputs = (*self.graph.outputs, blob)
            dtype = x.dtype if info.dtype is onnx_ir.DataType.UNDEFINED else info.dtype.numpy()
            ports.append(Port(info.name, blob, x.shape, dtype, batch))
        return tuple(ports)

    def _output_form(self, x: Tensor) -> tuple[Form, int | None]:
        """The form in which an output leaves the net, and its batch axis: the one that costs the fewest layers."""
        options: list[tuple[int, int, Form, int | None]] = []
        one = [axis for axis in range(x.rank) if x.shape[axis] == 1]
        batches: list[int | None] = [*(a for a in one if a == 0 and x.rank > 1), None, *(a for a in one if a != 0)]
        if x.view.batch and x.rank > 1:  # a Mat has a dim besides its batch
            batches = [*(axis for axis in range(x.rank) if x.view.axes[axis] == x.view.batch), *batches]
        if x.rank > MAX_DIMS:  # one axis more than a Mat has dims
            batches += [axis for axis, size in enumerate(x.shape) if isinstance(size, int)]
        for order, batch in enumerate(batches):
            dims = tuple((axis,) for axis in range(x.rank) if axis != batch) or ((),)
            form = Form(dims, () if batch is None else (batch,))
            if len(dims) <= MAX_DIMS:
                options.append((self.cost(x, form), order, form, batch))
        if not options:
            reason = f"shape {_text(x.shape)} has more than four axes besides the batch"
            raise self.refuse(reason, "squeeze or reshape it in the model")
        _, _, form, batch = min(options, key=lambda option: option[:2])
        return form, batch

    def _prune(self) -> None:
        """Drop layers that only fed shapes or refused branches."""
        for layer in reversed(self.graph):
            if layer.type != "Input" and not any(blob.uses for blob in layer.outputs):
                self.graph.remove(layer)

    # ---- pieces

    def _step(self, blob: Blob, step: Step) -> Blob:
        key = (blob, step)
        if key not in self._forms:
            if isinstance(step, Reorder):
                made = self.layer("Permute", blob, order_type=order_type(step.perm))
            elif isinstance(step, Shuffle):
                block, mode = _SHUFFLE_PARAMS[step.type]
                params: dict[str, Any] = {block: step.block} | ({mode: step.mode} if mode else {})
                made = self.layer(step.type, blob, **params)
            else:
                dims = step.dims if step.batch is None else (step.batch, *step.dims)
                batches = {"input_batch_axis": 0} if step.unbatch else {}
                if step.batch is not None:
                    batches["output_batch_axis"] = 0
                made = self.regrouped(blob, dims, batches)
            self._forms[key] = made
        return self._forms[key]

    def _row_major(self, x: Tensor, dims: Sequence[Dim]) -> Blob:
        """The tensor's elements in its own order, as a Mat of `dims`, or of one dim where those are more than four."""
        atoms = flat(x.view.axes)
        if len(dims) > MAX_DIMS or not dims:
            dims = [product(dims)]
        blob, view = x.blob, x.view
        if (view.batch + flat(view.dims)) != atoms:
            order = tuple((atom,) for atom in atoms)
            flattened = order if len(order) <= MAX_DIMS else (atoms,)
            for step in plan(view, flattened):
                blob = self._step(blob, step)
            view = View((), flattened, view.axes)
        return self.regrouped(blob, tuple(dims), {"input_batch_axis": 0} if view.batch else {})

    def _name_blob(self, value: Item | None, name: str) -> None:
        """Let the blob that a node made carry the name of the node's output."""
        if not isinstance(value, Tensor) or value.blob.producer is None or value.blob.producer.type == "Input":
            return
        if value.blob.name.startswith(f"{self._label}_out") and name not in {v.name for v in self._model.outputs}:
            self._rename(value.blob, self._names.new(name))

    def _rename(self, blob: Blob, name: str) -> None:
        self._names.rename(blob.name, name)
        blob.name = name


def _cut_before(node: onnx_ir.Node) -> str:
    """The advice to end the net where a node begins."""
    made = [value.name for value in node.inputs if value is not None and value.name and value.producer() is not None]
    begin = f"convert what is before it with --outputs {','.join(dict.fromkeys(made))}, and " if made else ""
    return f"{begin}do this step outside ncnn"


def infer_shapes_of(layer: Layer, outputs: int) -> list[tuple[Shape | None, Dim]]:
    """Shapes and batches of a layer that has no output blobs yet."""
    layer.outputs = tuple(Blob("") for _ in range(outputs))
    return infer_shapes(layer)


def _separations(view: View, axes: Sequence[int]) -> Iterator[tuple[Dims, Atoms]]:
    """Dims and batch in which each of the axes is a dim: in the tensor's own axes first, then with the rest merged."""
    wanted = [view.axes[axis] for axis in axes]
    batch = view.batch if not set(view.batch) & set(flat(wanted)) else ()
    natural = tuple(group for group in view.axes if group and not set(group) <= set(batch))
    for dims in (
        _merged(natural, wanted) if flat(natural) == tuple(a for a in flat(view.axes) if a not in batch) else None,
        _around(flat(view.dims) if batch == view.batch else view.batch + flat(view.dims), wanted),
        _around(tuple(atom for atom in flat(view.axes) if atom not in batch), wanted),
    ):
        if dims is not None and len(dims) <= MAX_DIMS:
            yield dims, batch


def _merged(dims: Dims, kept: Sequence[Atoms]) -> Dims:
    """The dims with as many neighbours merged, the innermost first, as leaves four; none of `kept` is merged."""
    while len(dims) > MAX_DIMS:
        i = next((i for i in range(len(dims) - 1, 0, -1) if dims[i - 1] not in kept and dims[i] not in kept), 0)
        if not i:
            break
        dims = (*dims[: i - 1], dims[i - 1] + dims[i], *dims[i + 1 :])
    return dims


def _around(order: Atoms, groups: Sequence[Atoms]) -> Dims | None:
    """`order` cut so that each group is a dim, and what lies between is one; None where a group is not together."""
    dims: list[list[Atom]] = [[]]
    i = 0
    while i < len(order):
        group = next((g for g in groups if g == order[i : i + len(g)]), None)
        if group is None:
            dims[-1].append(order[i])
            i += 1
        else:
            dims += [list(group), []]
            i += len(group)
    found = tuple(tuple(dim) for dim in dims if dim)
    return found if all(group in found for group in groups) else None


def _differ(a: Shape, b: Shape) -> bool:
    """Whether shapes surely differ: open sizes may be equal by what ONNX demands of them, and not by their names."""
    return len(a) != len(b) or any(isinstance(n - m, int) and n != m for n, m in zip(a, b, strict=True))


def _is_default(layer: Layer, name: str) -> bool:
    assert layer.spec is not None
    value, default = layer.params[name], layer.spec.by_name[name].default_in(layer.resolved)
    return tuple(value) == tuple(default) if isinstance(value, (tuple, list)) else bool(value == default)


def _attributes(node: onnx_ir.Node) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, attribute in node.attributes.items():
        value = attribute.value
        if attribute.type == onnx_ir.AttributeType.TENSOR:
            value = value.numpy()
        elif isinstance(value, (list, tuple)):
            value = tuple(value)
        result[name] = value
    return result


def _node_name(node: onnx_ir.Node) -> str:
    return node.name or next((value.name for value in node.outputs if value.name), node.op_type)


def _text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
