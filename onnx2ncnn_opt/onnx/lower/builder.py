"""Graph builder: adds layers and constants, and converts tensors to the layout that a layer needs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from onnx2ncnn_opt.errors import ShapeError
from onnx2ncnn_opt.ir.codes import BinaryOp, Interp, UnaryOp
from onnx2ncnn_opt.ir.cut import input_params
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, by_axis, known, product
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer, check_layer
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.ir.ranges import Range, Ranges, of_numbers
from onnx2ncnn_opt.ir.shapes import infer_shapes
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.ir.view import MAX_DIMS, Atoms, Dims, Regroup, Step, View, flat, plan, step_layer
from onnx2ncnn_opt.ir.weight import Array, Weight
from onnx2ncnn_opt.onnx.lower.expressions import LONGEST_TEXT, SizeWriter, UnknownSize
from onnx2ncnn_opt.onnx.lower.layout import Layout, plain_dims, separations
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value, held_as_float, is_float

_FIT = "give sizes that fit with --shape, or check how the model was exported"
AxesOfDims: TypeAlias = Sequence[Sequence[int]]
Weights: TypeAlias = Mapping[str, Array | Weight] | None
Results: TypeAlias = Sequence[tuple[Shape | None, Dim]]


class Refusal(Exception):
    """Raised inside an importer: ncnn has no exact equivalent of the node, unless each pair in `equal` is equal."""

    def __init__(self, reason: str, hint: str = "", equal: Iterable[tuple[Dim, Dim]] = ()) -> None:
        super().__init__(reason)
        self.reason, self.hint, self.equal = reason, hint, tuple(equal)


class Invalid(Refusal):
    """A node that breaks its operator's definition, unless each pair in `equal` is equal."""


class ShapeMismatch(Refusal):
    """Operands whose `sizes` do not match: no runtime accepts the model with them."""

    def __init__(self, reason: str, sizes: Sequence[int]) -> None:
        super().__init__(reason, _FIT)
        self.sizes = tuple(sizes)


