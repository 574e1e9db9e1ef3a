"""What older ncnn releases lack is named, with the release that has it."""

from typing import Any

import pytest

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.releases import NEWEST, OLDEST, check_release, too_new


@pytest.mark.parametrize(
    ("type", "params", "since"),
    [
        ("RMSNorm", {}, 20240815),
        ("Flip", {"axes": (0,)}, 20250806),
        ("UnaryOp", {"op_type": 19}, 0),
        ("UnaryOp", {"op_type": 20}, 20260521),
        ("BinaryOp", {"op_type": 11}, 0),
        ("BinaryOp", {"op_type": 15}, 20260308),
        ("Reshape", {"w": 4}, 0),
        ("Reshape", {"shape_expr": "0w,0h"}, 20250310),
        ("Reshape", {"w": 4, "output_batch_axis": 0}, 20260702),
        ("Softmax", {}, 20250318),
        ("Convolution", {}, 0),
    ],
)
def test_the_release_that_is_needed(type: str, params: dict[str, Any], since: int) -> None:
    layer = Layer(type, "layer", [Blob("x", (2, 3, 4, 5))], [Blob("y")], params)
    assert too_new(layer, NEWEST) is None
    assert too_new(layer, since) is None
    reason = too_new(layer, since - 1)
    assert reason is None if since == 0 else reason is not None and f"needs ncnn {since} or newer" in reason


def test_a_batch_needs_a_release_that_has_batches() -> None:
    assert too_new(Layer("ReLU", "layer", [Blob("x")], [Blob("y", (4,), 3)]), 20260616) is not None
    assert too_new(Layer("ReLU", "layer", [Blob("x")], [Blob("y", (4,))]), 20260616) is None


def test_the_tables_name_existing_layers() -> None:
    from onnx2ncnn_opt.ir import releases

    assert set(releases._TYPES) <= set(LAYERS)
    assert all(name in LAYERS[kind].by_name for kind, name in releases._PARAMS)
    assert {kind for kind, _ in releases._RANKS} <= set(LAYERS)


def test_releases_before_the_oldest_are_not_a_target() -> None:
    check_release(OLDEST)
    with pytest.raises(UsageError, match="too old"):
        check_release(OLDEST - 1)
