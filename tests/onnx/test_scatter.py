"""Gathers by constant indices, scatters, Trilu, CumSum and OneHot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from testing.compared import compare_nodes, model_of


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("seed", range(40))
def test_gather_elements(seed: int) -> None:
    """Indices of their own for each element, or the same along every other axis."""
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 5, rng.integers(1, 5)))
    axis = int(rng.integers(-len(shape), len(shape)))
    smaller = tuple(int(rng.integers(1, n + 1)) for n in shape)
    indices = rng.integers(-shape[axis], shape[axis], smaller)
    if seed % 2:
        first = np.take(indices, [0], axis=axis % len(shape))
        rows = rng.integers(0, shape[axis], smaller[axis])
        indices = 0 * first + rows.reshape(tuple(-1 if i == axis % len(shape) else 1 for i in range(len(shape))))
    node = helper.make_node("GatherElements", ["x", "i"], ["y"], axis=axis)
    compare_nodes(node, {"x": normal(seed, *shape)}, {"i": indices}, rel=0)


@pytest.mark.parametrize("seed", range(40))
def test_gather_nd(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(2, 5)))
    batch_dims = int(rng.integers(0, 2))
    depth = int(rng.integers(1, len(shape) - batch_dims + 1))
    outer = shape[:batch_dims] + tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 3)))
    limits = np.array(shape[batch_dims : batch_dims + depth])
    indices = rng.integers(-limits, limits, (*outer, depth))
    node = helper.make_node("GatherND", ["x", "i"], ["y"], batch_dims=batch_dims)
    compare_nodes(node, {"x": normal(seed, *shape)}, {"i": indices}, rel=0)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("constant", ["", "x", "u"])
def test_scatter_nd(seed: int, constant: str) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 5)))
    depth = int(rng.integers(1, len(shape) + 1))
    places = np.array(list(np.ndindex(shape[:depth])))
    count = int(rng.integers(1, len(places) + 1))
    indices = places[rng.permutation(len(places))[:count]]
    arrays = {"x": normal(seed, *shape), "u": normal(seed + 1, count, *shape[depth:])}
    constants = {name: arrays.pop(name) for name in [constant] if name}
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"])
    compare_nodes(node, arrays, {"i": indices, **constants}, opset=18, rel=0)


@pytest.mark.parametrize("seed", range(30))
def test_scatter_elements(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
    axis = int(rng.integers(-len(shape), len(shape)))
    smaller = [int(rng.integers(1, n + 1)) for n in shape]
    order = np.argsort(rng.random(shape), axis=axis)  # no place twice
    indices = order[tuple(slice(n) for n in smaller)]
    node = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], axis=axis)
    inputs = {"x": normal(seed, *shape), "u": normal(seed + 1, *smaller)}
    compare_nodes(node, inputs, {"i": indices}, rel=0)


@pytest.mark.parametrize("seed", range(20))
def test_scatter_nd_at_computed_indices(seed: int) -> None:
    """Of several updates for one place the last one stays, and infinities stay where they are."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
    depth, count = int(rng.integers(1, len(shape) + 1)), tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 3)))
    places = np.stack([rng.integers(-n, n, count) for n in shape[:depth]], axis=-1)
    inputs = {"x": normal(seed, *shape), "i": places, "u": normal(seed + 1, *count, *shape[depth:])}
    inputs["x"].flat[0], inputs["u"].flat[-1] = np.inf, -np.inf
    constants = {name: inputs.pop(name) for name in [("x", "u", "")[seed % 3]] if name}
    compare_nodes(helper.make_node("ScatterND", ["x", "i", "u"], ["y"]), inputs, constants, opset=18, rel=0)


@pytest.mark.parametrize("seed", range(20))
def test_scatter_elements_at_computed_indices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 5)))
    axis = int(rng.integers(-len(shape), len(shape)))
    wanted = list(shape)
    wanted[axis] = int(rng.integers(1, 7))
    inputs = {"x": normal(seed, *shape), "i": rng.integers(-shape[axis], shape[axis], wanted)}
    inputs["u"] = normal(seed + 1, *wanted)
    inputs["x"].flat[0], inputs["u"].flat[-1] = np.inf, -np.inf
    constants = {name: inputs.pop(name) for name in [("x", "u", "")[seed % 3]] if name}
    compare_nodes(helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], axis=axis), inputs, constants, rel=0)


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("constant", ["", "x", "u"])
def test_scatter_reduces_at_computed_indices(reduction: str, dtype: Any, constant: str) -> None:
    rng = np.random.default_rng(5)
    for operator, shape, places, inner in (
        ("ScatterElements", (3, 5), rng.integers(-5, 5, (3, 7)), ()),
        ("ScatterND", (3, 2, 4), np.stack([rng.integers(-3, 3, 5), rng.integers(-2, 2, 5)], axis=1), (4,)),
        ("ScatterND", (6,), rng.integers(-6, 6, (2, 3, 1)), ()),
    ):
        count = places.shape if operator == "ScatterElements" else places.shape[:-1]
        x, u = (rng.integers(-4, 5, size).astype(dtype) for size in (shape, (*count, *inner)))
        if dtype == np.float32:
            x, u = x + np.float32(0.25), u * np.float32(1.5)
            x.flat[:2], u.flat[:2] = [np.inf, -np.inf], [np.inf, -np.inf]
        inputs = {"x": x, "i": places, "u": u}
        constants = {name: inputs.pop(name) for name in [constant] if name}
        attributes: dict[str, Any] = {"axis": 1} if operator == "ScatterElements" else {}
        node = helper.make_node(operator, ["x", "i", "u"], ["y"], reduction=reduction, **attributes)
        compare_nodes(node, inputs, constants, opset=18, dtype=dtype, rel=1e-6)


