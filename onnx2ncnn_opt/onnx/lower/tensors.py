"""Tensors of the model in the net: the layouts that layers need, and views that need no layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from onnx2ncnn_opt.errors import ShapeError
from onnx2ncnn_opt.ir.codes import BinaryOp, Interp, UnaryOp
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, known, product
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.ranges import Range, Ranges, of_numbers
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.ir.view import MAX_DIMS, Atoms, Dims, Regroup, Step, View, flat, plan, step_layer
from onnx2ncnn_opt.onnx.lower.builder import Builder, Weights
from onnx2ncnn_opt.onnx.lower.expressions import LONGEST_TEXT, SizeWriter, UnknownSize
from onnx2ncnn_opt.onnx.lower.layout import Layout, plain_dims, separations
from onnx2ncnn_opt.onnx.value import Constant, Tensor, Value, held_as_float

AxesOfDims: TypeAlias = Sequence[Sequence[int]]


class TensorBuilder(Builder):
    """Converts operands to the layouts that layers need, and wraps blobs as tensors of the model."""

    def __init__(self, types: Mapping[str, LayerSpec], public: Sequence[str]) -> None:
        """See `Builder`."""
        super().__init__(types, public)
        self._layouts: dict[tuple[Blob, Step], Blob] = {}
        self._ones: dict[tuple[Sym, int], Blob] = {}
        self._ranges = Ranges()
        self._operands: dict[Blob, tuple[View, tuple[Value, ...]]] = {}
        self._longer: dict[tuple[Blob, Atoms], tuple[Dims, Callable[[], Value]]] = {}

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
                return self._resized(blob, step)
        kind, params = step_layer(step)
        return self.layer(kind, blob, **params)

    def _resized(self, blob: Blob, step: Regroup) -> Blob:
        """Append a Reshape with expressions.

        ncnn packs the outermost axis if its size is a multiple of 4. A Reshape that reads sizes of other blobs repacks
        number by number, which is a hundred times slower. So plain Reshapes repack before it, or around it.
        """
        batches: dict[str, Any] = step.batch_axes
        [text], others = self.size_expressions([step.whole[::-1]], blob, whole_batch=bool(batches))
        old, (first, *rest) = blob.known_shape[0], step.whole
        if others and not batches and old != first and (_may_be_packed(old) or _may_be_packed(first)):
            if isinstance(first, int):
                return self._step(self._step(blob, Regroup((first, product(rest)))), step)
            joined = _joined(step.whole)
            if joined is not None:
                row = self._step(blob, Regroup((1, product(joined)))) if _may_be_packed(old) else blob
                blob = self._step(row, Regroup((1, *joined)))
                [text], others = self.size_expressions([step.whole[::-1]], blob)
        return self.layer("Reshape", blob, *others, shape_expr=text, **batches)

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

    def note_longer(self, x: Tensor, axis: int, make: Callable[[], Value]) -> None:
        """Record how to compute x with at least one element along an axis that may be empty."""
        self._longer[x.blob, x.view.axes[axis]] = x.view.axes, make

    def longer(self, x: Value, axis: int) -> Tensor | None:
        """Return x with at least one element along an axis that may be empty; None without a record."""
        x = self.tensor(x)
        old, make = self._longer.get((x.blob, x.view.axes[axis]), ((), None))
        if make is None or not set(x.view.axes) <= {*old, ()}:
            return None
        made = self.tensor(make())
        new: dict[Atoms, Atoms] = {**dict(zip(old, made.view.axes, strict=True)), (): ()}
        return made.viewed(made.view.with_axes(new[atoms] for atoms in x.view.axes))

    def reshape(self, x: Value, shape: Shape) -> Value:
        """Return the tensor with another shape; needs a layer only if regrouping the view's factors is impossible."""
        if isinstance(x, Constant):
            return Constant(x.array.reshape(known(shape)))
        view = x.view.reshape(shape)
        if view is not None:
            return x.viewed(view)
        whole = self._row_major(x, [size for size in shape if size != 1])
        return self.wrap(whole, shape, plain_dims(shape), dtype=x.dtype)

    def ones(self, size: Sym, copies: int = 1) -> Tensor:
        """Return a row of ones whose length is a dynamic size; several `copies` are along a first axis."""
        if (size, copies) not in self._ones:
            [text], others = self.size_expressions([(size, 1)])
            one = self.memory(np.ones(copies, np.float32))
            row = self.layer("Interp", one, *others, resize_type=Interp.NEAREST, size_expr=text)
            self._ones[size, copies] = row
        shape, dims = ((size,), [[], [], [0]]) if copies == 1 else ((copies, size), [[0], [], [1]])
        return self.wrap(self._ones[size, copies], shape, dims)

    def has_ones(self, size: Sym) -> bool:
        """Return True if there is a row of ones of this length, so the net takes no inputs that make the size 0."""
        return (size, 1) in self._ones

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


def _may_be_packed(size: Dim) -> bool:
    return not isinstance(size, int) or size % 4 == 0


def _joined(dims: Shape) -> Shape | None:
    """Return at most three dims: of four, a fixed one is joined to its neighbour; None if there is none."""
    if len(dims) < MAX_DIMS:
        return dims
    at = next((i for i in (2, 1) if any(isinstance(size, int) for size in dims[i : i + 2])), None)
    return None if at is None else (*dims[:at], product(dims[at : at + 2]), *dims[at + 2 :])


def _differ(a: Shape, b: Shape) -> bool:
    """Return True if shapes certainly differ. Dynamic sizes of different names may be equal if ONNX demands it."""
    return len(a) != len(b) or any(isinstance(n - m, int) and n != m for n, m in zip(a, b, strict=True))
