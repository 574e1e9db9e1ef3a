import pytest

from onnx2ncnn_opt.rewrite.events import Applied, LayerRef
from onnx2ncnn_opt.rewrite.lineage import Group, groups, side_by_side


def rewrite(name: str, before: str, after: str) -> Applied:
    old, new = (tuple(LayerRef("Layer", ref) for ref in text.split()) for text in (before, after))
    return Applied(name, old, new)


@pytest.mark.parametrize(
    ("before", "after", "events", "expected"),
    [
        (  # a chain is one group
            *("in conv bn relu end", "in conv end"),
            [rewrite("fuse_bn", "conv bn", "conv"), rewrite("fuse_relu", "conv relu", "conv")],
            [Group((1, 2, 3), (1,), ("fuse_bn", "fuse_relu"))],
        ),
        ("a drop b", "a b", [rewrite("eliminate", "drop", "")], [Group((1,), (), ("eliminate",))]),
        (  # a name that is free again is another layer
            *("x y", "x"),
            [rewrite("eliminate", "x", ""), rewrite("replace", "y", "x")],
            [Group((0,), (), ("eliminate",)), Group((1,), (0,), ("replace",))],
        ),
        ("x", "a b", [rewrite("split", "x", "a b")], [Group((0,), (0, 1), ("split",))]),
        (  # a layer that is made and taken again is in neither net
            *("x y", "z"),
            [rewrite("make", "x", "t"), rewrite("use", "t y", "z")],
            [Group((0, 1), (0,), ("make", "use"))],
        ),
    ],
)
def test_groups(before: str, after: str, events: list[Applied], expected: list[Group]) -> None:
    assert groups(before.split(), after.split(), events) == tuple(expected)


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
