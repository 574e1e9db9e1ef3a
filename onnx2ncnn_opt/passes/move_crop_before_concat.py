from bisect import bisect_right
from itertools import accumulate

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._crops import cropped, part
from onnx2ncnn_opt.rewrite.pattern import kept, op
from onnx2ncnn_opt.rewrite.rule import needed, require, rewrite

_CONCAT = op("Concat", "concat")


@rewrite(op("Crop", "crop")(_CONCAT), op("Crop", "crop")(kept(_CONCAT)), exact=True, purpose="assignments to slices")
def move_crop_before_concat(crop: Layer, concat: Layer) -> Layer | Blob:
    """a, b, c ── Concat ── Crop ──   ⇒   b ── Crop ──, or b itself, or a, b ── Concat ──

    If the Crop keeps some whole parts, or a piece of one part.
    """
    axis, start, end = needed(part(crop), "the range of the Crop is unknown, or it cuts several axes")
    same_axis = concat["axis"] % len(crop.input.known_shape) == axis
    require(same_axis, "it cuts another axis than the Concat joins")
    sizes = [blob.shape[axis] if blob.shape is not None else None for blob in concat.inputs]
    ends = list(accumulate(size for size in sizes if isinstance(size, int)))
    require(len(ends) == len(sizes), "the size of a part is not known")
    starts = [0, *ends[:-1]]
    if start in starts and end in ends:
        parts = concat.inputs[starts.index(start) : ends.index(end) + 1]
        return parts[0] if len(parts) == 1 else Layer("Concat", crop.name, parts, (), {"axis": concat["axis"]})
    i = bisect_right(ends, start)
    require(end <= ends[i], f"it cuts through '{concat.inputs[i].name}'")
    return cropped(crop, concat.inputs[i], {axis: (start - starts[i], end - starts[i])})