class Builder:
    """Appends layers and constants, named after the node, and converts operands to the layouts that layers need."""

    def __init__(self, types: Mapping[str, LayerSpec], public: Sequence[str]) -> None:
        """`types` is the table of layers; the names `public` are reserved for the model's inputs and outputs."""
        self.graph = Graph(types)
        self._label = ""
        self._names = NamePool(public)
        self._layer_names = NamePool()
        self._memory: dict[tuple[bytes, Shape], Blob] = {}
        self._layouts: dict[tuple[Blob, Step], Blob] = {}
        self._ones: dict[Sym, Blob] = {}
        self._open_inputs: list[Blob] = []
        self._ranges = Ranges()
        self._operands: dict[Blob, tuple[View, tuple[Value, ...]]] = {}

    def refuse(self, reason: str, hint: str = "") -> Refusal:
        """Return the exception for a node without an exact equivalent: the reason, and advice for the user."""
        return Refusal(reason, hint)

    def fixed(self, sizes: Iterable[Dim | None], reason: str, hint: str = "bind it with --shape") -> tuple[int, ...]:
        """Return the sizes as integers; raise Refusal with `reason` if one is dynamic."""
        numbers = tuple(sizes)
        if not all(isinstance(size, int) for size in numbers):
            raise self.refuse(reason, hint)
        return tuple(size for size in numbers if isinstance(size, int))

    def invalid(self, reason: str, equal: Iterable[tuple[Dim, Dim]] = ()) -> Refusal:
        """Return the exception for a node that breaks its operator's definition unless the pairs are equal."""
        return Invalid(reason, "check how the model was exported, and bind its dynamic dimensions with --shape", equal)

    def mismatch(self, reason: str, pairs: Iterable[tuple[Dim, Dim]]) -> Refusal:
        """Return the exception for pairs of sizes that have to be equal, or to broadcast."""
        for a, b in pairs:
            if isinstance(a, int) and isinstance(b, int) and a != b:
                return ShapeMismatch(reason, (a, b))
        return Refusal(reason, _FIT)

    def layer(self, kind: str, /, *inputs: Blob, weights: Weights = None, **params: Any) -> Blob:
        """Append a layer with one output; see `layers` for more."""
        return self.layers(kind, *inputs, weights=weights, **params)[0]

    def layers(
        self, kind: str, /, *inputs: Blob, weights: Weights = None, outputs: int = 1, **params: Any
    ) -> tuple[Blob, ...]:
        """Append a layer, and return its output blobs with inferred shapes; omit parameters with default values."""
        new = self._layer(kind, inputs, params, weights).without_defaults()
        new.outputs = tuple(Blob("") for _ in range(outputs))
        return self._append(new, infer_shapes(new))

    def custom(
        self, kind: str, /, *inputs: Blob, results: Results, params: Mapping[Any, Any], weights: Weights = None
    ) -> tuple[Blob, ...]:
        """Append a layer that ncnn does not have; `results` are shape and batch count of each output.

        The keys of `params` are names for declared types (docs/plugins.md), else ids. Only declared types have weights.
        """
        return self._append(self._layer(kind, inputs, params, weights), results)

    def _layer(self, kind: str, inputs: Sequence[Blob], params: Mapping[Any, Any], weights: Weights) -> Layer:
        name = self._layer_names.take(self._label)
        stored = {key: data if isinstance(data, Weight) else self.f32(data) for key, data in (weights or {}).items()}
        return Layer(kind, name, inputs, (), params, stored, (self._label,), self.graph.types.get(kind))

    def _append(self, layer: Layer, results: Results) -> tuple[Blob, ...]:
        layer.outputs = tuple(Blob(self._names.take(f"{self._label}_out"), shape, batch) for shape, batch in results)
        check_layer(layer)
        self.graph.add(layer)
        return layer.outputs

    def memory(self, array: Array) -> Blob:
        """Return a constant as a blob of the same shape (rank 1 to 4); equal constants share a blob."""
        if not array.size:
            raise self.refuse("a tensor is empty, and ncnn has no empty tensors", "remove it from the model")
        data = self.i32(array) if np.issubdtype(array.dtype, np.integer) else self.f32(array)
        key = (data.dtype.char.encode() + data.tobytes(), tuple(data.shape))
        if key not in self._memory:
            name = self._layer_names.take(f"{self._label}_const")
            blob = Blob(self._names.take(name), tuple(data.shape))
            self.graph.add(Layer("MemoryData", name, (), (blob,), by_axis(data.shape), {"data": data}, (self._label,)))
            self._memory[key] = blob
        return self._memory[key]

    def spread(self, array: Array, shape: Sequence[int]) -> Array:
        """Return the constant broadcast to a shape; raise Refusal if that is impossible."""
        fits = zip(reversed(array.shape), reversed(shape), strict=False)
        if array.ndim > len(shape) or any(n not in (1, m) for n, m in fits):
            raise self.invalid(f"a constant of shape {list(array.shape)} does not broadcast to {list(shape)}")
        return np.broadcast_to(array, shape)

    def f32(self, array: Array) -> Array:
        """Return the constant as float32; raise Refusal if a finite number would overflow."""
        if array.dtype in (np.float32, np.int32):
            return array
        if array.dtype.kind not in "iub" and not is_float(array.dtype):
            raise self.refuse(f"a constant of type {array.dtype}", "cast it to float32 in the model")
        with np.errstate(over="ignore"):
            result = array.astype(np.float32)
        if not np.array_equal(np.isfinite(result), np.isfinite(array.astype(np.float64))):
            raise self.refuse("a constant does not fit into float32", "clip it in the model")
        return result

    def i32(self, array: Array) -> Array:
        """Return the constant as int32; raise Refusal if a number does not fit."""
        result = array.astype(np.int32)
        if not np.array_equal(result, array):
            raise self.refuse("an integer constant does not fit into int32", "clip it in the model")
        return result

    def input(self, name: str, view: View) -> Blob:
        """Append an input of the net, in the layout of its view."""
        blob = Blob(name, view.mat_shape, product(atom.size for atom in view.batch))
        self.graph.add(Layer("Input", self._layer_names.take(name), (), (blob,), input_params(blob.shape)))
        if any(isinstance(size, Sym) for size in (*view.mat_shape, blob.batch)):
            self._open_inputs.append(blob)
        return blob

    def range_of(self, x: Value) -> Range:
        """Return the known range of a value's elements."""
        return of_numbers(self.f32(x.array)) if isinstance(x, Constant) else self._ranges.of(x.blob)

    def mat(self, x: Value, dims: AxesOfDims, batch: Sequence[int] = ()) -> Blob:
        """Return the tensor as a Mat whose dims, outermost first, and batch consist of these axes.

        Axes of size 1 may be omitted; an empty group is a dim of size 1.
        """
        x = self.tensor(x)
        return self.in_layout(x, Layout(tuple(map(tuple, dims)), tuple(batch))).blob

    def in_layout(self, x: Tensor, layout: Layout) -> Tensor:
        """Return the tensor in a layout, with as few layers as possible; consumers share the layouts of a blob."""
        return self.in_mat(x, *layout.atoms(x.view))

    def cost(self, x: Tensor, layout: Layout) -> int:
        """Return the number of layers, except existing ones, that convert the tensor to a layout."""
        return self._missing(x, *layout.atoms(x.view))

    def _missing(self, x: Tensor, dims: Dims, batch: Atoms) -> int:
        blob: Blob | None = x.blob
        steps = plan(x.view, dims, batch)
        for done, step in enumerate(steps):
            blob = self._layouts.get((blob, step)) if blob is not None else None
            if blob is None:
                return len(steps) - done
        return 0

    def in_mat(self, x: Tensor, dims: Dims, batch: Atoms) -> Tensor:
        """Return the tensor in a Mat of these dims and batch, given as atoms of its view (as axes: `in_layout`)."""
        blob = x.blob
        for step in plan(x.view, dims, batch):
            blob = self._step(blob, step)
        return Tensor(blob, View(batch, dims, x.view.axes), x.dtype)

    def from_channels(self, x: Tensor, blob: Blob, dtype: Any = np.float32) -> Tensor:
        """Return the output of a layer on `channels` of x as a tensor: the batch is axis 0, each dim an axis."""
        return self.wrap(blob, (x.shape[0], *blob.known_shape), [[axis] for axis in range(1, x.rank)], [0], dtype)

    def channels(self, x: Value) -> Blob:
        """Return the tensor with axis 0 as batch and each other axis as a dim, for convolutions and poolings."""
        return self.mat(x, self._channel_dims(x), [0])

    def channel_dims(self, x: Tensor) -> list[list[int]]:
        """Return the dims of `channels`; only axis 1 if x is an image of one pixel, stored as a row."""
        dims = self._channel_dims(x)
        is_row = all(size == 1 for size in x.shape[2:]) and not self.cost(x, Layout(((1,),), (0,)))
        return dims[:1] if is_row else dims

    def _channel_dims(self, x: Value) -> list[list[int]]:
        if not 2 <= x.rank <= MAX_DIMS + 1:
            raise self.refuse(f"the operand has rank {x.rank}, ncnn takes rank 2 to 5 here", "reshape it in the model")
        return [[axis] for axis in range(1, x.rank)]

    def along(self, x: Value, axes: Sequence[int]) -> Tensor:
        """Return the tensor in a layout in which each of these axes, unless of size 1, is a dim (see `View.dim_of`)."""
        laid_out = self.separated(x, axes)
        if laid_out is not None:
            return laid_out
        reason = f"axes {list(axes)} of a rank {x.rank} tensor need more than ncnn's four dims"
        raise self.refuse(reason, "reshape it in the model")

    def separated(self, x: Value, axes: Sequence[int]) -> Tensor | None:
        """Return the result of `along`; None if it needs more than four dims."""
        x = self.tensor(x)
        longer = [axis for axis in axes if x.view.axes[axis]]
        if all(x.view.dim_of(axis) is not None for axis in longer):
            return x
        options = list(separations(x.view, longer))
        return self.in_mat(x, *min(options, key=lambda option: self._missing(x, *option))) if options else None

    def with_plain_axes(self, x: Tensor) -> Tensor:
        """Return the tensor in the order of its axes, each of which is one atom."""
        dims = plain_dims(x.shape)
        return self.wrap(self.mat(x, dims), x.shape, dims, dtype=x.dtype)

    def _step(self, blob: Blob, step: Step) -> Blob:
        if (blob, step) not in self._layouts:
            self._layouts[blob, step] = self.apply_step(blob, step)
        return self._layouts[blob, step]

    def apply_step(self, blob: Blob, step: Step) -> Blob:
        """Append the layer of a layout step; a Reshape with several dynamic sizes computes them from other blobs."""
        if isinstance(step, Regroup):
            dynamic = sum(isinstance(size, Sym) for size in step.whole)
            if len(step.whole) > MAX_DIMS or dynamic > 1:
                batches: dict[str, Any] = step.batch_axes
                [text], others = self.size_expressions([step.whole[::-1]], blob, whole_batch=bool(batches))
                return self.layer("Reshape", blob, *others, shape_expr=text, **batches)
        kind, params = step_layer(step)
        return self.layer(kind, blob, **params)

    def _row_major(self, x: Tensor, dims: Sequence[Dim]) -> Blob:
        """Return the tensor's elements in the order of its axes as a Mat of `dims`; of one dim if these exceed four."""
        atoms = flat(x.view.axes)
        if len(dims) > MAX_DIMS or not dims:
            dims = [product(dims)]
        if x.view.batch + flat(x.view.dims) != atoms:
            x = self.in_mat(x, tuple((atom,) for atom in atoms) if len(atoms) <= MAX_DIMS else (atoms,), ())
        return self.apply_step(x.blob, Regroup(tuple(dims), unbatch=bool(x.view.batch)))

    def tensor(self, x: Value) -> Tensor:
        """Return the value as a tensor of the net; a constant becomes MemoryData."""
        if isinstance(x, Tensor):
            return x
        view = View.of(x.shape, plain_dims(x.shape))
        dtype = held_as_float(x.dtype) if x.dtype == np.bool_ else x.dtype
        return Tensor(self.memory(x.array.reshape(known(view.mat_shape))), view, dtype)

    def wrap(
        self, blob: Blob, shape: Shape, dims: AxesOfDims, batch: Sequence[int] = (), dtype: Any = np.float32
    ) -> Tensor:
        """Return a layer's output as the ONNX tensor of `shape`; `dims` and `batch` list the axes in the Mat."""
        view = View.of(shape, dims, batch)
        expected = view.mat_shape, product(atom.size for atom in view.batch)
        if blob.shape is None or _differ((*blob.shape, blob.batch), (*expected[0], expected[1])):
            raise ShapeError(f"'{self._label}' gives {(blob.shape, blob.batch)} in ncnn, but {expected} in ONNX")
        return Tensor(blob, view, np.dtype(dtype))

    def like(self, x: Tensor, blob: Blob) -> Tensor:
        """Return an elementwise layer's output as a tensor in its operand's layout."""
        return Tensor(blob, x.view, x.dtype)

    def unary(self, x: Value, kind: str, /, weights: Weights = None, **params: Any) -> Tensor:
        """Apply an elementwise layer to the tensor in its present layout."""
        x = self.tensor(x)
        result = self.like(x, self.layer(kind, x.blob, weights=weights, **params))
        if weights is None:
            self.note_operands(result, x)
        return result

    def apply(self, x: Value, operation: UnaryOp | BinaryOp, number: float | None = None) -> Tensor:
        """Apply a UnaryOp, or a BinaryOp with a number, to the tensor in its present layout."""
        if number is None:
            return self.unary(x, "UnaryOp", op_type=operation)
        return self.unary(x, "BinaryOp", op_type=operation, with_scalar=1, b=number)

    def note_operands(self, x: Tensor, *operands: Value) -> None:
        """Record the operands of an elementwise layer, for consumers that recompute x."""
        self._operands[x.blob] = x.view, operands

    def operands_of(self, x: Tensor) -> tuple[Value, ...] | None:
        """Return the operands of the elementwise layer that computed x; None without one, or if x has another view."""
        view, operands = self._operands.get(x.blob, (None, ()))
        return operands if view == x.view else None

    def reshape(self, x: Value, shape: Shape) -> Value:
        """Return the tensor with another shape; needs a layer only if regrouping the view's factors is impossible."""
        if isinstance(x, Constant):
            return Constant(x.array.reshape(known(shape)))
        view = x.view.reshape(shape)
        if view is not None:
            return x.viewed(view)
        whole = self._row_major(x, [size for size in shape if size != 1])
        return self.wrap(whole, shape, plain_dims(shape), dtype=x.dtype)

    def ones(self, size: Sym) -> Tensor:
        """Return a row of ones whose length is a dynamic size."""
        if size not in self._ones:
            [text], others = self.size_expressions([(size, 1)])
            one = self.memory(np.ones(1, np.float32))
            self._ones[size] = self.layer("Interp", one, *others, resize_type=Interp.NEAREST, size_expr=text)
        return self.wrap(self._ones[size], (size,), [[], [], [0]])

    def size_expressions(
        self, lists: Sequence[Sequence[Dim]], blob: Blob | None = None, *, whole_batch: bool = False
    ) -> tuple[list[str], list[Blob]]:
        """Return lists of sizes as ncnn's expressions, and the blobs, other than `blob`, whose sizes they use.

        A layer with these expressions reads `blob`, or a blob without dynamic sizes, as its first input, and the others
        after it. `whole_batch` is for a layer that reads the whole batch at once.
        """
        writer = SizeWriter(blob, self._sources, whole_batch=whole_batch)
        try:
            texts = [",".join(map(writer.text, sizes)) for sizes in lists]
        except UnknownSize as error:
            reason = f"the size {error} cannot be computed from those of the inputs"
            raise self.refuse(reason, "bind it with --shape") from None
        if any(len(text) > LONGEST_TEXT for text in texts):
            reason = "the expressions of its sizes are longer than ncnn's 255 characters"
            raise self.refuse(reason, "bind some with --shape")
        return texts, writer.others

    def _sources(self) -> Iterator[Blob]:
        """Yield blobs that together have every dynamic size as a dim: the inputs, with their batches as dims."""
        for blob in self._open_inputs:
            if blob.batch != 1:
                dims = blob.shape or ()
                whole = (blob.batch, *dims)
                step = Regroup(whole if len(whole) <= MAX_DIMS else (blob.batch * dims[0], *dims[1:]), unbatch=True)
                blob = self._step(blob, step)
            yield blob


def _differ(a: Shape, b: Shape) -> bool:
    """Return True if shapes certainly differ. Dynamic sizes of different names may be equal if ONNX demands it."""
    return len(a) != len(b) or any(isinstance(n - m, int) and n != m for n, m in zip(a, b, strict=True))
