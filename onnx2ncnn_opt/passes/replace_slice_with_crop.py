from onnx2ncnn_opt.ir.dim import is_fixed, known
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._crops import cropped
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, layer_pass, require


@layer_pass(op("Slice"), exact=True, purpose="recurrent layers with one used step, the last")
def replace_slice_with_crop(layer: Layer) -> Replacement | None:
    """x ── Slice ── a, b, c (only b is read)   ⇒   x ── Crop ── b

    A Slice copies all of its parts, and ncnn treats parts that no layer reads as outputs.
    """
    used = [i for i, blob in enumerate(layer.outputs) if blob.uses]
    if len(used) != 1 or len(layer.outputs) == 1:
        return None
    part = layer.outputs[used[0]]
    shapes = [blob.shape for blob in layer.outputs[: used[0] + 1] if blob.shape is not None]
    require(len(shapes) == used[0] + 1, f"the sizes of the parts of '{layer.input.name}' are unknown")
    sizes = [shape[layer["axis"] % len(shape)] for shape in shapes]
    require(is_fixed(sizes), f"the sizes of the parts of '{layer.input.name}' are known only at run time")
    *others, size = known(sizes)
    crop = cropped(layer, layer.input, {layer["axis"] % len(shapes[0]): (sum(others), sum(others) + size)})
    crop.outputs = (Blob(part.name, part.shape, part.batch),)
    return Replacement((layer,), added=[(crop, layer)], reads={part: crop.output})
