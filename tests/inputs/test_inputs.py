import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as pillow

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.inputs.draws import DATA, LARGE, Data, Draw, Wanted, draw_inputs, draws
from onnx2ncnn_opt.inputs.given import Picture, check_inputs, given_inputs, load_image, load_inputs
from onnx2ncnn_opt.manifest import Image
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from testing.models import parsed

TABLE = "{" + ", ".join("0.5" for _ in range(7 * 3)) + "}"


def loaded(graph: str) -> LoadedModel:
    return load_model(parsed(graph))


def drawn(graph: str) -> dict[str, np.ndarray]:
    return draw_inputs(loaded(graph))


def test_floats_are_standard_normal_and_repeatable() -> None:
    model = loaded("(float[64, 64] x, float[64, 64] z) => (float[64, 64] y) { y = Add(x, z) }")
    first, again, other = (draw_inputs(model, draw=Draw(seed, plain=True)) for seed in (1, 1, 2))
    assert first["x"].dtype == np.float32
    # 4096 samples: the mean's standard error is 1/64.
    assert abs(first["x"].mean()) < 4 / 64
    assert abs(first["x"].std() - 1) < 4 / 64
    np.testing.assert_array_equal(first["x"], again["x"])
    assert not np.array_equal(first["x"], other["x"])
    assert not np.array_equal(first["x"], first["z"])


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Gather(table, i)",
        "j = Cast<to = 6>(i) k = Reshape(j, shape) y = Gather(table, k)",
        "axes = Constant<value_ints = [0]>() j = Unsqueeze(i, axes) k = Squeeze(j, axes) y = Gather(table, k)",
        "t = Transpose(table) y = Gather<axis = 1>(t, i)",
        "t = Identity(table) y = Gather(t, i)",
        "a, b = Split<num_outputs = 2>(i) y = Gather(table, b)",
        "y = Gather<axis = -2>(table, i)",
    ],
)
def test_indexes_stay_within_their_table(nodes: str) -> None:
    text = f"(int64[400] i) => (float[N, M] y) <float[7, 3] table = {TABLE}, int64[1] shape = {{-1}}> {{ {nodes} }}"
    values = set(drawn(text)["i"].tolist())
    if "Transpose" in nodes:  # whose output declares no shape: 0 is all that is safe
        assert values == {0}
    else:
        assert values == set(range(7))


@pytest.mark.parametrize(
    ("graph", "least"),
    [
        (  # the smallest of several tables counts
            "(int64[400] i) => (float[N, 2] y, float[N, 2] z) <float[2, 2] a = {1, 2, 3, 4}, float[1, 2] b = {1, 2}>"
            "{ y = Gather(a, i) z = Gather(b, i) }",
            1,
        ),
        # the table of words is not the first input
        (
            "(int32[1, 400] i, float[400, 3] rows) => (float[1, 400, 3] y) <float[7, 3] words = "
            + TABLE
            + ", float[3] g = {1, 1, 1}> { y, n = com.microsoft.EmbedLayerNormalization(i, , words, rows, , g, g) }",
            7,
        ),
        # the axis has another name
        (
            "(int64[400] i, uint8[32, 3] w, float[2, 3] s) => (float[32, N] y)"
            "{ y = com.microsoft.GatherBlockQuantized<block_size = 16, gather_axis = 1, quantize_axis = 0>(w, i, s) }",
            3,
        ),
        # a position in a live tensor is an index
        ("(float[5, 300] x, int64[5, 300] i) => (float[5, 300] y) { y = GatherElements(x, i) }", 5),
    ],
)
def test_other_indexes(graph: str, least: int) -> None:
    assert set(drawn(graph)["i"].ravel().tolist()) == set(range(least))


@pytest.mark.parametrize(("dtype", "numpy"), [("int64", np.int64), ("bool", np.bool_), ("int32", np.int32)])
def test_masks_keep_something_and_hide_something_in_every_row(dtype: str, numpy: type) -> None:
    graph = f"({dtype}[60, 3] mask, float[60, 3] x) => (float[60, 3] y) {{ m = Cast<to = 1>(mask) y = Mul(m, x) }}"
    mask = drawn(graph)["mask"]
    assert mask.dtype == numpy
    assert set(np.unique(mask).tolist()) == {0, 1}
    assert (mask.max(axis=1) == 1).all()
    assert (mask.min(axis=1) == 0).all()
    assert 0 < mask[:, 2].mean() < 1


