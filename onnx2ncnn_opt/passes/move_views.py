"""`move_views`: give blobs that elementwise layers connect the common layout that needs the fewest views."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.ir.dim import Shape, is_fixed, known
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.ir.view import Regroup, Reorder, Step
from onnx2ncnn_opt.passes._constants import is_stored_in_32_bits, with_data
from onnx2ncnn_opt.passes._views import (
    Steps,
    chain_above,
    chain_below,
    cost,
    end_of,
    equivalent,
    in_layout,
    inverse,
    is_plain,
    private,
    shape_after,
    shortest,
    step_of,
    steps_of,
    view_layers,
    viewed,
)
from onnx2ncnn_opt.passes.eliminate_reshape_after_reduction import SHORT, kept_shape
from onnx2ncnn_opt.passes.fuse_permute_matrix import GEMM
from onnx2ncnn_opt.rewrite.rule import Edits, Replacement, attempt, graph_pass, require

# These work along the innermost axis; the other layers accept any layout.
_ROWWISE = frozenset({"LayerNorm", "RMSNorm", "Softmax"})
_TRANSPOSED = Reorder((1, 0))
_MOST_LAYOUTS = 12  # to try; nets have two or three


@dataclass
class _ViewRegion:
    """Layers connected through blobs of one shape, their outputs, and the position of each layer of the graph."""

    layers: dict[Layer, None]
    inner: set[Blob]
    order: dict[Layer, int]

    @property
    def incoming(self) -> list[Blob]:
        """The blobs that the region reads and other layers produce, constants included."""
        return list(dict.fromkeys(b for layer in self.layers for b in layer.inputs if b not in self.inner))


class _Layout(NamedTuple):
    """Steps from a region's shape to another layout of it."""

    shape: Shape
    steps: Steps

    @property
    def start(self) -> Shape:
        """The shape in this layout."""
        return shape_after(self.shape, self.steps)

    @property
    def keeps_rows(self) -> bool:
        """True if the innermost axis stays, and layers over rows accept the rank."""
        view = viewed(self.shape, self.steps)
        if view is None or len(view.axes) not in (2, 3) or not view.dims[-1]:
            return False
        return view.axes[-1] == view.dims[-1]


class _Edge(NamedTuple):
    """A blob at the border of a region, and the chain of views between the region and the rest of the net.

    `steps` lead from the far end to the region's shape, or from the region to the far end. Two kinds of steps cost
    nothing. The layer at the far end can do the `free` step itself (see `_own_step`). Other consumers of the far end
    need `shared` steps anyway, and equal layers are merged.
    """

    is_input: bool
    blob: Blob
    chain: tuple[Layer, ...] = ()
    steps: Steps = ()
    free: Step | None = None
    shared: frozenset[Step] = frozenset()

    @property
    def outwards(self) -> Steps:
        """The steps from the region's shape to the far end."""
        return inverse(self.blob.known_shape, self.steps) if self.is_input else self.steps

    def steps_in(self, layout: _Layout) -> Steps | None:
        """Return the steps for another layout of the region; None if they cannot be written as layers."""
        if self.is_input:
            return shortest(self.blob.known_shape, (*self.steps, *layout.steps))
        return shortest(layout.start, (*inverse(layout.shape, layout.steps), *self.steps))

    def paid(self, steps: Steps) -> Steps:
        """Return those of the edge's steps that cost something."""
        if len(steps) == 1 and steps[0] in self.shared:
            return ()
        from_far_end = steps if self.is_input else steps[::-1]
        return from_far_end[1:] if steps and from_far_end[0] == self.free else steps


@graph_pass(exact=False, purpose="transformers and models with channels last")
def move_views(graph: Graph) -> Edits:
    """x ── Permute ── elementwise, LayerNorm ── Permute ──   ⇒   x ── elementwise, LayerNorm ──

    Blobs that elementwise layers connect may have any common layout. The pass chooses the layout that needs the fewest
    views at all inputs and outputs of these layers. Constants are stored in this layout.
    """
    for rowwise in (_ROWWISE, frozenset[str]()):
        for region in _regions(graph, rowwise):
            yield from attempt(next(iter(region.layers)), _reform, region)


def _regions(graph: Graph, rowwise: Collection[str]) -> list[_ViewRegion]:
    """Return the regions of elementwise layers and `rowwise` types; the latter join regions, but fix their rows."""

    def neighbours(layer: Layer) -> Iterator[Layer]:
        form = layer.output.shape, layer.output.batch
        for near in (*layer.output.users, *(blob.producer for blob in layer.inputs)):
            if near is not None and _fits(near, rowwise) and (near.output.shape, near.output.batch) == form:
                yield near

    order = {layer: i for i, layer in enumerate(graph)}
    seen: set[Layer] = set()
    regions: list[_ViewRegion] = []
    for first in graph.layers:
        if first not in seen and _fits(first, rowwise):
            layers = dict.fromkeys(reached([first], neighbours))
            regions.append(_ViewRegion(layers, {layer.output for layer in layers}, order))
            seen.update(layers)
    return regions


