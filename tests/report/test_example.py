"""Programs that `example` prints: the Python one runs and is right; the C++ one is held against ncnn's interface."""

import runpy
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt import Net
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.manifest import Manifest, read_manifest
from onnx2ncnn_opt.report.embed import embed
from onnx2ncnn_opt.report.example import example
from testing import present
from testing.decoders import decoder
from testing.models import parsed
from testing.programs import WARNINGS, output_of
from testing.tails import COMPILER

Compiles = Callable[[Path], None]
MODELS = {
    "types": """(int64[N, 5] i, float[N, 5] x, bool[N, 5] m, float s)
        => (float[N, 5] y, int64[N, 5] j, int64[N] k, bool[N, 5] b, float t, int64[N, 5] same) <int64 one = {1}>
        { f = Cast<to = 1>(i) fx = Mul(f, x) y = Where(m, fx, x) j = Add(i, one)
          k = ArgMax<axis = 1, keepdims = 0>(x) b = Not(m) r = ReduceSum<keepdims = 0>(x) t = Add(r, s)
          same = Identity(i) }""",
    "image": """(float[1, 3, 20, 30] image, float[1, 1, 8, 9] gray) => (float[1, 3, 1, 1] y, float[1, 1, 8, 9] z)
        { y = GlobalAveragePool(image) z = Relu(gray) p = MaxPool<kernel_shape = [2, 2]>(gray) }""",
    "batch": """(float[4, 3, 7, 9] x, float[N, 2, H, W] v) => (float[4, 3, 1, 1] y, float[N, 2, 1, 1] z)
        { y = GlobalAveragePool(x) z = GlobalAveragePool(v) }""",
    "numbers": """(float[N, 2, 7, 9] x, float[N] t) => (float[N, 2, 1, 1] y) <int64[4] shape = {-1, 1, 1, 1}>
        { r = Reshape(t, shape) s = Mul(x, r) y = GlobalAveragePool(s) }""",
    "windows": """(float[1, 2, H, W] x, float[N, 5, 2] v, float[L, 5] l) => (float y, float z, float w)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] end = {9999}>
        { y = MaxPool<kernel_shape = [3, 25]>(x) z = Slice(v, one, end, zero)
          two = Constant<value_ints = [2]>() s = ReduceSum<keepdims = 0>(v, two) c = Concat<axis = 0>(l, s)
          t = Transpose(c) u = Unsqueeze(t, zero) w = MaxPool<kernel_shape = [4], strides = [2]>(u) }""",
    "dims": """(float[2, 4, 5, 6] v, int64[3, 2, 5] k, float[7] l)
        => (float[2, 4, 5, 6] c, int64[3, 2, 5] d, float[7] n)
        { c = Neg(v) d = Add(k, k) n = Exp(l) }""",
}


def saved(folder: Path, name: str) -> tuple[Manifest, Path, Path]:
    files = lower(parsed(MODELS[name])).save(folder / "net")
    return read_manifest(files.manifest), files.param, files.bin


def python_program(folder: Path, *net: Any, **options: Any) -> Path:
    program = folder / "program.py"
    program.write_text(example(*net, language="python", **options))
    return program


def drawn(manifest: Manifest) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for entry in manifest.inputs:
        shape = [size if isinstance(size, int) else {"N": 3}.get(str(size), 6) for size in entry.shape]
        feeds[entry.name] = (rng.standard_normal(shape) * 3).astype(entry.dtype)
    return feeds


@pytest.mark.parametrize("name", ["types", "image", "batch", "numbers", "dims"])
def test_the_python_program_agrees_with_a_verified_run(tmp_path: Path, name: str) -> None:
    manifest, param, bin = saved(tmp_path, name)
    program = python_program(tmp_path, manifest, param, bin)
    feeds = drawn(manifest)
    parts = runpy.run_path(str(program))
    results = parts["run"](parts["load"](), feeds)
    with Net(tmp_path / "net") as net:
        reference = net.run(feeds)
    assert list(results) == list(reference)
    for output, array in reference.items():
        assert results[output].dtype == array.dtype
        np.testing.assert_array_equal(results[output], array, output, strict=True)
    assert [line.split()[0] for line in output_of(program).splitlines()] == [entry.name for entry in manifest.outputs]


