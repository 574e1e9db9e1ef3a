"""`--split llm`: the three nets of ncnn_llm compute what the whole net does, from unset caches."""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt import Conversion, convert
from onnx2ncnn_opt.api.lower import Files
from onnx2ncnn_opt.api.split import split_llm
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.param.files import NetFiles, read_net, write_net
from onnx2ncnn_opt.param.text import parse_param
from onnx2ncnn_opt.runtime.base import Feed, Fetch, Step
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.verification.decode import Decoder
from testing.exports import ROOT, refilled, sampled
from testing.ncnn_llm import greedy, onnxruntime_scores, tables
from testing.pass_cases import fill_weights

WIDTH, HEADS, HALF, VOCABULARY, THETA = 32, 2, 8, 40, 10000.0
LAST = 50  # position

BLOCK = """
RMSNorm     norm{i}   1 1 x{i} a{i} 0=32 1=1e-6
Gemm        q{i}      1 1 a{i} q{i} 3=1 5=1 8=32 9=32
Gemm        k{i}      1 1 a{i} k{i} 3=1 5=1 8=32 9=32
Gemm        v{i}      1 1 a{i} v{i} 3=1 5=1 8=32 9=32
Reshape     qh{i}     1 1 q{i} qh{i} 0=16 1=2 2=-1
Reshape     kh{i}     1 1 k{i} kh{i} 0=16 1=2 2=-1
Reshape     vh{i}     1 1 v{i} vh{i} 0=16 1=2 2=-1
Permute     qp{i}     1 1 qh{i} qp{i} 0=2
Permute     kp{i}     1 1 kh{i} kp{i} 0=2
Permute     vp{i}     1 1 vh{i} vp{i} 0=2
RotaryEmbed qr{i}     3 1 qp{i} cos sin qr{i}
RotaryEmbed kr{i}     3 1 kp{i} cos sin kr{i}
SDPA        attn{i}   6 3 qr{i} kr{i} vp{i} mask pk{i} pv{i} o{i} nk{i} nv{i} 5=1 7=1
Permute     op{i}     1 1 o{i} op{i} 0=2
Reshape     oh{i}     1 1 op{i} oh{i} 0=32 1=-1
Gemm        out{i}    1 1 oh{i} y{i} 3=1 5=1 8=32 9=32
BinaryOp    add{i}    2 1 x{i} y{i} x{n}
"""
HEAD = """
RMSNorm norm 1 1 x2 h 0=32 1=1e-6
Gemm    head 1 1 h logits 3=1 5=1 8=40 9=32
"""
START = """
Input input_ids 0 1 input_ids
Input mask      0 1 mask
Input positions 0 1 positions
Input pk0       0 1 pk0
Input pv0       0 1 pv0
Input pk1       0 1 pk1
Input pv1       0 1 pv1
Embed      embed 1 1 input_ids x0 0=32 1=40 3=1280
MemoryData freq  0 1 freq 0=8 1=1
MatMul     angle 2 1 positions freq angles
UnaryOp    cos   1 1 angles cos 0=10
UnaryOp    sin   1 1 angles sin 0=9
"""


MORE = "Embed more 1 1 input_ids e 0=32 1=40 3=1280\nBinaryOp plus 2 1 e x0 x00\n"


def written(folder: Path, text: str, theta: float = THETA) -> NetFiles:
    lines = [line for line in text.splitlines() if line]
    tops = sum(int(line.split()[3]) for line in lines)
    graph = parse_param("\n".join(["7767517", f"{len(lines)} {tops}", *lines, ""])).graph
    fill_weights(graph)
    for layer in graph:
        if layer.name == "freq":
            layer.weights["data"] = (theta ** (-np.arange(HALF) / HALF)).astype(np.float32)
    files = NetFiles.at(folder / "whole.ncnn")
    write_net(graph, files.param, files.bin)
    return files


def whole() -> str:
    return START + BLOCK.format(i=0, n=1) + BLOCK.format(i=1, n=2) + HEAD


