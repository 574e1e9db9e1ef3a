"""Every pass on zeros and ones: the nets of its fixtures, with the numbers of layers that were never trained.

Each net gets one of the numbers, in turn; all with --thorough.
"""

from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.passes import PASSES
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from testing.pass_cases import FOLDER, load
from tests.passes.test_fixtures import BY_NAME, applied, assert_same, compute, rounding_of

_ONES = {"var_data", "slope_data", "scale_data", "gamma_data"}
_ZEROS = {"bias_data", "mean_data", "beta_data", "C_data"}
# Products with equal columns make equal numbers, of which a LayerNorm amplifies the rounding.
_MATRICES = {"weight_data", "B_data", "q_weight_data", "k_weight_data", "v_weight_data", "out_weight_data"}
_SCALES = ("height_scale", "width_scale")  # an Interp by 0 is no net


def fill(graph: Graph, numbers: str) -> bool:
    """Set weights, or parameters that are numbers, to 0 or 1; `untrained` is what a layer has that changes nothing.

    Returns whether there are any.
    """
    count = 0
    for layer in graph:
        for name, weight in list(layer.weights.stored_items()):
            by_kind = {
                "untrained": 1 if name in _ONES else 0 if name in _ZEROS else None,
                "zeros": 1 if name == "var_data" else 0,
                "ones": None if name in _MATRICES else 1,
            }
            if weight.is_float and by_kind.get(numbers) is not None:
                layer.weights[name] = np.full(weight.data.size, by_kind[numbers], np.float32)
                count += 1
        kinds = {p.name: p.kind for p in layer.spec.params} if layer.spec else {}
        for param in layer.params:
            if kinds.get(str(param)) == "float" and param not in ("eps", *_SCALES) and numbers.startswith("parameters"):
                layer.params[param] = float(numbers.endswith("1"))
                count += 1
    return count > 0


NUMBERS = ("untrained", "zeros", "ones", "parameters 0", "parameters 1")


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_plain_numbers(name: str, numbers: str, tmp_path: Path, worker: NcnnWorker, thorough: bool) -> None:
    for number, case in enumerate(load(FOLDER / f"{name}.md"), NUMBERS.index(numbers)):
        if not thorough and number % len(NUMBERS):
            continue
        changed = []
        for passes in ([BY_NAME[name]], PASSES)[: 2 if thorough or number % 2 else 1]:
            graph = case.net()
            if fill(graph, numbers) and applied(graph, passes):
                changed.append(graph)
                assert not applied(graph, passes), f"{case}: a second run changes the net again"
        if changed:
            before = case.net()
            fill(before, numbers)
            feeds = case.feeds(before)
            expected = compute(before, feeds, tmp_path / "before", worker)
            for graph in changed:
                graph.check()
            if not all(np.isfinite(array).all() for array in expected.values()):
                continue  # what a CPU makes of x / 0 depends on its vectors
            for graph in changed:
                after = compute(graph, feeds, tmp_path / "after", worker)
                assert_same(after, expected, rounding_of(before, worker))