@pytest.mark.parametrize("nodes", ["n = Sub(one, m) a = Mul(n, low)", "a = Mul(low, m)"])
def test_floats_that_hide_scores_are_masks(nodes: str) -> None:
    graph = "(float[60, 3] m, float[60, 3] x) => (float[60, 3] y) <float one = {1}, float[1] low = {-3e38}>"
    mask = drawn(f"{graph} {{ {nodes} s = Add(x, a) y = Softmax(s) }}")["m"]
    assert mask.dtype == np.float32
    assert set(np.unique(mask).tolist()) == {0, 1}


def test_floats_that_become_bools_are_masks() -> None:
    """With padding at each pixel of an image, attention gave NaN in ONNX Runtime, and no net agreed."""
    mask = drawn(
        "(float[1, 1, 8, 8] m, float[1, 1, 4, 4] x) => (float[1, 1, 4, 4] y) <float[4] half = {1, 1, 0.5, 0.5}, "
        "float low = {-3e38}> { r = Resize(m, , half) b = Cast<to = 9>(r) s = Where(b, low, x) y = Softmax(s) }"
    )["m"]
    assert mask.dtype == np.float32
    assert set(np.unique(mask).tolist()) == {0, 1}


@pytest.mark.parametrize(
    "compared",
    [
        "s = Shape<start = 1>(x) n = Squeeze(s) i = Range(zero, n, one) r = Unsqueeze(size, axes) m = Less(i, r)",
        "h = Div(size, hop) r = Unsqueeze(h, axes) m = Greater(r, table)",
        "last = Sub(size, one) end = Gather<axis = 1>(x, last) s = Squeeze(last, axes) m = Greater(end, end)",
    ],
)
def test_lengths_of_sequences_hide_some_of_their_ends(compared: str) -> None:
    """Lengths of 0 and 1 hid all of a sound: its features were 0, whatever the net computed."""
    constants = "int64 zero = {0}, int64 one = {1}, int64[1] axes = {1}, int64 hop = {1}, int64[4] table = {0, 1, 2, 3}"
    model = loaded(
        f"(float[B, N] x, int64[B] size) => (float[B, N] y) <{constants}> {{ {compared} y = Where(m, x, x) }}"
    )
    feeds = [draw_inputs(model, {"B": 16, "N": 40}, draw=Draw(seed)) for seed in range(4)]
    lengths = np.concatenate([each["size"] for each in feeds])
    assert (lengths.min(), lengths.max()) == (20, 39)


def test_bytes_fill_their_range() -> None:
    image = drawn("(uint8[1, 3, 40, 40] x) => (float[1, 3, 40, 40] y) { y = Cast<to = 1>(x) }")["x"]
    assert image.dtype == np.uint8
    assert (image.min(), image.max()) == (0, 255)


@pytest.mark.parametrize("operator", ["Sqrt", "Log", "Acos", "Acosh", "Asin", "Atanh"])
def test_values_lie_in_the_domain_of_their_function(operator: str) -> None:
    x = drawn(f"(float[500] x) => (float[500] y) {{ a = Identity(x) y = {operator}(a) }}")["x"]
    function = {"Acos": "arccos", "Acosh": "arccosh", "Asin": "arcsin", "Atanh": "arctanh"}
    with np.errstate(all="raise"):
        assert np.isfinite(getattr(np, function.get(operator, operator.lower()))(x)).all()
    assert np.ptp(x) > 1


