"""The command that a failed conversion prints, tried as it is printed."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt import Net
from onnx2ncnn_opt.api import working_options
from onnx2ncnn_opt.cli.main import main
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing.command import Ended, without_progress
from testing.decoders import MODEL, model_of
from testing.models import write_model

FROZEN = "(float[N, 3, H, W] x) => (float[N, K] y) <int64[2] s = {1, 3072}> { a = Relu(x) y = Reshape(a, s) }"
FLAT = "(float[N, 3, H, W] x) => (float[N, K] y) <int64[2] s = {1, 9600}> { a = Relu(x) y = Reshape(a, s) }"
LENGTH = "(float[N, L] x) => (float[M, 23] y) <int64[2] s = {1, 23}> { a = Relu(x) y = Reshape(a, s) }"
RATE = (
    "(float[N, L] x, float[2, N, 4] state, int64 sr) => (float[N, M] y, float[2, N, 4] next) "
    "<int64 rate = {16000}, int64[2] s = {1, 128}> { c = Equal(sr, rate) next = Relu(state) "
    "y = If(c)<then_branch = a () => (float[1, 128] t) { t = Reshape(x, s) }, "
    "else_branch = b () => (float[1, 128] u) { d = Reshape(x, s) u = Elu(d) }> }"
)
EMPTY = (
    "(bool more, float[1, 4] x, float[1, N] past) => (float[1, 4] y, float[1, M] z) <int64[2] none = {1, 0}> {"
    "y, z = If(more)<then_branch = a () => (float[1, 4] t, float[1, 0] e) { t = Relu(x) "
    "e = ConstantOfShape(none) }, else_branch = b () => (float[1, 4] u, float[1, N] f) { u = Neg(x) f = Relu(past) }> }"
)
MIDDLE = "(float[1, 4, 4] x) => (float[1] y) { a = Relu(x) b = Det(a) y = Sigmoid(b) }"
TWO = (
    "(float[1, 3, 4, 4] x, float[2, 4, 1] v) => (float[1, 2, n] y) <int64[1] zero = {0}, float[1, 4, n] u> "
    "{ f = Relu(x) i = NonZero(f) c = Cast<to = 1>(i) u = Unsqueeze(c, zero) y = Conv(u, v) }"
)
BATCH = FROZEN.replace("{1, 3072}", "{2, 3072}")
TABLE = (
    f"(float[1, L] x) => (float[1, L] y) <float[1, 37] t = {{{', '.join(map(str, range(37)))}}}> "
    "{ a = Add(x, t) y = Relu(a) }"
)
TWO_LENGTHS = (
    "(float[1, S] x, float[1, T] y) => (float[1, 23] a, float[1, 17] b) <int64[2] s = {1, 23}, int64[2] t = {1, 17}> "
    "{ c = Relu(x) a = Reshape(c, s) d = Relu(y) b = Reshape(d, t) }"
)
PAIR = (
    "(float[N, A, B] x) => (float[N, 1, 1] y) <float[20, 3] t = {%s}, float[1, 20, 3] w = {%s}> "
    "{ a = Mul(x, t) y = Conv(a, w) }"
) % ((", ".join(map(str, range(60))),) * 2)
# NaN for all sizes but one.
UNPROVEN = (
    "(float[1, L] x) => (float[1, L] y) <int64[1] k = {37}> { s = Shape<start = 1>(x) d = Sub(s, k) "
    "f = Cast<to = 1>(d) q = Mul(f, f) n = Neg(q) r = Sqrt(n) y = Add(x, r) }"
)
NOISE = "(float[n, 4] x) => (float[n, 4] y) { a = Relu(x) r = RandomNormalLike(a) b = Mul(r, a) y = Sigmoid(b) }"
NO_ROWS = (
    "(float[1, 1, H, W] x) => (float[1, 6] y) <int64[1] zero = {0}, int64[1] two = {2}, int64[2] s = {1, 6}> "
    "{ a = Slice(x, zero, zero, two) y = Reshape(a, s) }"
)
# More different sides than sizes are tried for.
SIDES = (
    "(float[1, 3, A, B] a, float[1, 3, C, D] b, float[1, 3, E, F] c) => (float[1, 3] x, float[1, 3, C, D] y, "
    "float[1, 3, E, F] z) { x = Det(a) y = Relu(b) z = Relu(c) }"
)
# The ratio of the sizes is fixed only for multiples of 4.
POOLED = (
    "(float[1, 3, H, W] x) => (float y) { a = AveragePool<kernel_shape = [4, 4], strides = [4, 4]>(x) "
    's = Shape(x) y = Resize<mode = "nearest">(a, , , s) }'
)

# The number of channels depends on whether the height is even.
EVEN = (
    "(float[1, 1, H, W] x) => (float y) <int64[1] two = {2}, int64[1] one = {1}, float[1, 2, 1, 1] k = {3, 4}> {"
    " h = Shape<start = 2, end = 3>(x) a = Div(h, two) b = Mul(a, two) c = Equal(b, h) n = Where(c, two, one)"
    " size = Concat<axis = 0>(one, n, one, one) e = Expand(x, size) y = Conv(e, k) }"
)


def of_fixed_sizes(shape: str, kernel: str) -> str:
    """Return a model whose pads need fixed sizes."""
    strides, rank = ", ".join("2" for _ in kernel.split(",")[2:]), kernel.count(",") + 1
    return (
        f"(float[{shape}] x) => (float y) <float one = {{0.5}}, int64[{rank}] s = {{{kernel}}}> "
        f'{{ w = Expand(one, s) a = Relu(x) y = ConvTranspose<auto_pad = "SAME_UPPER", strides = [{strides}]>(a, w) }}'
    )


UNKNOWN = "(float[1, 4] x) => (float[1, 4] y) { a = Relu(x) b = made.up.Op(a) y = Sigmoid(b) }"
OWN = "(float[1, 4] x) => (float[1, 4] y) { a = Relu(x) y = made.up.Op(a) }"
# Together their names are longer than a line of an error.
MANY = [letter * 90 for letter in "ABCDEF"]
MANY_OWN = (
    f"(float[1, 4] x) => ({', '.join(f'float[1, 4] y{i}' for i in range(6))}) "
    f"{{ a = Relu(x) {' '.join(f'y{i} = made.up.{name}(a)' for i, name in enumerate(MANY))} }}"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Return a function that runs a command in `tmp_path`, with time for the search even on a busy machine."""
    monkeypatch.setattr(working_options, "_SECONDS", 600.0)
    monkeypatch.chdir(tmp_path)

    def command(*args: str) -> Ended:
        code, (out, err) = main(args), capsys.readouterr()
        return Ended(code, out, without_progress(err))

    return command


