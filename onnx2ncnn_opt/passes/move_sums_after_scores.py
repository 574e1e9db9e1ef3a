from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.dim import Shape, broadcast_shape
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup, View
from onnx2ncnn_opt.passes._linear import add
from onnx2ncnn_opt.passes._views import end_of, shortest, step_of, view_layers
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, known_shape, layer_pass, needed, require

_SUM = add("a", "b")


@layer_pass(
    op("Softmax"), exact=False, purpose="relative positions along both axes of an image (MViTv2), as a mask of SDPA"
)
def move_sums_after_scores(softmax: Layer) -> Replacement | None:
    """q @ k ── Reshape ── + a ── + b ── Reshape ── Softmax   ⇒   q @ k ── + Reshape(a + b) ── Softmax

    If a and b broadcast to the size of the scores only together, as the positions along the two axes of an image.
    """
    layers, addends = list[Layer](), list[tuple[Blob, Shape]]()
    blob = softmax.input
    while (layer := blob.producer) is not None and layer.type != "MatMul" and blob.uses == 1 and blob.shape:
        whole = [operand for operand in layer.inputs if operand.shape == blob.shape]
        if isinstance(step_of(layer), Regroup):
            layers.append(layer)
            blob = layer.input
        elif _SUM.fits(layer) and len(whole) == 1:
            layers.append(layer)
            addends.append((layer.inputs[layer.inputs[0] is whole[0]], blob.known_shape))
            blob = whole[0]
        else:
            return None
    if len(addends) != 2 or layer is None or len(layers) == len(addends):
        return None
    require(blob.uses == 1 and blob.shape == softmax.input.shape, "the scores have another shape in the end")
    require({addend.batch for addend, _ in addends} == {blob.batch}, "the batch counts differ")
    common, made, operands = addends[0][1], list[Layer](), list[Blob]()
    for addend, shape in addends:
        views = _reshaped(addend, _regrouped(addend, shape, common), softmax)
        operands.append(end_of(addend, views))
        made += views
    require(broadcast_shape(map(known_shape, operands)) == common, "the addends together are smaller than the scores")
    name = softmax.input.name
    mask, total = Blob(f"{name}_mask", common, blob.batch), Blob(name, blob.shape, blob.batch)
    made.append(Layer("BinaryOp", mask.name, operands, [mask], {"op_type": BinaryOp.ADD}))
    views = _reshaped(mask, known_shape(blob), softmax)
    inputs = [blob, end_of(mask, views)]
    made += [*views, Layer("BinaryOp", layers[0].name, inputs, [total], {"op_type": BinaryOp.ADD})]
    return Replacement(tuple(layers), added=[(new, softmax) for new in made], reads={softmax.input: total})


def _regrouped(addend: Blob, whole: Shape, common: Shape) -> Shape:
    """Return the shape of an addend of a blob of the shape `whole` beside one that is reshaped to `common`."""
    shape = known_shape(addend)
    require(len(shape) in range(2, len(whole) + 1), f"'{addend.name}' may belong to several axes")
    shape = (*shape, *(1,) * (len(whole) - len(shape)))  # ncnn aligns fewer axes with the outer ones
    reason = f"'{addend.name}' is not constant along whole axes"
    view = needed(View.of(whole, [[axis] for axis in range(len(whole))]).reshape(common), reason)
    kept = {atom for size, dim in zip(shape, view.dims, strict=True) if size != 1 for atom in dim}
    require(all(size in (1, of) for size, of in zip(shape, whole, strict=True)), reason)
    require(all(kept.issuperset(axis) or kept.isdisjoint(axis) for axis in view.axes), reason)
    return tuple(size if kept.intersection(axis) else 1 for size, axis in zip(common, view.axes, strict=True))


def _reshaped(blob: Blob, shape: Shape, like: Layer) -> list[Layer]:
    """Return the layers that reshape a blob."""
    steps = needed(shortest(known_shape(blob), (Regroup(shape),)), "several sizes are dynamic")
    return view_layers(blob, steps, like=[like])
