"""Inputs of int8 layers on one side of 0: they get both signs, and the net stays right on each device."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.ir.codes import Activation
from onnx2ncnn_opt.ir.features import Feature
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.quantization.centre import centre
from onnx2ncnn_opt.quantization.emit import Scales, quantise
from onnx2ncnn_opt.runtime.base import Array
from testing.param_text import layer
from tests.quantization.test_emit import built, decibels, drawn, run

FIRST = "Convolution a 1 1 x y 0=16 1=3 4=1 5=1 6=432 9=1"
NETS = {
    "3x3": (FIRST, "Convolution b 1 1 y z 0=24 1=3 4=1 5=1 6=3456"),
    "stride 2, 12 channels": (
        "Convolution a 1 1 x y 0=12 1=3 4=1 6=324 9=1",
        "Convolution b 1 1 y z 0=24 1=3 3=2 4=1 6=2592",
    ),
    "depthwise between 1x1": (
        "Convolution a 1 1 x y 0=16 1=1 5=1 6=48 9=3 -23310=2,0,4",
        "ConvolutionDepthWise b 1 1 y w 0=16 1=3 4=1 5=1 6=144 7=16 9=1",
        "Convolution c 1 1 w z 0=24 1=1 6=384",
    ),
    "two readers": (
        FIRST,
        "Convolution b 1 1 y p 0=24 1=3 4=1 6=3456",
        "Convolution c 1 1 y q 0=24 1=1 5=1 6=384",
        "BinaryOp e 2 1 p q z 0=0",
    ),
    "a float reader that pads": (
        FIRST,
        "Convolution b 1 1 y p 0=16 1=3 4=1 6=2304",
        "ConvolutionDepthWise f 1 1 y q 0=16 1=3 4=1 5=1 6=144 7=16",
        "BinaryOp e 2 1 p q z 0=0",
    ),
    "innerproduct": (FIRST, "InnerProduct b 1 1 y z 0=10 1=1 2=27040"),
}


def net_of(lines: tuple[str, ...]) -> Graph:
    return built("Input in 0 1 x", *lines)


def scales_of(lines: tuple[str, ...], feeds: Mapping[str, Array], folder: Path) -> dict[str, Scales]:
    """Return the scale of each layer's input by its largest number."""
    graph = net_of(lines)
    inputs = {each.name: each.inputs[0] for each in graph if each.name not in ("in", "e", "f")}
    graph.outputs = tuple(dict.fromkeys(blob for blob in inputs.values() if not blob.is_input))
    found = {**feeds, **run(graph, feeds, folder)}
    return {name: Scales(127 / float(np.abs(found[blob.name]).max())) for name, blob in inputs.items()}


@pytest.mark.parametrize("name", NETS)
def test_centred_inputs_gain_precision(name: str, tmp_path: Path) -> None:
    feeds = {"x": drawn(3, 13, 13)}
    scales = scales_of(NETS[name], feeds, tmp_path)
    expected, found = run(net_of(NETS[name]), feeds, tmp_path)["z"], []
    for is_centring in (False, True):
        graph = net_of(NETS[name])
        quantise(graph, scales)
        if is_centring:
            centre(graph)
        found.append(decibels(expected, run(graph, feeds, tmp_path)["z"]))
    assert found[1] > found[0] + 0.7 > 35


@pytest.mark.parametrize(
    "lines",
    [
        ("Convolution a 1 1 x y 0=16 1=3 4=1 5=1 6=432", NETS["3x3"][1]),
        ("Convolution a 1 1 x y 0=16 1=3 4=1 5=1 6=432 9=2 -23310=1,0.1", NETS["3x3"][1]),
        (*NETS["3x3"], "ReLU r 1 1 y q"),
        (FIRST, "Convolution b 1 1 y z 0=24 1=3 4=1 5=1 6=3456 18=1"),
    ],
    ids=["both signs", "leaky", "another reader", "it pads"],
)
def test_nets_that_stay(lines: tuple[str, ...]) -> None:
    graph = net_of(lines)
    quantise(graph, {"b": Scales(20.0)})
    before = layer(graph, "b").weights["weight_data"].copy()
    centre(graph)
    np.testing.assert_array_equal(layer(graph, "b").weights["weight_data"], before)


def test_layers_that_pad_stay_on_the_cpu_with_those_of_the_same_int8() -> None:
    graph = net_of(NETS["depthwise between 1x1"])
    quantise(graph, {name: Scales(20.0) for name in "abc"})
    centre(graph)
    assert [layer(graph, name)["featmask"] for name in "abc"] == [Feature.NO_VULKAN] * 3
    assert layer(graph, "b")["pad_value"] == 127
    graph = net_of(NETS["depthwise between 1x1"])
    quantise(graph, {name: Scales(20.0) for name in "abc"})
    centre(graph, padded=False)
    assert [layer(graph, name)["featmask"] for name in "abc"] == [0] * 3
    assert layer(graph, "a")["activation_params"] == (0, 4)
    assert layer(graph, "b")["activation_type"] == Activation.CLIP