@pytest.mark.parametrize(
    ("nodes", "argument"),
    [
        ("a = Add(x, c) b = Mul(c, a)", lambda x: 3 * (x + 3)),
        ("a = Sub(c, x) b = Add(c, a)", lambda x: 3 + (3 - x)),
        ("a = Sub(x, c) b = Div(a, c)", lambda x: (x - 3) / 3),
    ],
)
def test_values_whose_multiples_lie_in_the_domain(nodes: str, argument: Callable[[np.ndarray], np.ndarray]) -> None:
    """NaN of log(250 * x + 0.05) hid the net behind it."""
    x = drawn(f"(float[500] x) => (float[500] y) <float c = {{3}}> {{ {nodes} y = Log(b) }}")["x"]
    assert 0 < argument(x).min() < argument(x).max() < 5


def test_a_domain_behind_thousands_of_sums() -> None:
    """Recursion ended with a traceback."""
    sums = "".join(f"a{number + 1} = Add(a{number}, c) " for number in range(1500))
    graph = f"(float[500] x) => (float[500] y) <float c = {{0.001}}> {{ a0 = Identity(x) {sums} y = Log(a1500) }}"
    assert (drawn(graph)["x"] + 1.5).min() > 0


@pytest.mark.parametrize("nodes", ["y = Log(x) z = Log(a)", "z = Log(a) y = Log(x)"])
def test_domains_without_a_common_number(nodes: str) -> None:
    graph = "(float[50] x) => (float[50] y, float[50] z) <float c = {9}>"
    assert drawn(f"{graph} {{ a = Add(x, c) {nodes} }}")["x"].min() > 0


def test_sizes_left_open() -> None:
    graph = (
        "(float[N, 3, H, W] image, int64[N, seq] ids, float[N, seq, 8] x) => (float[N, 3, H, W] y, int64[N, seq] z,"
        "float[N, seq, 8] w) { y = Relu(image) z = Neg(ids) w = Relu(x) }"
    )
    shapes = {name: x.shape for name, x in drawn(graph).items()}
    assert shapes == {"image": (1, 3, 64, 96), "ids": (1, 16), "x": (1, 16, 8)}
    image = parsed("(float[1, 3, X, Y] x) => (float[1, 3, X, Y] y) { y = Relu(x) }")
    axes = load_model(image, shapes={"x": (1, 3, "8*H", "2*W + 1")})
    assert draw_inputs(axes)["x"].shape == (1, 3, 64, 97)  # lengths are those of axes, not of names
    given = draw_inputs(loaded(graph), {"N": 2, "seq": 5})
    assert (given["ids"].shape, given["x"].shape) == ((2, 5), (2, 5, 8))
    assert drawn("(int64 t) => (float y) { y = Cast<to = 1>(t) }")["t"].shape == ()


