import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._constants import constant_array, is_stored_in_32_bits, with_data
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, known_shape, layer_pass, require


@layer_pass(
    op("BinaryOp", op_type=BinaryOp.ADD, with_scalar=0),
    exact=True,
    purpose="positions behind a class token, in images of any size (DINOv2, Depth Anything)",
)
def move_sum_before_concat(sum: Layer) -> Replacement | None:
    """const, x ── Concat, const, y ── Concat ── BinaryOp add ──   ⇒   const, (x, y ── BinaryOp add) ── Concat ──

    Pairs of constants become one constant; one other pair is left.
    """
    first, second = (blob.made_by("Concat") for blob in sum.inputs)
    if first is None or second is None:
        return None
    shapes = [[known_shape(blob) for blob in (*each.inputs, each.output)] for each in (first, second)]
    require(shapes[0] == shapes[1], "the joined parts differ in shape")
    pairs = [*zip(first.inputs, second.inputs, strict=True)]
    constants = [blob for pair in pairs if all(map(is_stored_in_32_bits, pair)) for blob in pair]
    require(len(constants) == 2 * len(pairs) - 2, "not all parts but one are constants in 32 bits")
    require(all(blob.uses == 1 and not blob.is_output for blob in sum.inputs), "what is joined is needed as it is")
    made = [_sum(sum, a, b) for a, b in pairs]
    return Replacement(
        (*(blob.known_producer for blob in constants), first, second, sum),
        takes={sum: first.having(inputs=[layer.output for layer in made], outputs=())},
        added=[(layer, sum) for layer in made],
        may_stay=True,
    )


def _sum(sum: Layer, a: Blob, b: Blob) -> Layer:
    """Return the layer that computes a part of a sum: a constant for two constants."""
    output = Blob(f"{a.name}_sum", a.shape, a.batch)
    if not is_stored_in_32_bits(a) or not is_stored_in_32_bits(b):
        return sum.having(inputs=[a, b], outputs=[output])
    data = [constant_array(blob.known_producer).astype(np.float32) for blob in (a, b)]
    return with_data(a.known_producer, data[0] + data[1]).having(outputs=[output])