def proposed(ended: Ended) -> str:
    """Return the arguments of the command that ends the error, before those for a second net."""
    lines = [line for line in ended.err.splitlines() if not line.startswith("then: ")]
    return lines[-1].removeprefix("this works: onnx2ncnn-opt ")


@pytest.mark.parametrize(
    ("graph", "options", "code"),
    [
        (FROZEN, "--shape x:1,3,32,32", 2),
        (FLAT, "--shape x:1,3,32,100", 2),
        (LENGTH, "--shape x:1,23", 2),
        (BATCH, "--shape x:2,3,32,32", 2),
        (TABLE, "--shape x:1,37", 2),
        (TWO_LENGTHS, "--shape x:1,23 --shape y:1,17", 2),
        (PAIR, "--shape x:1,20,3", 2),
        (UNPROVEN, "--shape x:1,37", 2),
        (POOLED, "--shape 'x:1,3,4*h,4*w'", 1),
        (EVEN, "--shape 'x:1,1,2*h,2*w'", 1),
        (of_fixed_sizes("1, 3, H, W", "3, 2, 3, 3"), "--shape x:1,3,640,640", 1),
        (of_fixed_sizes("1, 16, H, W", "16, 2, 3, 3"), "--shape x:1,16,64,64", 1),
        (of_fixed_sizes("1, 1, D, H, W", "1, 1, 2, 2, 2"), "--shape x:1,1,64,64,64", 1),
        (of_fixed_sizes("N, 1, L", "1, 2, 3"), "--shape x:1,1,16000", 1),
        (of_fixed_sizes("N, 4, L", "4, 2, 3"), "--shape x:1,4,512", 1),
        (RATE, "--value sr=16000 --shape x:1,128 --shape state:2,1,4", 1),
        (EMPTY, "--value more=true --outputs y", 1),
        (MIDDLE, "--outputs a", 1),
        (NOISE, "--noise-inputs", 1),
        (TWO, "--outputs u", 1),
        (OWN, "--custom made.up::Op --no-verify", 1),
        (MANY_OWN, f"{' '.join(f'--custom made.up::{name}' for name in MANY)} --no-verify", 1),
        (UNKNOWN, "--outputs a", 1),
        (SIDES, "--outputs y,z", 1),
    ],
)
def test_a_failure_ends_with_a_command_that_works(
    graph: str, options: str, code: int, tmp_path: Path, run: Callable[..., Ended]
) -> None:
    write_model(tmp_path, graph)
    ended = run("convert", "model.onnx", "-o", "my net")
    assert ended.code == code
    command = proposed(ended)
    assert command == f"convert model.onnx -o 'my net' {options}"
    assert run(*shlex.split(command)).code == 0