@pytest.mark.parametrize(
    ("type", "said"),
    [("float[100000, 100000, 100000]", "--shape"), ("float[0, 3]", "--shape"), ("string[3]", "string")],
)
def test_inputs_that_cannot_be_drawn(type: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        drawn(f"({type} x) => ({type} y) {{ y = Identity(x) }}")


TWO = "(float[1, 2] b, int64[N] a) => (float[1, 2] y, int64[N] z) { y = Relu(b) z = Neg(a) }"
A, B = np.arange(3), np.array([[0.5, -0.5]], np.float32)


def test_inputs_from_a_file_by_name_or_in_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "named.npz", a=A, b=B.astype(np.float64))
    np.savez(tmp_path / "in order.npz", B, A)
    for name in ("named.npz", "in order.npz"):
        inputs = load_inputs(tmp_path / name, loaded(TWO))
        assert list(inputs) == ["b", "a"]
        assert inputs["b"].dtype == np.float32
        np.testing.assert_array_equal(inputs["a"], A)
        np.testing.assert_array_equal(inputs["b"], B)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"a": A}, "the model has the inputs b, a; given are a"),
        ({"a": A, "b": B, "c": B}, "given are a, b, c"),
        ({"a": A, "b": B.T}, "the model takes b: float"),
        ({"a": A, "b": B[0]}, r"not an array of shape \[2\]"),
        ({"a": A.astype(np.float32), "b": B}, "the model takes a: int64"),
    ],
)
def test_arrays_that_do_not_fit(arrays: dict[str, np.ndarray], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_inputs(arrays, loaded(TWO))


def test_a_size_that_two_inputs_share_is_one_size() -> None:
    model = loaded("(float[N] a, float[N] b) => (float[N] y) { y = Add(a, b) }")
    with pytest.raises(UsageError, match="the model takes b"):
        check_inputs({"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}, model)


ARRAY, OBJECTS = io.BytesIO(), io.BytesIO()
np.save(ARRAY, A)
np.savez(OBJECTS, a=np.array([{}], dtype=object), b=B)  # a pickle, which could run anything


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((content, r"in\.npz") for content in (b"", b"PK\x03\x04 cut off", b"no archive", OBJECTS.getvalue())),
        (ARRAY.getvalue(), r"numpy\.savez"),
    ],
)
def test_files_that_hold_no_inputs(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "in.npz").write_bytes(content)
    with pytest.raises(UsageError, match=said):
        load_inputs(tmp_path / "in.npz", loaded(TWO))


def test_zeros_of_both_signs_up_to_the_end_of_a_row() -> None:
    model = loaded("(float[9, 30] x) => (float[9, 30] y) { y = Relu(x) }")
    x = draw_inputs(model, draw=Draw(3))["x"]
    for part in (x[:, :-1], x[:, -1]):
        assert (part[part == 0] * 0 == 0).all()
        assert {bool(sign) for sign in np.signbit(part[part == 0])} == {True, False}
        assert (part < 0).any()
    assert np.count_nonzero(draw_inputs(model, draw=Draw(3, plain=True))["x"]) == x.size


def test_large_numbers_in_large_inputs() -> None:
    model = loaded("(float[9, 30] x) => (float[9, 30] y) { y = Relu(x) }")
    below, above = (draw_inputs(model, draw=Draw(seed, LARGE))["x"] for seed in (3, 4))
    assert above[-1, -1] > 30
    assert below[-1, -1] < -30
    assert np.exp(above.astype(np.float32)).max() < 2.4e38
    assert np.mean(np.abs(above) > 20) < np.mean(np.abs(below) > 20)  # more outliers for seeds 2 and 3


def test_some_numbers_of_two_inputs_are_nearly_equal() -> None:
    model = loaded("(float[40, 1] a, float[1, 40] b) => (bool[40, 40] y) { y = Less(a, b) }")
    shares = []
    for draw in (Draw(3, plain=True), Draw(3), Draw(3, LARGE)):
        a, b = draw_inputs(model, draw=draw).values()
        shares.append(np.mean(np.abs(b.ravel() - a.ravel()) < 0.1 * np.abs(a.ravel())))
    assert shares[0] < 0.1
    assert min(shares[1:]) > 0.1


def test_flat_inputs_differ_along_one_axis() -> None:
    text = (
        "(float[1,6,9,9] x, uint8[1,6,9,9] b) => (float[1,6,9,9] y, uint8[1,6,9,9] z) {{ y = {}(x) z = Identity(b) }}"
    )
    flat = draw_inputs(loaded(text.format("Relu")), draw=Draw(4, LARGE, flat=1))
    assert np.ptp(flat["x"], axis=(2, 3)).max() < 0.1 * LARGE < np.ptp(flat["x"][0, :, 0, 0])
    assert (np.abs(flat["x"]).max(axis=(2, 3)) < 0.05 * LARGE).any()  # a channel of almost nothing
    assert np.ptp(flat["b"], axis=(2, 3)).max() == 0 < np.ptp(flat["b"])
    assert draw_inputs(loaded(text.format("Log")), draw=Draw(4, LARGE, flat=5))["x"].min() > 0


def test_a_tiny_net_runs_on_more_inputs() -> None:
    large, small, tiny = (
        draws(7, is_small=small, is_tiny=tiny) for small, tiny in ((False, False), (True, False), (True, True))
    )
    assert tiny[: len(small)] == small and small[: len(large)] == large  # noqa: PT018
    assert len(large) < len(small) < len(tiny) == len({*tiny})
    assert {draw.flat for draw in tiny} == {None, 0, 1, 2, 3}
    assert str(small[-1]) == "seed 8, large flat (axis 1)"


@pytest.mark.parametrize("guard", ["c = Less(x, z) y = Where(c, a, z)", "b = Max(x, z) y = Add(a, b)"])
def test_guarded_inputs_leave_the_domain(guard: str) -> None:
    model = loaded(f"(float[300] x) => (float[300] y) <float z = {{0}}> {{ a = Log(x) {guard} }}")
    assert draw_inputs(model)["x"].min() > 0
    x = draw_inputs(model, draw=Draw(1))["x"]
    assert (x < 0).any()
    assert (x == 0).any()


def test_divisors_are_not_0_unless_something_guards_them() -> None:
    graph = "(float[300] x, float[300] d) => (float[300] y) { y = Div(x, d) }"
    assert np.abs(draw_inputs(loaded(graph), draw=Draw(1))["d"]).min() > 0.2
    assert np.abs(draw_inputs(loaded(graph.replace("y = ", "s = Sign(d) y = ")), draw=Draw(1))["d"]).min() > 0.2
    for guard in ("s = Max(d, x)", "r = Neg(y) z = Identity(y) s = Max(z, x)"):
        guarded = graph.replace("y)", "y, float[300] s)").replace("y = Div(x, d)", f"y = Div(x, d) {guard}")
        assert (draw_inputs(loaded(guarded), draw=Draw(1))["d"] == 0).any()


@pytest.mark.parametrize(
    "between",
    ["a = Abs(w)", "n = Neg(w) a = Identity(n)", "b = Abs(w) a = Sqrt(b)", "a = ReduceSum<keepdims = 1>(w)"],
)
def test_a_value_that_is_zero_with_an_input_is_a_divisor_too(between: str) -> None:
    model = loaded(f"(float[3,50] x, float[3,50] w) => (float[3,50] y) {{ {between} y = Div(x, a) }}")
    assert np.abs(draw_inputs(model, draw=Draw(3, LARGE))["w"]).min() > 1


def test_the_base_of_a_negative_power_is_a_divisor_too() -> None:
    text = "(float[300] x) => (float[300] y) <float e = {NUMBER}> { y = Pow(x, e) }"
    smallest = {e: np.abs(draw_inputs(loaded(text.replace("NUMBER", e)), draw=Draw(1))["x"]).min() for e in ("-1", "2")}
    assert smallest["-1"] > 0.2
    assert smallest["2"] == 0


def test_a_value_moved_by_a_window_is_a_divisor_too() -> None:
    nodes = "m = MaxPool<kernel_shape = [1, 1]>(x) y = Reciprocal(m)"
    model = loaded(f"(float[1,3,9,9] x) => (float[1,3,9,9] y) {{ {nodes} }}")
    assert np.abs(draw_inputs(model, draw=Draw(1))["x"]).min() > 0.2


def test_indexes_sweep_their_table() -> None:
    model = loaded("(int64[10] i) => (float[10, 3] y) <float[7, 3] table = " + TABLE + "> { y = Gather(table, i) }")
    first, second = (draw_inputs(model, swept={"i": n})["i"] for n in (0, 10))
    both = np.concatenate([first, second])
    assert all(set(both[n : n + 7]) == set(range(7)) for n in range(14))


IMAGE = "(float[1, 3, H, 4] x) => (float[1, 3, H, 4] y) { y = Relu(x) }"


def picture(folder: Path, name: str = "photo.png") -> Path:
    """An image of 2 rows and 4 columns: red is 0 to 7, green 100, blue 200."""
    pixels = np.full((2, 4, 3), (0, 100, 200), np.uint8)
    pixels[..., 0] = np.arange(8).reshape(2, 4)
    pillow.fromarray(pixels).save(folder / name)
    return folder / name


def test_an_image(tmp_path: Path) -> None:
    path = picture(tmp_path)
    plain = given_inputs(path, loaded(IMAGE))["x"]
    assert (plain.shape, plain.dtype) == ((1, 3, 2, 4), np.dtype(np.float32))
    np.testing.assert_array_equal(plain[0, 0], np.arange(8).reshape(2, 4))
    image = Picture(path, Image(mean=(200, 90, 10), std=(2.0,), bgr=True))
    array = given_inputs(image, loaded(IMAGE))["x"]
    np.testing.assert_array_equal(array[0, 0], np.zeros((2, 4)))
    np.testing.assert_array_equal(array[0, 1], np.full((2, 4), 5))
    np.testing.assert_array_equal(array[0, 2], (np.arange(8).reshape(2, 4) - 10) / 2)


def test_an_image_for_a_net_that_takes_pixels(tmp_path: Path) -> None:
    path = picture(tmp_path)
    conversion = lower(parsed(IMAGE), images={"x": "mean=1,90,10:std=2:bgr"})
    array = given_inputs(path, conversion.model, conversion.manifest())["x"]
    np.testing.assert_array_equal(array[0, 0], (np.arange(8).reshape(2, 4) - 1) / 2)
    np.testing.assert_array_equal(array[0, 1:, 0, 0], [5, 95])
    own = given_inputs(Picture(path, Image(std=(4.0,))), conversion.model, conversion.manifest())["x"]
    np.testing.assert_array_equal(own[0, :, 0, 0], [0, 25, 50])


def test_an_image_that_keeps_its_aspect(tmp_path: Path) -> None:
    path = picture(tmp_path)
    model = loaded("(float[1, 3, 4, 4] x) => (float[1, 3, 4, 4] y) { y = Identity(x) }")
    array = given_inputs(Picture(path, Image(std=(2.0,), letterbox=114)), model)["x"]
    np.testing.assert_array_equal(array[0, :, [0, 3]], np.full((2, 3, 4), 57))
    np.testing.assert_array_equal(array[0, 0, 1:3], np.arange(8).reshape(2, 4) / 2)


def test_images_in_other_layouts_and_sizes(tmp_path: Path) -> None:
    path = picture(tmp_path, "photo.jpg")
    rows = given_inputs(path, loaded("(uint8[N, 6, 8, 3] x) => (uint8[N, 6, 8, 3] y) { y = Identity(x) }"))["x"]
    assert (rows.shape, rows.dtype) == ((1, 6, 8, 3), np.dtype(np.uint8))
    gray = given_inputs(path, loaded("(float[1, 1, H, W] x) => (float[1, 1, H, W] y) { y = Relu(x) }"))["x"]
    assert gray.shape == (1, 1, 2, 4)


GREY = "(float[1, 1, H, W] x) => (float[1, 1, H, W] y) { y = Relu(x) }"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B"])
def test_modes_of_images(mode: str, tmp_path: Path) -> None:
    """Black is 0 and white is 255 in each; numbers of 16 bits are divided by 257."""
    pixels = np.array([[0, 255], [0, 255]], np.uint8)
    if mode.startswith("I"):
        wide = (pixels * np.uint16(257)).astype(">u2" if mode.endswith("B") else "<u2")
        image = pillow.frombytes(mode, (2, 2), wide.tobytes())
    else:
        image = pillow.fromarray(pixels).convert("RGB" if mode == "CMYK" else "L").convert(mode)
    path = tmp_path / ("photo.png" if mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else "photo.tiff")
    image.save(path)
    found = load_image(Picture(path), loaded(GREY))["x"]
    np.testing.assert_allclose(found[0, 0], pixels, atol=1)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_images_without_a_white(mode: str, tmp_path: Path) -> None:
    pillow.new(mode, (2, 2)).save(tmp_path / "photo.tiff")
    with pytest.raises(UsageError, match=f"mode {mode} does not say which number is white"):
        load_image(Picture(tmp_path / "photo.tiff"), loaded(GREY))


def test_images_that_do_not_fit(tmp_path: Path) -> None:
    path = picture(tmp_path)
    with pytest.raises(UsageError, match="one input"):
        given_inputs(path, loaded(TWO))
    with pytest.raises(UsageError, match="mean is"):
        given_inputs(Picture(path, Image(mean=(1.0, 2.0))), loaded(IMAGE))
    integers = loaded("(uint8[1, 3, H, 4] x) => (uint8[1, 3, H, 4] y) { y = Identity(x) }")
    with pytest.raises(UsageError, match="std is"):
        given_inputs(Picture(path, Image(std=(2.0,))), integers)
    broken = tmp_path / "broken.png"
    broken.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UsageError, match="no image can be read"):
        given_inputs(broken, loaded(IMAGE))


