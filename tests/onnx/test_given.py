"""Sizes that the caller gives: names, sums and gaps among numbers."""

from __future__ import annotations

from typing import Any

import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.onnx.read.load import load_model
from testing.onnx_text import parsed


def shapes_of(inputs: str, shapes: dict[str, list[Any]]) -> dict[str, str]:
    names = [part.split()[-1] for part in inputs.split(", float")]
    nodes = " ".join(f"o{i} = Identity({name})" for i, name in enumerate(names))
    outputs = ", ".join(f"float o{i}" for i in range(len(names)))
    loaded = load_model(parsed(f"({inputs}) => ({outputs}) {{ {nodes} }}"), shapes=shapes)
    return {info.name: ",".join(map(str, info.shape)) for info in loaded.inputs}


@pytest.mark.parametrize(
    ("inputs", "shapes", "bound"),
    [
        ("float[n,3,h,w] x", {"x": [1, 3, None, "?"]}, {"x": "1,3,h,w"}),
        ("float[n,s] x", {"x": [1, "S"]}, {"x": "1,S"}),
        ("float[a,b] x, float[c,d] y", {"x": ["N", "S"], "y": ["N", "S"]}, {"x": "N,S", "y": "N,S"}),
        ("float[a,b] x, float[b,d] y", {"x": [None, "S"]}, {"x": "a,S", "y": "S,d"}),
        (
            "float[a] x, float[b] y, float[c] m",
            {"x": ["P"], "y": ["S"], "m": ["P+S"]},
            {"x": "P", "y": "S", "m": "P + S"},
        ),
        ("float[a] x, float[b] m", {"x": [3], "m": ["a+S"]}, {"x": "3", "m": "3 + S"}),
        ("float[8] x, float[b] y", {"x": ["S"], "y": ["2*S"]}, {"x": "8", "y": "16"}),
        ("float[a] x, float[12] m, float[b] y", {"m": ["a+b"], "y": [4]}, {"x": "8", "m": "12", "y": "4"}),
        ("float[s0] x, float[s1] y", {"x": ["s0"], "y": ["s0"]}, {"x": "s0", "y": "s0"}),
        ("float[a] x", {"x": ["(S + 1)//2"]}, {"x": "((1 + S)//(2))"}),
    ],
)
def test_what_follows(inputs: str, shapes: dict[str, list[Any]], bound: dict[str, str]) -> None:
    assert shapes_of(inputs, shapes) == bound


DYNAMIC = "float[N,3,H,W] x, float[N,7] ids"


@pytest.mark.parametrize(
    ("inputs", "shapes", "said"),
    [
        (DYNAMIC, {"img": [1]}, r"no input is called 'img'; inputs are: x: float\[N, 3, H, W\]; ids: float\[N, 7\]"),
        (DYNAMIC, {"x": [3, 4, 4]}, "has 3 sizes, the model wants 4"),
        (DYNAMIC, {"x": [1, 4, 4, 4]}, "axis 1 is 3 in the model, not 4"),
        (DYNAMIC, {"x": [0, 3, 4, 4]}, "0 is not a possible size"),
        (DYNAMIC, {"x": [-1, 3, 4, 4]}, "-1 is not a possible size"),
        (DYNAMIC, {"x": [2**31, 3, 4, 4]}, "2147483648 is not a possible size"),
        (DYNAMIC, {"x": [1, 3, 4, 4], "ids": [2, 7]}, "size 'N' cannot be both 1 and 2"),
        ("float[a,a] x", {"x": [1, 2]}, "size 'a' cannot be both 1 and 2"),
        ("float[8] x, float[9] y", {"x": ["S"], "y": ["S"]}, "axis 0 is 9 in the model, not 8"),
        ("float[a] x, float[12] m", {"x": ["P"], "m": ["P+S"]}, "axis 0 is 12 in the model, not P [+] S"),
        ("float[8] x", {"x": ["S*S"]}, r"axis 0 is 8 in the model, not S\*S"),
        ("float[8] x", {"x": ["S+9"]}, "axis 0 is 8 in the model, not 9 [+] S"),
        ("float[a] x", {"x": ["S T"]}, "'S T' is not a size; give a number, a name, a sum such as P[+]S, or [?]"),
        ("float[a] x", {"x": ["f(S)"]}, "is not a size"),
        ("float[a] x", {"x": ["8//S"]}, "is not a size"),
        ("float[a] x", {"x": ["S//0"]}, "is not a size"),
        ("float[a] x", {"x": ["S" * 1000]}, "is not a size"),
        ("float[a] x", {"x": [1.5]}, "1.5 is not a size"),
        ("float[a] x", {"x": [True]}, "True is not a possible size"),
        ("float[a] x", {"x": ["0"]}, "0 is not a possible size"),
    ],
)
def test_what_cannot_be(inputs: str, shapes: dict[str, list[Any]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shapes_of(inputs, shapes)


def test_names_go_into_the_net_and_its_verification() -> None:
    """A mask as long as what is new and what was before: the names tell, and both runs know it."""
    model = parsed(
        "(float[b, s0, 4] past, float[b, s1, 4] x, float[b, s2] mask) => (float[b, s3, 4] y)"
        "<int64[1] two = {2}> { k = Concat<axis = 1>(past, x) m = Unsqueeze(mask, two) y = Mul(k, m) }"
    )
    conversion = lower(model, shapes={"past": [1, "P", None], "x": [None, "S", 4], "mask": [1, "P+S"]})
    manifest = conversion.manifest()
    assert [entry.shape for entry in manifest.inputs] == [(1, "P", 4), (1, "S", 4), (1, "P + S")]
    assert manifest.outputs[0].shape == (1, "P + S", 4)
    report = conversion.verify()
    report.check()
    assert [set(sizes) for sizes in report.sizes] == [{"P", "S"}] * 2
