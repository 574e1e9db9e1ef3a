from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, known_shape, layer_pass, require


@layer_pass(op(("Concat", "Slice")), exact=True, purpose="pairs of Slice and Concat after other passes")
def eliminate_slice_concat(layer: Layer) -> Replacement | None:
    """a, b ── Concat ── Slice ── c, d   ⇒   a, b; and x ── Slice ── Concat ──   ⇒   x ──

    The parts must have the same number, order and sizes, along the same axis.
    """
    other = layer.inputs[0].producer if layer.inputs else None
    if other is None or {other.type, layer.type} != {"Concat", "Slice"}:
        return None
    if any(blob.producer is not other for blob in layer.inputs):
        return None
    whole = layer.inputs[0] if layer.type == "Slice" else other.inputs[0]
    rank = len(known_shape(whole))
    require(other["axis"] % rank == layer["axis"] % rank, "the axes differ")
    if layer.type == "Slice":
        same = [blob.shape for blob in other.inputs] == [blob.shape for blob in layer.outputs]
        require(same and None not in {blob.shape for blob in other.inputs}, "it is not cut between the joined parts")
    else:
        whole_again = layer.inputs == other.outputs and layer.output.shape == whole.shape
        require(whole_again, "not all parts are joined in their order")
    reads = dict(zip(layer.outputs, other.inputs, strict=True))
    return Replacement((other, layer), reads=reads, may_stay=True)
