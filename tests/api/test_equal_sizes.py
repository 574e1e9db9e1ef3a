"""Dynamic dimensions that are one under several names."""

import pytest

from onnx2ncnn_opt.api.equal_sizes import equal_sizes
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UsageError
from testing.models import serialized

# As torch exports a DynamicCache: a length of its own for every layer, and a mask as long as old and new together.
CACHE = (
    "(float[1, s0, 4] p0, float[1, s1, 4] p1, float[1, s2, 4] p2, float[1, n, 4] x, float[1, m, 1] mask)"
    " => (float[1, t, 4] y) {"
    " c0 = Concat<axis = 1>(p0, x) c1 = Concat<axis = 1>(p1, x) c2 = Concat<axis = 1>(p2, x)"
    " a = Add(c0, c1) b = Add(a, c2) y = Mul(b, mask) }"
)


def test_lengths_of_a_cache_are_one() -> None:
    tied = equal_sizes(serialized(CACHE, 17))
    assert tied.names == (("s0", "s1", "s2"),)
    conversion = lower(serialized(CACHE, 17), shapes=tied.shapes)
    assert [entry.shape[1] for entry in conversion.manifest().inputs] == ["s0", "s0", "s0", "n", "m"]
    conversion.verify().check()


def test_a_mask_does_not_hide_equal_lengths() -> None:
    """Floats are drawn longer than masks, and the model runs only if keys, values and the mask are equally long."""
    graph = (
        "(float[1, q, 4] x, float[1, k, 4] keys, float[1, v, 4] values, bool[1, q, k] mask) => (float[1, q, 4] y)"
        " <float off = {0}, float low = {-10000}> { t = Transpose<perm = [0, 2, 1]>(keys) s = MatMul(x, t)"
        " m = Where(mask, off, low) sm = Add(s, m) p = Softmax<axis = -1>(sm) y = MatMul(p, values) }"
    )
    assert equal_sizes(serialized(graph, 17)).names == (("k", "v"),)


def test_lengths_that_are_apart_stay_apart() -> None:
    graph = "(float[1, a, 4] x, float[1, b, 4] y) => (float[1, c, 4] z) { z = Concat<axis = 1>(x, y) }"
    assert equal_sizes(serialized(graph, 17)).names == ()
    graph = "(float[a, 4] x, float[4, b] y) => (float[a, b] z) { z = MatMul(x, y) }"
    assert equal_sizes(serialized(graph, 17)).names == ()


def test_names_of_the_caller_stay() -> None:
    tied = equal_sizes(serialized(CACHE, 17), shapes={"p0": [1, "P", 4], "mask": [1, "P + n", 1]})
    assert tied.names == (("P", "s1", "s2"),)
    assert [str(size) for size in tied.shapes["mask"]] == ["1", "P + n", "1"]


@pytest.mark.parametrize(
    ("graph", "shapes", "said"),
    [
        (
            "(float[1, 2, h, w] images) => (float y) <float[4] s = {1.0, 1.0, 2.0, 2.0}> {"
            ' p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(images) u = Resize<mode = "nearest">(p, , s)'
            " [cat] y = Concat<axis = 1>(images, u) }",
            {"images": (1, 2, 7, 8)},
            "the model does not accept images:1,2,7,8: Concat cat gets 7 and 6; many nets want multiples of 32",
        ),
        (
            "(float[n, 3] x, float[m, 3] y) => (float z) { [sum] z = Add(x, y) }",
            {"x": (2, 3), "y": (5, 3)},
            "the model does not accept x:2,3 y:5,3: Add sum gets 2 and 5",
        ),
        (
            "(float[n, k] x, float[m, 3] y) => (float z) { [product] z = MatMul(x, y) }",
            {"x": (2, 4), "y": (5, 3)},
            "the model does not accept x:2,4 y:5,3: MatMul product gets 4 and 5",
        ),
        (
            "(float[n] x) => (float z) <int64[2] s = {2, 4}> { [to] z = Reshape(x, s) }",
            {"x": (9,)},
            "the model does not accept x:9: Reshape to gets 9 and 8",
        ),
    ],
)
def test_sizes_that_the_model_does_not_take(graph: str, shapes: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(UsageError) as error:
        lower(serialized(graph, 17), shapes=shapes)
    assert str(error.value) == said


def test_a_model_that_onnx_runtime_refuses_is_left_to_others() -> None:
    graph = "(float[1, a] x, float[1, b] y) => (float z) { z = made.up.Odd(x, y) }"
    assert equal_sizes(serialized(graph, 17)).names == ()
