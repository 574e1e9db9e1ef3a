import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.param.files import read_net
from testing import present
from testing.command import (
    COMMAND,
    HERE,
    SMALL,
    install_plugin,
    names,
    net_files,
    refused,
    run,
    run_well,
    without_progress,
    write_sine,
)
from testing.models import serialized, write_model


def test_files_lie_beside_the_model_and_belong_together(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    model = write_model(tmp_path / "models", SMALL)
    run_well(tmp_path, "convert", "models/model.onnx")
    assert names(tmp_path) == {"models"}
    assert names(model.parent) == {"model.onnx"} | net_files("model")
    net = read_net(model.parent / "model.ncnn.param", model.parent / "model.ncnn.bin")
    assert [layer.type for layer in net.graph] == ["Input", "Convolution", "Sigmoid", "BinaryOp", "Softmax"]
    manifest = read_manifest(model.parent / "model.ncnn.json")
    assert [(t.name, t.blob, t.shape, t.batch_axis) for t in manifest.inputs] == [("x", "x", (1, 3, 8, 8), 0)]
    assert [t.name for t in manifest.outputs] == ["y", "z"]
    assert manifest.source.sha256 == hashlib.sha256(model.read_bytes()).hexdigest()
    assert manifest.passes == ("fuse_activation",)
    assert (manifest.layers.before, manifest.layers.after) == (8, 7)  # two Splits among them


def test_copies_of_shared_weights_are_noted(tmp_path: Path) -> None:
    """Layers of a model share a weight of 4 MB, as the steps of a loop do; 21 copies are 88 MB."""
    products = " ".join(f"x{step + 1} = MatMul(x{step}, w)" for step in range(21))
    write_model(
        tmp_path, f"(float[1, 1024] x0) => (float[1, 1024] x21) {{ {products} }}", w=np.eye(1024, dtype=np.float32)
    )
    ended = run(tmp_path, "convert", "model.onnx", "--no-verify")
    assert ended.code == 0
    assert "note: the net stores 22,020,096 numbers, the model 1,048,576: ncnn's layers cannot share" in ended.out


def test_sizes_that_are_left_out_come_first(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "(float[1, t, 4] x, float[1, n] z) => (float y, float w) <int64[1] one = {1}, int64[1] four = {4}> {"
        " n = Shape<start = 1, end = 2>(x) q = Div(n, four) k = Mul(q, four) rest = Slice(x, k, n, one)"
        " p = Mul(rest, rest) y = Concat<axis = 1>(x, p) w = Gather<axis = 1>(z, four) }",
    )
    _, *notes = run_well(tmp_path, "convert", "model.onnx").out.splitlines()
    assert notes[:2] == [
        "note: n must be 5 or more in this net; for smaller sizes, fix it with --shape",
        "note: t: this net may not take all sizes of the model",
    ]
    assert "note: not tried: t=44 n=45, which the model takes, and the net does not" in notes


def test_the_summary_is_plain_lines(small: Path) -> None:
    ended = run_well(small, "convert", "model.onnx", "-o", "net", "--effort", "thorough")
    assert names(small) == {"model.onnx"} | net_files("net")
    words = [line.split(":")[0] for line in ended.out.splitlines()]
    assert words == ["ok", "layers", "fp16 (estimated)", "wrote", "time", "next"]
    verdict = r"ok: net.ncnn.param agrees with model.onnx \(relative error \d\.\de-\d\d; (.*), fp16 estimated\)"
    assert present(re.fullmatch(verdict, ended.out.splitlines()[0]))[1] == HERE
    told = "layers: 8 -> 7 (1 rewrite, 2 near misses; -v lists them); ncnn 20240102 or newer runs them"
    assert ended.out.splitlines()[1] == told
    (written,) = ended.lines("wrote")
    assert written[::3] == ["net.ncnn.param", "net.ncnn.bin", "net.ncnn.json"]


def test_all_details(small: Path) -> None:
    ended = run_well(small, "convert", "model.onnx", "-v")
    assert ended.out.startswith("ok: ")
    assert ended.lines("model") == [["model.onnx", "(opset", "18,", "unknown)"]]
    assert ended.lines("layers")[0][:3] == ["8", "->", "7;"]
    assert ended.lines("pass") == [["fuse_activation", "1"]]
    outputs = ended.lines("output")[2:]  # after their shapes
    assert [words[:2] for words in outputs] == [["y", "ok"], ["z", "ok"]]
    for words in outputs:
        assert words[2:4] == ["rule", "rounding"]
        named = [words[4:6], words[7:9], words[10:11], words[12:14]]
        assert named == [["max", "error"], ["relative", "error"], ["allowed"], ["at", "seed"]]
        assert 0 <= float(words[6]) < 1e-5
        assert 0 <= float(words[9]) < float(words[11])


def test_verbose_lists_rewrites_and_near_misses(small: Path) -> None:
    ended = run(small, "convert", "model.onnx", "--no-verify", "-v")
    assert "input: x float32[1, 3, 8, 8] is blob x, without its batch axis 0" in ended.out
    assert "rewrite: fuse_activation: Convolution 'c' + ReLU 'r' => Convolution 'c'" in ended.out
    assert "near miss: fuse_swish: Sigmoid 's' + BinaryOp 'y': 's' is also used by Softmax 'z'" in ended.out


@pytest.mark.parametrize("option", [("--skip", "fuse_activation"), ("--no-optimize",)])
def test_passes_can_be_left_out(small: Path, option: tuple[str, ...]) -> None:
    ended = run_well(small, "convert", "model.onnx", *option)
    assert [word.rstrip(";") for word in ended.lines("layers")[0][:3]] == ["8", "->", "8"]
    assert "ReLU" in (small / "model.ncnn.param").read_text()


def test_a_folder_as_prefix(small: Path) -> None:
    assert run(small, "convert", "model.onnx", "--skip", "what", "--no-verify", "-o", "nets/").code == 2
    assert names(small) == {"model.onnx"}
    for prefix in ("nets/", "nets", "more/model"):
        assert run(small, "convert", "model.onnx", "--no-verify", "-o", prefix).code == 0
        assert names(small / prefix.split("/")[0]) == net_files("model")


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("missing/one/net", "there is no folder missing"),
        ("missing/one/", "there is no folder missing"),
        ("/proc/one/", "cannot make the folder /proc/one"),
        ("model.onnx/net", "there is no folder model.onnx"),
        ("net.param", "-o takes a prefix, not 'net.param'"),
        ("taken", "taken.ncnn.bin: it is a folder"),
        ("itself", "itself.ncnn.param: it is the model itself"),
        ("/proc/no", "cannot write /proc/no.ncnn.param"),  # where not even root can write
    ],
)
def test_paths_that_cannot_be_written(small: Path, prefix: str, message: str) -> None:
    (small / "taken.ncnn.bin").mkdir()
    (small / "itself.ncnn.param").symlink_to("model.onnx")
    assert message in refused(small, "convert", "model.onnx", "--no-verify", "-o", prefix)


