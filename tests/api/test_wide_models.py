"""Models of shapes for which something once took the square of their size."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from onnx2ncnn_opt.api.lower import lower
from testing.models import parsed


def joined(count: int, *, is_dynamic: bool = False) -> str:
    """A Concat of so many inputs, each of which is the layout of all, and perhaps of a size of its own."""
    inputs = ", ".join(f"float[1, {f'n{i}' if is_dynamic else 4}, 5] x{i}" for i in range(count))
    return f"({inputs}) => (float y) {{ y = Concat<axis = 1>({', '.join(f'x{i}' for i in range(count))}) }}"


def cut(count: int) -> str:
    """A tensor in so many slices, each with readers of its own, as a gate may have, and outputs of their own."""
    outputs, slices = (", ".join(f"{name}{i}" for i in range(count)) for name in ("float y", "s"))
    nodes = " ".join(f"t{i} = Tanh(s{i}) y{i} = Mul(t{i}, t{i})" for i in range(count))
    return f"(float[1, {2 * count}, 5] x) => ({outputs}) {{ {slices} = Split<axis = 1>(x) {nodes} }}"


def scrambled(count: int) -> str:
    """Views in a row of which no two are one."""
    nodes = " ".join(f"t{i} = Transpose<perm = [0, 2, 1]>(x{i}) x{i + 1} = Reshape(t{i}, s)" for i in range(count))
    return f"(float[1, 6, 8] x0) => (float y) <int64[3] s = {{1, 6, 8}}> {{ {nodes} y = Relu(x{count}) }}"


def calls(graph: str, layers: int) -> int:
    """Return how many functions lowering calls, which no other load of the machine changes."""
    model = parsed(graph, 17)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event.endswith("call")

    old = sys.getprofile()
    sys.setprofile(profile)
    try:
        conversion = lower(model)
    finally:
        sys.setprofile(old)
    assert len(conversion.graph) == layers
    return count


@pytest.mark.parametrize(
    ("graph", "layers"),
    [
        (joined, lambda n: n + 1),
        (partial(joined, is_dynamic=True), lambda n: n + 1),
        (cut, lambda n: 2 * n + 2),
        (scrambled, lambda n: 2 * n + 2),
    ],
    ids=["joined", "joined, dynamic", "cut", "scrambled"],
)
def test_work_is_linear(graph: Callable[[int], str], layers: Callable[[int], int]) -> None:
    once, twice = (calls(graph(count), layers(count)) for count in (100, 200))
    assert twice < 2.3 * once