def test_the_loops_of_a_decoder(tmp_path: Path) -> None:
    """The Python one gives the tokens that a net gives that reads the whole text for each."""
    _, param, bin = decoder(tmp_path)
    manifest = read_manifest(param.with_suffix(".json"))
    program = python_program(tmp_path, manifest, param, bin)
    tokens, ids = output_of(program).split(), [1, 2, 3]
    with Net(param) as runner:
        for _ in range(32):
            runner.reset()
            ids.append(int(runner.step(ids)["logits"][0, -1].argmax()))
    assert tokens == [str(token) for token in ids[3:]]
    program.write_text(program.read_text().replace("[1, 2, 3]", "[1] * 40"))
    assert len(output_of(program).split()) == 64 - 40 + 1, "the table of positions has 64 rows"
    several = tuple(replace(entry, dtype="float32", element="float32") for entry in manifest.inputs)
    with pytest.raises(UsageError, match="takes tokens"):
        example(replace(manifest, inputs=several), param, bin, language="cpp")


def test_the_loop_of_a_decoder_in_cpp(tmp_path: Path, compiles: Compiles) -> None:
    _, param, bin = decoder(tmp_path)
    manifest, embedded = read_manifest(param.with_suffix(".json")), embed(param, bin)
    (tmp_path / f"{embedded.name}.mem.h").write_text(embedded.mem)
    (tmp_path / f"{embedded.name}.id.h").write_text(embedded.ids)
    for net in (None, embedded):
        (tmp_path / "main.cpp").write_text(example(manifest, param, bin, language="cpp", embedded=net))
        compiles(tmp_path / "main.cpp")


def test_a_decoder_of_single_tokens_begins_with_one(tmp_path: Path) -> None:
    _, param, bin = decoder(tmp_path)
    manifest = read_manifest(param.with_suffix(".json"))

    def with_tokens(count: int) -> Manifest:
        [ids] = [entry for entry in manifest.inputs if entry.name == "input_ids"]
        fixed = replace(ids, shape=(*ids.shape[:-1], count))
        return replace(manifest, inputs=tuple(fixed if entry == ids else entry for entry in manifest.inputs))

    assert "ids = [1]  #" in example(with_tokens(1), param, bin, language="python")
    assert "ids = {1};" in example(with_tokens(1), param, bin, language="cpp")
    with pytest.raises(UsageError, match="takes one token, not 4 in each step"):
        example(with_tokens(4), param, bin, language="python")


@pytest.mark.parametrize("name", ["types", "image", "batch", "numbers", "dims", "windows"])
def test_the_cpp_program_is_compiled(tmp_path: Path, name: str, compiles: Compiles) -> None:
    program = tmp_path / "program.cpp"
    shapes = {"v": (2, 5, 2), "l": (2, 5)} if name == "windows" else {}
    program.write_text(example(*saved(tmp_path, name), language="cpp", shapes=shapes))
    compiles(program)


def test_the_cpp_program_makes_mats_of_the_right_shape(tmp_path: Path) -> None:
    text = example(*saved(tmp_path, "image"), language="cpp")
    assert "in0_pixels.data(), ncnn::Mat::PIXEL_RGB, in0_w, in0_h, 30, 20);" in text
    assert "in1_pixels.data(), ncnn::Mat::PIXEL_GRAY, in1_w, in1_h, 9, 8);" in text
    assert "in0.substract_mean_normalize(in0_mean, in0_norm);" in text
    text = example(*saved(tmp_path, "batch"), language="cpp", shapes={"v": (2, 2, 5, 6)})
    assert "ncnn::Mat in0(9, 7, 3, (size_t)4u, 1, 4);" in text
    assert "ncnn::Mat in1(6, 5, 2, (size_t)4u, 1, 2);" in text
    assert "float* to = in0.batch(b).channel(q);" in text
    assert "dynamic, other sizes will do: N = 2, H = 5, W = 6" in text
    text = example(*saved(tmp_path, "dims"), language="cpp")
    assert "ncnn::Mat in0(6, 5, 4, 2);" in text
    assert "std::vector<int> in1_data(30, 0);" in text
    assert 'printf("%ld ", std::lround(p[i]));' in text
    assert "ncnn::Mat in2(7);" in text