def test_a_full_disk_leaves_nothing(small: Path) -> None:
    (small / "model.ncnn.param").write_text("what was here before")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}

    def run_full(words: str) -> subprocess.CompletedProcess[str]:
        shell = ["bash", "-c", f"ulimit -f 0; exec {shlex.join(COMMAND)} {words}"]  # no file may grow
        return subprocess.run(shell, cwd=small, env=environment, capture_output=True, text=True, timeout=60)

    done = run_full("convert model.onnx --no-verify")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: cannot write model.ncnn.param")
    assert done.stderr.endswith("File too large\n")
    assert names(small) == {"model.onnx", "model.ncnn.param"}
    assert (small / "model.ncnn.param").read_text() == "what was here before"
    done = run_full("report model.onnx -o page.html --json")  # needs temporary files
    assert (done.returncode, json.loads(done.stdout)["error"]["type"]) == (1, "FileNotFoundError")


UNSUPPORTED = (
    "(float[1, 3, 8, 8] x) => (float[1, 3, 8, 8] y, float[1, 3, 8, 8] z, float[1, 3, 8, 8] v)"
    "{ [odd] y = made.up.Odd(x) [dice] d = Bernoulli(x) r = Relu(d) z = Add(r, x) [fine] v = Neg(x) }"
)


def test_every_unsupported_node_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, UNSUPPORTED)
    ended = run(tmp_path, "convert", "model.onnx")
    assert (ended.code, ended.out, names(tmp_path)) == (1, "", {"model.onnx"})
    assert ended.err.splitlines() == [
        "Error: cannot express 2 nodes in ncnn:",
        "  made.up::Odd 'odd': ncnn has no equivalent of this operator, but --custom makes it a layer of your own "
        "(docs/plugins.md)",
        "  Bernoulli 'dice': ncnn has no equivalent of this operator",
        "convert the 1 of 5 nodes before them with --outputs v and do the rest outside ncnn",
        "this works: onnx2ncnn-opt convert model.onnx --outputs v",
    ]
    split = run(tmp_path, "convert", "model.onnx", "--split", "llm")  # which is not tried
    assert split.err.splitlines()[-1] == ended.err.splitlines()[-1]


