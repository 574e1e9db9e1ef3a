import numpy as np
import pytest

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.int8 import (
    LARGEST_SUM,
    in_int8,
    integers,
    is_exact,
    is_garbage_on_x86,
    largest_sum,
    may_use_winograd,
    row_scales,
)


def convolution(outputs: int, inputs: int, group: int = 1, *, kernel: int = 3, stride: int = 1) -> Layer:
    weight = np.random.default_rng(0).standard_normal((outputs, inputs // group, kernel, kernel)).astype("f4")
    params = {"num_output": outputs, "kernel_w": kernel, "stride_w": stride, "weight_data_size": weight.size}
    kind = "Convolution" if group == 1 else "ConvolutionDepthWise"
    params |= {} if group == 1 else {"group": group}
    return Layer(kind, "c", [Blob("x")], [Blob("y")], params, {"weight_data": weight})


@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "is_garbage"),
    [
        (64, 64, 8, True),
        (64, 32, 4, True),
        (64, 64, 32, False),
        (12, 12, 3, False),
        (64, 64, 64, False),
        (8, 8, 1, False),
    ],
)
def test_groups_that_are_garbage_on_x86(outputs: int, inputs: int, group: int, is_garbage: bool) -> None:
    assert is_garbage_on_x86(convolution(outputs, inputs, group)) == is_garbage


def test_the_law_of_winograd() -> None:
    rows = np.full((2, LARGEST_SUM // 127 // 127), 127, np.int8)
    assert largest_sum(rows) <= LARGEST_SUM < largest_sum(np.hstack([rows, rows[:, :1]]))
    rows[:, ::2] = -127
    assert largest_sum(rows, is_positive=True) * 2 <= largest_sum(rows) + 127 * 127
    layers = [convolution(8, 8), convolution(8, 8, stride=2), convolution(8, 8, kernel=1), convolution(8, 8, 8)]
    assert [may_use_winograd(layer) for layer in layers] == [True, False, False, False]


def test_int8_of_a_layer() -> None:
    layer = convolution(8, 4)
    rows = layer.weights["weight_data"].reshape(8, -1)
    rows[3] = 0
    layer.weights["weight_data"] = rows
    scales = row_scales(rows)
    assert scales[3] == 1
    assert not is_exact(rows, scales)
    made = in_int8(layer, scales, 20.0)
    assert made.weights["weight_data"].dtype == np.int8
    np.testing.assert_array_equal(made.weights["weight_data"].reshape(8, -1), integers(rows, scales[:, None]))
    assert is_exact(integers(rows, scales[:, None]) / scales[:, None], scales)
    assert made["int8_scale_term"] == 2
