"""The rules of .param text, one by one."""

import re
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.errors import GraphError, ParamError
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.param.text import format_param, parse_param
from testing.param_text import one_layer


def net(*lines: str, layers: int | None = None, blobs: int = 99) -> str:
    """The text of layers after an Input with the top x."""
    lines = ("Input in 0 1 x", *lines)
    return f"7767517\n{len(lines) if layers is None else layers} {blobs}\n" + "\n".join(lines) + "\n"


def layer(text: str, type: str = "BinaryOp") -> Layer:
    """The layer that a line with these parameters gives."""
    return parse_param(net(f"{type} l 1 1 x y {text}")).graph.layers[1]


@pytest.mark.parametrize(
    ("type", "text", "params"),
    [
        ("BinaryOp", "0=2 1=1 2=0.5", {"op_type": 2, "with_scalar": 1, "b": 0.5}),
        ("BinaryOp", "", {}),
        ("BinaryOp", "2=3", {"b": 3.0}),
        ("BinaryOp", "2=16777217", {"b": 16777216.0}),
        ("BinaryOp", "02=+3. +1=001", {"b": 3.0, "with_scalar": 1}),
        ("BinaryOp", "2=.5e+1", {"b": 5.0}),
        ("BinaryOp", "2=1.00000005960464477540", {"b": 1.0}),  # ncnn rounds to double first
        ("BinaryOp", "2=1e-50 0=3", {"b": 0.0, "op_type": 3}),
        ("BinaryOp", "0=1 0=2", {"op_type": 2}),
        ("BinaryOp", "0=1 0=2.0", {}),  # the last one counts, and is of the wrong kind
        ("BinaryOp", "0=2.0 1=a 2=1.0,2.0", {}),
        ("BinaryOp", "0=e1", {}),  # a string, not a number
        ("BinaryOp", "\t0=1\t \f2=2.0\v", {"op_type": 1, "b": 2.0}),
        ("BinaryOp", "29=7 28=0.5 27=a,b 26=1,2 25=1.5,2 -23324=0", None),
        ("Eltwise", "1=1,2", {"coeffs": (1.0, 2.0)}),
        ("Eltwise", "1=1.0,2,", {"coeffs": (1.0, 2.0)}),
        ("Eltwise", "-23301=2,1,2", {"coeffs": (1.0, 2.0)}),
        ("Eltwise", "-23301=+1,2.5", {"coeffs": (2.5,)}),
        ("Eltwise", "-23301=0", {"coeffs": ()}),
        ("Eltwise", "1=0.5", {}),
        ("Reduction", "3=0, 1=0", {"axes": (0,), "reduce_all": 0}),
        ("Reduction", "3=0.0,", {}),
        ("Reduction", "3=0", {}),
        ("Reduction", "-23303=2,0,-1", {"axes": (0, -1)}),
        ("Reshape", '6="0w, 1"', {"shape_expr": "0w, 1"}),
        ("Reshape", "6=max(0w,2),-1", {"shape_expr": "max(0w,2),-1"}),
        ("Reshape", '6=""', {"shape_expr": ""}),
        ("Reshape", "6=3", {}),
        ("Mine", '0=1 5="a b" 7=0.5 9=1,', {0: 1, 5: "a b", 7: 0.5, 9: (1,)}),
    ],
)
def test_parameters_have_ncnn_s_meaning(type: str, text: str, params: dict[Any, Any] | None) -> None:
    expected = {29: 7, 28: 0.5, 27: "a,b", 26: (1, 2), 25: (1.5, 2.0), 24: ()} if params is None else params
    found = layer(text, type).params
    assert found == expected
    assert {name: str(value) for name, value in found.items()} == {n: str(v) for n, v in expected.items()}


