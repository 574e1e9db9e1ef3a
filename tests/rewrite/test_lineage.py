from __future__ import annotations

import pytest

from onnx2ncnn_opt.rewrite.events import Applied, LayerRef
from onnx2ncnn_opt.rewrite.lineage import Group, groups, side_by_side


def rewrite(name: str, before: str, after: str) -> Applied:
    old, new = (tuple(LayerRef("Layer", ref) for ref in text.split()) for text in (before, after))
    return Applied(name, old, new)


def test_a_chain_of_rewrites_is_one_group() -> None:
    events = [rewrite("fuse_bn", "conv bn", "conv"), rewrite("fuse_relu", "conv relu", "conv")]
    found = groups(["in", "conv", "bn", "relu", "end"], ["in", "conv", "end"], events)
    assert found == (Group((1, 2, 3), (1,), ("fuse_bn", "fuse_relu")),)


def test_what_is_eliminated_has_no_layer_after() -> None:
    assert groups(["a", "drop", "b"], ["a", "b"], [rewrite("eliminate", "drop", "")]) == (
        Group((1,), (), ("eliminate",)),
    )


def test_a_name_that_is_free_again_is_another_layer() -> None:
    events = [rewrite("eliminate", "x", ""), rewrite("replace", "y", "x")]
    found = groups(["x", "y"], ["x"], events)
    assert found == (Group((0,), (), ("eliminate",)), Group((1,), (0,), ("replace",)))


def test_one_layer_becomes_several() -> None:
    assert groups(["x"], ["a", "b"], [rewrite("split", "x", "a b")]) == (Group((0,), (0, 1), ("split",)),)


def test_a_layer_that_is_made_and_taken_again_is_in_neither_net() -> None:
    events = [rewrite("make", "x", "t"), rewrite("use", "t y", "z")]
    assert groups(["x", "y"], ["z"], events) == (Group((0, 1), (0,), ("make", "use")),)


@pytest.mark.parametrize(
    ("partners", "rows"),
    [
        ({}, [(0, None), (1, None), (2, None), (None, 0), (None, 1)]),
        ({0: 0, 1: 2}, [(0, 0), (1, None), (2, 1)]),
        ({1: 1}, [(0, None), (None, 0), (1, 1), (2, None)]),
        ({0: 2, 1: 1}, [(0, None), (None, 0), (1, 1), (2, None)]),  # they cross: one pair stays in one row
        ({0: 1, 1: 1}, None),  # two of the net have one partner
    ],
)
def test_rows_have_every_layer_once_and_in_order(
    partners: dict[int, int], rows: list[tuple[int | None, int | None]] | None
) -> None:
    found = side_by_side(3, 2, partners)
    assert [left for left, _ in found if left is not None] == [0, 1, 2]
    assert [right for _, right in found if right is not None] == [0, 1]
    assert rows is None or list(found) == rows


def test_rows_of_long_lists() -> None:
    size = 5000
    found = side_by_side(size, size, {number: size - 1 - number for number in range(size)})
    assert sum(None not in row for row in found) == 1
    assert len(side_by_side(size, size, {number: number for number in range(size)})) == size