@pytest.mark.parametrize(
    ("node", "shapes", "reason"),
    [
        (helper.make_node("ScatterElements", ["x", "i", "u"], ["y"]), [(3, 4), (2, 3), (2, 3)], "cover the other axes"),
        (helper.make_node("ScatterND", ["x", "i", "u"], ["y"]), [(3, 4), (2, 1), (2, 3)], "updates of shape"),
        (helper.make_node("ScatterND", ["x", "i", "u"], ["y"]), [(5000,), (1000, 1), (1000,)], "too many to compare"),
    ],
)
def test_computed_indices_that_are_refused(node: Any, shapes: Sequence[tuple[int, ...]], reason: str) -> None:
    x, i, u = shapes
    with pytest.raises(UnsupportedError, match=reason):
        lower(model_of([node], {"x": normal(0, *x), "i": np.zeros(i, np.int64), "u": normal(1, *u)}, opset=18))


def test_a_slice_that_is_assigned() -> None:
    """``x[:, 1:3] = u`` as PyTorch exports it."""
    indices = np.stack(np.meshgrid(np.arange(1), [1, 2], indexing="ij"), axis=-1)
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"])
    compare_nodes(node, {"x": normal(0, 1, 4, 5, 6), "u": normal(1, 1, 2, 5, 6)}, {"i": indices}, rel=0)


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [None, -2, 0, 1, 9])
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 4, 4)])
def test_trilu(upper: int, k: int | None, shape: tuple[int, ...]) -> None:
    x = normal(0, *shape)
    x[..., 0, 1], x[..., 1, 0] = np.inf, -np.inf
    node = helper.make_node("Trilu", ["x", *(["k"] if k is not None else [])], ["y"], upper=upper)
    compare_nodes(node, {"x": x}, {} if k is None else {"k": np.array(k)}, rel=0)


@pytest.mark.parametrize(("exclusive", "reverse"), list(itertools.product((0, 1), (0, 1))))
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 4), (1, 3, 4, 5), (2, 3, 1, 4, 5)])
def test_cumsum(exclusive: int, reverse: int, shape: tuple[int, ...]) -> None:
    for axis in range(-1, len(shape)):
        node = helper.make_node("CumSum", ["x", "a"], ["y"], exclusive=exclusive, reverse=reverse)
        compare_nodes(node, {"x": normal(0, *shape)}, {"a": np.array(axis)}, rel=2e-6)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 4)])
def test_one_hot(shape: tuple[int, ...]) -> None:
    """Negative indices count from the end, others out of range are nowhere."""
    indices = np.random.default_rng(0).integers(-6, 7, shape)
    for values, axis in itertools.product(([0, 1], [2.5, -1]), range(-len(shape) - 1, len(shape) + 1)):
        node = helper.make_node("OneHot", ["x", "d", "v"], ["y"], axis=axis)
        compare_nodes(node, {"x": indices}, {"d": np.array([4]), "v": np.array(values, np.float32)})


@pytest.mark.parametrize("axis", [0, -1])
def test_one_hot_of_floats(axis: int) -> None:
    """Numbers between whole ones are cut off."""
    places = [1, 1.5, -1, -0.5, -3.0000002, 2.9999998, 9, 10, -10, -11, 1e-30, -1e-30, 0, np.nan, np.inf, -np.inf]
    node = helper.make_node("OneHot", ["x", "d", "v"], ["y"], axis=axis)
    constants = {"d": np.float32(10), "v": np.array([2.5, -1], np.float32)}
    compare_nodes(node, {"x": np.array(places, np.float32)}, constants)


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
def test_scatter_reduces(reduction: str) -> None:
    rng = np.random.default_rng(5)
    node = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], axis=1, reduction=reduction)
    inputs = {"x": normal(0, 3, 5), "u": normal(1, 2, 7)}
    compare_nodes(node, inputs, {"i": rng.integers(-5, 5, (2, 7))}, opset=18)
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction=reduction)
    inputs = {"x": normal(0, 3, 2, 4), "u": normal(1, 5, 4)}
    places = np.stack([rng.integers(-3, 3, 5), rng.integers(-2, 2, 5)], axis=1)
    compare_nodes(node, inputs, {"i": places}, opset=18)


@pytest.mark.parametrize("size", [1, 2, 7, 30])
@pytest.mark.parametrize("largest", [0, 1])
def test_sorted(size: int, largest: int) -> None:
    node = helper.make_node("TopK", ["x", "k"], ["y", "i"], axis=1, largest=largest)
    few = np.random.default_rng(size).integers(-3, 3, (2, size, 3)).astype(np.float32)
    few[0, 0, :2] = np.inf, -np.inf
    for x in (normal(size, 2, size, 3), few):
        compare_nodes(node, {"x": x}, {"k": np.array([size])}, rel=0)


@pytest.mark.parametrize(
    ("node", "indices", "reason"),
    [
        (helper.make_node("ScatterND", ["x", "i", "x"], ["y"]), [[0], [7]], "not all in an axis of size 2"),
        (helper.make_node("GatherElements", ["x", "i"], ["y"]), [[5]], "not all in an axis of size 2"),
        (helper.make_node("GatherND", ["x", "i"], ["y"]), [[5]], "not all in axes of sizes [2]"),
    ],
)
def test_refused(node: Any, indices: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        lower(model_of([node], {"x": normal(0, 2, 3)}, {"i": np.array(indices)}, opset=18))
    assert reason in str(error.value)