@pytest.mark.parametrize(
    "token",
    [
        "32=1", "-1=1", "-23332=0", "-23400=0", "0000000000000000000002=1", "2=", "2 =1", "2==1", "2= 1", "x=1", "3",
        "#", "2=0x1", "2=1_0", "2=--1", "2=1.2.3", "2=1e", "2=.", "2=.e1", "2=-", "2=-inf", "2='a'", "2=_a", "2=äb",
        "2=\u0663", "2=2147483648", "2=-2147483649", "2=3.4028236e38", "2=1e999", "2=0." + "1" * 126, "2=" + "9" * 5000,
        "2=1.0,,2", "2=,", "2=1,2.5", "2=1.0,a", "-23302=2,1", "-23302=1,1,2", "-23302=2.0,1,2", "-23302=2,1.0,2",
        "-23302=-1", "-23302=2,1,2,", '2="a', '2="', '2="a"b', '2="a"b"', "2=" + "a" * 256, '2="' + "ö" * 128 + '"',
    ],
)  # fmt: skip
def test_parameters_that_ncnn_refuses_or_garbles(token: str) -> None:
    with pytest.raises(ParamError, match=r"^<param>:4: layer 'l'") as caught:
        layer(token)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", r":1: not an ncnn .param file"),
        (b"7767517", r":1: not an ncnn .param file"),
        (b"\x08\x08\x12\x07pytorch 2 \xff\n", r":1: not an ncnn .param file"),  # an ONNX model
        (b"7767518\n1 1\nInput in 0 1 x\n", r":1: not an ncnn .param file"),
        (b"\xef\xbb\xbf7767517\n1 1\nInput in 0 1 x\n", r":1: not an ncnn .param file"),
        (b"7767517\n1 1\nInput in 0 1 \xff\n", r":3: not a text file: byte 25 is not UTF-8"),
        (b"7767517\n1 1\nInput in 0 1 x\0\n", r":3: not a text file: byte 26 is zero"),
        ("7767517\n\n1 x\nInput in 0 1 x\n", r":3: the header's counts '1 x' are not numbers"),
        ("7767517\n0 0\n", r":2: the header's counts '0 0'"),
        ("7767517\n1 1000001\nInput in 0 1 x\n", r":2: the header's counts '1 1000001'"),
        ("7767517\n99999999999999999999 1\nInput in 0 1 x\n", r":2: the header's counts"),
        (net(layers=3), r":2: the header says 3 layers, but 1 follow"),
        (net("ReLU r 1 1 x y", blobs=1), r":2: the header says 1 blobs, but the layers have 2"),
        (net("ReLU"), r":4: a layer needs type, name and two blob counts, found 'ReLU'"),
        (net("ReLU r 1 1 x y", "0=0.5 s 1 1 y z"), r":5: a layer needs type, name and two blob counts, found '0=0.5 s"),
        (net("ReLU r one 1 x y"), r":4: layer 'r' has the blob counts 'one 1'"),
        (net("ReLU r -1 1 y"), r":4: layer 'r' has the blob counts '-1 1'"),
        (net("ReLU r 1 99999999999 x y"), r":4: layer 'r' has the blob counts '1 99999999999'"),
        (net("ReLU r 1 9999999 x y"), r":4: layer 'r' should name 10000000 blobs, but the line ends early"),
        (net("ReLU r 1 1 x"), r":4: layer 'r' should name 2 blobs"),
        (net("ReLU r 1 1"), r":4: layer 'r' should name 2 blobs"),
        (net("ReLU r 1 1 x " + "y" * 256), r":4: the name 'y+\.\.\.' is longer than 255 bytes"),
        (net("ReLU " + "ö" * 128 + " 1 1 x y"), r":4: the name 'ö+\.\.\.' is longer than 255 bytes"),
        (net("ReLU r 1 1 x x"), r":4: layer 'r' produces the blob 'x', which net.param:3 already does"),
        (net("ReLU r 1 1 z y", "ReLU s 1 1 x z"), r":4: layer 'r' reads the blob 'z', but only .*:5 produces it"),
        (net("ReLU r 1 1 z y"), r":4: layer 'r' reads the blob 'z', but no layer produces it"),
        (net("ReLU r 1 1 y y"), r":4: layer 'r' reads the blob 'y', but only net.param:4 produces it"),
        (net("ReLU r 1 2 x y z"), r":4: ReLU 'r' has 2 outputs, needs 1"),
        (net("MatMul m 1 1 x y"), r":4: MatMul 'm' has 1 inputs, needs 2"),
        (net("BinaryOp b 2 1 x x y 1=1"), r":4: BinaryOp 'b' must have one input and one output"),
        (net("Split s 1 0 x"), r":4: layer 's' is a Split of 1 blobs into 0"),
        (net("Split s 2 1 x x y"), r":4: layer 's' is a Split of 2 blobs into 1"),
        (net("ReLU r 1 1 x y 31=1.0"), r":4: layer 'r': the feature mask \(31\) must be an integer"),
        (net("Mine r 1 1 x y 31=1,"), r":4: layer 'r': the feature mask"),
        (net("ReLU r 1 1 x y -23330=3,1,2,3"), r":4: layer 'r': shape hints \(30\) are 4 or 5 integers"),
        (net("ReLU r 1 1 x y 30=1"), r":4: layer 'r': shape hints \(30\)"),
        (net("Mine r 1 1 x y 30=1.0,2,1,1"), r":4: layer 'r': shape hints \(30\)"),
        (net("ReLU r 1 1 x y\n0=0.5"), r":5: a layer needs type, name"),
    ],
)
def test_bad_files(text: str | bytes, message: str) -> None:
    with pytest.raises(ParamError, match=r"^net\.param" + message):
        parse_param(text, file="net.param")


