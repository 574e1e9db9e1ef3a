"""The registry of shape rules, the functions that run them, and their helpers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, TypeAlias

from onnx2ncnn_opt.errors import ShapeError
from onnx2ncnn_opt.ir import dim
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, by_axis
from onnx2ncnn_opt.ir.expression import evaluate
from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.spec import Trait

MAX_RANK = 4


class Batched(NamedTuple):
    """An output whose batch count is not the common one of the inputs."""

    shape: Shape | None
    batch: Dim


Output: TypeAlias = "Shape | Batched | None"
# A rule takes the layer and its input shapes, and returns the one output, or a list with every output.
Rule: TypeAlias = Callable[..., "Output | list[Output]"]

_RULES: dict[str, tuple[Rule, bool]] = {}
_ELEMENTWISE: tuple[Rule, bool] = (lambda layer, x: x), False


def shape_of(*types: str, unknown_inputs: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule `(layer, *input shapes)` for layer types.

    With `unknown_inputs` the rule is called even if an input shape is None; otherwise all outputs are None then.
    """

    def register(rule: Rule) -> Rule:
        for type in types:
            assert type not in _RULES, type
            _RULES[type] = rule, unknown_inputs
        return rule

    return register


def infer_shapes(layer: Layer) -> list[tuple[Shape | None, Dim]]:
    """Return (shape, batch count) of every output of a layer, from its inputs' shapes, its parameters and weights.

    None stands for an unknown shape. Raises ShapeError if the layer cannot take its inputs. Outputs of custom layers
    are unknown, except those of elementwise ones.
    """
    shapes = [blob.shape for blob in layer.inputs]
    outputs: Output | list[Output] = [None] * len(layer.outputs)
    entry = _RULES.get(layer.type, _ELEMENTWISE if layer.has(Trait.ELEMENTWISE) else None)
    if entry is not None:
        rule, unknown_inputs = entry
        least = layer.spec.inputs[0] if layer.spec else 0
        if len(shapes) < least:
            fail(layer, f"it needs {least} inputs")
        if unknown_inputs or None not in shapes:
            outputs = rule(layer, *shapes)
    if not isinstance(outputs, list):
        outputs = [outputs]
    if len(outputs) != len(layer.outputs):
        fail(layer, f"it makes {len(outputs)} outputs, not {len(layer.outputs)}")
    return [_checked(layer, output) for output in outputs]


def assign_shapes(layer: Layer) -> None:
    """Give the outputs of a layer the shapes and batch counts that `infer_shapes` finds."""
    for blob, (shape, batch) in zip(layer.outputs, infer_shapes(layer), strict=True):
        blob.shape, blob.batch = shape, batch


def infer_graph(graph: Graph) -> None:
    """Infer shape and batch count of every blob, in order; the blobs that the caller feeds keep theirs."""
    for layer in graph:
        assign_shapes(layer)


def _checked(layer: Layer, output: Output) -> tuple[Shape | None, Dim]:
    if isinstance(output, Batched):
        shape, batch = output
    else:
        shape, batch = output, 1
        for blob in layer.inputs:
            batch = broadcast(layer, batch, blob.batch, "the batch counts of its inputs")
    for size in (*(shape or ()), batch):
        if isinstance(size, int) and size <= 0:
            fail(layer, f"its output would be {text(shape)}, which has no elements")
    return shape, batch


def text(shape: Sequence[Dim] | None) -> str:
    """Return a shape as messages show it."""
    return "?" if shape is None else f"({', '.join(map(str, shape))})"


def fail(layer: Layer, reason: str) -> NoReturn:
    """Raise ShapeError with the layer, its input shapes and a reason."""
    inputs = ", ".join(f"'{blob.name}' {text(blob.shape)}" for blob in layer.inputs)
    raise ShapeError(f"{layer.type} '{layer.name}'{' on ' + inputs if inputs else ''}: {reason}")


def need_rank(layer: Layer, shape: Shape, *ranks: int) -> None:
    """Fail unless the shape has one of the ranks."""
    if len(shape) not in ranks:
        fail(layer, f"it takes {' or '.join(map(str, ranks))}-D blobs, not {len(shape)}-D")


def differ(a: Dim, b: Dim) -> bool:
    """Return whether two sizes surely differ: their difference is a constant other than 0."""
    difference = a - b
    return isinstance(difference, int) and difference != 0


def equal(layer: Layer, a: Dim, b: Dim, subject: str) -> Dim:
    """Return the common size of a and b, a number if one is a number; fail if they surely differ."""
    if differ(a, b):
        fail(layer, f"{subject} must be equal, but are {a} and {b}")
    return b if isinstance(a, Sym) and isinstance(b, int) else a


def broadcast(layer: Layer, a: Dim, b: Dim, subject: str) -> Dim:
    """Return the size that two sizes broadcast to; fail if neither is 1 and they surely differ.

    Of two dynamic sizes it is the larger one: the other is equal at run time, or 1.
    """
    size = None if 1 not in (a, b) and differ(a, b) else dim.broadcast(a, b)
    if size is None:
        fail(layer, f"{subject} must be equal, but are {a} and {b}")
    return size


def position(layer: Layer, axis: int, rank: int, name: str = "axis") -> int:
    """Return the axis counted from 0; fail if the rank has no such axis."""
    if not -rank <= axis < rank:
        fail(layer, f"{name} {axis} is out of range for a {rank}-D blob")
    return axis % rank


def positions(layer: Layer, axes: Sequence[int], rank: int, name: str = "axis") -> list[int]:
    """Return the axes counted from 0."""
    return [position(layer, axis, rank, name) for axis in axes]


def data_axis(layer: Layer, rank: int) -> int:
    """Return the parameter `axis` counted from 0; ncnn ignores it on 1-D blobs."""
    return 0 if rank == 1 else position(layer, layer["axis"], rank)


def parts(layer: Layer, size: Dim, count: int, subject: str) -> Dim:
    """Return `size / count`; fail if that is surely not an integer."""
    if count < 1 or differ(size // count * count, size):
        fail(layer, f"{subject} {size} cannot be parted into {count}")
    return size // count


def evaluated(layer: Layer, name: str, *, whole_batch: bool = False) -> list[Dim] | None:
    """Return the value of an expression parameter. Most layers get the items of a batch one by one, so n is 1."""
    try:
        return evaluate(layer[name], [(blob.shape, blob.batch if whole_batch else 1) for blob in layer.inputs])
    except ShapeError as error:
        fail(layer, f"{name}: {error}")


def named_sizes(shape: Shape) -> dict[str, Dim]:
    """Return the sizes by ncnn's names of the axes, w h d c; 1 for axes that the rank does not have."""
    return {**dict.fromkeys("whdc", 1), **by_axis(shape)}