# Rows that see no key: attention's queries are 0 there, or its result is. The runner has none.
OPEN = "Reduction most 1 1 mask most 0=4 1=0 -23303=1,-1 4=1 5=1\nThreshold rows 1 1 most rows 0=-100\n"
WIDE = f"{OPEN}ExpandDims open 1 1 rows open -23303=1,0\n"
TABLES = f"{OPEN}BinaryOp gc 2 1 cos rows gc 0=2\nBinaryOp gs 2 1 sin rows gs 0=2\n"


def gated(layers: str, *pairs: tuple[str, str]) -> str:
    text = whole()
    for old, new in (("RMSNorm     norm0", f"{layers}RMSNorm norm0"), *pairs):
        assert old in text
        text = text.replace(old, new)
    return text


GATES = {
    "none": whole(),
    "queries": gated(WIDE, ("SDPA        attn0   6 3 qr0", "BinaryOp g0 2 1 qr0 open g0 0=2\nSDPA attn0 6 3 g0")),
    "tables": gated(TABLES, ("qp0 cos sin", "qp0 gc gs")),
    "results": gated(WIDE, ("Permute     op0     1 1 o0", "BinaryOp g0 2 1 o0 open g0 0=2\nPermute op0 1 1 g0")),
}


@pytest.mark.parametrize("gate", GATES)
def test_three_nets_are_the_whole(gate: str, tmp_path: Path) -> None:
    files = written(tmp_path, GATES[gate])
    paths = split_llm(files, tmp_path / "nets", steps)
    assert {path.name for path in paths} == {
        *(f"{name}.ncnn.{kind}" for name in ("embed", "decoder", "lm_head") for kind in ("param", "bin")),
        "model.json",
    }
    config = json.loads((tmp_path / "nets" / "model.json").read_text())
    assert config["setting"] == {
        "attn_cnt": 2,
        "hidden_size": WIDTH,
        "rope": {"type": "RoPE", "rope_head_dim": 2 * HALF, "rope_theta": THETA},
    }
    assert config["params"]["proj_out_bin"] == "lm_head.ncnn.bin"
    decoder = read_net(*(tmp_path / "nets" / config["params"][f"decoder_{kind}"] for kind in ("param", "bin"))).graph
    caches = [f"cache_{role}{i}" for i in (0, 1) for role in "kv"]
    assert {blob.name for blob in decoder.inputs} == {"in0", "in1", "in2", "in3", *caches}
    assert {blob.name for blob in decoder.outputs} == {"out0", *(f"out_{name}" for name in caches)}
    assert not any(layer.type in ("Embed", "UnaryOp", "MemoryData", "Threshold") for layer in decoder)
    length = 3
    ids = np.array([3, 1, 7], np.int32)
    mask = np.triu(np.full((length, length), -1e4, np.float32), 1)
    positions = np.arange(length, dtype=np.float32)[:, None]
    angles = positions * (THETA ** (-np.arange(HALF) / HALF)).astype(np.float32)
    with NcnnWorker() as worker:

        def run(param: Path, output: str, **feeds: np.ndarray) -> np.ndarray:
            runner = NcnnRunner(param, param.with_suffix(".bin"), worker=worker)
            return runner.run(feeds, [Fetch(output)])[output]

        expected = run(files.param, "logits", input_ids=ids, mask=mask, positions=positions)
        words = "embed_token", "decoder", "proj_out"
        nets = {word: tmp_path / "nets" / config["params"][f"{word}_param"] for word in words}
        x = run(nets["embed_token"], "out0", in0=ids)
        x = run(nets["decoder"], "out0", in0=x, in1=mask, in2=np.cos(angles), in3=np.sin(angles))
        found = run(nets["proj_out"], "out0", in0=x)
    assert found.shape == (length, VOCABULARY)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("5=1 7=1", "5=1", "SDPA 'attn0' keeps no caches"),
        ("RMSNorm     norm0   1 1 x0", f"{MORE}RMSNorm norm0 1 1 x00", "2 tables of embed"),
        ("add1    2 1 x1 y1", "add1    2 1 positions y1", "with out0, .* also needs positions"),
        ("vp1 mask", "vp1 positions", "the mask 'positions'"),
        (
            "attn1   6 3 qr1 kr1 vp1 mask pk1 pv1 o1 nk1 nv1 5=1",
            "attn1 5 3 qr1 kr1 vp1 pk1 pv1 o1 nk1 nv1",
            "without a mask",
        ),
        ("Gemm    head 1 1 h logits", "Gemm    head 2 1 h positions logits", "operands of Gemm 'head'"),
    ],
)
def test_other_nets_are_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    text = whole().replace(old, new)
    if "7=1" in old:
        text = "\n".join(" ".join(_without_cache(line.split())) for line in text.splitlines() if line)
    with pytest.raises(UsageError, match=said):
        split_llm(written(tmp_path, text), tmp_path / "nets", steps)