WHOLE = serialized(SMALL)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 a checkpoint", "zip file"),
        (b"\x08\x08\x3a\xff\xff\xff\x7f", "truncated"),
        (bytes(range(256)) * 40, "not an ONNX model"),
        *((WHOLE[:length], "not an ONNX model, or truncated") for length in (len(WHOLE) // 3, len(WHOLE) - 1)),
    ],
)
def test_broken_models(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    error = refused(tmp_path, "convert", "model.onnx", code=1)
    assert error.startswith("Error: model.onnx: ")
    assert message in error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing.onnx"], "'missing.onnx' does not exist"),
        (["."], "'.' is a directory"),
        ([], "Missing argument 'MODEL...'"),
        (["model.onnx", "--nonsense"], "--nonsense"),
        (["model.onnx", "--skip", "fuse_convolution_relu"], "did you mean fuse_convolution_"),
        (["model.onnx", "--skip", "qqq"], "no pass called qqq; `onnx2ncnn-opt passes` lists them"),
        (["model.onnx", "--shape", "x"], "'x' is not of the form name:1,3,224,224"),
        (["model.onnx", "--shape", "x:1,,3"], "'x:1,,3' is not of the form"),
        (["model.onnx", "--shape", "x:1,-3"], "'x:1,-3' is not of the form"),
        (["model.onnx", "--shape", "x:1,3", "--shape", "x:1,4"], "two shapes for input 'x'"),
        (["model.onnx", "--shape", "w:1,3"], "no input is called 'w'; inputs are: x: float[1, 3, 8, 8]"),
        (["model.onnx", "--shape", "x:1,3,8,9"], "axis 3 is 8 in the model, not 9"),
        (["model.onnx", "--shape", "x:1,3"], "has 2 sizes, the model wants 4"),
        (["model.onnx", "--seed", "-1"], "--seed"),
        (["model.onnx", "--no-verify", "--keep-failed"], "which --no-verify skips"),
        (["model.onnx", "--no-verify", "--inputs", "model.onnx"], "which --no-verify skips"),
        (["model.onnx", "--inputs", "model.onnx"], "model.onnx: no inputs can be read from it"),
        (["model.onnx", "--inputs", "other.npz"], "given are q"),
    ],
)
def test_wrong_usage(small: Path, args: list[str], message: str) -> None:
    np.savez(small / "other.npz", q=np.zeros(3), r=np.zeros(3))
    assert message in refused(small, "convert", *args)


def test_shapes_bind_dynamic_dimensions(tmp_path: Path) -> None:
    model = write_model(tmp_path, "(float[n, c] a_0, float s) => (float[n, c] y) { y = Mul(a_0, s) }")
    model.write_bytes(model.read_bytes().replace(b"a_0", b"a:0"))  # TensorFlow's names have colons
    for options, shape in ((["--shape", "a:0:1,5", "--shape", "s:"], (1, 5)), ([], ("n", "c"))):
        ended = run(tmp_path, "convert", "model.onnx", *options)
        assert (ended.code, ended.err) == (0, "")
        assert read_manifest(tmp_path / "model.ncnn.json").outputs[0].shape == shape


NOTHING = "no files are written"


@pytest.mark.parametrize("keep", [False, True])
def test_a_failed_verification(tmp_path: Path, keep: bool) -> None:
    """Nothing is written, or the net on demand."""
    write_sine(tmp_path)
    (tmp_path / "model.ncnn.param").write_text("what was here before")
    ended = run(tmp_path, "convert", "model.onnx", "--inputs", "in.npz", *["--keep-failed"] * keep)
    assert ended.code == 3
    assert names(tmp_path) == {"model.onnx", "in.npz", *(net_files("model") if keep else ["model.ncnn.param"])}
    assert ((tmp_path / "model.ncnn.param").read_text() == "what was here before") != keep
    y, z = ended.lines("output")
    assert (y[0], y[1] in ("nan", "mismatch"), z[:2]) == ("y", True, ["z", "ok"])
    assert ended.out.startswith("wrong: model.ncnn.param differs from model.onnx (")
    assert len(ended.lines("wrote")) == keep
    error, command = ended.err.splitlines()
    assert error == f"Error: 1 of 2 outputs differ from ONNX Runtime's; {'the files are kept' if keep else NOTHING}"
    ended = run(tmp_path, *command.removeprefix("next: onnx2ncnn-opt ").split())
    assert (ended.code, "model.ncnn.param" in names(tmp_path)) == (3, True)
    assert ("first wrong layer: " in ended.out) == keep


