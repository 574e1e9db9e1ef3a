"""Every operator on zeros and ones: the models of its fixtures, with the weights of a model that was never trained.

Every second model gets one of the numbers, in turn; each one all of them with --thorough.
"""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx2ncnn_opt.errors import UnsupportedError
from testing.arrays import first_difference
from testing.compared import conversions
from testing.conformance import Harness
from testing.op_cases import Case
from tests.onnx.test_op_fixtures import CASES

_WITHOUT = {
    "quantization": "a scale of 0 is no model",
    "division": "ncnn's x / 0 is NaN",
    "normalization: LayerNormalization: width one": "ncnn adds and takes away 316 times the operand",
    "contrib: EmbedLayerNormalization": "rows of equal numbers, of which ncnn adds and takes away up to 1e6 times each",
    "normalization: BatchNormalization that trains": "ONNX Runtime writes into equal weights, which it shares",
}


def has_weights(case: Case) -> bool:
    weights = case.model().graph.initializer
    return any(weight.dims and weight.data_type == onnx.TensorProto.FLOAT for weight in weights)


NUMBERS = ((0, 9), (1, 9), (0, 1))  # zeros, ones, zero biases: the number, and the most axes of the weights that get it
PARTS = 24  # tests that several processes share
WEIGHTED = [case for case in CASES if has_weights(case) and not str(case).startswith((*_WITHOUT,))]


@pytest.mark.parametrize("part", range(PARTS))
def test_plain_weights(part: int, harness: Harness, thorough: bool) -> None:
    for turn, case in enumerate(WEIGHTED[part::PARTS] if thorough else WEIGHTED[2 * part :: 2 * PARTS]):
        for number, most_axes in NUMBERS if thorough else (NUMBERS[turn % len(NUMBERS)],):
            check(case, number, most_axes, harness)


def check(case: Case, number: float, most_axes: int, harness: Harness) -> None:
    model = case.model()
    for weight in model.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT and len(weight.dims) <= most_axes:
            value = 1 if weight.name in ("var", "positive") else number
            weight.CopyFrom(numpy_helper.from_array(np.full(weight.dims, value, np.float32), weight.name))
    try:
        converted = conversions(model)
    except UnsupportedError:
        return
    for sizes in case.sizes:
        feeds = case.feeds(model, sizes)
        reference = list(case.reference(model, feeds).values())
        for conversion in converted:
            assert not first_difference(harness.run(conversion, feeds), reference), f"{case}, {number}"
