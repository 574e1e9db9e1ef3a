import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from testing.command import SMALL, names, refused, run, run_well
from testing.handmade import write_net
from testing.models import write_model

# y = relu(x), z = -x, and nets that other converters could have made of it.
BOTH = "(float[1, 3, 4, 5] x) => (float[1, 3, 4, 5] y, float[1, 3, 4, 5] z) { y = Relu(x) z = Neg(x) }"
RIGHT = ("Input in 0 1 x", "Split s 1 2 x a b", "ReLU r 1 1 a y", "UnaryOp n 1 1 b z 0=1")
PNNX = ("Input in 0 1 in0", "Split s 1 2 in0 a b", "ReLU r 1 1 a out0", "UnaryOp n 1 1 b out1 0=1")
WRONG = ("Input in 0 1 x", "Split s 1 2 x a b", "ReLU r 1 1 a y 0=0.5", "UnaryOp n 1 1 b z 0=1")
VERIFY = ("verify", "model.onnx", "net.param", "net.bin")
UNKNOWN = ("Input in 0 1 x", "Nonsense n 1 1 x y")


@pytest.mark.parametrize("lines", [RIGHT, PNNX])
def test_right_nets(tmp_path: Path, lines: tuple[str, ...]) -> None:
    write_model(tmp_path, BOTH)
    write_net(tmp_path, *lines)
    ended = run_well(tmp_path, *VERIFY)
    assert [words[:2] for words in ended.lines("output")] == [["y", "ok"], ["z", "ok"]]


@pytest.mark.parametrize(
    ("lines", "y", "z", "message", "verdict"),
    [
        (WRONG, "mismatch", "ok", "off by up to", "differs from"),
        (UNKNOWN, "refused", "refused", "layer Nonsense not exists", "does not run, unlike"),
    ],
)
def test_wrong_nets(tmp_path: Path, lines: tuple[str, ...], y: str, z: str, message: str, verdict: str) -> None:
    write_model(tmp_path, BOTH)
    write_net(tmp_path, *lines)
    ended = run(tmp_path, *VERIFY)
    assert ended.code == 3
    assert [words[:2] for words in ended.lines("output")] == [["y", y], ["z", z]]
    assert message in ended.out
    assert ended.out.startswith(f"wrong: net.param {verdict} model.onnx (")
    end = "differ from ONNX Runtime's" if verdict == "differs from" else "are missing"
    told = f"Error: {2 - (y, z).count('ok')} of 2 outputs {end}\nnext: onnx2ncnn-opt bisect"
    assert ended.err == f"{told} model.onnx net.param net.bin\n"
    assert run(tmp_path, "bisect", *VERIFY[1:]).code == 3
    assert names(tmp_path) == {"model.onnx", "net.param", "net.bin"}


def test_the_tolerance_of_the_user(tmp_path: Path) -> None:
    write_model(tmp_path, BOTH)
    write_net(tmp_path, "Input in 0 1 x", "Split s 1 2 x a b", "ReLU r 1 1 a y 0=0.01", "UnaryOp n 1 1 b z 0=1")
    assert run(tmp_path, *VERIFY).code == 3
    assert run(tmp_path, *VERIFY, "--rtol", "0.05", "--seeds", "1").code == 0
    lax = run(tmp_path, *VERIFY, "--atol", "1")
    assert (lax.code, "rule limit" in lax.out) == (0, True)
    assert run(tmp_path, *VERIFY, "--rtol", "0.001", "--atol", "0").code == 3
    write_net(tmp_path, *RIGHT)
    assert run(tmp_path, *VERIFY, "--modes", "bf16", "--rtol", "0.02").code == 0
    strict = run(tmp_path, *VERIFY, "--modes", "bf16", "--rtol", "1e-5", "--atol", "1e-6")
    assert (strict.code, [words[2] for words in strict.lines("output")]) == (3, ["mismatch", "mismatch"])
    for wrong in ("nan", "-1", "inf", "x"):
        assert run(tmp_path, *VERIFY, "--rtol", wrong).code == 2


def test_the_next_command_has_the_options_that_both_have(tmp_path: Path) -> None:
    write_model(tmp_path, BOTH)
    write_net(tmp_path, *WRONG)
    ended = run(tmp_path, *VERIFY, "--rtol=1e-4", "--seed", "3", "--effort", "quick", "--report", "page.html")
    command = ended.err.splitlines()[-1].removeprefix("next: onnx2ncnn-opt ")
    assert command == "bisect model.onnx net.param net.bin --seed 3"
    assert run(tmp_path, *command.split()).code == 3


def test_inputs_and_shapes(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[n, c] x) => (float[n, c] y) { y = Relu(x) }")
    write_net(tmp_path, "Input in 0 1 x", "Clip r 1 1 x y 0=0 1=2")  # right up to 2
    for upper, code in ((1, 0), (3, 3)):
        np.savez(tmp_path / "in.npz", x=np.linspace(-1, upper, 7, dtype=np.float32)[None])
        assert run(tmp_path, *VERIFY, "--inputs", "in.npz").code == code
    ended = run(tmp_path, *VERIFY, "--shape", "x:1,2,3")
    assert ended.code == 2
    assert "has 3 sizes, the model wants 2" in ended.err