def _without_cache(words: list[str]) -> list[str]:
    return [*words[:2], "4", "1", *words[4:8], words[10], words[13]] if words[0] == "SDPA" else words


def steps(counts: Sequence[int] = (5, 1, 1), window: int = LAST + 1, chunk: int = LAST + 1) -> list[Step]:
    """Return steps of so many tokens, and the last two tokens without caches; the mask may hide early keys."""
    caches, found = [(f"p{role}{i}", f"n{role}{i}") for i in (0, 1) for role in "kv"], list[Step]()
    for past, count in zip((*accumulate(counts, initial=0), LAST - 1), (*counts, 0, 2), strict=True):
        ids = np.arange(past, past + count, dtype=np.int32)
        rows, keys = ids[:, None], np.arange(past + count)
        is_hidden = (keys > rows) | (keys <= rows - window) | (keys // chunk < rows // chunk)
        mask = np.where(is_hidden, np.float32(-1e4), np.float32(0))
        arrays = {"input_ids": ids % VOCABULARY, "mask": mask, "positions": ids.astype(np.float32)[:, None]}
        feeds = {name: Feed(array) for name, array in arrays.items()}
        if count:
            found.append(Step(feeds, caches, past, found[-1] if found else None))
    return [*found[:-1], Step(found[-1], (), LAST - 1)]


MATMUL, COS, SIN = "MatMul     angle 2 1 positions", "angles cos 0=10", "angles sin 0=9"
TIMES = "angles {0}0 {1}\nBinaryOp {0}1 1 1 {0}0 {0} 0=2 1=1 2={2}".format
LATE = "BinaryOp late 1 1 positions late 0=1 1=1 2=30.0\nReLU more 1 1 late more\nBinaryOp at 2 1 positions more at\n"
BIASED = {MATMUL: f"BinaryOp bias 1 1 mask biased 0=0 1=1 2=0.5\n{MATMUL}", "mask pk": "biased pk"}


def decoder_of(folder: Path) -> Graph:
    return read_net(folder / "nets" / "decoder.ncnn.param", folder / "nets" / "decoder.ncnn.bin").graph


def changed(changes: dict[str, str]) -> str:
    text = whole()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({COS: TIMES("cos", "0=10", 1.2)}, "the cosines 'cos'"),
        ({"cos sin qr": "sin cos qr", "cos sin kr": "sin cos kr"}, "the cosines 'sin'"),
        ({MATMUL: f"{LATE}MatMul angle 2 1 at"}, "the cosines 'cos'"),  # other frequencies after 30 positions
        (BIASED, "the mask 'biased'"),
    ],
)
def test_tables_and_masks_that_the_runner_does_not_make(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    """Every token is compared, before a file is written."""
    files = written(tmp_path, changed(changes))
    with pytest.raises(UsageError, match=said):
        split_llm(files, tmp_path / "nets", steps)
    assert not (tmp_path / "nets").exists()


def test_a_fixed_number_of_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="each step takes 2 tokens; leave their number dynamic"):
        split_llm(written(tmp_path, whole()), tmp_path / "nets", lambda: steps((2, 2)))


def test_the_decoder_scales_tables(tmp_path: Path) -> None:
    """YaRN multiplies cosines and sines."""
    scaled = {COS: TIMES("cos", "0=10", 1.5), SIN: TIMES("sin", "0=9", 1.5)}
    split_llm(written(tmp_path, changed(scaled)), tmp_path / "nets", steps)
    factors = [layer["b"] for layer in decoder_of(tmp_path) if layer.computes(BinaryOp.MUL, scalar=True)]
    assert factors == [1.5, 1.5]


