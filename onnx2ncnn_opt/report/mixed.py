"""The report of `mixed` on its work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onnx2ncnn_opt.report.console import Block


@dataclass(frozen=True)
class MaskRow:
    """A mask in words, and its cost in each run; None if the cost could not be measured."""

    mask: str
    seconds: float | None


def mixed_blocks(
    masks: Sequence[MaskRow], before: float, after: float, budget: float, seconds: float | None, checked: str
) -> list[Block]:
    """Return the masks with their costs, the errors (in units of an output's largest value), and where nets ran."""
    blocks: list[Block] = []
    for row in masks:
        cost = "" if row.seconds is None else f"; costs {row.seconds * 1e3:+.2f} ms"
        blocks.append(f"mask: {row.mask}{cost}")
    blocks.append(f"masks: {len(masks)}")
    error = "NaN or infinity" if math.isnan(before) else f"{before:.1e}"
    blocks.append(f"fp16: off by {error} -> {after:.1e} of an output's largest value, {budget:.1e} is allowed")
    blocks.append(f"time: {seconds * 1e3:.2f} ms with masks" if seconds is not None else "time: not measured")
    return [*blocks, f"checked: {checked}"]