def test_one_array(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 3, 2, 4), np.float32))
    assert given_inputs(tmp_path / "x.npy", loaded(IMAGE))["x"].sum() == 24
    with pytest.raises(UsageError, match="one array"):
        given_inputs(tmp_path / "x.npy", loaded(TWO))


def test_ranges() -> None:
    draws = Wanted(seeds=2, ranges=((-1, 1), (5, 6))).draws(7)
    assert [(draw.seed, draw.between) for draw in draws] == [(7, (-1, 1)), (7, (5, 6)), (8, (-1, 1)), (8, (5, 6))]
    array = draw_inputs(loaded(IMAGE), {"H": 50}, draw=draws[1])["x"]
    assert array.shape == (1, 3, 50, 4)
    assert 5 <= array.min() < 5.1 < 5.9 < array.max() <= 6
    assert str(draws[1]) == "seed 7, inputs from 5 to 6"


@pytest.mark.parametrize("shape", ["1, 3, 40, 56", "2, 40, 56, 3", "1, 40, 56"])
@pytest.mark.parametrize("data", DATA)
def test_pictures_are_mostly_smooth_have_edges_and_fill_their_range(shape: str, data: Data) -> None:
    model = loaded(f"(float[{shape}] x) => (float[{shape}] y) {{ y = Relu(x) }}")
    picture = draw_inputs(model, draw=Draw(0, plain=True, data=data))["x"]
    low, high = data.pixels
    assert (picture.min(), picture.max()) == pytest.approx((low, high), abs=1e-5 * high)
    steps = np.abs(np.diff(picture, axis=-2 if picture.shape[-1] == 3 else -1)) / picture.std()
    assert np.median(steps) < 0.2  # noise has 1
    assert steps.max() > 1


