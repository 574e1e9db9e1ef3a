"""Attention and RotaryEmbedding of ONNX 23 and 24."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import helper

from testing.compared import compare, compare_nodes, model_of, types

# Sums of products under a softmax, in another order than ONNX Runtime's.
REL = 3e-5


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


CASES = list(itertools.product((1, 2), ((4, 4), (4, 2)), (False, True), (0, 1), (None, 0.3)))


@pytest.mark.parametrize(("batch", "heads", "flat", "causal", "scale"), CASES)
def test_attention(batch: int, heads: tuple[int, int], flat: bool, causal: int, scale: float | None) -> None:
    (h, g), (rows, columns, size, width) = heads, (5, 7, 8, 6)
    shapes = [(batch, h, rows, size), (batch, g, columns, size), (batch, g, columns, width)]
    if flat:
        shapes = [(b, length, n * e) for b, n, length, e in shapes]  # type: ignore[misc]
    inputs = {name: normal(i, *shape) for i, (name, shape) in enumerate(zip("qkv", shapes, strict=True))}
    attributes: dict[str, Any] = {"q_num_heads": h, "kv_num_heads": g} if flat else {}
    if scale is not None:
        attributes["scale"] = scale
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=causal, **attributes)
    conversion = compare_nodes(node, inputs, opset=23, rel=REL)
    assert types(conversion).count("SDPA") == 1


MASKS = [(5, 7), (1, 5, 7), (4, 5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (2, 4, 5, 7)]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("kind", ["float", "bool"])
@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("causal", [0, 1])
def test_masks(shape: tuple[int, ...], kind: str, fed: bool, causal: int) -> None:
    inputs = {"q": normal(0, 2, 4, 5, 8), "k": normal(1, 2, 4, 7, 8), "v": normal(2, 2, 4, 7, 6)}
    mask = normal(3, *shape)
    if kind == "bool":
        mask = mask > -0.5
        mask[..., 0] = True  # a row of which nothing is left has no softmax
    constants = {} if fed else {"m": mask}
    node = helper.make_node("Attention", ["q", "k", "v", "m"], ["y"], is_causal=causal)
    feeds = {**inputs, "m": mask} if fed else inputs
    compare_nodes(node, feeds, constants, opset=24, rel=REL)


@pytest.mark.parametrize("shape", [(2, 1, 1, 7), (1, 4, 1, 7), (1, 7)])
@pytest.mark.parametrize("fed", [False, True])
def test_masks_of_one_row(shape: tuple[int, ...], fed: bool) -> None:
    """ONNX broadcasts them; ONNX Runtime wants all rows."""
    inputs = {"q": normal(0, 2, 4, 5, 8), "k": normal(1, 2, 4, 7, 8), "v": normal(2, 2, 4, 7, 6)}
    mask = normal(3, *shape)
    node = helper.make_node("Attention", ["q", "k", "v", "m"], ["y"])
    spread = helper.make_node("Attention", ["q", "k", "v", "full"], ["y"])
    expand = helper.make_node("Expand", ["m", "shape"], ["full"])
    feeds, constants = ({**inputs, "m": mask}, {}) if fed else (inputs, {"m": mask})
    shapes = {"shape": np.array([*shape[:-2], 5, 7])}
    reference = model_of([expand, spread], feeds, {**constants, **shapes}, opset=24)
    compare(model_of([node], feeds, constants, opset=24), feeds, rel=REL, reference=reference)


@pytest.mark.parametrize("causal", [0, 1])
def test_past(causal: int) -> None:
    inputs = {name: normal(i, 2, 3, 4, 8) for i, name in enumerate("qkv")}
    inputs |= {"pk": normal(3, 2, 3, 5, 8), "pv": normal(4, 2, 3, 5, 8)}
    node = helper.make_node(
        "Attention", ["q", "k", "v", "", "pk", "pv"], ["y", "present_k", "present_v"], is_causal=causal
    )
    compare_nodes(node, inputs, opset=23, rel=REL, outputs=("y", "present_k", "present_v"))


ROTARY = list(itertools.product((0, 1), (1, 2), (True, False), (0, 4), ("none", "constant", "fed")))


@pytest.mark.parametrize(("interleaved", "batch", "flat", "rotated", "positions"), ROTARY)
def test_rotary_embedding(interleaved: int, batch: int, flat: bool, rotated: int, positions: str) -> None:
    heads, length, size = 3, 5, 8
    x = normal(0, batch, length, heads * size) if flat else normal(0, batch, heads, length, size)
    half = (rotated or size) // 2
    ids = np.random.default_rng(1).integers(0, 10, (batch, length))
    table = (batch, length, half) if positions == "none" else (10, half)
    constants = {"cos": normal(2, *table), "sin": normal(3, *table)}
    inputs = {"x": x}
    if positions != "none":
        (inputs if positions == "fed" else constants)["ids"] = ids
    node = helper.make_node(
        "RotaryEmbedding",
        ["x", "cos", "sin", *(["ids"] if positions != "none" else [])],
        ["y"],
        interleaved=interleaved,
        rotary_embedding_dim=rotated,
        num_heads=heads if flat or rotated else 0,
    )
    compare_nodes(node, inputs, constants, opset=23)
