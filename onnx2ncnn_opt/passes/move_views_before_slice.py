import math

from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, exact_div, named, symbol
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup, Reorder, Step
from onnx2ncnn_opt.passes._views import (
    Steps,
    chain_above,
    chain_below,
    cost,
    end_of,
    is_plain,
    private,
    shape_after,
    shortest,
    steps_of,
    view_layers,
    viewed,
)
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, layer_pass, needed, require


@layer_pass(op("Slice"), exact=True, purpose="heads of queries, keys and values from one Gemm")
def move_views_before_slice(layer: Layer) -> Replacement | None:
    """x ── Slice ── the same views after every part ──   ⇒   x ── views ── Slice ──

    One chain of views replaces those of all parts, and those before the Slice. If parts are equal, the number of the
    part becomes the outermost axis: the pairs of ShuffleNetV2 become ShuffleChannel and Slice. Parts of different sizes
    stay parts of one axis.
    """
    x, parts = layer.input, len(layer.outputs)
    chains = [*map(chain_below, layer.outputs)]
    if parts < 2 or not any(chains):
        return None
    require(all(chains), "a part is needed as it is")
    shapes = [blob.known_shape for blob in layer.outputs]
    fewest = [shortest(shape, steps_of(chain)) for shape, chain in zip(shapes, chains, strict=True)]
    views_of_parts = [steps for steps in fewest if steps and is_plain(steps)]
    if len(views_of_parts) < parts:
        return None
    results = [shape_after(shape, steps) for shape, steps in zip(shapes, views_of_parts, strict=True)]
    axis = layer["axis"] % len(x.known_shape)
    if len(set(shapes)) == 1:
        require(len(set(views_of_parts)) == 1, "the parts take different views")
        steps, new_axis = _with_parts(parts, axis, shapes[0], views_of_parts[0]), 0
    else:
        steps, new_axis = _of_all_sizes(axis, shapes, views_of_parts)
    above = private(chain_above(x)) if x.uses == 1 else ()
    source = above[0].input if above else x
    no_fewer = "all parts at once need as many views"
    short = needed(shortest(source.known_shape, (*steps_of(above), *steps)), no_fewer)
    require(cost(short) < cost(*map(steps_of, (above, *chains))), no_fewer)
    views = view_layers(source, short, like=above or chains[0])
    sizes = [size if isinstance(size := shape[new_axis], int) else -233 for shape in results]
    blobs = [Blob(old.name, shape, old.batch) for old, shape in zip(layer.outputs, results, strict=True)]
    end = end_of(source, views)
    new = layer.having(inputs=[end], outputs=blobs, axis=new_axis, slices=tuple(sizes), indices=None)
    reads = {chain[-1].output: blob for chain, blob in zip(chains, blobs, strict=True)}
    removed = (*above, layer, *(view for chain in chains for view in chain))
    return Replacement(removed, added=[(made, layer) for made in (*views, new)], reads=reads)


def _of_all_sizes(axis: int, shapes: list[Shape], views: list[Steps]) -> tuple[Steps, int]:
    """Return the steps for all parts of different sizes together, and the axis along which the result is sliced.

    A part is a number of units: 1 and 2 units of 64 for sizes 64 and 128. Steps that are the same for any number of
    units are right for all parts together. Units must be first in an axis before and after, so parts stay contiguous.
    """
    sizes = [size for shape in shapes if isinstance(size := shape[axis], int)]
    require(len(sizes) == len(shapes), "the parts have dynamic sizes")
    unit = math.gcd(*sizes)
    counts = [size // unit for size in sizes]
    count = symbol("units of a part")
    general = tuple(_of_any(same_place, counts, count) for same_place in zip(*views, strict=False))
    require(len({len(steps) for steps in views}) == 1 and None not in general, "the parts take different views")
    steps = tuple(step for step in general if step is not None)
    view = viewed((*shapes[0][:axis], count * unit, *shapes[0][axis + 1 :]), steps)
    first = view.dims[axis][0] if view is not None else None
    axes = [i for i, atoms in enumerate(view.axes) if atoms and atoms[0] is first] if view is not None else []
    require(first is not None and isinstance(first.size, Sym) and bool(axes), "the parts do not stay side by side")
    whole = {str(count): sum(counts)}
    return tuple(Regroup(named(s.dims, whole)) if isinstance(s, Regroup) else s for s in steps), axes[0]


def _of_any(steps: tuple[Step, ...], counts: list[int], count: Sym) -> Step | None:
    """Return the step for a part of `count` units from the steps for `counts`; None if they differ otherwise."""
    if len(set(steps)) == 1 and not isinstance(steps[0], Regroup):
        return steps[0]
    groups = [step.dims for step in steps if isinstance(step, Regroup)]
    if len(groups) < len(steps) or len({len(dims) for dims in groups}) > 1:
        return None
    dims: list[Dim] = []
    for sizes in zip(*groups, strict=True):
        per_unit = exact_div(sizes[0], counts[0])
        if len(set(sizes)) == 1:
            dims.append(sizes[0])
        elif per_unit is not None and all(size == per_unit * n for size, n in zip(sizes, counts, strict=True)):
            dims.append(count * per_unit)
        else:
            return None
    return Regroup(tuple(dims))


def _with_parts(parts: int, axis: int, part: Shape, views: Steps) -> Steps:
    """Return the steps for all equal parts together: the part number is the first axis until the last step."""
    rank = len(part)
    steps: list[Step] = [
        Regroup((*part[:axis], parts, *part[axis:])),
        Reorder((axis, *(i for i in range(rank + 1) if i != axis))),
    ]
    for step in views:
        if isinstance(step, Reorder):
            steps.append(Reorder((0, *(p + 1 for p in step.perm))))
        elif isinstance(step, Regroup):
            steps.append(Regroup((parts, *step.dims)))
    first, *rest = shape_after(part, views)
    return (*steps, Regroup((first * parts, *rest)))
