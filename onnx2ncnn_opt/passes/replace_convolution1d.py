"""`replace_convolution1d`: 1-D convolutions, and the layers between them, on images of one row.

ncnn has better kernels for convolutions of (c, 1, w) than of (c, w), and lacks some kernels for 1-D. A Reshape copies
its input, so the pass also replaces all layers between the convolutions.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from onnx2ncnn_opt.errors import ShapeError
from onnx2ncnn_opt.ir.dim import Shape, Sym
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.kernels import cost
from onnx2ncnn_opt.ir.layers import types_with
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.shapes import infer_shapes
from onnx2ncnn_opt.ir.spec import Trait
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._constants import is_constant
from onnx2ncnn_opt.passes._families import WEIGHTED
from onnx2ncnn_opt.passes._fold import require_own_weights
from onnx2ncnn_opt.passes._views import view_layers
from onnx2ncnn_opt.rewrite.rule import Edits, Refused, Replacement, attempt, graph_pass, known_shape, require

_CONVOLUTIONS = frozenset(type for type in WEIGHTED if type.endswith("1D"))
_RANK = 2  # of a sequence

Params = dict[str, Any]
# Layers connected by sequences, each with its equivalent on images of one row, not yet connected.
_SequenceRegion = dict[Layer, Layer]


@graph_pass(exact=False, purpose="speech, and series of measurements")
def replace_convolution1d(graph: Graph) -> Edits:
    """x ── Convolution1D, ... ──   ⇒   x ── Reshape (c, 1, w) ── Convolution, ... ── Reshape (c, w) ──"""
    order = {layer: i for i, layer in enumerate(graph)}
    for region in _regions(graph):
        first = next(layer for layer in region if layer.type in _CONVOLUTIONS)
        yield from attempt(first, _replaced, region, order)
    for layer in graph:
        if layer.type in _CONVOLUTIONS and layer in order and _on_images(layer) is None:
            yield from attempt(layer, _refuse, layer)


def _refuse(layer: Layer) -> None:
    """Refuse a 1-D convolution that has no equivalent on images, with the reason."""
    require_own_weights(layer)
    blob = layer.inputs[0]
    known_shape(blob)
    require(not layer["featmask"], f"'{layer.name}' has a feature mask")
    raise Refused(f"'{layer.name}' has shape hints, or blobs with several dynamic dimensions")


def _is_sequence(blob: Blob) -> bool:
    return blob.shape is not None and len(blob.shape) == _RANK


def _image(shape: Shape) -> Shape:
    return (shape[0], 1, shape[1]) if len(shape) == _RANK else shape


def _regions(graph: Graph) -> Iterator[_SequenceRegion]:
    seen: set[Layer] = set()
    for start in graph.layers:
        if start.graph is graph and start not in seen and start.type in _CONVOLUTIONS:
            region: _SequenceRegion = {}
            seen.update(reached([start], partial(_join, region)))
            if start in region:
                yield region


def _join(region: _SequenceRegion, layer: Layer) -> Iterator[Layer]:
    """Add a layer to the region if it has an equivalent on images; yield the layers that sequences connect with it."""
    new = _on_images(layer)
    if new is not None:
        region[layer] = new
        for blob in filter(_is_sequence, (*layer.inputs, *layer.outputs)):
            yield from (near for near in (*blob.users, blob.producer) if near is not None)


def _on_images(layer: Layer) -> Layer | None:
    """Return the equivalent of a layer on images of one row; None if none is known."""
    rule = _RULES.get(layer.type)
    if rule is None or not all(isinstance(name, str) for name in layer.params):
        return None
    if layer["shape_hints"] or layer["featmask"]:
        return None
    blobs = *layer.inputs, *layer.outputs
    if any(blob.shape is None or sum(isinstance(size, Sym) for size in blob.shape) > 1 for blob in blobs):
        return None
    if not any(_is_sequence(blob) and not is_constant(blob) for blob in layer.inputs):
        return None
    params = rule(layer)
    if params is None:
        return None
    kind = layer.type.removesuffix("1D")
    inputs, outputs = (map(_placeholder, blobs) for blobs in (layer.inputs, layer.outputs))
    new = layer.having(type=kind, inputs=inputs, outputs=outputs, **params).without_defaults()
    try:
        shapes = infer_shapes(new)
    except ShapeError:
        return None
    return new if shapes == [(blob.shape, blob.batch) for blob in new.outputs] else None


def _placeholder(blob: Blob) -> Blob:
    """Return a placeholder with the name and batch of a blob, and the shape of its image."""
    return Blob(blob.name, _image(blob.shape or ()), blob.batch)


def _replaced(region: _SequenceRegion, order: Mapping[Layer, int]) -> Replacement:
    """Return the region on images, with a Reshape at each sequence that enters or leaves; refused if it is slower."""
    inside = sorted(region, key=order.__getitem__)
    fresh: dict[Blob, Blob] = {}
    added: list[tuple[Layer, Layer | None]] = []
    views: list[Layer] = []
    for layer in inside:
        for blob in layer.inputs:
            if _is_sequence(blob) and blob not in fresh:
                entry = _entry(blob, layer)
                fresh[blob] = entry.output
                added.append((entry, layer))
                views += [entry] if entry.type == "Reshape" and not _is_view(blob.producer) else []
        old, inputs = region[layer], [fresh.get(blob, blob) for blob in layer.inputs]
        fresh |= zip(layer.outputs, old.outputs, strict=True)
        added.append((old.having(inputs=inputs, outputs=old.outputs), layer))
    reads: dict[Blob, Blob] = {}
    for blob in (blob for layer in inside for blob in layer.outputs):
        outside = [user for user in blob.users if user not in region]
        if not outside and not blob.is_output:
            continue
        reads[blob] = fresh[blob]
        if _is_sequence(blob):
            (back,) = view_layers(fresh[blob], (Regroup(blob.known_shape),), like=[blob.known_producer])
            back.name = f"{blob.known_producer.name}_sequence"
            reads[blob] = back.output
            added.append((back, min(outside, key=order.__getitem__) if outside else None))
            views += [back] if blob.is_output or not all(map(_leads_to_image, outside)) else []
    gain = cost(inside) - cost([*views, *region.values()])
    require(gain > 0, "the convolutions are too small to gain by it")
    return Replacement(tuple(inside), added=added, reads=reads, may_stay=True)


def _entry(blob: Blob, reader: Layer) -> Layer:
    """Return the layer that turns an entering sequence into an image: a Reshape, or the reshaped constant."""
    if is_constant(blob):
        rows, columns = blob.known_shape
        return blob.known_producer.having(outputs=[_placeholder(blob)], w=columns, h=1, c=rows)
    (view,) = view_layers(blob, (Regroup(_image(blob.known_shape)),), like=[reader])
    view.name, view.output.name = f"{reader.name}_image", f"{blob.name}_image"
    return view


def _is_view(layer: Layer | None) -> bool:
    """Return True for a Reshape that only the sequence needs, or of an image of one row: another one replaces it."""
    if layer is None or layer.type != "Reshape" or len(layer.inputs) > 1:
        return False
    return layer.output.uses == 1 or layer.input.shape == _image(layer.output.shape or ())


def _leads_to_image(layer: Layer) -> bool:
    """Return True if a layer reshapes a sequence to an image of one row."""
    return layer.type == "Reshape" and layer.output.shape == _image(layer.inputs[0].shape or ())


def _convolution(layer: Layer) -> Params | None:
    if len(layer.inputs) > 1:  # the blob of weights computed at run time has another rank
        return None
    # ncnn needs SAME pads on all sides or on none; along an axis of size 1 they add nothing.
    pad = None if min(layer["pad_left"], layer["pad_right"]) < 0 else 0
    params: Params = {"kernel_h": 1, "dilation_h": 1, "stride_h": 1, "pad_top": pad, "pad_bottom": pad}
    if layer.type.startswith("Deconvolution"):
        params |= {"output_pad_bottom": 0, "output_h": 1 if layer["output_w"] > 0 else None}
    return params


def _pooling(layer: Layer) -> Params | None:
    if layer["global_pooling"]:
        return {}
    if layer["adaptive_pooling"]:
        return {"out_h": 1}
    return {"kernel_h": 1, "stride_h": 1, "pad_top": 0, "pad_bottom": 0}


def _axis(layer: Layer) -> Params | None:
    return {"axis": _moved(layer["axis"])}


def _moved(axis: int) -> int:
    """Return the axis in an image for an axis in a sequence."""
    return (0, 2)[axis % _RANK]


def _rows(layer: Layer) -> Params | None:
    """Return no change, for normalisations along the rows of a sequence; None for others."""
    return {} if layer["affine_size"] == (layer.input.shape or (0,))[-1] else None


def _binary(layer: Layer) -> Params | None:
    if layer["with_scalar"]:
        return {}
    ranks = {len(blob.shape or ()) for blob in layer.inputs}
    if ranks == {_RANK}:
        return {}
    # ncnn broadcasts a vector along the outermost axis if the sizes are equal, for every rank.
    vector = next((blob for blob in layer.inputs if len(blob.shape or ()) == 1), None)
    sequence = next(blob for blob in layer.inputs if _is_sequence(blob))
    fits = ranks == {1, _RANK} and vector is not None and vector.shape == sequence.known_shape[:1]
    return {} if fits and isinstance(sequence.known_shape[0], int) else None


def _sequences(layer: Layer) -> Params | None:
    """Return no change if all operands are sequences; None otherwise."""
    return {} if all(map(_is_sequence, layer.inputs)) else None


def _crop(layer: Layer) -> Params | None:
    if not layer["starts"] or not layer["ends"] or layer["starts_expr"] or layer["ends_expr"] or layer["axes_expr"]:
        return None
    axes = layer["axes"] or range(len(layer["starts"]))
    return {"axes": tuple(map(_moved, axes))}


def _padding(layer: Layer) -> Params | None:
    rows = layer["top"] or layer["bottom"] or layer["front"] or layer["behind"]
    return None if rows or layer["per_channel_pad_data_size"] else {}


def _reduction(layer: Layer) -> Params | None:
    if layer["reduce_all"] or not layer["axes"] or not layer["fixbug0"]:
        return None
    axes = {_moved(axis) for axis in layer["axes"]}
    return {"axes": tuple(sorted(axes if layer["keepdims"] else axes | {1}))}


_RULES: Mapping[str, Callable[[Layer], Params | None]] = {
    # No change for layers that treat all elements of a slice of the outermost axis alike.
    **dict.fromkeys(types_with(Trait.ELEMENTWISE) | {"BatchNorm", "GroupNorm", "PReLU"}, lambda layer: {}),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(("GLU", "Slice", "Softmax"), _axis),
    **dict.fromkeys(("LayerNorm", "RMSNorm"), _rows),
    **dict.fromkeys(("Eltwise", "Scale"), _sequences),
    "BinaryOp": _binary,
    "Concat": lambda layer: _axis(layer) if _sequences(layer) is not None else None,
    "Crop": _crop,
    "Padding": _padding,
    "Pooling1D": _pooling,
    "Reduction": _reduction,
}