def test_sizes_below_the_minimum(tmp_path: Path) -> None:
    manifest, param, bin = saved(tmp_path, "windows")
    assert manifest.minimum == {"H": 3, "W": 25, "N": 2, "-1 + ((L + N)//(2))": 1}
    shapes = {"v": (2, 5, 2), "l": (2, 5)}
    run = runpy.run_path(str(python_program(tmp_path, manifest, param, bin, shapes=shapes)))
    net, feeds = run["load"](), {"x": np.ones((1, 2, 3, 25), np.float32), "v": np.ones((2, 5, 2), np.float32)}
    feeds["l"] = np.ones((2, 5), np.float32)
    assert run["run"](net, feeds)["y"].shape == (1, 2, 1, 1)
    for name, shape, said in (
        ("x", (1, 2, 2, 25), "the net is for H of 3 or more"),
        ("v", (1, 5, 2), "the net is for N of 2 or more"),
        ("l", (1, 5), r"the net is for -1 \+ \(\(L \+ N\)//\(2\)\) of 1 or more"),
    ):
        with pytest.raises(SystemExit, match=said):
            run["run"](net, {**feeds, name: np.ones(shape, np.float32)})
    text = example(manifest, param, bin, language="cpp", shapes=shapes)
    assert "ncnn::Mat in0(25, 16, 2);" in text
    assert "if (in0.h < 3)" in text
    assert "if (in1.c < 2)" in text
    assert "if (-1 + ((in1.c + in2.h)/(2)) < 1)" in text
    with pytest.raises(UsageError, match="the net is for H of 3 or more, not 2"):
        example(manifest, param, bin, language="cpp", shapes={"x": (1, 2, 2, 25)})


def test_sizes_that_are_no_multiples(tmp_path: Path) -> None:
    model = """(float[1,2,H,4] x) => (float[1,2,h,2,4] y) {
        s = Shape<start = 2, end = 3>(x) two = Constant<value_ints = [2]>() half = Div(s, two)
        front = Constant<value_ints = [1, 2]>() back = Constant<value_ints = [2, 4]>()
        shape = Concat<axis = 0>(front, half, back) y = Reshape(x, shape)
    }"""
    files = lower(parsed(model)).save(tmp_path / "net")
    manifest = read_manifest(files.manifest)
    assert manifest.inputs[0].shape == (1, 2, "2*H_2", 4)
    with (
        Net(tmp_path / "net") as net,
        pytest.raises(UsageError, match=r"2\*H_2 has to be a multiple of 2, but an array"),
    ):
        net.run({"x": np.ones((1, 2, 5, 4), np.float32)})
    run = runpy.run_path(str(python_program(tmp_path, manifest, files.param, files.bin)))
    loaded = run["load"]()
    assert run["run"](loaded, {"x": np.ones((1, 2, 6, 4), np.float32)})["y"].shape == (1, 2, 3, 2, 4)
    with pytest.raises(SystemExit, match=r"the net is for multiples of 2 as 2\*H_2"):
        run["run"](loaded, {"x": np.ones((1, 2, 5, 4), np.float32)})
    assert "if (in0.h % 2)" in example(manifest, files.param, files.bin, language="cpp")


def test_sizes_that_do_not_fit_and_wrong_manifests(tmp_path: Path) -> None:
    manifest, param, bin = saved(tmp_path, "batch")
    with pytest.raises(UsageError, match="the net has no input 'q'; its inputs are x, v"):
        example(manifest, param, bin, language="cpp", shapes={"q": (1,)})
    with pytest.raises(UsageError, match=r"--shape x:4,3,7,8 is not a shape of x: float32\[4, 3, 7, 9\]"):
        example(manifest, param, bin, language="cpp", shapes={"x": (4, 3, 7, 8)})
    liar = replace(manifest, inputs=(replace(manifest.inputs[0], dtype="int8); import os; (0"), *manifest.inputs[1:]))
    with pytest.raises(UsageError, match="is not a type of arrays"):
        example(liar, param, bin, language="python")