def _fits(layer: Layer, rowwise: Collection[str]) -> bool:
    """Return True if a layer computes the same in every layout; its operands must have its shape."""
    if len(layer.outputs) != 1 or any(not isinstance(name, str) for name in layer.params):
        return False
    shape = layer.output.shape
    if shape is None or layer["shape_hints"]:
        return False
    if layer.type == "Eltwise" or (layer.type == "BinaryOp" and not layer["with_scalar"]):
        return _operands_fit(layer, shape)
    if not layer.has(Trait.ELEMENTWISE) and layer.type != "BinaryOp" and layer.type not in rowwise:
        return False
    # A constant that is the only operand has to keep its size, because no other operand broadcasts it.
    if layer.input.shape != shape or is_stored_in_32_bits(layer.input):
        return False
    return layer.type not in _ROWWISE or _is_over_rows(layer, shape)


def _is_over_rows(layer: Layer, shape: Shape) -> bool:
    if layer.type == "Softmax":
        return layer["axis"] in (-1, len(shape) - 1)
    return len(shape) in (2, 3) and bool(layer["affine_size"] == shape[-1])


def _operands_fit(layer: Layer, shape: Shape) -> bool:
    """Return True if all operands have the result's shape, or are constants that broadcast to it along known axes."""
    for blob in layer.inputs:
        if blob.shape is None:
            return False
        if is_stored_in_32_bits(blob):
            # The axis along which a 1-D constant broadcasts depends on its size.
            if layer.type != "BinaryOp" or len(blob.shape) not in {len(shape), *range(2, len(shape))}:
                return False
            if not is_fixed(shape):
                return False
        elif blob.shape != shape or blob.batch != layer.output.batch:
            return False
    return not all(is_stored_in_32_bits(blob) for blob in layer.inputs)


def _reform(region: _ViewRegion) -> Replacement | None:
    shape = next(iter(region.layers)).output.known_shape
    entries = {blob: _input_edge(region, blob) for blob in region.incoming if not is_stored_in_32_bits(blob)}
    inner = sorted(region.inner, key=lambda blob: region.order[blob.known_producer])
    exits = [edge for blob in inner for edge in _output_edges(region, blob)]
    layouts = _layouts(shape, [*entries.values(), *exits])
    if not layouts:
        return None
    own = {layer for edge in (*entries.values(), *exits) for layer in edge.chain}
    edges = [*(edge._replace(shared=_views_of_others(edge.blob, own)) for edge in entries.values()), *exits]
    is_rowwise = any(layer.type in _ROWWISE for layer in region.layers)
    fitting = [layout for layout in layouts if not is_rowwise or layout.keeps_rows]
    best = _best(fitting, edges)
    if best is None:
        others = [layout for layout in layouts if layout not in fitting]
        require(_best(others, edges) is None, "a layer needs the innermost axis where it is")
        return None
    return _reformed(region, best, entries, exits)


def _best(layouts: Sequence[_Layout], edges: Sequence[_Edge]) -> _Layout | None:
    """Return the layout with the cheapest views on all edges; None if none is cheaper than the present one."""
    best, least = None, cost(*(edge.paid(edge.steps) for edge in edges))
    for layout in layouts[:_MOST_LAYOUTS]:
        paid = [edge.paid(steps) for edge in edges if (steps := edge.steps_in(layout)) is not None]
        if len(paid) == len(edges) and cost(*paid) < least:
            best, least = layout, cost(*paid)
    return best


def _input_edge(region: _ViewRegion, blob: Blob) -> _Edge:
    """Return the edge at a blob that the region reads, with the views that only the region needs."""
    if blob.is_output or not blob.is_read_only_by(region.layers):
        return _Edge(True, blob)
    chain = private(chain_above(blob))
    source = chain[0].input if chain else blob
    if source in region.inner:
        return _Edge(True, blob)  # views from the region to itself are an output edge
    free = _own_step(source.producer) if source.uses == 1 else None
    return _Edge(True, source, chain, steps_of(chain), free)


def _is_gemm(layer: Layer | None) -> bool:
    """Return True if a layer is a Gemm that can read or write its blob transposed (see `fuse_permute_matrix`)."""
    return layer is not None and GEMM.fits(layer) and layer["quantize_term"] == 0


def _own_step(producer: Layer | None) -> Step | None:
    """Return the step that a layer can do itself: a Gemm transposes its result, a Reduction keeps its axes."""
    if _is_gemm(producer):
        return _TRANSPOSED
    if producer is not None and SHORT.fits(producer) and producer.input.shape:
        return Regroup(kept_shape(producer, producer.input.shape))
    return None


