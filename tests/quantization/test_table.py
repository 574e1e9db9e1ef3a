"""Scales as ncnn2table writes them."""

from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.param.files import write_net
from onnx2ncnn_opt.quantization.emit import Scales, quantise
from onnx2ncnn_opt.quantization.quantize import Options, quantize_net
from onnx2ncnn_opt.quantization.table import format_table, read_table
from onnx2ncnn_opt.runtime.base import Feed
from testing.param_text import net
from testing.pass_cases import fill_weights

TABLE = "a_param_0 10 20\nb_param_0 7\na 30.5\nb 12\n"


def built() -> Graph:
    graph = net(
        "Input in 0 1 x",
        "Convolution a 1 1 x y 0=2 1=1 6=6",
        "ConvolutionDepthWise b 1 1 y z 0=2 1=1 6=2 7=2",
        "Gemm c 1 1 z o 3=1 5=1 6=1 8=2 9=4 10=-1",
    )
    fill_weights(graph)
    return graph


def test_a_table_of_ncnn2table(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(TABLE + "c_param_0 1\n\nanother 1 2\n")
    found = read_table(tmp_path / "t", built())
    assert {name: scales.input for name, scales in found.items()} == {"a": 30.5, "b": 12}
    np.testing.assert_array_equal(found["a"].rows[0], [10, 20])
    np.testing.assert_array_equal(found["b"].rows[0], [7, 7])


def test_a_table_that_is_written_is_read_again(tmp_path: Path) -> None:
    graph = built()
    quantise(graph, {"a": Scales(30.5), "b": Scales(1 / 3), "c": Scales(1.0)})
    (tmp_path / "t").write_text(format_table(graph))
    again = built()
    quantise(again, read_table(tmp_path / "t", again))
    assert format_table(again) == format_table(graph)


def test_quantize_takes_its_scales(tmp_path: Path) -> None:
    write_net(built(), tmp_path / "n.param", tmp_path / "n.bin")
    (tmp_path / "t").write_text(TABLE)
    feeds = [{"x": Feed(np.random.default_rng(i).standard_normal((3, 1, 4)).astype(np.float32))} for i in range(8)]
    made = quantize_net(tmp_path / "n.param", tmp_path / "n.bin", feeds, Options(every=True, table=tmp_path / "t"))
    assert format_table(made.graph) == "a_param_0 10 20\nb_param_0 7 7\na 30.5\nb 12\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a_param_0 10 20 30\na 1", "needs 2 scales for its weights, not 3, and one for its input"),
        ("a 1", "needs 2 scales for its weights, not 0, and one for its input"),
        ("a_param_0 10 inf\na 1", "line 1: the scales of 'a_param_0'"),
        ("a_param_0 10 20\na 0", "line 2: the scales of 'a'"),
        ("a_param_0 ten\na 1", "line 1: a name and numbers"),
        ("d_param_0 10\nd 1", "no scales for a layer"),
        ("", "no scales for a layer"),
    ],
)
def test_tables_that_do_not_fit(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_table(tmp_path / "t", built())


OTHERS = (
    ("LSTM l 1 1 x y 0=4 1=192 2=2", [32, 32]),
    ("GRU l 1 1 x y 0=4 1=72 2=0", [12, 12]),
    ("Embed l 1 1 x y 0=6 1=5 3=30", [1]),
    ("MultiHeadAttention l 1 1 x y 0=8 1=2 2=64", [8, 8, 8, 1]),
)


@pytest.mark.parametrize(("line", "counts"), OTHERS)
def test_layers_whose_inputs_get_scales_at_run_time(line: str, counts: list[int], tmp_path: Path) -> None:
    def filled() -> Graph:
        graph = net("Input in 0 1 x", line)
        fill_weights(graph)
        return graph

    graph = filled()
    quantise(graph, {"l": Scales(1.0, whole=True)})
    (tmp_path / "t").write_text(format_table(graph))
    found = read_table(tmp_path / "t", filled())
    assert [part.size for part in found["l"].rows] == counts
    again = filled()
    quantise(again, found)
    assert format_table(again) == format_table(graph)
    (tmp_path / "t").write_text("l_param_0 1 2 3 4 5\n")
    with pytest.raises(UsageError, match=f"'l' needs {counts[0]}"):
        read_table(tmp_path / "t", filled())