# As in speech synthesis: durations say how long the sound is, and a mask hides letters.
SPEECH = """
(int64[1, T] ids, float[1, 1, T] mask, float[1] speed) => (float[1, 2, U] y, float[1, 1, T] durations)
<int64 zero = {0}, int64 unit = {1}, int64[2] around = {0, 2}, int64[1] time = {2}>
{
    e = Gather(letters, ids)
    et = Transpose<perm = [0, 2, 1]>(e)
    h = Conv<pads = [1, 1]>(et, encoder)
    hidden = Mul(h, mask)
    p = Conv(hidden, predictor)
    d0 = Sigmoid(p)
    d1 = Mul(d0, speed)
    d2 = Mul(d1, mask)
    durations = Ceil(d2)
    total = ReduceSum<keepdims = 0>(durations)
    length = Cast<to = 7>(total)
    r = Range(zero, length, unit)
    rf = Cast<to = 1>(r)
    u = Unsqueeze(rf, around)
    end = CumSum(durations, time)
    start = Sub(end, durations)
    early = Less(u, start)
    begun = Not(early)
    inside = Less(u, end)
    both = And(begun, inside)
    path = Cast<to = 1>(both)
    text = Transpose<perm = [0, 2, 1]>(hidden)
    z = MatMul(path, text)
    zt = Transpose<perm = [0, 2, 1]>(z)
    s = Conv<pads = [1, 1]>(zt, decoder)
    y = Mul(s, speed)
}
"""


