"""DFT, STFT and windows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from testing.compared import compare_nodes, model_of, types

# Sums of as many products as the transform is long, against ONNX Runtime's fast one.
REL = 1e-5


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


TRANSFORMS = list(itertools.product((17, 20), (1, 2), (0, 1), (0, 1), (None, 5, 12)))


@pytest.mark.parametrize(("opset", "parts", "inverse", "onesided", "length"), TRANSFORMS)
def test_dft(opset: int, parts: int, inverse: int, onesided: int, length: int | None) -> None:
    if onesided and (inverse or parts == 2):
        return
    for shape, axis in (((1, 8, parts), 1), ((2, 7, parts), 1), ((2, 3, 9, parts), 2), ((2, 9, 3, parts), 1)):
        constants: dict[str, Any] = {} if length is None else {"n": np.array(length)}
        names = ["x", "" if length is None else "n"]
        attributes: dict[str, Any] = {"inverse": inverse, "onesided": onesided}
        if opset == 20:
            constants["a"] = np.array(axis)
            names.append("a")
        else:
            attributes["axis"] = axis
        node = helper.make_node("DFT", names, ["y"], **attributes)
        compare_nodes(node, {"x": normal(0, *shape)}, constants, opset=opset, rel=REL)


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("shape", [(1, 50), (2, 50, 1), (1, 16, 1)])
def test_stft(onesided: int, window: bool, shape: tuple[int, ...]) -> None:
    constants = {"s": np.array(5), "n": np.array(16)}
    if window:
        constants["w"] = np.hanning(16).astype(np.float32)
    node = helper.make_node("STFT", ["x", "s", "w" if window else "", "n"], ["y"], onesided=onesided)
    conversion = compare_nodes(node, {"x": normal(0, *shape)}, constants, rel=REL)
    assert types(conversion).count("Convolution1D") == 1


@pytest.mark.parametrize("kind", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("periodic", [0, 1])
def test_windows(kind: str, periodic: int) -> None:
    nodes = [helper.make_node(kind, ["n"], ["w"], periodic=periodic), helper.make_node("Mul", ["x", "w"], ["y"])]
    compare_nodes(nodes, {"x": normal(0, 1, 3, 10)}, {"n": np.array(10)}, rel=1e-6)


@pytest.mark.parametrize(("opset", "size", "length"), [(17, 5, None), (20, 5, 8), (17, 5, 9), (20, 2, 2), (20, 1, 1)])
def test_dft_to_real_numbers(opset: int, size: int, length: int | None) -> None:
    for shape, axis in (((1, size, 2), 1), ((2, 3, size, 2), 2), ((2, size, 3, 2), 1)):
        constants = {} if length is None else {"n": np.array(length)}
        names = ["x", "" if length is None else "n"]
        attributes: dict[str, Any] = {"inverse": 1, "onesided": 1}
        if opset == 20:
            constants["a"] = np.array(axis)
            names.append("a")
        else:
            attributes["axis"] = axis
        node = helper.make_node("DFT", names, ["y"], **attributes)
        compare_nodes(node, {"x": normal(0, *shape)}, constants, opset=opset, rel=REL)


@pytest.mark.parametrize(
    ("shape", "length", "reason"),
    [
        ((1, 1, 2), None, "a length of 0"),
        ((1, 5, 2), 10, "10 real numbers from a spectrum of shape"),
        ((1, 5, 2), 5, "5 real numbers from a spectrum of shape"),
        ((1, 5, 1), None, "8 real numbers from a spectrum of shape"),
    ],
)
def test_refused(shape: tuple[int, ...], length: int | None, reason: str) -> None:
    constants = {} if length is None else {"n": np.array(length)}
    node = helper.make_node("DFT", ["x", *constants], ["y"], inverse=1, onesided=1)
    with pytest.raises(UnsupportedError, match=reason):
        lower(model_of([node], {"x": normal(0, *shape)}, constants, opset=20))
