"""If with a condition that is known when the model is converted."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from testing.compared import compare, types

# As TorchScript writes `x.squeeze(1)`: what is done depends on the shape.
SQUEEZE = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[2, {channels}, 4] x) => (float y) {{
    shape = Shape(x)
    one = Constant<value_int = 1>()
    size = Gather<axis = 0>(shape, one)
    test = Equal(size, one)
    z = If(test) <
        then_branch = then () => (float t) {{
            s = Neg(x)
            t = Floor(s)
        }},
        else_branch = other () => (float e) {{
            s = Relu(x)
            e = Exp(s)
        }}
    >
    y = Abs(z)
}}
"""


@pytest.mark.parametrize(("channels", "layers"), [(1, ["UnaryOp"] * 3), (3, ["ReLU", "UnaryOp", "UnaryOp"])])
def test_the_branch_that_is_taken(channels: int, layers: list[str]) -> None:
    model = onnx.parser.parse_model(SQUEEZE.format(channels=channels))
    x = np.random.default_rng(0).standard_normal((2, channels, 4)).astype(np.float32)
    conversion = compare(model, {"x": x})
    assert types(conversion) == layers


def test_refused() -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[3] x, bool[1] c) => (float y) {
            y = If(c) <then_branch = a () => (float t) { t = Neg(x) }, else_branch = b () => (float e) { e = Abs(x) }>
        }
        """
    )
    with pytest.raises(UnsupportedError) as error:
        lower(model)
    assert "condition is known only at run time" in str(error.value)


def test_what_the_branch_cannot_express_is_refused_once() -> None:
    text = SQUEEZE.replace("t = Floor(s)", "t = NonZero(s)").format(channels=1)
    with pytest.raises(UnsupportedError) as error:
        lower(onnx.parser.parse_model(text))
    assert [node.operator for node in error.value.nodes] == ["NonZero"]
