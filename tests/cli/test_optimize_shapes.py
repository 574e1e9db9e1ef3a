"""Where `optimize` gets shapes from that the .param does not state, and what it says where nothing tells them."""

from pathlib import Path

import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UsageError
from testing.command import refused, run, run_well
from testing.handmade import tagged, write_net
from testing.models import parsed
from testing.optimized import apply_passes

PROGRAM = """
def test_inference():
    in0 = torch.rand(1, 3, 8, 9, dtype=torch.float)
    in1 = torch.randint(10, (1, 5), dtype=torch.int)
    with ncnn.Net() as net:
        with net.create_extractor() as ex:
            ex.input("in0", ncnn.Mat(in0{feed}).clone())
            ex.input("in1", ncnn.Mat(in1{feed}).clone())
"""
GRAPH = """7767517
3 2
pnnx.Input               in0                      0 1 0 #0=(1,3,8,9)f32
pnnx.Input               in1                      0 1 1 #1=(1,5)i32
"""


def net(folder: Path) -> None:
    """What pnnx writes for a convolution and an embedding, but for the files beside it."""
    write_net(
        folder,
        "Input in0 0 1 in0",
        "Input in1 0 1 in1",
        "Convolution c 1 1 in0 out0 0=2 1=1 6=6",
        "Embed e 1 1 in1 out1 0=4 1=10 3=40",
        weights=tagged(range(6)) + tagged(range(40)),
        stem="m.ncnn",
    )


@pytest.mark.parametrize("feed", [".numpy(), batch_index=0", ".squeeze(0).numpy()"])
def test_from_pnnx_s_program(tmp_path: Path, feed: str) -> None:
    net(tmp_path)
    (tmp_path / "m_ncnn.py").write_text(PROGRAM.format(feed=feed))
    ended = run_well(tmp_path, "optimize", "m.ncnn.param", "m.ncnn.bin", "-o", "out", "-v")
    assert "note: from m_ncnn.py: in0:3,8,9, in1:5" in ended.out
    assert [words[:2] for words in ended.lines("output")] == [["out0", "ok"], ["out1", "ok"]]


def test_given_shapes_precede_those_of_pnnx_s_graph(tmp_path: Path) -> None:
    net(tmp_path)
    (tmp_path / "m.pnnx.param").write_text(GRAPH)
    ended = run_well(tmp_path, "optimize", "m.ncnn.param", "-o", "out")
    assert "note: from m.pnnx.param: in0:3,8,9, in1:5" in ended.out
    ended = run_well(tmp_path, "optimize", "m.ncnn.param", "-o", "out", "--shape", "in0:1,3,4,5", "--shape", "in1:7")
    assert "note: in0:1,3,4,5 is a batch of one, in0:3,4,5" in ended.out
    assert "m.pnnx.param" not in ended.out


@pytest.mark.parametrize(
    "text", ["", "pnnx.Input in0 0 1 0 #0=(", "pnnx.Input nobody 0 1 0 #0=(1,3)f32", "\xff\x00" * 99]
)
def test_files_without_shapes(tmp_path: Path, text: str) -> None:
    net(tmp_path)
    (tmp_path / "m.pnnx.param").write_text(text)
    (tmp_path / "m_ncnn.py").mkdir()
    error = refused(tmp_path, "optimize", "m.ncnn.param", "-o", "out")
    assert "the shape of the input 'in0' and 'in1' is unknown" in error
    assert "--shape in0:3,224,224 --shape in1:16 " in error


def test_an_example_of_the_right_rank(tmp_path: Path) -> None:
    weights = tagged(range(30)) + tagged(range(8)) + tagged(range(12))
    write_net(tmp_path, "Input in0 0 1 in0", "GRU g 1 1 in0 out0 0=2 1=30", weights=weights)
    with pytest.raises(UsageError, match="give it, like --shape in0:16,5 "):
        apply_passes(tmp_path / "net.param", tmp_path / "net.bin").verify()


def test_shapes_that_the_net_does_not_take(tmp_path: Path) -> None:
    net(tmp_path)
    ended = run(tmp_path, "optimize", "m.ncnn.param", "-o", "out", "--shape", "in0:2,3,4,5", "--shape", "in1:7")
    assert (ended.code, "it takes 3-D blobs, not 4-D" in ended.err) == (2, True)
    five = ("--shape", "in0:1,1,3,4,5", "--shape", "in1:7")
    assert run(tmp_path, "optimize", "m.ncnn.param", "-o", "out", *five).code == 2


def test_a_layer_that_ncnn_lacks(tmp_path: Path) -> None:
    write_net(tmp_path, "Input in 0 1 x 0=4", "Mine m 1 1 x y", "Mine n 1 1 y z")
    ended = run_well(tmp_path, "optimize", "net.param", "-o", "out", "--no-verify")
    assert "note: ncnn has no layer type Mine (2 layers)" in ended.out


def test_an_example_from_the_manifest(tmp_path: Path) -> None:
    """A Reshape in between hides the rank; NET.json has it, and which axis is the batch."""
    text = "(float[1, n, 4] x) => (float[m] y) <int64[1] s = {-1}> { y = Reshape(x, s) }"
    files = lower(parsed(text, 17)).save(tmp_path / "net")
    with pytest.raises(UsageError, match=r"give it, like --shape x:(1,)?16,4 "):
        apply_passes(files.param, files.bin).verify()


def test_an_example_that_is_large_enough(tmp_path: Path) -> None:
    text = "(float[1, 2, n] x) => (float[1, 2, m] y) { y = MaxPool<kernel_shape = [40]>(x) }"
    files = lower(parsed(text, 17)).save(tmp_path / "net")
    with pytest.raises(UsageError, match=r"give it, like --shape x:2,40 "):
        apply_passes(files.param, files.bin).verify()
