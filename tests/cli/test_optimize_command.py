from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.param.files import read_net
from testing.command import install_plugin, names, refused, run, run_well
from testing.handmade import raw, tagged, write_net

LINES = (
    "Input data 0 1 data 0=8 1=8 2=3",
    "Convolution c 1 1 data a 0=3 1=1 5=1 6=9",
    "BatchNorm n 1 1 a b 0=3",
    "Split s 1 2 b b_0 b_1",
    "ReLU r 1 1 b_0 x",
    "Sigmoid g 1 1 b_1 y",
)
OPTIMIZE = ("optimize", "in.param", "in.bin", "-o", "out")


def net(folder: Path, kernel: float = 1.0) -> None:
    rng = np.random.default_rng(0)
    norm = [rng.uniform(0.5, 1.5, 3) for _ in range(4)]
    weights = tagged(rng.standard_normal(9) * kernel) + raw(rng.standard_normal(3), *norm)
    write_net(folder, *LINES, weights=weights, stem="in")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    net(tmp_path)
    return tmp_path


def test_a_net_is_optimised_and_verified(folder: Path) -> None:
    ended = run_well(folder, *OPTIMIZE, "-v")
    assert names(folder) == {"in.param", "in.bin", "out.param", "out.bin"}
    assert ended.lines("pass") == [["fuse_affine", "1"]]
    fused = "rewrite: fuse_affine: Convolution 'c' + BatchNorm 'n' => Convolution 'c'"
    assert fused in ended.out.splitlines()
    assert ended.out.startswith("ok: out.param agrees with in.param (relative error ")
    assert ended.lines("layers") == [["6", "->", "5"]]
    assert ended.lines("memory")[0][:5] == ["1.5", "kB", "->", "1.5", "kB"]
    assert [words[:2] for words in ended.lines("output")] == [["x", "ok"], ["y", "ok"]]
    (written,) = ended.lines("wrote")
    assert written[::3] == ["out.param", "out.bin"]
    graph = read_net(folder / "out.param", folder / "out.bin").graph
    assert [layer.type for layer in graph] == ["Input", "Convolution", "ReLU", "Sigmoid"]
    again = run(folder, "optimize", "out.param", "out.bin", "-o", "again", "--no-verify")
    assert again.lines("pass") == []
    assert again.out.startswith("done: again.param, not verified\n")
    assert (folder / "again.param").read_bytes() == (folder / "out.param").read_bytes()
    assert (folder / "again.bin").read_bytes() == (folder / "out.bin").read_bytes()


def test_a_note_counts_layers_beyond_the_header(folder: Path) -> None:
    with (folder / "in.param").open("a") as file:
        file.write("Noop end 2 1 x y z\n")
    ended = run_well(folder, *OPTIMIZE, "-v")
    assert "note: layers after those that the header counts are left out: 1" in ended.out
    assert [words[:2] for words in ended.lines("output")] == [["x", "ok"], ["y", "ok"]]


def test_shapes_that_a_net_does_not_take_verify_nothing(tmp_path: Path) -> None:
    lines = ("Input data 0 1 data", "ReLU r 1 1 data a", "InnerProduct p 1 1 a out 0=2 2=24")
    write_net(tmp_path, *lines, weights=tagged(np.ones(24)), stem="in")
    told = "InnerProduct 'p' on 'a' (16): the inputs of the weights and the elements of the blob must be equal"
    error = refused(tmp_path, *OPTIMIZE, "--shape", "data:16")
    assert f"the net cannot be verified at these shapes, which it does not take: {told}" in error
    assert run(tmp_path, *OPTIMIZE, "--shape", "data:12").code == 0


def test_caches_of_attention_stay_unset_and_are_not_compared(tmp_path: Path) -> None:
    lines = (
        "Input in 0 4 q k v mask",
        "Input cache 0 2 past_k past_v",
        "ReLU r 1 1 q a",
        "Noop t 1 1 a b",
        "SDPA s 6 3 b k v mask past_k past_v y next_k next_v 5=1 7=1",
    )
    write_net(tmp_path, *lines, stem="in")
    shapes = [word for shape in ("q:4,3,8", "k:2,3,8", "v:2,3,8", "mask:3,3") for word in ("--shape", shape)]
    ended = run_well(tmp_path, *OPTIMIZE, *shapes, "-v")
    assert [words[:2] for words in ended.lines("output")] == [["y", "ok"]]
    assert "note: caches are not compared, as only ncnn can read them: next_k, next_v" in ended.out
    graph = read_net(tmp_path / "out.param", tmp_path / "out.bin").graph
    assert [layer.type for layer in graph] == ["Input", "Input", "ReLU", "SDPA"]


def test_binary_and_back(folder: Path) -> None:
    ended = run_well(folder, "optimize", "in.param", "in.bin", "-o", "mid", "--binary")
    assert {"mid.param.bin", "mid.bin"} < names(folder)
    indexes = {words[0]: words[2] for words in ended.lines("blob")}
    assert set(indexes) == {"data", "x", "y"}
    ended = run(folder, "optimize", "mid.param.bin", "mid.bin", "-o", "same")
    assert (ended.code, ended.lines("blob")) == (0, [])
    assert (folder / "same.param.bin").read_bytes() == (folder / "mid.param.bin").read_bytes()
    ended = run_well(folder, "optimize", "mid.param.bin", "mid.bin", "-o", "text", "--text")
    graph = read_net(folder / "text.param", folder / "text.bin").graph
    assert {blob.name for blob in (*graph.inputs, *graph.outputs)} == set(indexes.values())


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_weights_in_16_bits(folder: Path, kind: str) -> None:
    ended = run_well(folder, *OPTIMIZE, f"--{kind}", "-v")
    assert ended.lines("storage") == [["1", "weights", "as", f"{kind},", "0", "stay", "as", "they", "are"]]
    assert len(ended.lines("output")) == len(ended.lines("output in fp32")) == 2
    assert (folder / "out.bin").stat().st_size == 4 + 20 + 12


