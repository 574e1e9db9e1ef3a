"""The table of kernels and costs: names that ncnn has, and choices that follow from them."""

from onnx2ncnn_opt.ir.dim import symbol
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.kernels import _NS_PER_PRODUCT, cost
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.shapes import assign_shapes


def test_every_name_is_a_layer_of_ncnn() -> None:
    assert set(_NS_PER_PRODUCT) <= set(LAYERS)


def test_a_layer_without_kernel_costs_more() -> None:
    flat = _layer("Convolution1D", (32, 100), kernel_w=3, weight_data_size=32 * 32 * 3)
    image = _layer("Convolution", (32, 1, 100), kernel_w=3, kernel_h=1, weight_data_size=32 * 32 * 3)
    assert cost([flat]) > cost([image])
    assert cost([flat, image]) == cost([flat]) + cost([image])


def test_few_channels_gain_nothing() -> None:
    flat = _layer("Convolution1D", (8, 100), kernel_w=3, weight_data_size=8 * 8 * 3)
    image = _layer("Convolution", (8, 1, 100), kernel_w=3, kernel_h=1, weight_data_size=8 * 8 * 3)
    assert cost([flat]) == cost([image])


def test_groups_cost_less_than_all_channels_and_more_than_single_ones() -> None:
    full = _layer("Convolution", (64, 28, 28), kernel_w=3, weight_data_size=64 * 64 * 9)
    halves = _layer("ConvolutionDepthWise", (64, 28, 28), kernel_w=3, weight_data_size=64 * 32 * 9, group=2)
    single = _layer("ConvolutionDepthWise", (64, 28, 28), kernel_w=3, weight_data_size=64 * 9, group=64)
    assert cost([single]) < cost([halves]) < cost([full])


def test_a_dynamic_dimension_has_a_usual_size() -> None:
    blob = Blob("x", None)
    assert cost([Layer("ReLU", "relu", [blob], [Blob("y", None)])]) > 0


def test_the_tokens_of_an_image_are_as_many_as_its_pixels() -> None:
    h, w = symbol("h"), symbol("w")
    image, tokens = (Blob("x", shape) for shape in ((8, h, w), (8, h * w)))
    assert cost([Layer("ReLU", "r", [image], [image])]) == cost([Layer("ReLU", "r", [tokens], [tokens])])


def _layer(type: str, shape: tuple[int, ...], **params: int) -> Layer:
    layer = Layer(type, type, [Blob("x", shape)], [Blob("y")], {"num_output": shape[0], **params})
    assign_shapes(layer)
    return layer
