"""View layers: their conversion to steps of the view algebra, the shortest steps, and the conversion back to layers."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from onnx2ncnn_opt.ir.dim import Shape, Sym, known
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.layers import types_with
from onnx2ncnn_opt.ir.permute import inverted, permutation
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.ir.view import Regroup, Reorder, Step, View, plan, step_layer
from onnx2ncnn_opt.ir.weight import Array

Steps: TypeAlias = tuple[Step, ...]

VIEWS = types_with(Trait.VIEW)
# The longest chain of views: passes try every part of a chain. Models have a dozen.
LONGEST = 64


def step_of(layer: Layer) -> Step | None:
    """Return the effect of a view layer on each item of a batch; None for other layers and for unknown shapes.

    Also None for a view that has a feature mask or moves the batch axis, which the algebra cannot express.
    """
    if layer.type not in VIEWS or len(layer.inputs) != 1 or layer["featmask"]:
        return None
    before, after = layer.input, layer.output
    if before.shape is None or after.shape is None or any(not isinstance(name, str) for name in layer.params):
        return None
    if layer.type == "Permute":
        return Reorder(permutation(layer["order_type"], len(before.shape)))
    if layer.type == "Reshape" and (layer["input_batch_axis"] != 233 or layer["output_batch_axis"] != 233):
        return None
    return Regroup(after.shape)


def chain_above(blob: Blob, *others: str) -> tuple[Layer, ...]:
    """Return the chain of views, or `others`, that ends in a blob, the nearest one last; up to `LONGEST`."""
    chain: list[Layer] = []
    while len(chain) < LONGEST and (layer := blob.producer) and (layer.type in others or step_of(layer) is not None):
        chain.append(layer)
        blob = layer.input
    return tuple(reversed(chain))


def before_views(blob: Blob) -> Blob:
    """Return the source of the views above a blob; the blob itself if there are none."""
    chain = chain_above(blob)
    return chain[0].input if chain else blob


def chain_below(blob: Blob) -> tuple[Layer, ...]:
    """Return the chain of view layers below a blob, each the only user of its input, the nearest one first."""
    chain: list[Layer] = []
    while len(chain) < LONGEST and blob.uses == 1 and blob.users and step_of(blob.users[0]) is not None:
        chain.append(blob.users[0])
        blob = chain[-1].output
    return tuple(chain)


def private(chain: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return the last layers of a chain, whose results nothing else uses."""
    return chain[max((i + 1 for i, layer in enumerate(chain[:-1]) if layer.output.uses > 1), default=0) :]


def steps_of(layers: Iterable[Layer]) -> Steps:
    """Return the steps of consecutive view layers."""
    return tuple(step for step in map(step_of, layers) if step is not None)


def is_plain(steps: Steps) -> bool:
    """Return True if no step is a shuffle, which `inverse` and `shape_after` do not accept."""
    return all(isinstance(step, Reorder | Regroup) for step in steps)


def inverse(shape: Shape, steps: Steps) -> Steps:
    """Return the steps that lead back to a blob of this shape."""
    back: list[Step] = []
    for step in steps:
        if isinstance(step, Reorder):
            back.append(Reorder(tuple(map(step.perm.index, range(len(shape))))))
        else:
            back.append(Regroup(shape))
        shape = shape_after(shape, (step,))
    return tuple(reversed(back))


def shape_after(shape: Shape, steps: Steps) -> Shape:
    """Return the shape that the steps lead to."""
    for step in steps:
        shape = tuple(shape[p] for p in step.perm) if isinstance(step, Reorder) else _dims(step)
    return shape


def _dims(step: Step) -> Shape:
    assert isinstance(step, Regroup)
    return step.dims


@lru_cache(maxsize=4096)
def viewed(shape: Shape, steps: Steps) -> View | None:
    """Return the view of a blob after the steps; None if they cut axes that cannot be split there."""
    view = View.of(shape, [[i] for i in range(len(shape))])
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        if isinstance(step, Reorder):
            view = view.transpose(step.perm)
        elif not isinstance(following, Regroup):
            reshaped = view.reshape(_dims(step))
            if reshaped is None:
                return None
            view = reshaped
    return view


