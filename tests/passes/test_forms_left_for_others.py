"""Forms that one pass leaves for another, which has to come later."""

import numpy as np

from onnx2ncnn_opt.api.lower import lower
from testing.compared import types
from testing.models import parsed


def test_a_norm_over_channels_whose_variance_has_no_axis_for_them() -> None:
    """FFTformer, as torch.export writes `x.var(-1)`: its Reshape belongs to the Reduction, not to the division."""
    body = """t = Transpose<perm = [0, 2, 1]>(x) mean = ReduceMean(t, last) d = Sub(t, mean) square = Mul(d, d)
        var = ReduceMean<keepdims = 0>(square, last) more = Add(var, eps) root = Sqrt(more)
        column = Unsqueeze(root, last) y = Div(d, column)"""
    model = f"(float[1,6,40] x) => (float[1,40,6] y) <int64[1] last = {{-1}}> {{ {body} }}"
    assert "LayerNorm" in types(lower(parsed(model, eps=np.float32(1e-5))))
