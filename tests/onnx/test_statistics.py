"""RMSNormalization, GroupNormalization, MeanVarianceNormalization, LpNormalization and LpPool."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from testing.compared import compare_nodes, model_of, types


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


SHAPES: list[tuple[int, ...]] = [(8,), (3, 8), (1, 5, 8), (2, 3, 4, 8), (1, 2, 3, 4, 5)]


@pytest.mark.parametrize(("shape", "axis"), [(s, a) for s in SHAPES for a in range(-len(s), 0)])
def test_rms_norm(shape: tuple[int, ...], axis: int) -> None:
    node = helper.make_node("RMSNormalization", ["x", "s"], ["y"], axis=axis, epsilon=1e-3)
    for scale in (normal(1, *shape[axis:]), np.ones(shape[-1], np.float32)):
        compare_nodes(node, {"x": normal(0, *shape)}, {"s": scale}, opset=23)


@pytest.mark.parametrize(
    ("opset", "shape", "groups"),
    list(
        itertools.product((18, 21), [(1, 12), (2, 12, 5), (1, 12, 4, 5), (3, 12, 4, 5), (1, 12, 2, 3, 4)], (1, 3, 12))
    ),
)
def test_group_norm(opset: int, shape: tuple[int, ...], groups: int) -> None:
    node = helper.make_node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=groups)
    size = 12 if opset == 21 else groups
    compare_nodes(node, {"x": normal(0, *shape)}, {"s": normal(1, size), "b": normal(2, size)}, opset=opset, rel=3e-5)


@pytest.mark.parametrize("axes", [None, [0, 2, 3], [2, 3], [1], [0, 1, 2, 3], [1, 2]])
@pytest.mark.parametrize("batch", [1, 2])
def test_mean_variance_norm(axes: Any, batch: int) -> None:
    node = helper.make_node("MeanVarianceNormalization", ["x"], ["y"], **({} if axes is None else {"axes": axes}))
    compare_nodes(node, {"x": normal(0, batch, 3, 4, 5)}, rel=3e-5)


@pytest.mark.parametrize(("shape", "p"), list(itertools.product(SHAPES, (1, 2))))
def test_lp_norm(shape: tuple[int, ...], p: int) -> None:
    """Rows of zeros stay zeros."""
    x = normal(0, *shape)
    if len(shape) > 1:
        x[0, 0] = 0
    for axis in range(-1, len(shape)):
        compare_nodes(helper.make_node("LpNormalization", ["x"], ["y"], axis=axis, p=p), {"x": x})


@pytest.mark.parametrize(
    ("p", "stride", "pads"), list(itertools.product((1, 2, 3), (1, 2), ((0, 0, 0, 0), (1, 0, 1, 1))))
)
def test_lp_pool(p: int, stride: int, pads: Any) -> None:
    node = helper.make_node("LpPool", ["x"], ["y"], kernel_shape=[3, 2], p=p, strides=[stride, 1], pads=pads)
    compare_nodes(node, {"x": normal(0, 2, 3, 7, 6)})
    compare_nodes(helper.make_node("GlobalLpPool", ["x"], ["y"], p=p), {"x": normal(0, 2, 3, 7, 6)})


def test_as_few_layers_as_can_be() -> None:
    rms = helper.make_node("RMSNormalization", ["x", "s"], ["y"])
    assert types(compare_nodes(rms, {"x": normal(0, 1, 5, 8)}, {"s": normal(1, 8)}, opset=23)) == ["RMSNorm"]
    group = helper.make_node("GroupNormalization", ["x", "s", "s"], ["y"], num_groups=2)
    assert types(compare_nodes(group, {"x": normal(0, 1, 8, 3, 3)}, {"s": normal(1, 8)}, opset=21)) == ["GroupNorm"]


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (helper.make_node("GroupNormalization", ["x", "s", "s"], ["y"], num_groups=3), "8 channels do not divide"),
        (helper.make_node("GroupNormalization", ["x", "s", "s"], ["y"], num_groups=4), "not [8]"),
        (helper.make_node("LpNormalization", ["x"], ["y"], p=3), "p is 3"),
        (helper.make_node("LpPool", ["x"], ["y"], kernel_shape=[2, 2], ceil_mode=1), "ceil_mode"),
    ],
)
def test_refused(node: Any, reason: str) -> None:
    constants = {"s": normal(0, 4)} if "s" in node.input else {}
    with pytest.raises(UnsupportedError) as error:
        lower(model_of([node], {"x": normal(0, 1, 8, 3, 3)}, constants, opset=21))
    assert reason in str(error.value)