@pytest.mark.parametrize("language", ["cpp", "python"])
def test_names_cannot_end_a_string_or_a_comment(tmp_path: Path, language: str) -> None:
    manifest, param, bin = saved(tmp_path, "image")
    evil = 'a"\n); import os; exit(7) # \\'
    entry = replace(manifest.inputs[0], name=evil, shape=(1, 3, evil, 30))
    text = example(replace(manifest, inputs=(entry, manifest.inputs[1])), param, bin, language=language)
    assert not any(line.lstrip().startswith(");") for line in text.splitlines())
    if language == "python":
        compile(text, "program", "exec")
        program = tmp_path / "program.py"
        program.write_text(text)
        assert evil in runpy.run_path(str(program))["run"].__code__.co_consts
    else:
        assert not any(line.endswith("\\") for line in text.splitlines())


def letterboxed(folder: Path) -> tuple[Manifest, Path, Path]:
    text = "(float[1, 3, 24, 40] x) => (float[1, 3, 24, 40] y) { y = Neg(x) }"
    files = lower(parsed(text), images={"x": "std=255:letterbox"}).save(folder / "net")
    return read_manifest(files.manifest), files.param, files.bin


@pytest.mark.parametrize(("height", "width", "inner"), [(48, 40, (24, 20)), (12, 40, (12, 40)), (31, 57, (22, 40))])
def test_a_picture_keeps_its_aspect_and_boxes_find_back(
    tmp_path: Path, height: int, width: int, inner: tuple[int, int]
) -> None:
    program = python_program(tmp_path, *letterboxed(tmp_path))
    parts = runpy.run_path(str(program))
    picture = np.full((height, width, 3), (10, 20, 30), np.uint8)
    array = parts["letterbox"](picture, 24, 40, 114.0)
    inside = (array[0] == 10) & (array[1] == 20) & (array[2] == 30)
    assert ((array == 114).all(0) ^ inside).all()
    rows, columns = np.nonzero(inside)
    assert [int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1] == list(inner)
    edge = np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], float)
    back = parts["to_picture"](edge, picture, 24, 40)
    assert np.abs(back - [0, 0, width, height]).max() <= 1 / min(40 / width, 24 / height)
    output_of(program)


def test_the_letterbox_in_cpp_is_that_of_python(tmp_path: Path, compiles: Compiles) -> None:
    net = letterboxed(tmp_path)
    text = example(*net, language="cpp")
    assert "ncnn::BORDER_CONSTANT, 114.0f);" in text
    (tmp_path / "main.cpp").write_text(text)
    compiles(tmp_path / "main.cpp")
    struct = text[text.index("// The place of a picture") : text.index("int main()")]
    main = """int main() {
        for (int h = 1; h < 50; h += 6) for (int w = 1; w < 70; w += 3) {
            Letterbox box(w, h, 40, 24); float b[4] = {1, 2, 30, 20}; box.to_picture(b);
            std::printf("%d %d %d %d %g %g %g %g\\n", box.w, box.h, box.left, box.top, b[0], b[1], b[2], b[3]); }
        return 0; }"""
    (tmp_path / "box.cpp").write_text(f"#include <cmath>\n#include <cstdio>\n{struct}{main}")
    subprocess.run([present(COMPILER), *WARNINGS, tmp_path / "box.cpp", "-o", tmp_path / "box"], timeout=60, check=True)
    done = subprocess.run([tmp_path / "box"], capture_output=True, text=True, timeout=60, check=True)
    parts = runpy.run_path(str(python_program(tmp_path, *net)))
    expected = []
    for height in range(1, 50, 6):
        for width in range(1, 70, 3):
            picture = np.zeros((height, width, 3), np.uint8)
            box = parts["to_picture"](np.array([[1, 2, 30, 20]]), picture, 24, 40)[0]
            expected.append([*parts["place"](picture, 24, 40)[1:], *box])
    np.testing.assert_allclose(np.loadtxt(done.stdout.splitlines()), expected, rtol=1e-4)
