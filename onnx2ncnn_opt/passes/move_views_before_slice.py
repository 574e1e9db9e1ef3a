import math
from collections.abc import Iterator

from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, exact_div, symbol
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
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
from onnx2ncnn_opt.rewrite.rule import Miss, Replacement, attempt, graph_pass, needed, require


@graph_pass(exact=True, purpose="heads of queries, keys and values that are one Gemm")
def move_views_before_slice(graph: Graph) -> Iterator[Replacement | Miss]:
    """x ── Slice ── the same views after every part ──   ⇒   x ── views ── Slice ──

    The views happen once for all parts, together with those before the Slice. Of equal parts the number of the part
    becomes the outermost axis: the pairs of ShuffleNetV2 become ShuffleChannel and Slice. Parts of different
    sizes stay parts of one axis.
    """
    for layer in graph.layers:
        if layer.graph is graph and layer.type == "Slice":
            yield from attempt(layer, _move, layer)


def _move(layer: Layer) -> Replacement | None:
    x, parts = layer.input, len(layer.outputs)
    chains = [*map(chain_below, layer.outputs)]
    if parts < 2 or not any(chains):
        return None
    require(all(chains), "a part is needed as it is")
    shapes = [blob.known_shape for blob in layer.outputs]
    ways = [shortest(shape, steps_of(chain)) for shape, chain in zip(shapes, chains, strict=True)]
    known_ways = [way for way in ways if way and is_plain(way)]
    if len(known_ways) < parts:
        return None
    results = [shape_after(shape, way) for shape, way in zip(shapes, known_ways, strict=True)]
    axis = layer["axis"] % len(x.known_shape)
    if len(set(shapes)) == 1:
        require(len(set(known_ways)) == 1, "the parts take different views")
        steps, along = _with_parts(parts, axis, shapes[0], known_ways[0]), 0
    else:
        steps, along = _of_all_sizes(axis, shapes, known_ways)
    above = private(chain_above(x)) if x.uses == 1 else ()
    source = above[0].input if above else x
    old = [cost(steps_of(chain)) for chain in (above, *chains)]
    no_fewer = "all parts at once need as many views"
    short = needed(shortest(source.known_shape, (*steps_of(above), *steps)), no_fewer)
    require(cost(short) < (sum(count for count, _ in old), sum(moves for _, moves in old)), no_fewer)
    views = view_layers(source, short, like=above or chains[0])
    sizes = [size if isinstance(size := shape[along], int) else -233 for shape in results]
    new = layer.having(inputs=[end_of(source, views)], axis=along, slices=tuple(sizes), indices=None)
    new.outputs = tuple(Blob(old.name, shape, old.batch) for old, shape in zip(layer.outputs, results, strict=True))
    reads = {chain[-1].output: blob for chain, blob in zip(chains, new.outputs, strict=True)}
    removed = (*above, layer, *(view for chain in chains for view in chain))
    return Replacement(removed, added=[(made, layer) for made in (*views, new)], reads=reads)


def _of_all_sizes(axis: int, shapes: list[Shape], ways: list[Steps]) -> tuple[Steps, int]:
    """Return the steps for parts of different sizes at once, and the axis along which they are parts after them.

    Steps that hold for any number of units hold for all of them together: a part is so many units. Units have to come
    first in the axis, before the steps and after them: the elements of a part stay side by side.
    """
    sizes = [size for shape in shapes if isinstance(size := shape[axis], int)]
    require(len(sizes) == len(shapes), "the parts have dynamic sizes")
    unit = math.gcd(*sizes)
    counts = [size // unit for size in sizes]
    count = symbol("units of a part")
    steps = tuple(_of_any(alike, counts, count) for alike in zip(*ways, strict=False))
    require(len({len(way) for way in ways}) == 1 and None not in steps, "the parts take different views")
    way = tuple(step for step in steps if step is not None)
    view = viewed((*shapes[0][:axis], count * unit, *shapes[0][axis + 1 :]), way)
    first = view.dims[axis][0] if view is not None else None
    along = [i for i, atoms in enumerate(view.axes) if atoms and atoms[0] is first] if view is not None else []
    require(first is not None and isinstance(first.size, Sym) and bool(along), "the parts do not stay side by side")
    whole = {str(count): sum(counts)}
    return tuple(
        Regroup(tuple(size.subs(whole) if isinstance(size, Sym) else size for size in step.dims))
        if isinstance(step, Regroup)
        else step
        for step in way
    ), along[0]


def _of_any(steps: tuple[Step, ...], counts: list[int], count: Sym) -> Step | None:
    """Return a step for parts of any number of units, given that for parts of these; None if they differ in more."""
    if len(set(steps)) == 1 and not isinstance(steps[0], Regroup):
        return steps[0]
    groups = [step.dims for step in steps if isinstance(step, Regroup)]
    if len(groups) < len(steps) or len({len(dims) for dims in groups}) > 1:
        return None
    dims: list[Dim] = []
    for sizes in zip(*groups, strict=True):
        each = exact_div(sizes[0], counts[0])
        if len(set(sizes)) == 1:
            dims.append(sizes[0])
        elif each is not None and all(size == each * n for size, n in zip(sizes, counts, strict=True)):
            dims.append(count * each)
        else:
            return None
    return Regroup(tuple(dims))


def _with_parts(parts: int, axis: int, part: Shape, way: Steps) -> Steps:
    """Return the steps for all parts at once: their number becomes the first axis, and at the end joins the next."""
    rank = len(part)
    steps: list[Step] = [
        Regroup((*part[:axis], parts, *part[axis:])),
        Reorder((axis, *(i for i in range(rank + 1) if i != axis))),
    ]
    for step in way:
        if isinstance(step, Reorder):
            steps.append(Reorder((0, *(p + 1 for p in step.perm))))
        elif isinstance(step, Regroup):
            steps.append(Regroup((parts, *step.dims)))
    first, *rest = shape_after(part, way)
    return (*steps, Regroup((first * parts, *rest)))
