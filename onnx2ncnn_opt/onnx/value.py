"""The values of an ONNX graph during the import: tensors in ncnn blobs, constants, and functions of dynamic sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, axis_index
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.view import View
from onnx2ncnn_opt.ir.weight import Array

Ints: TypeAlias = tuple[int, ...]  # an operand that must be constant integers
Sizes: TypeAlias = tuple[Dim, ...]  # an operand of integers that may depend on the model's dynamic sizes


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the net; `view` maps its axes to the dims and the batch of `blob`."""

    blob: Blob
    view: View
    dtype: np.dtype[np.generic]  # ONNX's; floats of any width are float32 in ncnn, integers int32

    @property
    def shape(self) -> Shape:
        """The ONNX shape."""
        return self.view.shape

    @property
    def rank(self) -> int:
        """The number of ONNX axes."""
        return len(self.view.axes)

    @property
    def batch_axis(self) -> int | None:
        """The axis that is the Mat's batch; None if none is."""
        return next((axis for axis, atoms in enumerate(self.view.axes) if atoms and atoms == self.view.batch), None)

    def viewed(self, view: View) -> Tensor:
        """Return the same blob under another view."""
        return Tensor(self.blob, view, self.dtype)

    def of_type(self, dtype: np.dtype[np.generic]) -> Tensor:
        """Return the same blob as elements of another ONNX type."""
        return Tensor(self.blob, self.view, dtype)

    def transpose(self, order: Sequence[int]) -> Tensor:
        """Return the same blob with its axes in another order."""
        return self.viewed(self.view.transpose(order))


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor whose values are known during the import."""

    array: Array

    @property
    def shape(self) -> Shape:
        """The ONNX shape."""
        return tuple(self.array.shape)

    @property
    def rank(self) -> int:
        """The number of ONNX axes."""
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The element type."""
        return self.array.dtype

    @property
    def scalar(self) -> float | None:
        """The number in an array of one element; None for other arrays."""
        return float(self.array.reshape(-1)[0]) if self.array.size == 1 else None

    def transpose(self, order: Sequence[int]) -> Constant:
        """Return the constant with its axes in another order."""
        return Constant(self.array.transpose(order))


@dataclass(frozen=True, eq=False)
class SymbolicTensor:
    """A tensor that depends only on the model's dynamic sizes, such as results of Shape, Range or ConstantOfShape.

    `cells` are its elements, `Dim`s or numbers. They broadcast to `shape`. Along an axis of cells of size 1, elements
    differ only by the `axis_index` in the cell: a Range over n has the one cell ``#0`` and the shape n.
    """

    cells: Array
    shape: Shape
    dtype: np.dtype[np.generic]

    @property
    def rank(self) -> int:
        """The number of ONNX axes."""
        return len(self.shape)

    def varies(self, axis: int) -> bool:
        """Return True if elements differ along an axis, counted from the end."""
        index, sizes = str(axis_index(-1 - axis)), self.cells.shape
        is_listed = len(sizes) >= -axis and sizes[axis] != 1
        return is_listed or any(index in cell.names() for cell in self.cells.flat if isinstance(cell, Sym))


Value: TypeAlias = Tensor | Constant
Operand: TypeAlias = Tensor | Constant | SymbolicTensor


@dataclass(frozen=True, eq=False)
class TensorSequence:
    """A sequence of tensors."""

    items: tuple[Value, ...]


Item: TypeAlias = Operand | TensorSequence  # any kind of operand
NodeItems: TypeAlias = Sequence[Item | None]  # operands or results of a node; None is absent or unknown


def is_float(dtype: np.dtype[np.generic]) -> bool:
    """Return True if ncnn stores the type as float32. bfloat16 and 8-bit floats are no subtypes of numpy's floating."""
    return np.issubdtype(dtype, np.floating) or dtype.name.startswith(("bfloat", "float"))


def held_as_float(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Return the type of a layer's result: ncnn computes integers and bools as float32; only inputs may be int32."""
    return dtype if is_float(dtype) else np.dtype(dtype.type, metadata={"held": "float32"})


BOOL = held_as_float(np.dtype(np.bool_))  # the type of bools that the net computes


def is_held_as_float(dtype: np.dtype[np.generic]) -> bool:
    """Return True if the type is one of `held_as_float`."""
    return bool(dtype.metadata)


def element_type(dtype: np.dtype[np.generic]) -> str:
    """Return the element type of a tensor's Mat."""
    return "float32" if is_float(dtype) or is_held_as_float(dtype) else "int32"
