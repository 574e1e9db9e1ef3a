"""The .bin, byte by byte, and what is said where it does not fit."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.errors import BinError, GraphError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.weight import Array, Encoding, Weight
from onnx2ncnn_opt.param.binary import load_weights, open_bin, weight_blocks, write_weights
from testing import param_text
from testing.param_text import one_layer

IP = "InnerProduct ip 1 1 x y 0=2 1=1 2=6"


def parsed(*lines: str) -> Graph:
    return param_text.parsed("Input in 0 1 x", *lines).graph


def load(graph: Graph, data: bytes) -> int:
    return load_weights(graph, np.frombuffer(data, np.uint8), file="net.bin")


def dump(graph: Graph) -> bytes:
    stream = io.BytesIO()
    write_weights(graph, stream)
    return stream.getvalue()


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


TABLE = np.arange(256, dtype="<f4") / 8
SIX = np.array([0.5, -2, 3, 0.25, 1, -8], "<f4")
BIAS = np.array([7, -7], "<f4").tobytes()
INDEXES = np.array([0, 8, 255, 1, 2, 3], np.uint8)
STORED: dict[Encoding, tuple[bytes, Array]] = {
    Encoding.FP32: (u32(0) + SIX.tobytes(), SIX),
    Encoding.FP32_FLAGGED: (u32(0x0002C056) + SIX.tobytes(), SIX),
    Encoding.FP16: (u32(0x01306B47) + SIX.astype("<f2").tobytes(), SIX),
    Encoding.BF16: (u32(0x01348B83) + (SIX.view("<u4") >> 16).astype("<u2").tobytes(), SIX),
    Encoding.TABLE: (u32(0x0000AB00) + TABLE.tobytes() + INDEXES.tobytes() + bytes(2), TABLE[INDEXES]),
}


@pytest.mark.parametrize("encoding", STORED, ids=lambda encoding: encoding.value)
def test_every_tag(encoding: Encoding) -> None:
    block, numbers = STORED[encoding]
    graph = parsed(IP)
    assert load(graph, block + BIAS) == 0
    weights = graph.layers[1].weights
    assert weights.stored("weight_data").encoding is encoding
    np.testing.assert_array_equal(weights["weight_data"], numbers)
    np.testing.assert_array_equal(weights["bias_data"], [7, -7])
    assert dump(graph) == block + BIAS


def test_int8_needs_a_layer_that_knows() -> None:
    block = u32(0x000D4B38) + np.array([1, -2, 3, -4, 5, -128], np.int8).tobytes() + bytes(2)
    scales = np.ones(3, "<f4").tobytes()
    graph = parsed(IP + " 8=2")
    assert load(graph, block + BIAS + scales) == 0
    weight = graph.layers[1].weights.stored("weight_data")
    assert weight.encoding is Encoding.INT8
    assert weight.data.tolist() == [1, -2, 3, -4, 5, -128]
    assert dump(graph) == block + BIAS + scales
    with pytest.raises(
        BinError, match=r"^net.bin: at byte 0: InnerProduct 'ip', weight_data is int8, but .* crash ncnn"
    ):
        load(parsed(IP), block + BIAS)
    graph.layers[1].params["int8_scale_term"] = 0
    for name in ("weight_data_int8_scales", "bottom_blob_int8_scales"):
        del graph.layers[1].weights[name]
    with pytest.raises(GraphError, match="weight_data is int8, but the layer's parameters do not say so"):
        dump(graph)


def test_a_constant_may_be_int8() -> None:
    graph = parsed("MemoryData m 0 1 y 0=3 21=0")
    block = u32(0x000D4B38) + np.array([1, -2, 3], np.int8).tobytes() + bytes(1)
    assert load(graph, block) == 0
    assert graph.layers[1].weights["data"].tolist() == [1, -2, 3]
    assert dump(graph) == block


def test_block_quantised_bytes() -> None:
    graph = parsed("Gemm g 1 1 x y 3=1 5=1 7=0 8=3 9=35 18=401")
    packed, scales = bytes(range(3 * 18)) + bytes(2), np.ones(3, "<f4").tobytes()
    assert load(graph, packed + scales) == 0
    weight = graph.layers[1].weights.stored("B_data_packed_bytes")
    assert (weight.encoding, weight.data.size) == (Encoding.BYTES, 54)
    assert dump(graph) == packed + scales


def test_constants_keep_every_bit_pattern() -> None:
    bits = np.array([3, -1, 0x7FA00001, -(2**31)], "<i4").tobytes()  # indexes, and a signalling NaN
    raw = parsed("MemoryData m 0 1 y 0=4")
    assert load(raw, bits) == 0
    assert dump(raw) == bits
    raw.layers[1].weights["data"] = np.frombuffer(bits, "<i4")
    assert raw.layers[1].weights["data"].dtype == np.int32
    assert dump(raw) == bits
    tagged = parsed("MemoryData m 0 1 y 0=4 21=0")
    half = u32(0x01306B47) + np.arange(4, dtype="<f2").tobytes()
    assert load(tagged, half) == 0
    assert tagged.layers[1].weights["data"].tolist() == [0, 1, 2, 3]
    assert dump(tagged) == half


def test_a_scalar_constant_has_no_weights() -> None:
    graph = parsed("MemoryData m 0 1 y")
    assert load(graph, b"") == 0
    assert weight_blocks(graph.layers[1]) == []


def test_weights_are_views_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "net.bin"
    path.write_bytes(STORED[Encoding.FP32][0] + BIAS)
    data = open_bin(path)
    graph = parsed(IP)
    load_weights(graph, data)
    for _, weight in graph.layers[1].weights.stored_items():
        assert np.shares_memory(weight.data, data)
        assert not weight.data.flags.writeable


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BinError, match=r"net.bin: cannot be read: No such file"):
        open_bin(tmp_path / "net.bin")
    with pytest.raises(BinError, match=r"cannot be read: Is a directory"):
        open_bin(tmp_path)
    (tmp_path / "empty.bin").write_bytes(b"")
    assert open_bin(tmp_path / "empty.bin").size == 0


@pytest.mark.parametrize("encoding", STORED, ids=lambda encoding: encoding.value)
def test_truncated_anywhere(encoding: Encoding) -> None:
    whole = STORED[encoding][0] + BIAS
    for size in range(len(whole)):
        with pytest.raises(
            BinError, match=r"^net\.bin: at byte \d+: InnerProduct 'ip', \w+ needs \d+ bytes, but .* after"
        ):
            load(parsed(IP), whole[:size])


@pytest.mark.parametrize(
    ("line", "data", "message"),
    [
        (
            "InnerProduct ip 1 1 x y 0=2 1=0 2=2147483647",
            bytes(40),
            r"net.bin: at byte 0: InnerProduct 'ip', weight_data needs 8589934588 bytes, but the file ends after 36",
        ),
        ("MemoryData m 0 1 y 0=2147483647 1=2147483647 2=2147483647", bytes(40), r"MemoryData 'm', data needs \d{29,}"),
        ("Bias b 1 1 x y", b"", r"net.bin: at byte 0: Bias 'b': its parameters give bias_data 0 elements"),
        ("Bias b 1 1 x y 0=-4", b"", r"Bias 'b': its parameters give bias_data -4 elements"),
        ("Gemm g 1 1 x y 5=1 8=3 9=35 18=408", bytes(99), r"at byte 0: quantize_term has the code 8, which is none of"),
        (
            "Mine m 1 1 x z\nBias b 1 1 z y 0=2",
            bytes(4),
            r"bias_data needs 8 bytes, but the file ends after 4; the custom layer 'm' \(Mine\) may have weights",
        ),
        (
            "Bias b 1 1 x z 0=2\nMine m 1 1 z y",
            bytes(12),
            r"net.bin: 4 bytes are left over after the last weight; the custom layer 'm' \(Mine\) may have weights",
        ),
    ],
)
def test_weights_that_do_not_fit(line: str, data: bytes, message: str) -> None:
    with pytest.raises(BinError, match=message):
        load(parsed(*line.split("\n")), data)


def test_bytes_after_the_last_weight_are_counted() -> None:
    graph = parsed(IP)
    assert load(graph, STORED[Encoding.FP32][0] + BIAS + b"12345") == 5


def bias(**changes: Any) -> Graph:
    """A Bias layer with two elements, changed."""
    graph = one_layer("Bias", {"bias_data_size": 2}, {"bias_data": np.ones(2)})
    graph.layers[1].weights.update(changes)
    return graph


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias_data": np.ones(3)}, "Bias 'l': bias_data has 3 elements, the parameters say 2"),
        ({"other": np.ones(3)}, r"Bias 'l' cannot hold the weights \['other'\]"),
        ({"bias_data": Weight(np.ones(2, np.float16), Encoding.FP16)}, "bias_data cannot be stored as fp16"),
        ({"bias_data": Weight(np.ones(2, np.float64))}, "bias_data is stored as fp32, but has the dtype float64"),
        ({"bias_data": Weight(np.ones(2, np.uint8), Encoding.BYTES)}, "bias_data cannot be stored as bytes"),
    ],
)
def test_weights_that_cannot_be_written(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        dump(bias(**changes))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (Weight(np.ones(6, np.uint8), Encoding.TABLE), "needs a table of 256 values"),
        (Weight(np.ones(6, np.uint8), Encoding.TABLE, TABLE, tag=0), "has a table, whose tag cannot be 0x0"),
        (Weight(np.ones(6, np.uint8), Encoding.TABLE, TABLE, tag=0x000D4B38), "whose tag cannot be 0xd4b38"),
        (Weight(np.ones(6, np.uint8), Encoding.TABLE, TABLE, tag=1 << 32), "whose tag cannot be 0x100000000"),
        (Weight(np.ones(6, np.float32), Encoding.FP16), "is stored as fp16, but has the dtype float32"),
        (Weight(np.ones(6, np.uint8), Encoding.BYTES), "cannot be stored as bare bytes"),
    ],
)
def test_tagged_weights_that_cannot_be_written(weight: Weight, message: str) -> None:
    graph = parsed(IP)
    graph.layers[1].weights.update({"bias_data": np.ones(2, np.float32)})
    graph.layers[1].weights["weight_data"] = weight
    with pytest.raises(GraphError, match=message):
        dump(graph)


def test_a_missing_weight() -> None:
    graph = bias()
    del graph.layers[1].weights["bias_data"]
    with pytest.raises(GraphError, match="Bias 'l' lacks its weight bias_data"):
        dump(graph)


def test_any_memory_layout_is_written_in_order() -> None:
    graph = parsed("Bias b 1 1 x y 0=6")
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    graph.layers[1].weights["bias_data"] = np.asfortranarray(values)
    assert dump(graph) == values.tobytes()
    graph.layers[1].weights["bias_data"] = values.astype(">f4").view(np.ndarray)
    assert dump(graph) == values.tobytes()