def test_pictures_of_a_batch_differ_in_colours() -> None:
    model = loaded("(float[2, 3, 40, 56] x) => (float[2, 3, 40, 56] y) { y = Relu(x) }")
    one, other = draw_inputs(model, draw=Draw(0, plain=True, data=DATA[0]))["x"]
    assert np.abs(one - other).mean() > 0.05


def test_sounds_have_pauses_and_other_inputs_are_normal() -> None:
    model = loaded(
        "(float[1, 4000] sound, float[80, 30] z) => (float[1, 4000] y, float[80, 1] w)"
        "{ y = Relu(sound) w = ReduceSum<axes=[1]>(z) }"
    )
    for data in DATA:
        arrays = draw_inputs(model, draw=Draw(0, plain=True, data=data))
        loud = np.abs(arrays["sound"]).reshape(-1, 100).max(-1)
        assert loud.min() < 0.1 * data.sound < data.sound < loud.max()
        assert arrays["z"].std() == pytest.approx(1, rel=0.1)


def test_latent_numbers_are_no_pictures() -> None:
    model = loaded("(float[1, 4, 64, 64] x) => (float[1, 4, 64, 64] y) { y = Relu(x) }")
    of_data, normal = (draw_inputs(model, draw=Draw(0, plain=True, data=data))["x"] for data in (DATA[0], None))
    np.testing.assert_array_equal(of_data, normal)


def test_states_are_no_pictures() -> None:
    """A state is an input, not the first, that an output of its shape replaces in the next run."""
    graph = "(float[1, 3, 40, 56] x, float[{0}] h) => (float[{1}] y, float[{2}] n) {{ y = Relu(x) n = Tanh(h) }}"
    picture = "1, 3, 40, 56"
    for shapes, is_state in (
        ((picture,) * 3, True),
        (("1, 1, 33, 16", picture, "a, b, c, d"), True),
        (("1, 1, 33, 16", picture, "1, 1, 33, 8"), False),
    ):
        model = loaded(graph.format(*shapes))
        normal, *others = (draw_inputs(model, draw=Draw(0, plain=True, data=data))["h"] for data in (None, *DATA))
        assert all(np.array_equal(h, normal) == is_state for h in others)
