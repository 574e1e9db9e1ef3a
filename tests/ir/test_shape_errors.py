"""Layers that cannot take their inputs: ncnn would compute garbage, or die."""

from __future__ import annotations

from typing import Any

import pytest

from onnx2ncnn_opt.errors import ShapeError
from onnx2ncnn_opt.ir.dim import Dim, Shape, larger, product, smaller, symbol
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import infer_graph, infer_shapes

H, W, N = symbol("h"), symbol("w"), symbol("n")


def layer_of(
    type_: str, /, *shapes: Shape | None, outputs: int = 1, batches: tuple[Dim, ...] = (), **params: Any
) -> Layer:
    counts = batches or (1,) * len(shapes)
    inputs = [Blob(f"in{i}", shape, n) for i, (shape, n) in enumerate(zip(shapes, counts, strict=True))]
    return Layer(type_, "culprit", inputs, [Blob(f"out{i}") for i in range(outputs)], dict(params.items()))


def conv(*shapes: Shape, type: str = "Convolution", **params: Any) -> Layer:
    return layer_of(type, *shapes, **{"num_output": 4, "weight_data_size": 108, "kernel_w": 3, **params})


def ints(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def attention(*shapes: Shape, **params: Any) -> Layer:
    return layer_of("MultiHeadAttention", *shapes, **{"embed_dim": 6, "num_heads": 2, "weight_data_size": 36, **params})


GEMM: dict[str, Any] = {"constantB": 1, "constantN": 3, "constantK": 5}
BROKEN = [
    (conv((3, 8)), "takes 3-D blobs, not 2-D"),
    (conv((2, 3, 8, 9)), "not 4-D"),
    (conv((5, 8, 9)), "input channels of the weights and of the blob must be equal, but are 3 and 5"),
    (conv((3, 2, 9)), "kernel spans 3 along h, the padded input has 2"),
    (conv((3, 8, 9), dilation_w=5), "kernel spans 11 along h"),
    (conv((3, 8, 9), weight_data_size=100), "not a multiple of 36"),
    (conv((3, 8, 9), stride_w=0), "a stride of [0, 0]"),
    (conv((3, 8, 9), kernel_w=0), "a kernel of [0, 0]"),
    (conv((3, 8, 9), pad_left=1, pad_right=-233), "mix positive and negative"),
    (conv((3, 8, 9), type="ConvolutionDepthWise", group=3), "num_output 4 in 3 groups"),
    (conv((3, 8, 9), type="ConvolutionDepthWise", group=2), "3 input channels in 2 groups"),
    (conv((3, 8, 9), (4, 2, 3, 3), dynamic_weight=1), "but are 2 and 3"),
    (conv((3, 8, 9), dynamic_weight=1), "the weights (and the bias) are further inputs"),
    (conv((3, 8, 9), (4, 9), dynamic_weight=1), "must be 4-D"),
    (conv((3, 9), (4, 3, 3), type="Convolution1D", dynamic_weight=1, bias_term=1), "further inputs"),
    (conv((5, 8, 9), type="Deconvolution"), "but are 3 and 5"),
    (conv((3, 2, 2), type="Deconvolution", pad_left=2, stride_w=1), "no elements"),
    (conv((3, 5, 6), type="Deconvolution", output_w=5), "output sizes need pads of -233 or -234"),
    (conv((3, 5, 6), type="Deconvolution", pad_left=1, pad_right=-233), "mix positive and negative"),
    (conv((3, 5, 6), type="Deconvolution", output_w=50, pad_left=-233), "larger than the full output"),
    (conv((3, 8, 9), (18, 5, 7), type="DeformableConv2D"), "sizes of the offset"),
    (conv((3, 8, 9), (18, 8, 9), type="DeformableConv2D", pad_left=-233), "SAME included"),
    (layer_of("Pooling", (8, 9), kernel_w=2), "takes 3-D blobs"),
    (layer_of("Pooling", (3, 4, 8, 9), kernel_w=2), "takes 3-D blobs"),
    (layer_of("Pooling", (3, 2, 9), kernel_w=3), "kernel spans 3 along h"),
    (layer_of("Pooling", (3, 2, 9), kernel_w=3, pad_mode=7), "pad_mode 7"),
    (layer_of("Pooling1D", (3, 9), adaptive_pooling=1, out_w=-233), "out_w -233"),
    (layer_of("Unfold", (3, 2, 2), kernel_w=3), "kernel spans 3"),
    (layer_of("Fold", (18, 19), kernel_w=3, output_w=7, output_h=6), "must be equal, but are 19 and 20"),
    (layer_of("Fold", (17, 20), kernel_w=3, output_w=7, output_h=6), "rows 17 cannot be parted into 9"),
    (layer_of("InnerProduct", (3, 5), num_output=4, weight_data_size=24), "but are 6 and 15"),
    (layer_of("InnerProduct", (6,), num_output=5, weight_data_size=24), "not a multiple of num_output"),
    (layer_of("MatMul", (2, 5), (4, 3)), "inner sizes must be equal, but are 5 and 4"),
    (layer_of("MatMul", (2, 5), (5, 3), transB=1), "but are 5 and 3"),
    (layer_of("MatMul", (3, 2, 5), (2, 5, 3)), "but are 3 and 2"),
    (layer_of("Gemm", (2, 5), (4, 3)), "inner sizes K"),
    (layer_of("Gemm", (2, 5), (5, 3), (4,)), "C has a shape that does not broadcast to (2, 3)"),
    (layer_of("Gemm", (2, 3, 5), (5, 3)), "whose rows are along c"),
    (layer_of("Gemm", (2, 5), (5, 3), (3,), (3,)), "more inputs than matrices"),
    (layer_of("Gemm", (2, 5)), "no input for it"),
    (
        layer_of("Gemm", (4, 6), **GEMM, constantC=1, constant_broadcast_type_C=-1),
        "but are 6 and 5",
    ),
    (
        layer_of("Gemm", (4, 5), **GEMM, constantM=2, constantC=1, constant_broadcast_type_C=3),
        "constantM",
    ),
    (layer_of("Einsum", (3, 4), (5, 2), equation=ints("ik,kj->ij")), "sizes of 'k' must be equal, but are 4 and 5"),
    (layer_of("Einsum", (3, 4), equation=ints("ik,kj->ij")), "for 1 inputs"),
    (layer_of("Einsum", (3, 4), equation=ints("ij->ji")), "equation 'ij->ji'"),
    (layer_of("Einsum", (3, 4), equation=ints("xy->i")), "not on the left"),
    (layer_of("Einsum", (3, 4), equation=ints("ii")), "sides of a matrix"),
    (layer_of("BinaryOp", (2, 3), (2, 4)), "but are 3 and 4"),
    (layer_of("BinaryOp", (2, 3, 4), (3, 4)), "but are 2 and 3"),
    (layer_of("BinaryOp", (2, 3, 4), (3,)), "but are 4 and 3"),
    (layer_of("BinaryOp", (H, 4), (H + 1, 4)), "but are h and 1 + h"),
    (layer_of("BinaryOp", (2, 3)), "needs 2 inputs"),
    (layer_of("Eltwise", (2, 3), (2, 1)), "but are 3 and 1"),
    (layer_of("Eltwise", (2, 3), (2, 3, 1)), "does not broadcast"),
    (layer_of("Eltwise", (2, 3)), "needs 2 inputs"),
    (layer_of("Concat", (2, 3), (2, 4)), "sizes along axis 1 must be equal"),
    (layer_of("Concat", (2, 3), (2, 3, 4)), "2-D blobs, not 3-D"),
    (layer_of("Concat", (2, 3), (2, 3), axis=2), "axis 2 is out of range"),
    (layer_of("Slice", (7, 2), slices=(3, 3), outputs=2), "make 6, not 7"),
    (layer_of("Slice", (7, 2), slices=(3, 4), outputs=3), "2 sizes for 3 outputs"),
    (layer_of("Slice", (7, 2), slices=(3, 3, -233, -233), outputs=4), "not all there"),
    (layer_of("Slice", (7, 2), indices=(5, 3), outputs=3), "not all there"),
    (layer_of("Slice", (7, 2), indices=(5,), outputs=3), "for 3 outputs"),
    (layer_of("Reshape", (2, 3, 4), w=5, h=5), "24 elements do not fit (5, 5)"),
    (layer_of("Reshape", (2, 3, 4), w=5, h=-1), "24 elements do not fit (-1, 5)"),
    (layer_of("Reshape", (2, 3, 4), w=-1, h=-1), "leaves two sizes open"),
    (layer_of("Reshape", (H, 4), w=4, h=H + 2, c=1), "elements do not fit"),
    (layer_of("Reshape", (2, 3, 4)), "states no shape"),
    (layer_of("Reshape", (2, 3, 4), shape_expr="foo(0w),1"), "'foo' has no result"),
    (layer_of("Reshape", (2, 3, 4), shape_expr="1w,1"), "the layer has 1 inputs"),
    (layer_of("Reshape", (2, 3, 4), shape_expr="1,1,1,24,1"), "more than 4 axes"),
    (layer_of("Reshape", (2, 3), w=6, output_batch_axis=0, batches=(2,)), "input_batch_axis is not given"),
    (layer_of("Reshape", (6,), w=-1, input_batch_axis=0, output_batch_axis=0), "0 axes remain"),
    (layer_of("Reshape", (6,), w=0, h=0, c=0, input_batch_axis=0), "does not have"),
    (layer_of("Permute", (2, 3), order_type=2), "no order_type 2 for 2-D"),
    (layer_of("Squeeze", (2, 1), axes=(2,)), "out of range"),
    (layer_of("ExpandDims", (2, 3, 4, 5), axes=(0,)), "would be 5-D"),
    (layer_of("ExpandDims", (2, 3), axes=(0, 0)), "repeat one"),
    (layer_of("Crop", (5, 7), starts=(3,), ends=(3,), axes=(0,)), "nothing is left of axis 0"),
    (layer_of("Crop", (5, 7), starts=(-6,), ends=(3,), axes=(0,)), "does not clamp"),
    (layer_of("Crop", (5, 7), starts=(9,), ends=(-233,), axes=(0,)), "nothing is left"),
    (layer_of("Crop", (5, 7), starts=(0,), ends=(2,), axes=(2,)), "out of range"),
    (layer_of("Crop", (5, 7), starts=(0,), ends=(2, 3)), "1 starts and 2 ends for 2 axes"),
    (layer_of("Crop", (5, 7), woffset=4, outw=-233, outh=0), "nothing is left of h"),
    (layer_of("Crop", (5, 7), (5, 6), woffset=2), "is not inside 7"),
    (layer_of("Crop", (5, 7), starts_expr="0", ends_expr="z"), "ends_expr"),
    (layer_of("Crop", (5, 7), woffset2=-1, outw=-233, outh=-233), "negative offsets along w"),
    (layer_of("Crop", (H, W), starts_expr="0", ends_expr="1", axes_expr="0w"), "axis w is not a number"),
    (layer_of("CopyTo", (5, 7), (2, 2), starts=(1,)), "1 starts for 2 axes"),
    (layer_of("Padding", (5, 7), left=7, type=2), "reflection of 7"),
    (layer_of("Padding", (5, 7), left=-7), "no elements"),
    (layer_of("Padding", (3, 5, 7), left=1, per_channel_pad_data_size=5), "but are 5 and 3"),
    (layer_of("Tile", (5, 7), axis=2, tiles=2), "out of range"),
    (layer_of("Tile", (5, 7), repeats=(1, 1, 1, 1, 1)), "more than 4 axes"),
    (layer_of("Reduction", (5, 7), reduce_all=0, axes=(2,)), "out of range"),
    (layer_of("Softmax", (5, 7), axis=2), "out of range"),
    (layer_of("CumulativeSum", (5, 7), axis=-3), "out of range"),
    (layer_of("Flip", (5, 7), axes=(2,)), "out of range"),
    (layer_of("GLU", (5, 7), axis=1), "size 7 cannot be parted into 2"),
    (layer_of("Diag", (2, 3), diagonal=5), "no elements"),
    (layer_of("CopyTo", (5, 7), (2, 7), starts=(4,), axes=(0,)), "is not inside 5"),
    (layer_of("CopyTo", (5, 7), (7,)), "not 1-D"),
    (layer_of("PixelShuffle", (7, 2, 3), upscale_factor=2), "channels 7 cannot be parted into 4"),
    (layer_of("PixelShuffle", (8, 3), upscale_factor=2), "takes 3-D blobs"),
    (layer_of("Reorg", (2, 3, 4), stride=2), "height 3 cannot be parted into 2"),
    (layer_of("ShuffleChannel", (5, 3, 4), group=2), "channels 5 cannot be parted into 2"),
    (layer_of("Interp", (2, 3, 4, 5), resize_type=1, output_width=4, output_height=4), "not 4-D"),
    (layer_of("Interp", (3, 4, 5), resize_type=1, height_scale=0.1), "no elements"),
    (layer_of("Interp", (3, 4, 5), resize_type=1, dynamic_target_size=1), "second input"),
    (layer_of("Interp", (3, 4, 5), resize_type=1, size_expr="1,2,3"), "3 sizes"),
    (layer_of("GridSample", (3, 4, 5), (7, 8, 3)), "coordinates in the grid"),
    (layer_of("PSROIPooling", (23, 9, 9), (4,), output_dim=2, pooled_width=4, pooled_height=3), "but are 23 and 24"),
    (layer_of("PriorBox", (3, 4, 5), min_sizes=(1.0,), max_sizes=(2.0,), image_width=-233, image_height=-233), "image"),
    (layer_of("BatchNorm", (3, 4, 5), channels=4), "but are 4 and 3"),
    (layer_of("InstanceNorm", (3, 4), channels=3), "but are 3 and 1"),
    (layer_of("GroupNorm", (3, 4, 5), channels=4, group=2), "but are 4 and 3"),
    (layer_of("GroupNorm", (3, 4, 5), channels=3, group=2), "channels 3 cannot be parted into 2"),
    (layer_of("LayerNorm", (3, 4, 5), affine_size=4), "none of the inner sizes 20, 5"),
    (layer_of("RMSNorm", (3, 4), affine_size=12), "none of the inner sizes 4"),
    (layer_of("PReLU", (3, 4, 5), num_slope=4), "num_slope"),
    (layer_of("Scale", (3, 4, 5), scale_data_size=1), "number of factors"),
    (layer_of("Scale", (3, 4, 5), scale_data_size=-233), "second input"),
    (layer_of("Bias", (3, 4), bias_data_size=3), "bias_data_size"),
    (layer_of("LRN", (3, 4)), "3-D blobs"),
    (layer_of("Noop", (3, 4), outputs=2), "1 inputs for 2 outputs"),
    (layer_of("MemoryData"), "has no size"),
    (layer_of("Embed", (2, 5), num_output=3), "1-D blobs"),
    (layer_of("LSTM", (5, 3), num_output=4, weight_data_size=4 * 4 * 2), "but are 2 and 3"),
    (layer_of("LSTM", (5, 3), (1, 4), num_output=4, weight_data_size=48), "2 states, not 1"),
    (layer_of("RNN", (5, 3), num_output=4, weight_data_size=13), "not a multiple of 4 rows"),
    (layer_of("ReLU", (5, 3), outputs=2), "it makes 1 outputs, not 2"),
    (layer_of("RotaryEmbed", (2, 5, 6), (2, 5, 3), (5, 3)), "channels of a table"),
    (layer_of("GRU", (2, 5, 3), num_output=4, weight_data_size=36), "2-D blobs"),
    (layer_of("GRU", (5, 3), num_output=4, weight_data_size=36, outputs=3), "1 states for 2 outputs"),
    (layer_of("RNN", (5, 3), (2, 4), num_output=4, weight_data_size=12), "elements of a state"),
    (layer_of("SDPA", (4, 5, 6), (2, 7, 5), (2, 7, 3)), "widths of queries and keys"),
    (layer_of("SDPA", (4, 5, 6), (3, 7, 6), (3, 7, 3)), "cannot share 3 groups"),
    (layer_of("SDPA", (4, 5, 6), (4, 7, 6), (4, 7, 3), attn_mask=1), "needs 4 inputs"),
    (layer_of("SDPA", (4, 5, 6), (4, 7, 6), (4, 7, 3), (5, 6), attn_mask=1), "columns of the mask"),
    (attention((5, 4)), "the width of the queries"),
    (attention((5, 6), (7, 6), (8, 6)), "numbers of keys and values"),
    (attention((5, 6), num_heads=4), "4 heads"),
    (attention((5, 6), (5, 6), (5, 6), (5, 5)), "not 1 to 3"),
    (layer_of("RotaryEmbed", (2, 5, 6), (5, 2), (5, 2)), "too narrow"),
    (layer_of("Spectrogram", (7,), n_fft=16), "a reflection of 8"),
    (layer_of("Spectrogram", (7,), n_fft=16, center=0), "for 7 elements"),
    (layer_of("InverseSpectrogram", (8, 11, 2), n_fft=16), "frequencies"),
    (layer_of("StatisticsPooling", (3, 4)), "3 or 4-D"),
    (layer_of("BinaryOp", (2,), (2,), batches=(2, 3)), "the batch counts of its inputs must be equal, but are 2 and 3"),
    (layer_of("Concat"), "needs 1 inputs"),
]


@pytest.mark.parametrize(("layer", "reason"), BROKEN, ids=[f"{layer.type}-{i}" for i, (layer, _) in enumerate(BROKEN)])
def test_what_is_impossible_is_refused_with_its_reason(layer: Layer, reason: str) -> None:
    with pytest.raises(ShapeError) as raised:
        infer_shapes(layer)
    message = str(raised.value)
    assert reason in message
    assert message.startswith(f"{layer.type} 'culprit'")
    for blob in layer.inputs:
        assert f"'{blob.name}' ({', '.join(map(str, blob.shape or ()))})" in message


def shape(layer: Layer) -> Shape | None:
    [(found, _)] = infer_shapes(layer)
    return found


def test_symbols_go_through_the_arithmetic() -> None:
    downsampled = shape(conv((3, H, W), stride_w=2, pad_left=1))
    assert downsampled == (4, (H + -1) // 2 + 1, (W + -1) // 2 + 1)
    assert shape(layer_of("Pooling", (3, H, W), kernel_w=2, stride_w=2, pad_mode=1)) == (3, H // 2, W // 2)
    assert shape(layer_of("Interp", (3, H, W), resize_type=1, height_scale=2.0, width_scale=0.5)) == (3, H * 2, W // 2)
    assert shape(layer_of("Interp", (3, H, W), resize_type=1, height_scale=1.2345, width_scale=2.0)) is None
    assert shape(layer_of("Reshape", (8, H, W), w=-1, h=2, c=4)) == (4, 2, H * W)
    assert shape(layer_of("Reshape", (8, H, W), shape_expr="*(0w,0h),0c")) == (8, H * W)
    assert shape(layer_of("Concat", (3, H), (3, H * 2), axis=1)) == (3, H * 3)
    assert shape(layer_of("PixelShuffle", (N * 4, H, W), upscale_factor=2)) == (N, H * 2, W * 2)
    assert shape(layer_of("Crop", (H, W), starts=(1, 0), ends=(-1, 3))) == (H + -2, smaller(W, 3))


def test_unknown_symbolic_sizes_are_none() -> None:
    assert shape(layer_of("Reshape", (2, 3, W), shape_expr="sqrt(0w),-1")) is None
    assert shape(layer_of("Interp", (2, 3, W), resize_type=1, size_expr="sqrt(0w)")) is None
    assert shape(layer_of("Crop", (2, W), starts_expr="0,0", ends_expr="1,sqrt(0w)")) is None
    assert shape(layer_of("InnerProduct", (H, W), num_output=4, weight_data_size=24)) is None


def test_a_number_is_preferred_to_a_symbol_and_1_gives_way() -> None:
    assert shape(layer_of("Eltwise", (H, 4), (3, W))) == (3, 4)
    assert shape(layer_of("BinaryOp", (H, 1), (1, W))) == (H, W)
    assert shape(layer_of("BinaryOp", (H, 5), (W, N))) == (larger(H, W), 5)


def test_the_batch_is_what_the_inputs_have_in_common() -> None:
    assert infer_shapes(layer_of("BinaryOp", (2,), (2,), batches=(1, N))) == [((2,), N)]
    assert infer_shapes(layer_of("Reshape", (2, 3), w=3, h=-1, input_batch_axis=0, batches=(N,))) == [((N * 2, 3), 1)]
    [(found, batch)] = infer_shapes(
        layer_of("Reshape", (N * 2, 3), w=3, h=2, c=-1, input_batch_axis=233, output_batch_axis=0)
    )
    assert (found, batch) == ((2, 3), N)


def test_unknown_inputs() -> None:
    assert shape(layer_of("ReLU", None)) is None
    assert shape(layer_of("Concat", (2, 3), None)) is None
    assert shape(layer_of("Reshape", None, w=4, h=3)) == (3, 4)
    assert shape(layer_of("Reshape", None, w=-1, h=3)) is None
    assert shape(layer_of("ROIAlign", (3, 9, 9), None, pooled_width=2, pooled_height=2)) == (3, 2, 2)
    assert shape(layer_of("ROIAlign", None, (4,), pooled_width=2, pooled_height=2)) is None
    assert shape(layer_of("SDPA", (4, 5, 6), None, (4, 7, 3))) is None
    assert shape(layer_of("MultiHeadAttention", None, embed_dim=6, weight_data_size=36)) is None
    assert shape(layer_of("Reshape", None, w=-1, h=3, output_batch_axis=0)) is None
    assert shape(layer_of("NobodyKnows", (2, 3))) is None
    assert shape(layer_of("Input")) is None
    assert shape(layer_of("Input", w=4, h=3, c=2)) == (2, 3, 4)


def test_a_crop_whose_numbers_are_data() -> None:
    assert shape(layer_of("Crop", (3, 5, 7), (6,), woffset=-233)) is None


def test_cached_keys_are_opaque() -> None:
    layer = layer_of("SDPA", (4, 5, 6), (4, 7, 6), (4, 7, 3), None, None, kv_cache=1, outputs=3)
    assert infer_shapes(layer) == [((4, 5, 3), 1), (None, 1), (None, 1)]


def test_a_graph_is_filled_in_order() -> None:
    graph = Graph()
    x, y, z, weight = Blob("x", (3, H, W), N), Blob("y"), Blob("z"), Blob("weight")
    graph.add(Layer("Input", "x", (), [x]))
    graph.add(Layer("MemoryData", "weight", (), [weight], {"w": 1, "h": 1, "c": 3}))
    graph.add(Layer("BinaryOp", "scale", [x, weight], [y]))
    graph.add(Layer("Flatten", "flatten", [y], [z]))
    graph.outputs = [z]
    infer_graph(graph)
    assert (x.shape, weight.shape, y.shape) == ((3, H, W), (3, 1, 1), (3, H, W))
    assert z.shape == (product((3, H, W)),)
    assert (weight.batch, y.batch, z.batch) == (1, N, N)
