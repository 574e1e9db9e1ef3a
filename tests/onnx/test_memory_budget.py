"""What fixtures/ops/budget.md cannot say: the largest that is possible, and what is too large together."""

import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from onnx2ncnn_opt.onnx import walk
from onnx2ncnn_opt.onnx.lower.memory_budget import MemoryBudget
from testing.models import parsed


def test_large_but_possible_at_run_time() -> None:
    """2**28 elements are the most, and a dynamic dimension counts as 1."""
    nodes = " ".join(f"h{i + 1} = Concat<axis = 1>(h{i}, h{i})" for i in range(28))
    assert lower(parsed(f"(float[n,1] x) => (float[] y) {{ h0 = Relu(x) {nodes} y = Sigmoid(h28) }}")).graph


def test_a_tail_makes_no_larger_outputs() -> None:
    nodes = " ".join(f"h{i + 1} = Concat<axis = 1>(h{i}, h{i})" for i in range(40))
    with pytest.raises(UnsupportedError, match="elements is too large"):
        lower(parsed(f"(float[1,3] x) => (float[] y) {{ h0 = Relu(x) {nodes} y = Sigmoid(h40) }}"))


def test_sizes_of_types_that_numpy_lacks_are_checked_before_the_work() -> None:
    body = "b = Cast<to = 16>(x) t = Tile(b, n) f = Cast<to = 1>(t) y = Sigmoid(f)"
    with pytest.raises(UnsupportedError, match=r"Tile .*: its result of 1048576 x 1048576 elements is too large"):
        lower(parsed(f"(float[1,1] x) => (float[] y) <int64[2] n = {{1048576, 1048576}}> {{ {body} }}"))


def test_many_constants_are_too_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of 1 MB each, where 64 MB are left."""
    monkeypatch.setattr(walk, "MemoryBudget", lambda given: MemoryBudget(given, least=2**26))
    nodes = " ".join(f"h{i} = ConstantOfShape(s)" for i in range(100))
    total = f"y = Concat<axis = 0>({', '.join(f'h{i}' for i in range(100))})"
    with pytest.raises(UnsupportedError, match="too large in all"):
        lower(parsed(f"() => (float[] y) <int64[1] s = {{262144}}> {{ {nodes} {total} }}"))


def test_no_memory_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(walk, "check_size", fails)
    with pytest.raises(UnsupportedError, match="Relu 'r': it takes more memory than there is"):
        lower(parsed("(float[1,1,3,3] x) => (float[] y) { [r] y = Relu(x) }"))
