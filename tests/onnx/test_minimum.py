"""The least sizes of a net: at them it is right, and below them it says so; a verification draws none below."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt import Net
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing.models import parsed
from testing.worker import WORKER

# Input, its minimum at which all other sizes may be 1, nodes.
WINDOWS = {
    "MaxPool": ("1,2,h,5", {"h": 3}, "y = MaxPool<kernel_shape = [3, 2]>(x)"),
    "MaxPool of a volume": (
        "2,1,d,4,w",
        {"d": 3},
        "y = MaxPool<kernel_shape = [3, 2, 1], strides = [2, 1, 1]>(x)",
    ),
    "MaxPool with gaps": ("1,2,n", {"n": 5}, "y = MaxPool<kernel_shape = [3], dilations = [2]>(x)"),
    "MaxPool with pads": ("1,2,n", {"n": 2}, "y = MaxPool<kernel_shape = [4], pads = [1, 1]>(x)"),
    "AveragePool of a row": ("1,2,n", {"n": 4}, "y = AveragePool<kernel_shape = [4], strides = [3]>(x)"),
    "AveragePools": (
        "1,2,h,w",
        {"h": 4, "w": 6},
        "p = AveragePool<kernel_shape = [2, 3], strides = [2, 3]>(x)"
        " q = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(p) y = Flatten(q)",
    ),
    "Conv": ("1,2,n", {"n": 5}, "y = Conv<dilations = [2]>(x, three)"),
    "Conv of channels from 1 on": ("1,c,4", {"c": 3}, "p = Slice(x, one, three_channels, one) y = Conv(p, three)"),
    "Conv after a stride": (
        "1,2,n",
        {"n": 5},
        "p = MaxPool<kernel_shape = [2], strides = [2], pads = [1, 0]>(x) y = Conv(p, three)",
    ),
    "ConvTranspose": ("1,2,n", {"n": 2}, "y = ConvTranspose<pads = [2, 1]>(x, three)"),
    "ConvTranspose of any size": ("1,2,n", {}, "y = ConvTranspose<pads = [1, 1]>(x, three)"),
    "ConvTranspose that only gives its shape": (
        "1,2,n",
        {"n": 2},
        "t = ConvTranspose<pads = [2, 1]>(x, three) s = Shape(t) y = Cast<to = 1>(s)",
    ),
    "Slice": ("3,b,2", {"b": 3}, "y = Slice(x, two, end, one)"),
    "Slice from the end": ("3,b,2", {"b": 3}, "y = Slice(x, start, minus_two, one)"),
    "a roll": (
        "3,b,2",
        {},
        "p = Slice(x, one, end, one) q = Slice(x, start, one, one) y = Concat<axis = 1>(p, q)",
    ),
    "a roll by Mod": (
        "3,b,2",
        {"b": 2},
        "n = Shape<start = 1, end = 2>(x) at = Mod(minus_two, n) p = Slice(x, at, n, one)"
        " q = Slice(x, start, at, one) y = Concat<axis = 1>(p, q)",
    ),
    "InstanceNormalization of a row": (
        "1,2,n",
        {"n": 2},
        "ones = Constant<value_floats = [1.0, 1.0]>() y = InstanceNormalization(x, ones, ones)",
    ),
    "Gather": ("b,3", {"b": 3}, "y = Gather<axis = 0>(x, two)"),
    "Pad by reflection": ("1,n", {"n": 3}, 'y = Pad<mode = "reflect">(x, pads)'),
}


def model_of(shape: str, nodes: str) -> onnx.ModelProto:
    return parsed(
        f"(float[{shape}] x) => (float y) <float[2, 2, 3] three ="
        " {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, int64[4] pads = {0, 2, 0, 1}, int64[1] start = {0},"
        " int64[1] one = {1}, int64[1] two = {2}, int64[1] minus_two = {-2},"
        " int64[1] three_channels = {3}, int64[1] end = {9223372036854775807}>"
        f" {{ {nodes} }}",
        opset=18,
    )


@pytest.mark.parametrize("name", WINDOWS)
def test_minimum(name: str, tmp_path: Path) -> None:
    shape, minimum, nodes = WINDOWS[name]
    model = model_of(shape, nodes)
    conversion = lower(model)
    assert conversion.manifest().minimum == minimum
    param = conversion.save(tmp_path / "net").param
    reference = OrtRunner(model.SerializeToString())

    def drawn(less: str = "") -> np.ndarray:
        sizes = [int(n) if n.isdigit() else minimum.get(n, 1) - (n == less) for n in shape.split(",")]
        return np.random.default_rng(0).standard_normal(sizes).astype(np.float32)

    expected = reference.run({"x": drawn()})["y"]
    with Net(param) as net:
        np.testing.assert_allclose(net.run({"x": drawn()})["y"], expected, rtol=1e-5, atol=1e-5)
        for size, least in minimum.items():
            with pytest.raises(UsageError, match=f"the net is for {size} of {least} or more, not {least - 1}"):
                net.run({"x": drawn(size)})
    conversion.verify(worker=WORKER).check()


def test_a_minimum_of_several_sizes(tmp_path: Path) -> None:
    model = parsed(
        "(float[1, 2, a] x, float[1, 2, b] z) => (float y)"
        " { c = Concat<axis = 2>(x, z) y = MaxPool<kernel_shape = [4], strides = [2]>(c) }"
    )
    conversion = lower(model)
    x, z = np.ones((1, 2, 1), np.float32), np.zeros((1, 2, 3), np.float32)
    with Net(conversion.save(tmp_path / "net").param) as net:
        np.testing.assert_array_equal(net.run({"x": x, "z": z})["y"], np.ones((1, 2, 1)))
        with pytest.raises(UsageError, match=r"the net is for -1 \+ \(\(a \+ b\)//\(2\)\) of 1 or more, not 0"):
            net.run({"x": x, "z": z[..., :2]})
    conversion.verify(worker=WORKER).check()


def test_a_table_is_cut_around_its_middle(tmp_path: Path) -> None:
    """Relative positions, as ESPnet and NeMo slice them; they take half of 2 * m - 1 then, which has to be positive."""
    model = parsed(
        "(float[1, 2, n] x) => (float y) <float[1, 9] table = {1, 2, 3, 4, 5, 6, 7, 8, 9}, int64[1] five = {5},"
        " int64[1] four = {4}, int64[1] two = {2}, int64[1] one = {1}, int64[1] zero = {0}>"
        " { p = MaxPool<kernel_shape = [2], strides = [2]>(x) m = Shape<start = 2>(p) first = Sub(five, m)"
        " last = Add(four, m) rows = Slice(table, first, last, one) size = Shape<start = 1>(rows) half = Div(size, two)"
        " end = Add(half, one) some = Slice(rows, zero, end, one) y = Add(p, some) }",
        opset=18,
    )
    conversion = lower(model)
    assert conversion.manifest().minimum == {"n": 2, "5 + -1*((n)//(2))": 0}
    with (
        Net(conversion.save(tmp_path / "net").param) as net,
        pytest.raises(UsageError, match=r"for \(\(n\)//\(2\)\) of 5 or less, not 6: the model's table ends there"),
    ):
        net.run({"x": np.ones((1, 2, 12), np.float32)})
    conversion.verify(worker=WORKER).check()


def test_sizes_that_only_a_minimum_makes_equal() -> None:
    """The slice has two rows if it has enough for the roll, but no layout of it shows that; no size is enough here."""
    model = parsed(
        "(float[s, 4, 3, w] x) => (float y) <int64 one = {1}, int64 zero = {0}, int64[1] start = {0},"
        " int64[1] end = {3}, int64[1] two = {2}> {"
        " a = Slice(x, start, end, start, two) n = Shape<start = 0, end = 1>(a) m = Squeeze(n)"
        " r = Range(zero, m, one) later = Add(r, two) at = Mod(later, n) y = Gather<axis = 0>(a, at) }",
        opset=23,
    )
    with pytest.raises(UsageError, match=r"the net is for \(\(1 \+ min\(3, s\)\)//\(2\)\) of 3 or more, not 2"):
        lower(model).verify(worker=WORKER)


@pytest.mark.parametrize("kernel", [100, 3000])
def test_a_verification_draws_sizes_from_the_minimum_on(kernel: int) -> None:
    conversion = lower(model_of("1,2,n", f"y = MaxPool<kernel_shape = [{kernel}]>(x)"))
    report = conversion.verify(worker=WORKER)
    report.check()
    sizes = [run["n"] for run in report.sizes]
    assert len(set(sizes)) == 2
    assert min(sizes) >= kernel


_REST = "n = Shape<start = 1, end = 2>(x) q = Div(n, four) k = Mul(q, four) rest = Slice(x, k, n, one)"
_WINDOW = (
    "n = Shape<start = 1, end = 2>(x) n0 = Squeeze(n) r = Range(zero, n0, step) i = Unsqueeze(r, one) d = Sub(r, i)"
    " far = Abs(d) keep = LessOrEqual(far, hundred) m = Where(keep, off, low) t = Transpose<perm = [0, 2, 1]>(x)"
    " s = MatMul(x, t) sm = Add(s, m) p = Softmax<axis = -1>(sm) y = MatMul(p, x)"
)


@pytest.mark.parametrize(
    ("nodes", "sizes", "notes"),
    [
        (f"{_REST} y = Concat<axis = 1>(x, rest)", {64, 63, 1}, []),
        (
            f"{_REST} p = Mul(rest, rest) y = Concat<axis = 1>(x, p)",
            {45, 1},
            ["not tried: t=44, which the model takes, and the net does not"],
        ),
        (_WINDOW, {64, 102, 1}, []),
    ],
)
def test_a_verification_tries_every_case(nodes: str, sizes: set[int], notes: list[str]) -> None:
    """Remainders that are 0, and others; one token; above and below a window."""
    model = parsed(
        "(float[1, t, 4] x) => (float y) <int64[1] one = {1}, int64[1] four = {4}, int64 zero = {0}, int64 step = {1},"
        f" int64 hundred = {{100}}, float off = {{0}}, float low = {{-10000}}> {{ {nodes} }}",
        opset=18,
    )
    report = lower(model).verify(worker=WORKER)
    report.check()
    assert {run["t"] for run in report.sizes} >= sizes
    assert [note for note in report.notes if "tried" in note] == notes
