import pytest

from onnx2ncnn_opt.api.lower import lower
from testing.models import parsed


@pytest.mark.parametrize("n", ["n", "m"])
def test_a_mask_for_each_key_gets_a_row_for_each_query(n: str) -> None:
    """BERT hides the padding of a sentence in this way."""
    graph = f"(float[4, n, 8] q, float[4, {n}, 8] k, float[4, {n}, 8] v, float[{n}] mask) => (float[4, n, 8] y) "
    nodes = "t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, t) m = Add(s, mask) w = Softmax<axis = -1>(m)"
    conversion = lower(parsed(f"{graph} {{ {nodes} y = MatMul(w, v) }}"))
    kinds = {layer.type for layer in conversion.graph}
    assert kinds >= {"Interp", "SDPA"}
    assert "Softmax" not in kinds
    assert conversion.verify().ok