def test_no_other_sizes_than_those_of_given_inputs(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, n] x) => (float[1, n] y) { y = Relu(x) }")
    np.savez(tmp_path / "in.npz", x=np.ones((1, 7), np.float32))
    for args in (("convert",), ("verify", "model.ncnn.param")):  # its weights are next to it
        ended = run(tmp_path, args[0], "model.onnx", *args[1:], "--inputs", "in.npz")
        assert "\nverified with: x [1, 7]\n" in ended.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("model.onnx", "net.param", "gone.bin"), "'gone.bin' does not exist"),
        (("model.onnx", "other.param"), "'other.bin' is not next to 'other.param'"),
        (("model.onnx", "net.param", "net.bin", "--manifest", "model.onnx"), "model.onnx: not a manifest"),
        (("model.onnx", "net.param", "net.bin", "--manifest", "other.json"), "the manifest belongs to another model"),
    ],
)
def test_wrong_usage(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    write_model(tmp_path, BOTH)
    write_net(tmp_path, *RIGHT)
    write_model(tmp_path, SMALL.replace("] x)", "] input)").replace("Conv(x", "Conv(input"), "other.onnx")
    assert run(tmp_path, "convert", "other.onnx", "--no-verify").code == 0
    (tmp_path / "other.ncnn.json").rename(tmp_path / "other.json")
    (tmp_path / "other.ncnn.param").rename(tmp_path / "other.param")
    assert message in refused(tmp_path, "verify", *args)


def test_a_broken_model_is_not_a_failed_verification(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nonsense")
    write_net(tmp_path, *RIGHT)
    error = refused(tmp_path, *VERIFY, code=1)
    assert error.startswith("Error: model.onnx: not an ONNX model")


CONVERTED = ("model.onnx", "model.ncnn.param", "model.ncnn.bin")


def test_a_net_up_to_inner_values(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 4] x) => (float[1, 4] y) { a = Abs(x) b = Sqrt(a) y = Neg(b) }")
    run_well(tmp_path, "convert", "model.onnx", "--outputs", "b,a", "--no-verify")
    ended = run_well(tmp_path, "verify", *CONVERTED)
    assert [words[:2] for words in ended.lines("output")] == [["b", "ok"], ["a", "ok"]]
    run_well(tmp_path, "mixed", *CONVERTED, "-o", "net")


def test_the_manifest_beside_the_net_is_used(folder: Path) -> None:
    path = folder / "model.ncnn.json"
    ended = run_well(folder, "verify", *CONVERTED)
    assert "note:" not in ended.out
    # It is believed: with another batch axis the shapes do not fit any more.
    manifest = json.loads(path.read_text())
    assert manifest["outputs"][0]["batch_axis"] == 0
    manifest["outputs"][0]["batch_axis"] = None
    path.write_text(json.dumps(manifest))
    y, z = run(folder, "verify", *CONVERTED).lines("output")
    assert (y[:2], z[:2]) == (["y", "shape"], ["z", "ok"])
    path.rename(folder / "moved.json")
    assert run(folder, "verify", *CONVERTED).code == 0
    assert run(folder, "verify", *CONVERTED, "--manifest", "moved.json").code == 3


@pytest.mark.parametrize("case", ["model", "net", "broken"])
def test_a_stale_manifest_is_not_trusted(folder: Path, case: str) -> None:
    manifest = folder / "model.ncnn.json"
    if case == "model":  # exported once more
        write_model(folder, SMALL.replace("r = Relu(c)", "r0 = Relu(c) r = Identity(r0)"))
        reason = "model.ncnn.json is not used: it was written for another model"
    elif case == "net":  # converted once more, by pnnx
        net = folder / "model.ncnn.param"
        net.write_text(re.sub(r"\bx\b", "in0", re.sub(r"\bz\b", "out1", re.sub(r"\by\b", "out0", net.read_text()))))
        reason = "model.ncnn.json is not used: model.ncnn.param has no blob 'x'"
    else:
        manifest.write_text("{")
        reason = "not used: model.ncnn.json: not a manifest"
    ended = run_well(folder, "verify", *CONVERTED)
    assert ended.out.splitlines()[1].startswith(f"note: {reason}")
    assert [words[:2] for words in ended.lines("output")] == [["y", "ok"], ["z", "ok"]]


def test_how_inputs_are_drawn(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 3, H, 4] x) => (float[1, 3, H, 4] y) { y = Relu(x) }")
    write_net(tmp_path, "Input in 0 1 x", "ReLU r 1 1 x y")
    options = ("--seeds", "2", "--range", "-1,1", "--sizes", "H=5", "--sizes", "H=9", "--json")
    drawn = run(tmp_path, *VERIFY, *options)
    assert (drawn.code, json.loads(drawn.out)["sizes"]) == (0, [{"H": 5}, {"H": 9}])
    Image.new("RGB", (4, 6), (10, 20, 30)).save(tmp_path / "photo.png")
    assert run(tmp_path, *VERIFY, "--inputs", "photo.png:mean=15:std=2:bgr").code == 0
    for wrong in (("--sizes", "W=5"), ("--sizes", "H"), ("--range", "1,0"), ("--inputs", "photo.png:mean=a")):
        assert run(tmp_path, *VERIFY, *wrong).code == 2
    assert run(tmp_path, *VERIFY, "--seeds", "2", "--inputs", "photo.png").code == 2