def _output_edges(region: _ViewRegion, blob: Blob) -> Iterator[_Edge]:
    """Yield an edge for each chain of views below a blob, and one for all other consumers."""
    others = blob.is_output
    for user in blob.users:
        if user in region.layers:
            continue
        if step_of(user) is None:
            others = True
            continue
        chain = user, *chain_below(user.output)
        last = chain[-1].output
        gemm = last.users[0] if last.uses == 1 and last.users and len(last.users[0].inputs) == 1 else None
        yield _Edge(False, blob, chain, steps_of(chain), _TRANSPOSED if _is_gemm(gemm) else None)
    if others:
        yield _Edge(False, blob)


def _layouts(shape: Shape, edges: Sequence[_Edge]) -> list[_Layout]:
    """Return the layouts on the edges of a region of this shape."""
    chains = [edge.outwards for edge in edges]
    starts = (chain[:length] for chain in chains for length in range(1, len(chain) + 1))
    different = dict.fromkeys(equivalent(shape, steps) for steps in starts)
    return [_Layout(shape, steps) for steps in different if steps and is_plain(steps)]


def _views_of_others(blob: Blob, own: Collection[Layer]) -> frozenset[Step]:
    """Return the views through which layers other than `own` read a blob; equal views are merged, so they cost once."""
    return frozenset(step for user in blob.users if user not in own and (step := step_of(user)) is not None)


def _reformed(region: _ViewRegion, layout: _Layout, entries: dict[Blob, _Edge], outputs: list[_Edge]) -> Replacement:
    """Return the region in another layout, with the views on its edges."""
    inside, fresh = region.layers, {blob: Blob(blob.name, layout.start, blob.batch) for blob in region.inner}
    outside, reads = _views_after(region, layout, outputs, fresh)
    within: list[tuple[Layer, Layer | None]] = []
    for blob in region.incoming:
        first = min((user for user in blob.users if user in inside), key=region.order.__getitem__)
        if is_stored_in_32_bits(blob):
            source, views = blob, [_constant(blob, layout)]
        else:
            edge = entries[blob]
            source, steps = reads.get(edge.blob, edge.blob), edge.steps_in(layout)
            assert steps is not None
            views = view_layers(source, steps, like=edge.chain or [first])
        fresh[blob] = end_of(source, views)
        within += ((view, first) for view in views)
    for layer in sorted(inside, key=region.order.__getitem__):
        new = layer.having(inputs=[fresh[blob] for blob in layer.inputs], outputs=[fresh[layer.output]])
        if layer.type == "Softmax":
            new.params["axis"] = -1
        within.append((new, layer))
    removed = dict.fromkeys(view for edge in (*entries.values(), *outputs) for view in edge.chain) | inside
    return Replacement(tuple(removed), added=[*within, *outside], reads=reads, may_stay=True)


def _views_after(
    region: _ViewRegion, layout: _Layout, outputs: list[_Edge], fresh: dict[Blob, Blob]
) -> tuple[list[tuple[Layer, Layer | None]], dict[Blob, Blob]]:
    """Return the views on the output edges, each with the layer after it, and the blobs that replace old ones."""
    added: list[tuple[Layer, Layer | None]] = []
    reads: dict[Blob, Blob] = {}
    # Edges without views first: their blobs get the public names, and a Noop gives the others a second name.
    for edge in sorted(outputs, key=lambda edge: bool(edge.chain)):
        steps = edge.steps_in(layout)
        assert steps is not None
        old, before = _exit(region, edge)
        views = view_layers(fresh[edge.blob], steps, like=edge.chain or [edge.blob.known_producer])
        end = end_of(fresh[edge.blob], views)
        if old.is_output and any(other.is_output and reads[other] is end for other in reads):
            views.append(Layer("Noop", edge.chain[-1].name, [end], [Blob(old.name, end.shape, end.batch)]))
            end = views[-1].output
        added += ((view, before) for view in views)
        reads[old] = end
    return added, reads


def _exit(region: _ViewRegion, edge: _Edge) -> tuple[Blob, Layer | None]:
    """Return the blob at the end of an output edge, and the layer before which its views are inserted."""
    if edge.chain:
        return edge.chain[-1].output, edge.chain[0]
    readers = [user for user in edge.blob.users if user not in region.layers and step_of(user) is None]
    return edge.blob, min(readers, key=lambda user: region.order.get(user, 0)) if readers else None


def _constant(blob: Blob, layout: _Layout) -> Layer:
    """Return a constant operand in the new layout; axes along which it is constant have size 1."""
    old, shape = blob.known_producer, layout.shape
    # ncnn aligns fewer dims with the outer axes.
    sizes = (*known(blob.known_shape), *(1,) * (len(shape) - len(blob.known_shape)))
    data = in_layout(np.broadcast_to(old.weights["data"].reshape(sizes), known(shape)), layout.steps)
    for axis in range(data.ndim):
        head = data.take([0], axis)
        data = head if np.array_equal(np.broadcast_to(head, data.shape), data, equal_nan=True) else data
    return with_data(old, data).having(outputs=[Blob(blob.name, data.shape)])