def test_layout_of_the_file_does_not_matter() -> None:
    plain = format_param(parse_param(net("ReLU r 1 1 x y 0=0.5")).graph)
    for text in (
        "7767517 2 2 Input in 0 1 x\nReLU r 1 1 x y 0=0.5",
        "\n 07767517\r\n\r\n+2\t9\r\nInput in 0 1 x\r\n\r\nReLU  r\t1 1 x y   0=0.5 \r\n\n",
        "7767517\n2 2\r  Input in 0 1 x\rReLU r 1 1 x y 0=0.5\r",
    ):
        assert format_param(parse_param(text).graph) == plain


def test_names_with_odd_characters() -> None:
    names = ["0=1", "a/b:0", "blöb", "nbsp\u00a0", "\x1c", "y" * 255, '"']
    lines = [
        f"ReLU r{i} 1 1 {source} {name}" for i, (source, name) in enumerate(zip(["x", *names], names, strict=False))
    ]
    graph = parse_param(net(*lines)).graph
    assert [blob.name for layer in graph for blob in layer.outputs] == ["x", *names]
    assert [line.split(" ")[-1] for line in format_param(graph).split("\n")[3:-1]] == names


def test_layer_names_may_repeat() -> None:
    graph = parse_param(net("ReLU in 1 1 x y", "ReLU in 1 1 y z")).graph
    assert [layer.name for layer in graph] == ["in", "in", "in"]
    assert parse_param(format_param(graph)).graph.layers[2].name == "in"


def test_shapes_come_from_hints_and_from_inputs() -> None:
    text = net(
        "Input a 0 1 a 0=4 1=3 2=2",
        "Input b 0 1 b 0=4 1=3 11=5 2=2",
        "Input c 0 1 c 0=4",
        "Input d 0 1 d 0=4 1=-1",
        "MemoryData m 0 1 m 0=7 1=2",
        "Slice s 1 2 m s t -23330=8,1,7,1,1,2,7,2,1",
        "ReLU r 1 1 s r -23330=5,4,6,5,4,3",
        "ReLU q 1 1 t q 30=4,6,5,4",
        "ReLU p 1 1 q p -23330=4,2,0,5,1",
    )
    graph = parse_param(text).graph
    shapes = {blob.name: blob.shape for layer in graph for blob in layer.outputs}
    assert shapes == {"x": None, "a": (2, 3, 4), "b": (2, 5, 3, 4), "c": (4,), "d": None, "m": (2, 7)} | {
        "s": (7,), "t": (2, 7), "r": (3, 4, 5, 6), "q": None, "p": None,
    }  # fmt: skip
    again = format_param(graph)
    for hint in ("-23330=8,1,7,1,1,2,7,2,1", "-23330=5,4,6,5,4,3", "-23330=4,4,6,5,4", "-23330=4,2,0,5,1"):
        assert hint in again