def test_verification_uses_the_given_inputs_and_seed(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 50] x) => (float[1, 50] y) { s = Sigmoid(x) y = Mul(s, x) }")  # exact of 0
    np.savez(tmp_path / "zeros.npz", x=np.zeros((1, 50), np.float32))
    results = {}
    for options in (("--seed", "0"), (), ("--seed", "1"), ("--inputs", "zeros.npz")):
        results[options] = run(tmp_path, "convert", "model.onnx", "-v", *options).lines("output")[1]
    assert results["--seed", "0"] == results[()]
    assert len({tuple(words) for words in results.values()}) == 3
    assert results["--inputs", "zeros.npz"][6] == "0.00e+00"


def test_a_model_that_onnxruntime_refuses(tmp_path: Path) -> None:
    # Of 16 bit floats ncnn makes 32 bit ones; ONNX Runtime has no such kernel for the type.
    write_model(tmp_path, "(bfloat16[1, 8] x) => (bfloat16[1, 8] y) { y = HardSwish(x) }")
    error = refused(tmp_path, "convert", "model.onnx", code=2)
    assert "ONNX Runtime refuses model.onnx" in error
    assert "--no-verify" in error
    assert run(tmp_path, "convert", "model.onnx", "--no-verify").code == 0


def started(folder: Path, begun: str, *options: str, **environment: str) -> subprocess.Popen[str]:
    """A conversion that goes on, once a file is there whose name begins so."""
    write_model(folder, SMALL)
    process = subprocess.Popen(
        [*COMMAND, "convert", "model.onnx", *options],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(process, folder, begun)
    return process


def wait_for(process: subprocess.Popen[str], folder: Path, begun: str) -> None:
    while process.poll() is None and not any(name.startswith(begun) for name in names(folder)):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "code", "message"), [(signal.SIGINT, 130, "Error: interrupted\n"), (signal.SIGTERM, 143, "")]
)
def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, number: signal.Signals, code: int, message: str
) -> None:
    begun = tmp_path_factory.mktemp("begun")
    python = tmp_path / "python"  # which says nothing: the net is verified for a while, under other names
    python.write_text(f"#!/bin/sh\ntouch {shlex.quote(str(begun / 'it'))}\nexec sleep 100\n")
    python.chmod(0o755)
    process = started(tmp_path, ".model.ncnn.json", "--on", str(python))
    # Cython clears errors while numpy.random is imported, also an interrupt: wait until that is over.
    wait_for(process, begun, "it")
    assert len(names(tmp_path)) == 5
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    # Python ends by SIGINT itself where that came while a string was executed (a dataclass); a shell sees the same.
    seen = 128 - process.returncode if process.returncode < 0 else process.returncode
    assert (seen, without_progress(err)) == (code, message)
    assert names(tmp_path) == {"model.onnx", "python"}


PASS = """
import functools, itertools, os, signal
from onnx2ncnn_opt.rewrite.rule import graph_pass

class Told:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.{number})

class Freed:
    def __del__(self):
        os.kill(os.getpid(), signal.{number})

@graph_pass(exact=True)
def mine(graph):
    open("begun", "w").close()
    {body}
    yield
"""


def started_with_pass(folder: Path, body: str, number: str) -> subprocess.Popen[str]:
    """A conversion that comes to this pass."""
    site = install_plugin(folder, PASS.format(body=body, number=number), passes="mine")
    return started(folder, "begun", "--no-verify", **site)


def test_a_signal_ends_c_code_as_well(tmp_path: Path) -> None:
    # The sum is C code, which looks at no signal, and its first number makes a file.
    first = "map(functools.partial(os.open, 'summing'), [os.O_CREAT])"
    process = started_with_pass(tmp_path, f"sum(itertools.chain({first}, range(10**12)))", "SIGTERM")
    wait_for(process, tmp_path, "summing")
    process.send_signal(signal.SIGTERM)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()  # without the watchdog it goes on for hours
    assert (process.returncode, without_progress(err)) == (-signal.SIGKILL, "")
    assert names(tmp_path) == {"model.onnx", "begun", "summing", "site"}


