"""Enclosures hold what they promise: values and slopes at random places within random cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.passes._enclosure import Enclosure
from onnx2ncnn_opt.passes._functions import applied, function_of

CELLS, PLACES = 400, 40
LAYERS: dict[str, dict[str, Any]] = {
    "CELU": {"alpha": 1.5},
    "Clip": {"min": -1.0, "max": 2.0},
    "ELU": {"alpha": 0.5},
    "GELU": {},
    "fast GELU": {"fast_gelu": 1},
    "HardSigmoid": {},
    "HardSwish": {},
    "ReLU": {"slope": 0.1},
    "Threshold": {"threshold": 0.5},
    **{key: {} for key in ("AbsVal", "Erf", "Exp", "Log", "Mish", "SELU", "Sigmoid", "Softplus", "Swish", "TanH")},
    **{f"UnaryOp {kind}": {"op_type": kind} for kind in (0, 1, 4, 5, 6, 7, 8, 15, 16, 21)},
    **{f"BinaryOp {kind}": {"op_type": kind, "with_scalar": 1, "b": 0.75} for kind in (0, 1, 2, 3, 4, 5, 7, 8)},
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("largest", [1e-3, 4.0, 120.0, 1e6])
def test_values_and_slopes_are_within(name: str, largest: float) -> None:
    layer = Layer(name.split()[-1] if name == "fast GELU" else name.split()[0], "", [Blob("")], (), LAYERS[name])
    function = function_of(layer)
    assert function is not None
    rng = np.random.default_rng(0)
    lo = rng.uniform(-largest, largest, CELLS) * (rng.random(CELLS) < 0.9)
    hi = lo + largest * 10.0 ** rng.uniform(-6, 0, CELLS)
    with np.errstate(all="ignore"):
        cell = applied(function, Enclosure.of(lo, hi))
        places = np.sort(rng.uniform(lo, hi, (PLACES, CELLS)), axis=0)
        values, steps = applied(function, places), np.diff(places, axis=0)
        slopes = np.diff(values, axis=0) / steps
        # What float32 flushes to zero, and what is lost where numbers near 1 are subtracted.
        known = ~np.isnan(values)
        low, high = cell.value.lo - 1e-35, cell.value.hi + 1e-35
        # By the mean value theorem quotients are slopes somewhere; those of small differences are rough.
        rough = 1e-35 + 1e-14 * (1 + np.abs(values).max(axis=0)) / steps + 1e-6 * np.abs(slopes)
        within = (cell.slope.lo <= slopes + rough) & (slopes - rough <= cell.slope.hi)
    assert ((low <= values) & (values <= high))[known].all()
    assert np.isinf(cell.value.largest)[~known.all(axis=0)].all()
    assert (within | ~np.isfinite(slopes) | ~np.isfinite(rough)).all()


def test_curvatures_are_within() -> None:
    """A spline of second order through the ends of a cell is off by an eighth of the curvature at most."""
    for name in ("Sigmoid", "TanH", "Swish", "GELU", "Mish", "Softplus"):
        function = function_of(Layer(name, "", [Blob("")]))
        assert function is not None
        lo = np.arange(-8, 8, 1 / 8)
        cell = applied(function, Enclosure.of(lo, lo + 1 / 8))
        middle = applied(function, lo + 1 / 16)
        straight = (applied(function, lo) + applied(function, lo + 1 / 8)) / 2
        assert (np.abs(middle - straight) <= cell.bend.largest / 8 / 64 + 1e-12).all()
        assert cell.bend.largest.max() < 4