def test_a_window_that_is_longer_than_the_prompt(tmp_path: Path) -> None:
    split_llm(written(tmp_path, whole()), tmp_path / "nets", lambda: steps(window=45))
    decoder = decoder_of(tmp_path)
    assert {layer.inputs[3].name for layer in decoder if layer.type == "SDPA"} == {"in1_last45"}


def test_chunks_of_attention_are_no_window(tmp_path: Path) -> None:
    """The last token but one sees all keys of its chunk, as with a window."""
    with pytest.raises(UsageError, match="the mask 'mask'"):
        split_llm(written(tmp_path, whole()), tmp_path / "nets", lambda: steps(chunk=LAST // 2))


@pytest.mark.parametrize(
    ("changes", "speed"),
    [
        ({MATMUL: "BinaryOp slow 1 1 positions slow 0=2 1=1 2=0.25\nMatMul angle 2 1 slow"}, 0.25),  # linear
        ({SIN: TIMES("sin", "0=9", -1.0)}, -1.0),
    ],
)
def test_scaled_frequencies_are_those_of_long_rope(changes: dict[str, str], speed: float, tmp_path: Path) -> None:
    split_llm(written(tmp_path, changed(changes)), tmp_path / "nets", steps)
    rope = json.loads((tmp_path / "nets" / "model.json").read_text())["setting"]["rope"]
    assert (rope["type"], rope["rope_head_dim"]) == ("LongRoPE", 2 * HALF)
    angles = np.arange(4000, 4003)[:, None] * THETA ** (-np.arange(HALF) / HALF) * speed
    for found, expected in zip(tables(rope, 4000, 3), (np.cos(angles), np.sin(angles)), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-3)


# Frequencies of Llama 3; two pairs of tables and a window in one of two layers; a window in all; half of each head.
CHOSEN = ("llama.optimum", "gemma3.dynamo", "mistral.optimum-sdpa", "phi.genai")
WHOLE = ("gemma2", "gpt2", "t5", "whisper")
DECODERS = {path.stem: path for path in sorted((ROOT / "fixtures" / "llm").glob("*.onnx"))}


def split(name: str, folder: Path) -> tuple[bytes, Conversion]:
    """Convert a decoder of fixtures/llm, and write its three nets into FOLDER/nets."""
    model = bytes(refilled(DECODERS[name]).SerializeToString())
    conversion = convert(model, folder / "net", verification=None)
    decoder = Decoder(conversion.model, conversion.manifest(), 0)
    split_llm(Files.of(folder / "net"), folder / "nets", decoder.all_steps)
    return model, conversion


@pytest.mark.parametrize(
    "path",
    sampled(
        [path for name, path in DECODERS.items() if not name.startswith(WHOLE)], [DECODERS[name] for name in CHOSEN]
    ),
)
def test_ncnn_llm_gives_the_tokens_of_onnxruntime(path: Path, tmp_path: Path) -> None:
    model, conversion = split(path.stem, tmp_path)
    prompt = np.random.default_rng(0).integers(3, 96, 12).tolist()
    expected = onnxruntime_scores(model, conversion.manifest(), prompt, 24)
    scores = greedy(tmp_path / "nets", prompt, 24)
    assert scores.argmax(1).tolist() == expected.argmax(1).tolist()
    np.testing.assert_allclose(scores, expected, atol=1e-4 * np.abs(expected).max())


def test_two_masks_and_two_pairs_of_tables(tmp_path: Path) -> None:
    """Gemma 3: the mask with a window is made of the runner's, and the runner's tables hold both pairs."""
    split("gemma3.optimum", tmp_path)
    decoder = decoder_of(tmp_path)
    assert {layer.inputs[3].name for layer in decoder if layer.type == "SDPA"} == {"in1_last8", "in1"}
    pairs = {tuple(blob.name for blob in layer.inputs[1:]) for layer in decoder if layer.type == "RotaryEmbed"}
    assert pairs == {("in2_0", "in3_0"), ("in2_1", "in3_1")}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma2.optimum", "no attention layer keeps caches; use the whole net"),
        ("gpt2.dynamo", "no rotary table tells ncnn_llm's positions; use the whole net"),
        ("whisper.optimum", "keeps no caches"),
    ],
)
def test_models_that_ncnn_llm_cannot_run(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        split(name, tmp_path)