@pytest.mark.parametrize("body", ["type('Made', (), {'x': Told()})", "Freed(); open('after', 'w').close()"])
@pytest.mark.parametrize(("number", "code", "message"), [("SIGINT", 130, "Error: interrupted\n"), ("SIGTERM", 143, "")])
def test_a_signal_where_python_wraps_or_drops_exceptions(
    tmp_path: Path, body: str, number: str, code: int, message: str
) -> None:
    process = started_with_pass(tmp_path, body, number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, without_progress(err)) == (code, message)
    assert names(tmp_path) == {"model.onnx", "begun", "site"}


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 8] x) => (float[1, 8] y) { [node] y = Det(x) }")
    path = tmp_path / "model.onnx"
    path.write_bytes(path.read_bytes().replace(b"node", b"\x1b[2J"))
    ended = run(tmp_path, "convert", "model.onnx")
    assert ended.code == 1
    assert "Det '\\x1b[2J'" in ended.err


def test_an_ascii_locale(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL, "mod\N{LATIN SMALL LETTER E WITH DIAERESIS}l.onnx")
    ended = run_well(tmp_path, "convert", "mod\N{LATIN SMALL LETTER E WITH DIAERESIS}l.onnx", PYTHONIOENCODING="ascii")
    assert "mod\\xebl.ncnn.param" in ended.out


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    name, graph = os.fsdecode(b"mod\xe8l"), "(float[1, 3, 8, 8] x) => (float[1, 64, 6, 6] y) { y = Conv(x, w) }"
    write_model(tmp_path, graph, f"{name}.onnx", w=np.ones((64, 3, 3, 3), np.float32))
    ended = run_well(tmp_path, "convert", f"{name}.onnx", "-o", f"{name}/{name}", "--report", f"{name}.html")
    assert ended.out.startswith("ok: mod\\udce8l/mod\\udce8l.ncnn.param agrees with mod\\udce8l.onnx ")
    run_well(tmp_path, "verify", f"{name}.onnx", *(f"{name}/{name}.ncnn.{kind}" for kind in ("param", "bin")))
    run_well(tmp_path, "example", f"{name}/{name}", "-o", f"{name}.cpp")
    assert b'load_param("mod\\350l/mod\\350l.ncnn.param")' in (tmp_path / f"{name}.cpp").read_bytes()
    assert b"<title>mod\\udce8l</title>" in (tmp_path / f"{name}.html").read_bytes()


def test_custom_operators(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 8] x) => (float[1, 8] y) { y = made.up.Op<beta = 2, alpha = 0.5>(x) }")
    error = refused(tmp_path, "convert", "model.onnx", "--custom", "made.up::Op=Mine")
    assert "--custom needs --no-verify: what custom operators compute is not known here" in error
    ended = run_well(tmp_path, "convert", "model.onnx", "--custom", "made.up::Op=Mine", "--no-verify")
    assert ended.lines("custom") == [["made.up::Op", "is", "Mine", "(0=alpha,", "1=beta)"]]
    assert "\nMine " in (tmp_path / "model.ncnn.param").read_text()


def test_an_input_is_bound_to_a_value(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "(float[1, 8] x, bool up, float[2] t) => (float[1, 8] y) {"
        " y = If(up) <"
        " then_branch = a () => (float[1, 8] p) { s = ReduceSum<keepdims = 0>(t) p = Sub(x, s) },"
        " else_branch = b () => (float[1, 8] q) { q = Neg(x) }> }",
    )
    assert "bind it with --value up=..." in refused(tmp_path, "convert", "model.onnx", code=1)
    ended = run_well(tmp_path, "convert", "model.onnx", "--value", "up=true", "--value", "t=0.5,1e-1")
    manifest = read_manifest(tmp_path / "model.ncnn.json")
    assert [entry.name for entry in manifest.inputs] == ["x"]
    assert {entry.name: entry.value for entry in manifest.values} == {"up": True, "t": (0.5, pytest.approx(0.1))}
    assert "bound: up = true" in ended.out
    assert run(tmp_path, "verify", "model.onnx", "model.ncnn.param", "model.ncnn.bin").code == 0
    for wrong in ("up", "up=", "=1", "up=yes", "up=1,,2"):
        assert run(tmp_path, "convert", "model.onnx", "--value", wrong).code == 2