def test_hints_follow_the_shapes() -> None:
    graph = parse_param(net("ReLU r 1 1 x y -23330=4,3,4,3,2")).graph
    relu = graph.layers[1]
    relu.output.shape = (5, 2, 3, 4)
    assert "-23330=5,4,4,3,2,5" in format_param(graph)
    relu.output.shape = None
    assert "-23330=4,3,4,3,2" in format_param(graph)
    relu.params["shape_hints"] = (1, 2)
    assert "-23330=0" in format_param(graph)


@pytest.mark.parametrize(
    ("type", "params", "text"),
    [
        ("BinaryOp", {"b": 1, "op_type": True, "with_scalar": np.int64(1)}, "0=1 1=1 2=1.0"),
        ("BinaryOp", {29: 7, 28: 0.5, 27: "a", 26: [1, 2], 25: np.array([1.5, 2]), 24: ()},
         '-23324=0 -23325=2,1.5,2.0 -23326=2,1,2 27="a" 28=0.5 29=7'),
        ("Reshape", {"shape_expr": "*(0w,2), -1"}, '6="*(0w,2), -1"'),
        ("Reshape", {"shape_expr": 'a"b'}, '6=a"b'),
        ("Reduction", {"axes": [0, -1], "reduce_all": 0}, "1=0 -23303=2,0,-1"),
        ("Eltwise", {"coeffs": (1, 0.5)}, "-23301=2,1.0,0.5"),
        ("Clip", {"max": float("inf"), "min": float("-inf")}, "0=-3.402823e38 1=3.402823e38"),
        ("ReLU", {"featmask": 4}, "31=4"),
        ("Mine", {0: 1, 31: 2}, "0=1 31=2"),
    ],
)  # fmt: skip
def test_written_parameters(type: str, params: dict[str | int, Any], text: str) -> None:
    line = format_param(one_layer(type, params)).splitlines()[3]
    assert line == f"{type:<16} {'l':<24} 1 1 x y {text}"


@pytest.mark.parametrize(
    ("type", "params", "message"),
    [
        ("BinaryOp", {"op_type": 1.0}, "BinaryOp 'l': op_type=1.0: not a 32-bit integer"),
        ("BinaryOp", {"op_type": 2**31}, "op_type=2147483648: not a 32-bit integer"),
        ("BinaryOp", {"b": "1.0"}, "b='1.0': not a number"),
        ("BinaryOp", {"b": float("nan")}, "b=nan: NaN cannot be written"),
        ("BinaryOp", {"c": 1}, "BinaryOp 'l' has no parameter c"),
        ("BinaryOp", {32: 1}, "BinaryOp 'l': there is no parameter id 32"),
        ("Mine", {"w": 1}, "Mine 'l' has no parameter w"),
        ("Reshape", {"shape_expr": "ö" * 128}, "not a string of at most 255 bytes on one line"),
        ("Reshape", {"shape_expr": "a\nb"}, "not a string of at most 255 bytes on one line"),
        ("Reshape", {"shape_expr": 'a "b"'}, "ncnn cannot read a string with both quotes and blanks"),
        ("Reshape", {"shape_expr": '"b"'}, "ncnn cannot read a string"),
        ("Reduction", {"axes": (0.0,)}, r"axes=\(0.0,\): not a 32-bit integer"),
        ("Reduction", {"axes": 0}, "axes=0: not an array"),
        ("Reduction", {"axes": "0"}, "axes='0': not an array"),
        ("My Type", {}, "'My Type' cannot be a layer type"),
        ("", {}, "'' cannot be a layer type"),
    ],
)
def test_values_that_cannot_be_written(type: str, params: dict[str | int, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        format_param(one_layer(type, params))


def test_header_counts() -> None:
    text = format_param(parse_param(net("Slice s 1 3 x a b c -23300=3,1,1,-233", "ReLU r 1 1 a d")).graph)
    assert re.match(r"7767517\n3 5\n", text)
