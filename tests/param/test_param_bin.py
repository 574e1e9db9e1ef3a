"""Binary .param files: they hold what the text holds, and ncnn computes the same from them."""

import struct
from contextlib import suppress
from random import Random

import numpy as np
import pytest

from onnx2ncnn_opt.errors import GraphError, ParamError
from onnx2ncnn_opt.param.param_bin import blob_indexes, format_param_bin, is_param_bin, parse_param_bin
from onnx2ncnn_opt.param.splits import list_layers
from testing.param_text import parsed
from testing.random_nets import random_graph


def test_the_bytes() -> None:
    lines = "Input in 0 1 x 0=4", 'Crop c 1 1 x y -23309=2,1,-1 19="0w"', "ReLU r 1 1 y z 0=0.5 31=1"
    graph = parsed(*lines).graph
    expected = struct.pack("<3i", 7767517, 3, 3)
    expected += struct.pack("<7i", 16, 0, 1, 0, 0, 4, -233)
    expected += struct.pack("<9i", 7, 1, 1, 0, 1, -23309, 2, 1, -1) + struct.pack("<2i", -23419, 2) + b"0w\0\0"
    expected += struct.pack("<i", -233)
    expected += struct.pack("<6ifiii", 26, 1, 1, 1, 2, 0, 0.5, 31, 1, -233)
    data = format_param_bin(list_layers(graph))
    assert data == expected
    assert is_param_bin(data)
    assert not is_param_bin(b"7767517\n")
    read = parse_param_bin(data).graph
    assert [(layer.type, layer.params) for layer in read] == [(layer.type, layer.params) for layer in graph]
    assert [blob.name for blob in (*read.inputs, *read.outputs)] == ["0", "2"]


@pytest.mark.parametrize("seed", range(300))
def test_random_nets_round_trip(seed: int) -> None:
    graph = random_graph(Random(seed))
    if any(layer.is_custom for layer in graph):
        with pytest.raises(GraphError, match="custom layer Mine is not known"):
            format_param_bin(list_layers(graph))
        return
    listing = list_layers(graph)
    data = format_param_bin(listing)
    read = parse_param_bin(data).graph
    indexes = blob_indexes(listing)
    assert [blob.name for blob in read.inputs] == [str(indexes[listing.names[blob]]) for blob in graph.inputs]
    outputs = {str(indexes[listing.names[blob]]) for blob in graph.outputs}
    assert outputs <= {blob.name for blob in read.outputs}
    assert [layer.type for layer in read if layer.type != "Split"] == [
        layer.type for layer in graph if layer.type != "Split"
    ]
    again = format_param_bin(list_layers(read))
    assert format_param_bin(list_layers(parse_param_bin(again).graph)) == again


def test_layers_in_any_order() -> None:
    relu, input_ = struct.pack("<6i", 26, 1, 1, 1, 0, -233), struct.pack("<5i", 16, 0, 1, 1, -233)
    graph = parse_param_bin(struct.pack("<3i", 7767517, 2, 2) + relu + input_).graph
    assert [layer.type for layer in graph] == ["Input", "ReLU"]
    assert [blob.name for blob in graph.outputs] == ["0"]


def test_custom_layers_keep_their_number_and_bits() -> None:
    custom = struct.pack("<8ifi", 256 | 3, 1, 1, 0, 1, 0, 7, 1, 0.25, -233)
    data = struct.pack("<3i", 7767517, 2, 2) + struct.pack("<5i", 16, 0, 1, 0, -233) + custom
    graph = parse_param_bin(data).graph
    assert graph.layers[1].params == {0: 7, 1: 0.25}
    assert format_param_bin(list_layers(graph)) == data


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((), "at byte 4: the file ends where 4 more bytes are needed"),
        ((0, 1), "at byte 4: 0 cannot be a number of layers"),
        ((1, -1), "at byte 8: -1 cannot be a number of blobs"),
        ((1, 1, 111), "at byte 12: there is no layer type 111"),
        ((1, 1, -5), "at byte 12: -5 cannot be a layer type"),
        ((1, 1, 16, 0, 99999999), "at byte 20: 99999999 cannot be a number of blobs"),
        ((1, 1, 16, 0, 1, 1), "at byte 24: 1 cannot be a blob"),
        ((1, 1, 16, 0, 1, 0, 32), "at byte 28: there is no parameter id 32"),
        ((1, 1, 16, 0, 1, 0, -1), "at byte 28: there is no parameter id -1"),
        ((1, 1, 16, 0, 1, 0, -23300, 1 << 30), "cannot be the length of an array"),
        ((1, 1, 16, 0, 1, 0, -23400, 256), "256 cannot be the length of a string"),
        ((1, 1, 16, 0, 1, 0, -23406, 4, -1), "the string before this is not UTF-8"),
        ((1, 2, 26, 1, 1, 0, 1, -233), "reads the blob '0', but no layer produces it"),
        ((2, 2, 26, 1, 1, 0, 1, -233, 26, 1, 1, 1, 0, -233), "needs its own output"),
        ((1, 1, 26, 1, 1, 0, 0, -233), "needs its own output"),
    ],
)
def test_broken_files(numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ParamError, match=r"^net:") as error:
        parse_param_bin(struct.pack(f"<{len(numbers) + 1}i", 7767517, *numbers), file="net")
    assert message in str(error.value)


@pytest.mark.parametrize("seed", range(100))
def test_noise_is_an_error_not_a_crash(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = parsed("Input in 0 1 x 0=4", "ReLU r 1 1 x y 0=0.5", "Noop n 1 1 y z").graph
    data = bytearray(format_param_bin(list_layers(graph)))
    for position in rng.integers(4, len(data), 3):
        data[position] ^= 1 << int(rng.integers(8))
    with suppress(ParamError, GraphError):
        format_param_bin(list_layers(parse_param_bin(bytes(data)).graph))