@pytest.mark.parametrize("kind", list(Encoding)[2:4])
def test_16_bits(small: Path, kind: Encoding) -> None:
    ended = run_well(small, "convert", "model.onnx", f"--{kind.value}")
    assert ended.lines("storage") == [["1", "weights", "as", f"{kind.value},", "0", "stay", "as", "they", "are"]]
    graph = read_net(small / "model.ncnn.param", small / "model.ncnn.bin").graph
    (layer,) = (layer for layer in graph if layer.type == "Convolution")
    assert layer.weights.stored("weight_data").encoding is kind


def test_a_model_in_16_bits_gets_a_note(tmp_path: Path) -> None:
    graph = "(float16[1, 4, 8, 8] x) => (float16[1, 2, 8, 8] y) { y = Conv(x, w) }"
    write_model(tmp_path, graph, w=np.ones((2, 4, 1, 1), np.float16))
    (note,) = run_well(tmp_path, "convert", "model.onnx", "--no-verify").lines("note")
    assert " ".join(note).endswith("--fp16 keeps them: half the size")
    assert run_well(tmp_path, "convert", "model.onnx", "--no-verify", "--fp16").lines("note") == []


def test_a_weight_that_does_not_fit_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL.replace("0.5, -0.25", "70000, -0.25"))
    ended = run_well(tmp_path, "convert", "model.onnx", "--fp16")
    (line,) = ended.lines("not fp16")
    assert "70000 is beyond the largest number of fp16, 65504" in " ".join(line)


def test_old_releases_cannot_read_bf16(small: Path) -> None:
    assert "weights in bf16 need ncnn 20261020 or newer, not 20260526" in refused(
        small, "convert", "model.onnx", "--bf16", "--ncnn", "20260526"
    )


def test_a_net_of_16_bits_remains_one(tmp_path: Path) -> None:
    scaled = "(float[1, 4, 8, 8] x) => (float[1, 2, 8, 8] z) <float[2, 4, 1, 1] w = {1.5, 2, 3, 4, 5, 6, 7, 8}>"
    write_model(tmp_path, scaled + "{ y = Conv(x, w) t = Constant<value_float = 3.0>() z = Mul(y, t) }")
    assert run(tmp_path, "convert", "model.onnx", "--no-optimize", "--fp16").code == 0
    ended = run_well(tmp_path, "optimize", "model.ncnn.param", "model.ncnn.bin", "-o", "out")
    assert [" ".join(line) for line in ended.lines("storage")] == ["1 folded weights as fp16 again, 0 have 32 bits now"]
    assert ended.lines("weights") == []
    assert (tmp_path / "out.bin").stat().st_size == (tmp_path / "model.ncnn.bin").stat().st_size


def test_the_last_row_and_nets_that_are_no_language_models(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, n, 4] x) => (float[1, n, 4] y) { y = Relu(x) }")
    run_well(tmp_path, "convert", "model.onnx", "--last-row", "y")
    manifest = read_manifest(tmp_path / "model.ncnn.json")
    assert manifest.outputs[0].shape == (1, 1, 4)
    assert manifest.source.append == "last-row:y"
    run_well(tmp_path, "verify", "model.onnx", "model.ncnn.param", "model.ncnn.bin")
    said = refused(tmp_path, "convert", "model.onnx", "--last-row", "y", "--append", "nms:y")
    assert "give one of them" in said
    split = ("convert", "model.onnx", "--split", "llm")
    assert "--split llm: no attention layer keeps caches" in refused(tmp_path, *split)
    for name in ("out", "out.ncnn.bin"):  # the folder of the three nets is no folder for the whole net
        (tmp_path / name).mkdir()
    assert "cannot write out.ncnn.bin: it is a folder" in refused(tmp_path, *split, "-o", "out")


def test_torchvisions_mean_and_std_get_a_note(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 3, 4, 4] x) => (float[1, 3, 4, 4] y) { y = Relu(x) }")
    said = "note: x: a std below 1 is for pixels of 0..1; for pixels of 0..255, take "
    right = "mean=123.67,116.28,103.53:std=58.395,57.12,57.375"
    for option, is_noted in (("mean=0.485,0.456,0.406:std=0.229,0.224,0.225", True), (right, False)):
        ended = run(tmp_path, "convert", "model.onnx", "--image", f"x:{option}")
        assert (ended.code, f"{said}{right}\n" in ended.out, said in ended.out) == (0, is_noted, is_noted)