def test_a_weight_that_overflows_is_named(tmp_path: Path) -> None:
    net(tmp_path, kernel=1e6)
    ended = run_well(tmp_path, *OPTIMIZE, "--fp16")
    (line,) = ended.lines("not fp16")
    assert "Convolution 'c', weight_data:" in " ".join(line)
    assert "beyond the largest number of fp16" in " ".join(line)


def test_a_cut(folder: Path) -> None:
    run_well(folder, *OPTIMIZE, "--start", "a", "--end", "y", "--shape-hints")
    graph = read_net(folder / "out.param", folder / "out.bin").graph
    assert [blob.name for blob in (*graph.inputs, *graph.outputs)] == ["a", "y"]
    assert all("-23330=4,3,8,8,3" in line for line in (folder / "out.param").read_text().splitlines()[2:])


def test_passes_are_chosen(folder: Path) -> None:
    bn = "fuse_affine"
    for options, rewrites in (
        (("--only", bn), 1),
        (("--skip", bn), 0),
        (("--limit", "0"), 0),
        (("--only", "fuse_mish"), 0),
    ):
        ended = run(folder, *OPTIMIZE, "--no-verify", "-v", *options)
        assert ended.code == 0
        assert len([line for line in ended.lines("rewrite") if line[0] == "fuse_affine:"]) == rewrites


def test_near_misses_have_reasons(tmp_path: Path) -> None:
    lines = (*LINES[:2], "ReLU r 1 1 a b", "BatchNorm n 1 1 b c 0=3")
    rng = np.random.default_rng(0)
    weights = tagged(rng.standard_normal(9)) + raw(rng.standard_normal(3), *np.ones((4, 3)))
    write_net(tmp_path, *lines, weights=weights, stem="in")
    ended = run_well(tmp_path, *OPTIMIZE, "-v")
    assert any("BatchNorm 'n'" in " ".join(words) for words in ended.lines("near miss"))


def test_a_net_that_ncnn_refuses(tmp_path: Path) -> None:
    write_net(tmp_path, "Input data 0 1 data 0=4", "Mine m 1 1 data out", stem="in")
    error = refused(tmp_path, *OPTIMIZE, code=3)
    assert "cannot run the original net" in error
    assert "--no-verify" in error
    assert run(tmp_path, *OPTIMIZE, "--no-verify").code == 0
    assert "Mine" in (tmp_path / "out.param").read_text()


def test_a_pass_that_is_wrong_leaves_nothing(folder: Path) -> None:
    site = install_plugin(folder, WRONG_PASS, passes="drop_sigmoid")
    (folder / "out.param").write_text("what was here before")
    ended = run(folder, *OPTIMIZE, **site)
    assert ended.code == 3
    assert ended.err == "Error: 1 of 2 outputs differ from the original net's; no files are written\n"
    assert [words[1] for words in ended.lines("output")] == ["ok", "mismatch"]
    assert names(folder) == {"in.param", "in.bin", "out.param", "site"}
    assert (folder / "out.param").read_text() == "what was here before"
    assert run(folder, *OPTIMIZE, "--skip", "drop_sigmoid", **site).code == 0


WRONG_PASS = """
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import rewrite


@rewrite(op("Sigmoid", "sigmoid"), exact=True)
def drop_sigmoid(sigmoid):
    \"\"\"A hard one instead, which is something else.\"\"\"
    return sigmoid.having(type="HardSigmoid")
"""


OUT = OPTIMIZE[1:]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["in.param"], 2, "Missing option '-o'"),
        (["open.param", "-o", "out"], 2, "open.param has no open.bin beside it"),
        (["in.param", "in.bin"], 2, "Missing option '-o'"),
        (["missing.param", "in.bin", "-o", "out"], 2, "'missing.param' does not exist"),
        (["in.param", "in.bin", "-o", "out.param"], 2, "-o takes a prefix, not 'out.param'"),
        (["in.param", "in.bin", "-o", "in"], 2, "it is the input itself"),
        (["in.param", "in.bin", "-o", "no/one/out"], 2, "there is no folder no"),
        ([*OUT, "--shape", "x:1"], 2, "no input is called 'x'; inputs are: data"),
        ([*OUT, "--shape", "data:2,2,3,4,5"], 2, "a blob has 1 to 4 sizes above 0"),
        ([*OUT, "--only", "fuse_nothing"], 2, "no pass called fuse_nothing"),
        ([*OUT, "--skip", "eliminate_nop"], 2, "did you mean eliminate_noop?"),
        ([*OUT, "--start", "q"], 2, "--start q: the net has no blob of that name"),
        ([*OUT, "--custom", "Mine"], 2, "does not declare a custom layer"),
        ([*OUT, "--custom", "ReLU:4"], 1, "ReLU cannot be declared as a custom layer"),
        (["in.bin", "in.param", "-o", "out"], 1, "in.bin:1: "),
        (["in.param", "in.param", "-o", "out"], 1, "in.param: at byte"),
        (["open.param", "in.bin", "-o", "out"], 2, "the shape of the input 'data' is unknown"),
    ],
)
def test_wrong_usage(folder: Path, args: list[str], code: int, message: str) -> None:
    (folder / "open.param").write_text((folder / "in.param").read_text().replace("data 0=8 1=8 2=3", "data"))
    assert message in refused(folder, "optimize", *args, code=code)
