"""Resize and Upsample: what each element of the result reads, for all modes and sizes; and random nodes in ncnn."""

from itertools import product

import numpy as np
import pytest
from onnx import helper

from onnx2ncnn_opt.errors import RunError, UnsupportedError
from onnx2ncnn_opt.onnx.lower.functional.resampling import Axis, Sampling
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing.compared import compare, model_of
from testing.random_resizes import COORDINATES, NEAREST, SCALES, random_resize

LONGEST = 13
NODES = 120
PARTS = 4


def _read(cases: list[tuple[int, np.ndarray]], attributes: dict[str, str], opset: int) -> list[np.ndarray]:
    """Which element of a row each element of the result is in ONNX Runtime; a case is a row's length, and its scale."""
    rows = {f"x{size}": np.arange(size, dtype=np.float32) for size in {size for size, _ in cases}}
    constants = {"none": np.zeros(0, np.float32)} | {f"s{i}": by for i, (_, by) in enumerate(cases)}
    nodes = []
    for i, (size, by) in enumerate(cases):
        said = ["none", "none", f"s{i}"] if by.dtype == np.int64 else ["none", f"s{i}"] if opset > 10 else [f"s{i}"]
        nodes.append(helper.make_node("Resize", [f"x{size}", *said], [f"y{i}"], **attributes))
    outputs = [f"y{i}" for i in range(len(cases))]
    found = OrtRunner(model_of(nodes, rows, constants, outputs=outputs, opset=opset).SerializeToString()).run(rows)
    return [found[name].astype(int) for name in outputs]


@pytest.mark.parametrize(("coordinates", "nearest"), [*product(COORDINATES[:-1], NEAREST)])
def test_nearest_reads_the_same_pixels_as_onnxruntime(coordinates: str, nearest: str) -> None:
    sizes = [(n, np.array([m], np.int64)) for n, m in product(range(1, LONGEST), range(1, LONGEST)) if n != m]
    scales = [(n, np.array([by], np.float32)) for n, by in product(range(1, LONGEST), SCALES)]
    cases: list[tuple[int, np.ndarray]] = [
        *sizes,
        *((n, by) for n, by in scales if np.floor(np.float32(n) * by[0]) not in (0, n)),
    ]
    attributes = {"mode": "nearest", "coordinate_transformation_mode": coordinates, "nearest_mode": nearest}
    sampling = Sampling("nearest", coordinates, nearest)
    for (size, by), read in zip(cases, _read(cases, attributes, 12), strict=True):
        scale = by[0] / size if by.dtype == np.int64 else float(by[0])
        assert sampling.nearest(Axis(0, size, len(read), scale)).tolist() == read.tolist(), (size, by)


def test_nearest_of_opset_10_reads_the_same_pixels_as_onnxruntime() -> None:
    scales = [(n, np.array([by], np.float32)) for n, by in product(range(1, 3 * LONGEST), SCALES)]
    cases = [(n, by) for n, by in scales if np.floor(np.float32(n) * by[0]) not in (0, n)]
    sampling = Sampling("nearest", "asymmetric", "simple")
    for (size, by), read in zip(cases, _read(cases, {"mode": "nearest"}, 10), strict=True):
        axis = Axis(0, size, len(read), float(by[0]))
        assert sampling.nearest(axis).tolist() == read.tolist(), (size, by)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_nodes_are_right_or_refused(part: int) -> None:
    """Modes, coordinates, roundings, sizes and scales of every version."""
    right = 0
    for seed in range(part, NODES, PARTS):
        model, feeds = random_resize(seed)
        try:
            OrtRunner(model.SerializeToString()).run(feeds)
        except RunError:
            continue  # what ONNX Runtime does not take has no reference
        try:
            compare(model, feeds)
            right += 1
        except UnsupportedError:
            pass
    assert right > 0.4 * NODES / PARTS