def test_two_nets(tmp_path: Path, run: Callable[..., Ended]) -> None:
    """The printed commands make two nets that compute what the model computes."""
    shapes = {"letters": (20, 8), "encoder": (8, 8, 3), "predictor": (1, 8, 1), "decoder": (2, 8, 3)}
    random = np.random.default_rng(0)
    weights: dict[str, Any] = {name: np.float32(random.standard_normal(shape)) for name, shape in shapes.items()}
    model = write_model(tmp_path, SPEECH, **weights)
    ended = run("convert", "model.onnx")
    assert ended.code == 1
    assert proposed(ended) == "convert model.onnx --outputs path,text,durations"
    assert run(*shlex.split(proposed(ended))).code == 0
    cut, rest = (line.removeprefix("then: ") for line in ended.err.splitlines()[-2:])
    subprocess.run([sys.executable, *shlex.split(cut)[1:]], check=True)
    assert run(*shlex.split(rest)[1:]).code == 0
    mask, speed = (np.arange(9) < 7).astype(np.float32).reshape(1, 1, 9), np.full(1, 3, np.float32)
    feeds: dict[str, Any] = {"ids": random.integers(0, 20, (1, 9)), "mask": mask, "speed": speed}
    with Net("model", isolated=False) as first, Net("rest", isolated=False) as second:
        halves = first.run(feeds)
        y = second.run({"path": halves["path"], "text": halves["text"], "speed": speed})["y"]
    expected = OrtRunner(model).run(feeds)
    np.testing.assert_array_equal(halves["durations"], expected["durations"])
    np.testing.assert_allclose(y, expected["y"], rtol=1e-5, atol=1e-5)


# Boxes with swapped corners, at which ONNX Runtime's RoiAlign overflows, whatever the inputs are.
SWAPPED = (
    "(float[1, 4, 4, 4] x, float[2, 4, 3, 3] v) => (float[n, 2, 1, 1] y) <float[1, 4] box = {1, 9, 9, 1}> "
    "{ f = Relu(x) i = NonZero(f) s = Shape<start = 1>(i) k = ConstantOfShape<value = int64[1] {0}>(s) "
    "e = Concat<axis = 0>(s, four) b = Expand(box, e) r = RoiAlign<output_height = 3, output_width = 3>(f, b, k) "
    "y = Conv(r, v) }"
)


def test_a_first_net_that_fails_is_no_advice(tmp_path: Path, run: Callable[..., Ended]) -> None:
    write_model(tmp_path, SWAPPED.replace("> {", ", int64[1] four = {4}> {"))
    ended = run("convert", "model.onnx")
    assert "Conv 'y' depends on it and needs a net again\n" in ended.err
    assert "then: " not in ended.err
    assert run(*shlex.split(proposed(ended))).code == 0


def test_a_first_net_without_layers_is_no_advice(tmp_path: Path, run: Callable[..., Ended]) -> None:
    """All that comes before the convolution can only be a tail, and no net is before that."""
    graph = (
        "(float[20] x, float[1, 1, 3] v) => (float[1, 1, 2] y) <int64[1] zero = {0}, int64[1] one = {1}, "
        "int64[1] four = {4}, int64[3] image = {1, 1, 4}> { p = Slice(x, zero, one) i = Cast<to = 7>(p) "
        "e = Add(i, four) s = Slice(x, i, e) r = Reshape(s, image) y = Conv(r, v) }"
    )
    write_model(tmp_path, graph)
    said = run("convert", "model.onnx").err
    assert "Slice 's' can follow a net, but Conv 'y' depends on it and needs a net again" in said
    assert "then: " not in said
    assert run("convert", "model.onnx", "--outputs", "r").code == 1


STRIDE = (
    "(float[1, 3, H, W] x) => (float[1, 3, H, W] y) <float[0] roi = {}, float[4] scales = {1, 1, 32, 32}> "
    "{ a = MaxPool<kernel_shape = [32, 32], strides = [32, 32]>(x) b = Resize(a, roi, scales) y = Add(x, b) }"
)
FIXED = "(float[1, 3, 8, 8] x) => (float[1, 3, 8, 8] y) { y = Relu(x) }"


@pytest.mark.parametrize(
    ("graph", "wrong", "right"),
    [
        (STRIDE, ["--shape", "x:1,3,100,?"], ["--shape", "x:1,3,128,?"]),
        (FIXED, ["--shape=x:1,3,100,100"], []),
        (FIXED, ["--shape", "image:1,3,8,8"], []),
    ],
)
def test_a_wrong_shape_ends_with_one_that_works(
    graph: str, wrong: list[str], right: list[str], tmp_path: Path, run: Callable[..., Ended]
) -> None:
    write_model(tmp_path, graph)
    ended = run("convert", "model.onnx", *wrong, "-o", "net")
    assert ended.code == 2
    words = shlex.split(proposed(ended))
    assert words == ["convert", "model.onnx", "-o", "net", *right]
    assert run(*words).code == 0


