"""Refusals of nodes, and checks of sizes and constants that raise them."""

from collections.abc import Iterable, Sequence

import numpy as np

from onnx2ncnn_opt.ir.dim import Dim
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.value import is_float

_FIT = "give sizes that fit with --shape, or check how the model was exported"


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


class Checks:
    """Checks of a node's sizes, axes and constants."""

    def refuse(self, reason: str, hint: str = "") -> Refusal:
        """Return the exception for a node without an exact equivalent: the reason, and advice for the user."""
        return Refusal(reason, hint)

    def invalid(self, reason: str, equal: Iterable[tuple[Dim, Dim]] = ()) -> Refusal:
        """Return the exception for a node that breaks its operator's definition unless the pairs are equal."""
        return Invalid(reason, "check how the model was exported, and bind its dynamic dimensions with --shape", equal)

    def mismatch(self, reason: str, pairs: Iterable[tuple[Dim, Dim]]) -> Refusal:
        """Return the exception for pairs of sizes that have to be equal, or to broadcast."""
        for a, b in pairs:
            if isinstance(a, int) and isinstance(b, int) and a != b:
                return ShapeMismatch(reason, (a, b))
        return Refusal(reason, _FIT)

    def fixed(self, sizes: Iterable[Dim | None], reason: str, hint: str = "bind it with --shape") -> tuple[int, ...]:
        """Return the sizes as integers; raise Refusal with `reason` if one is dynamic."""
        numbers = tuple(sizes)
        if not all(isinstance(size, int) for size in numbers):
            raise self.refuse(reason, hint)
        return tuple(size for size in numbers if isinstance(size, int))

    def axis(self, axis: int, rank: int) -> int:
        """Return an axis counted from the front; raise Refusal if a tensor of `rank` does not have it."""
        if not -rank <= axis < rank:
            raise self.invalid(f"axis {axis} of a tensor of rank {rank}")
        return axis % rank

    def axes(self, axes: Sequence[int], rank: int) -> list[int]:
        """Return axes counted from the front, in the same order; raise Refusal if one occurs twice."""
        result = [self.axis(axis, rank) for axis in axes]
        if len(set(result)) != len(result):
            raise self.invalid(f"axes {list(axes)} of a tensor of rank {rank}")
        return result

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
