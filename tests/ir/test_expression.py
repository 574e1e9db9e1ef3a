"""Size expressions, against numbers worked out by hand and against ncnn's rules."""

import pytest

from onnx2ncnn_opt.errors import ShapeError
from onnx2ncnn_opt.ir.dim import Dim, symbol
from onnx2ncnn_opt.ir.expression import evaluate

H, W, N = symbol("h"), symbol("w"), symbol("n")
# c=2 d=3 h=5 w=7 with a batch of 4, and h=11 w=13.
BLOBS = [((2, 3, 5, 7), 4), ((11, 13), 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0w,0h,0d,0c,0n", [7, 5, 3, 2, 4]),
        ("1w,1h,1d,1c,1n", [13, 11, 1, 1, 1]),
        ("+(0w,0h),-(0w,0h),*(0w,0h)", [12, 2, 35]),
        ("//(0w,2),//(-7,2),//(7,-2)", [3, -3, -3]),
        ("//(-7,2.5),//(7.0,2)", [-3, 3]),  # a fraction makes it a floor
        ("max(0w,0h),min(0w,0h),max(0w,9.5)", [7, 5, 9]),
        ("abs(-3),neg(0w),sign(-3),sign(0),square(0h)", [3, -7, -1, 0, 25]),
        ("trunc(-2.5),ceil(2.1),floor(-2.1),round(2.5),round(-2.5)", [-2, 3, -3, 3, -3]),
        ("/(0w,2),/(0w,2.0),*(0w,0.5)", [3, 3, 3]),
        ("*(/(0w,2),2)", [7]),
        ("and(6,3),or(6,3),xor(6,3),lshift(3,2),rshift(12,2)", [2, 7, 5, 12, 3]),
        ("remainder(-7,4),fmod(-7,4),pow(2,3),sqrt(16),exp(0),log10(1000)", [1, -3, 8, 4, 1, 3]),
        ("-1,0,2.9,1e1", [-1, 0, 2, 10]),
        ("*(3,/(1,3))", [1]),  # float32: 3 * 0.33333334 is 1 and not less
        ("0w, 4", [7, 4]),
        ("0w, 0c,3x,.5e1", [7, 0, 3, 5]),  # a number ends where it is none any more
        ("max(+(0w,1),//(*(0h,0c),3)),-1", [8, -1]),
    ],
)
def test_values(text: str, expected: list[int]) -> None:
    assert evaluate(text, BLOBS) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*(0w,0h),//(*(0w,4),2)", [H * W, W * 2]),
        ("max(+(0h,2),0h),min(+(0h,2),0h)", [H + 2, H]),
        ("neg(0h),abs(0h),square(0h),sign(0h),round(0h)", [H * -1, H, H * H, 1, H]),
        ("0n", [N]),
        ("//(0w,3)", [W // 3]),
        # What no polynomial says:
        ("/(0w,2)", None),
        ("//(12,0w)", [12 // W]),
        ("//(-12,0w)", None),
        ("and(0w,1)", None),
        ("0x3", None),
        ("sqrt(0w)", None),
        ("+(0w,0.5)", None),
    ],
)
def test_symbols(text: str, expected: list[Dim] | None) -> None:
    assert evaluate(text, [((2, 3, H, W), N)]) == expected


def test_an_unknown_shape_is_unknown() -> None:
    assert evaluate("0w", [(None, 2)]) is None
    assert evaluate("0n", [(None, 2)]) == [2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no result"),
        ("()", "no result"),
        ("foo(0w)", "'foo'"),
        ("+(1)", "'+'"),
        ("neg", "'neg'"),
        ("//(0w,0)", "'//'"),
        ("/(0w,0)", "'/'"),
        ("2w", "the layer has 2 inputs"),
        ("z", "'z'"),
        (" *(0w,2)", "' *'"),
        ("sqrt(-1)", "'sqrt'"),
        ("and(1.5,2)", "bits of 1.5"),
        ("inf", "no result"),
        ("nan,1", "no result"),
        ("exp(1000)", "'exp'"),
    ],
)
def test_expressions_that_ncnn_refuses_or_crashes_on(text: str, reason: str) -> None:
    with pytest.raises(ShapeError) as raised:
        evaluate(text, BLOBS)
    assert reason in str(raised.value)