def test_a_given_shape_is_not_given_twice(tmp_path: Path, run: Callable[..., Ended]) -> None:
    write_model(tmp_path, of_fixed_sizes("1, 3, H, W", "3, 2, 3, 3"))
    ended = run("convert", "model.onnx", "--shape", "x:1,3,?,64", "--effort", "quick")
    command = proposed(ended)
    assert command == "convert model.onnx --effort quick --shape x:1,3,640,64"
    assert run(*shlex.split(command)).code == 0


def test_a_decoder_of_single_tokens(tmp_path: Path, run: Callable[..., Ended]) -> None:
    """As exported from one step: its Reshapes have one token."""
    frozen = MODEL.replace("heads = {1, -1,", "heads = {1, 1,").replace("joined = {1, -1,", "joined = {1, 1,")
    onnx.save(model_of(frozen.replace("group = {1, -1,", "group = {1, 1,")), tmp_path / "model.onnx")
    ended = run("convert", "model.onnx")
    command = proposed(ended)
    assert (ended.code, command) == (
        2,
        "convert model.onnx --shape input_ids:1,1 --shape attention_mask:1,1+P --shape position_ids:1,1 "
        "--shape past_key:1,1,P,8 --shape past_value:1,1,P,8",
    )
    assert run(*shlex.split(command)).code == 0


def test_proposed_outputs_replace_the_given_ones(tmp_path: Path, run: Callable[..., Ended]) -> None:
    write_model(tmp_path, MIDDLE)
    ended = run("convert", "model.onnx", "--outputs", "b")
    command = proposed(ended)
    assert command == "convert model.onnx --outputs a"
    assert run(*shlex.split(command)).code == 0


def test_a_custom_operator_needs_no_verification(tmp_path: Path, run: Callable[..., Ended]) -> None:
    write_model(tmp_path, OWN)
    for options, code in ((["--custom", "made.up::Op"], 2), (["--no-verify"], 1)):
        ended = run("convert", "model.onnx", *options)
        assert (ended.code, proposed(ended)) == (code, "convert model.onnx --custom made.up::Op --no-verify")


@pytest.mark.parametrize(
    ("graph", "options", "said"),
    [
        ("(float[1, 8] x) => (float[1, 8] y) { y = Det(x) }", [], "Det"),
        (FIXED, ["--shape", "x:1,3,8,8", "--outputs", "z"], "no value called z"),
        (UNKNOWN, ["--custom", "made.up::Op"], "the model does not say which shape its output b has"),
        (NO_ROWS, [], "a tensor is empty, and ncnn has no empty tensors"),
    ],
)
def test_no_command_if_no_option_helps(
    graph: str, options: list[str], said: str, tmp_path: Path, run: Callable[..., Ended]
) -> None:
    write_model(tmp_path, graph)
    ended = run("convert", "model.onnx", *options)
    assert ended.code in (1, 2)
    assert said in ended.err
    assert "this works" not in ended.err


@pytest.mark.parametrize("last", ["y = Identity(a)", "b = Mul(a, a) y = Exp(b)"])
def test_classical_models_are_called_so(last: str, tmp_path: Path, run: Callable[..., Ended]) -> None:
    operators = f"a = ai.onnx.ml.Scaler<offset = [1.0], scale = [2.0]>(x) {last}"
    write_model(tmp_path, f"(float[N, 4] x) => (float[N, 4] y) {{ {operators} }}")
    told = "the model is classical machine learning (Scaler), which ncnn does not compute: run it in ONNX Runtime, or"
    assert told in run("convert", "model.onnx").err