@lru_cache(maxsize=4096)
def shortest(shape: Shape, steps: Steps) -> Steps | None:
    """Return the fewest steps with the same effect, one for two Reshapes; None if unknown or not writable as layers."""
    fewest = equivalent(shape, steps)
    regroups = [step for step in fewest or () if isinstance(step, Regroup)]
    is_writable = all(sum(isinstance(size, Sym) for size in step.dims) <= 1 for step in regroups)
    return fewest if is_writable else None


def equivalent(shape: Shape, steps: Steps) -> Steps | None:
    """Return the fewest steps with the same effect, which may have no layers (see `shortest`); None if unknown."""
    if all(isinstance(step, Regroup) for step in steps):
        # Only the last one counts, even if the view algebra cannot split the axes between.
        return steps[-1:] if steps and _dims(steps[-1]) != shape else ()
    view = viewed(shape, steps)
    return None if view is None else tuple(plan(view, view.axes))


def in_layout(data: Array, steps: Steps) -> Array:
    """Return the data of a blob after the steps."""
    for step in steps:
        data = data.transpose(step.perm) if isinstance(step, Reorder) else data.reshape(known(_dims(step)))
    return data


def steps_to(elements: Array, source: tuple[int, ...]) -> Steps | None:
    """Return the steps from the source to `elements`, an array of indices into it; None if it is not a view."""
    lines = (np.moveaxis(elements, axis, 0).reshape(size, -1)[:, 0] for axis, size in enumerate(elements.shape))
    whole = elements.reshape([size for line in lines for size in _runs(line)])
    strides = [int(whole.take(1, axis).flat[0]) for axis in range(whole.ndim)]
    order = sorted(range(whole.ndim), key=lambda axis: -strides[axis])
    back = inverted(order)
    sizes = tuple(whole.shape[axis] for axis in order)
    reached = np.arange(whole.size, dtype=elements.dtype).reshape(sizes).transpose(back)
    if whole.size != math.prod(source) or not np.array_equal(reached, whole):
        return None
    return Regroup(sizes), Reorder(back), Regroup(elements.shape)


def _runs(line: Array) -> list[int]:
    """Return the sizes of nested runs in which indices grow evenly: 0 1 4 5 8 9 are 3 runs of 2."""
    if line.size == 1:
        return []
    breaks = np.flatnonzero(np.diff(line) != line[1] - line[0])
    length = int(breaks[0]) + 1 if breaks.size else line.size
    return [*_runs(line[::length]), length] if line.size % length == 0 else [line.size]


def cost(*chains: Steps) -> tuple[int, int]:
    """Return the cost of chains of steps: the number of steps, then of those that move data."""
    steps = [step for chain in chains for step in chain]
    return len(steps), sum(not isinstance(step, Regroup) for step in steps)


def view_layers(source: Blob, steps: Steps, like: Sequence[Layer]) -> list[Layer]:
    """Return the layers of the steps, which start at a blob, with the names and origins of the layers `like`.

    Blobs get the names of those of views; other layers compute other values of the model, which keep their names.
    """
    origin = tuple(layer.traced for layer in like if layer.traced)
    layers, view = list[Layer](), f"{source.name}_view"
    for i, step in enumerate(steps):
        model = like[min(i, len(like) - 1)]
        kind, params = step_layer(step)
        end = Blob(view if step_of(model) is None else model.outputs[0].name, None, source.batch)
        layers.append(Layer(kind, model.name, [source], [end], params, origin=origin))
        assign_shapes(layers[-1])
        source = end
    return layers


def end_of(source: Blob, layers: Sequence[Layer]) -> Blob:
    """Return the output of a chain of layers; the source itself if there are none."""
    return layers[-1].output if layers else source
