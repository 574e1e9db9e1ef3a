"""What ncnnoptimize and pnnx are known to make wrong, in small nets: `verify` finds it, `bisect` names the layer.

The table in docs/find-faults.md says where each comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.api.bisect import bisect
from testing.command import write_model
from testing.handmade import raw, tagged, write_net


@dataclass(frozen=True)
class Case:
    """A model, the wrong net for it, the layers of which one is to blame, and what verification says."""

    name: str
    graph: str
    lines: tuple[str, ...]
    layers: tuple[str, ...]
    weights: bytes = b""
    status: str = "mismatch"


W = np.array([[0.5, -0.25, 0.125], [0.3, 0.2, -0.7]], np.float32)
KERNEL = "float[2, 3, 1, 1] w = {0.5, -0.25, 0.125, 0.3, 0.2, -0.7}"
MATRIX = "float[3, 2] w = {0.5, 0.3, -0.25, 0.2, 0.125, -0.7}"
CONV = "Convolution c 1 1 x {out} 0=2 1=1 5=1 6=6 9={activation}"
FED = "(float[1, 3, 4, 5] x) => (float[1, 2, 4, 5] y)"
X = "(float[1, 3, 4, 5] x) => (float[1, 3, 4, 5] y)"
INPUT = "Input in 0 1 x"

CASES = [
    Case(
        "a batch normalization goes into a convolution with an activation",
        FED + f"<{KERNEL}, float[2] s = {{2, 3}}, float[2] b = {{1, -1}}, float[2] m = {{0.5, 0.25}}, float[2] v = "
        "{1, 4}> { k = Conv(x, w) r = Relu(k) y = BatchNormalization<epsilon = 0.0>(r, s, b, m, v) }",
        (INPUT, CONV.format(out="y", activation=1)),
        ("c",),
        tagged(W * np.array([[2], [1.5]], np.float32)) + raw([0.0, -1.375]),
    ),
    Case(
        "an activation replaces that of a convolution",
        FED + f"<{KERNEL}> {{ k = Conv(x, w) s = Sigmoid(k) y = Relu(s) }}",
        (INPUT, CONV.format(out="y", activation=1)),
        ("c",),
        tagged(W) + raw([0.0, 0.0]),
    ),
    Case(
        "a constant of the rows is added to the columns",
        "(float[2, 3] x) => (float[2, 2] y)"
        + f"<{MATRIX}, float[2, 1] b = {{1, 2}}> {{ k = MatMul(x, w) y = Add(k, b) }}",
        (INPUT, "InnerProduct c 1 1 x y 0=2 1=1 2=6"),
        ("c",),
        tagged(W) + raw([1.0, 2.0]),
    ),
    Case(
        "the scale of a dropout goes through an activation",
        "(float[2, 3] x) => (float[2, 2] y)"
        + f"<{MATRIX}, float h = {{0.5}}> {{ k = MatMul(x, w) s = Sigmoid(k) y = Mul(s, h) }}",
        (INPUT, "InnerProduct c 1 1 x y 0=2 1=0 2=6 9=4"),
        ("c",),
        tagged(W * np.float32(0.5)),
    ),
    Case(
        "a Flatten of rows is left out",
        "(float[1, 2, 3] x) => (float[1, 6] y) { r = Relu(x) y = Flatten(r) }",
        (INPUT, "ReLU r 1 1 x y"),
        ("r",),
        status="shape",
    ),
    Case(
        "an output that a Split gave is gone",
        "(float[1, 2, 3] x) => (float[1, 2, 3] y, float[1, 2, 3] z) { y = Neg(x) z = Relu(y) }",
        (INPUT, "UnaryOp n 1 1 x 1 0=1", "ReLU r 1 1 1 z"),
        ("n",),
        status="missing",
    ),
    Case(
        "the kept dims of a mean are dropped",
        "(float[1, 3, 4, 5] x) => (float[1, 3, 4, 1] y) <int64[1] a = {3}> { r = Relu(x) y = ReduceMean(r, a) }",
        (INPUT, "ReLU r 1 1 x 1", "Pooling p 1 1 1 y 0=1 4=1"),
        ("p",),
        status="shape",
    ),
    Case(
        "parameters of a Shrink are not written",
        X + "{ r = Neg(x) y = Shrink<bias = 0.2, lambd = 0.9>(r) }",
        (INPUT, "UnaryOp n 1 1 x 1 0=1", "Shrink s 1 1 1 y"),
        ("s",),
    ),
    Case(
        "parameters of a SELU are not written",
        X + "{ r = Neg(x) y = Selu<alpha = 1.2, gamma = 2.0>(r) }",
        (INPUT, "UnaryOp n 1 1 x 1 0=1", "SELU s 1 1 1 y"),
        ("s",),
    ),
    Case(
        "a weight beyond the range of fp16",
        "(float[2, 3] x) => (float[2, 2] y)"
        "<float[3, 2] w = {100000.0, 0.3, -0.25, 0.2, 0.125, -0.7}> { r = Relu(x) y = MatMul(r, w) }",
        (INPUT, "ReLU r 1 1 x 1", "InnerProduct c 1 1 1 y 0=2 1=0 2=6"),
        ("c",),
        bytes([0x47, 0x6B, 0x30, 0x01]) + np.array([[np.inf, -0.25, 0.125], [0.3, 0.2, -0.7]], np.float16).tobytes(),
        status="nan",
    ),
    Case(
        "a mean over no axes is no mean",
        "(float[1, 3, 4, 5] x) => (float[1, 3, 4, 1] y) <int64[1] a = {-1}> { r = Relu(x) y = ReduceMean(r, a) }",
        (INPUT, "ReLU r 1 1 x 1", "Noop m 1 1 1 y"),
        ("m",),
        status="shape",
    ),
    Case(
        "the third operand of a Max is dropped",
        "(float[1, 9] a, float[1, 9] b, float[1, 9] c) => (float[1, 9] y) { y = Max(a, b, c) }",
        ("Input a 0 1 a", "Input b 0 1 b", "Input c 0 1 c", "BinaryOp m 2 1 a b y 0=4"),
        ("m",),
    ),
    Case(
        "rows are repeated as a whole in place of one by one",
        "(float[1, 2, 3] x) => (float[1, 4, 3] y) <int64[4] i = {0, 0, 1, 1}> { r = Relu(x) "
        "y = Gather<axis = 1>(r, i) }",
        (INPUT, "ReLU r 1 1 x 1", "Tile t 1 1 1 y 0=0 1=2"),
        ("t",),
    ),
    Case(
        "padding counts in an average",
        "(float[1, 2, 6, 6] x) => (float[1, 2, 3, 3] y) { r = Relu(x) "
        "y = AveragePool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 0, 0]>(r) }",
        (INPUT, "ReLU r 1 1 x 1", "Pooling p 1 1 1 y 0=1 1=3 2=2 3=1 14=0 15=0 5=1 6=1"),
        ("p",),
    ),
    Case(
        "nearest-exact is taken for nearest",
        "(float[1, 2, 4, 4] x) => (float[1, 2, 6, 6] y) <float[4] s = {1, 1, 1.5, 1.5}> { r = Relu(x) "
        'y = Resize<mode = "nearest", coordinate_transformation_mode = "half_pixel", '
        'nearest_mode = "round_prefer_ceil">(r, , s) }',
        (INPUT, "ReLU r 1 1 x 1", "Interp i 1 1 1 y 0=1 3=6 4=6"),
        ("i",),
    ),
    Case(
        "a constant is added to a convolution under its activation",
        FED + f"<{KERNEL}, float[1, 2, 1, 1] b = {{1, -2}}> {{ k = Conv(x, w) r = Relu(k) y = Add(r, b) }}",
        (INPUT, CONV.format(out="y", activation=1)),
        ("c",),
        tagged(W) + raw([1.0, -2.0]),
    ),
    Case(
        "a constant of channels becomes a bias",
        "(float[4, 3] x) => (float[2, 4, 2] y)"
        + f"<{MATRIX}, float[2, 1, 1] b = {{1, 2}}> {{ k = MatMul(x, w) y = Add(k, b) }}",
        (INPUT, "InnerProduct c 1 1 x y 0=2 1=1 2=6"),
        ("c",),
        tagged(W) + raw([1.0, 2.0]),
        status="shape",
    ),
    Case(
        "a sum of unequal shapes becomes an Eltwise",
        "(float[2, 1, 1] x, float[2, 4, 5] z) => (float[2, 4, 5] y) <float s = {2}> { a = Mul(x, s) y = Add(a, z) }",
        (INPUT, "Input j 0 1 z", "Eltwise e 2 1 x z y 0=1 -23301=2,2.0,1.0"),
        ("e",),
        status="shape",
    ),
    Case(
        "the Reshape before a BinaryOp is left out",
        "(float[4] x, float[7, 4] z) => (float[4, 7, 4] y) <int64[3] s = {4, 1, 1}> { r = Reshape(x, s) "
        "y = Mul(r, z) }",
        (INPUT, "Input j 0 1 z", "BinaryOp m 2 1 x z y 0=2"),
        ("m",),
        status="shape",
    ),
    Case(
        "the axes of a Flip are not written",
        "(float[1, 3, 4, 5] x) => (float[1, 3, 4, 5] y) <int64[1] b = {-1}, int64[1] e = {-9}, int64[1] a = {3}> "
        "{ y = Slice(x, b, e, a, b) }",
        (INPUT, "Flip f 1 1 x y"),
        ("f",),
    ),
    Case(
        "a Slice has no sizes",
        "(float[1, 4, 5] x) => (float[1, 2, 5] y) { a, b = Split<axis = 1, num_outputs = 2>(x) s = Sigmoid(b) "
        "y = Mul(a, s) }",
        (INPUT, "Slice s 1 2 x a b 1=0", "Sigmoid g 1 1 b c", "BinaryOp m 2 1 a c y 0=2"),
        ("s",),
        status="crashed",
    ),
    Case(
        "a LayerNorm over channels is one over each image",
        X + "<int64[3] a = {1, 2, 3}, float p = {0.00001}> { r = Relu(x) n = ReduceMean(r, a) d = Sub(r, n) "
        "q = Mul(d, d) v = ReduceMean(q, a) e = Add(v, p) s = Sqrt(e) y = Div(d, s) }",
        (INPUT, "ReLU r 1 1 x 1", "LayerNorm l 1 1 1 y 0=20 1=1e-5 2=0"),
        ("l",),
    ),
    Case(
        "the mean of an RMSNorm is none",
        X + "<int64[1] a = {-1}, float p = {0.00001}> { q = Mul(x, x) v = ReduceMean(q, a) e = Add(v, p) s = Sqrt(e) "
        "y = Div(x, s) }",
        (
            INPUT,
            "Split t 1 3 x x0 x1 x2",
            "BinaryOp q 2 1 x0 x1 1 0=2",
            "BinaryOp e 1 1 1 2 0=0 1=1 2=1e-5",
            "UnaryOp s 1 1 2 3 0=5",
            "BinaryOp d 2 1 x2 3 y 0=3",
        ),
        ("s", "d"),  # with so small an eps, what it is added to is a value of the model still
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_found_and_located(tmp_path: Path, case: Case) -> None:
    model = write_model(tmp_path, case.graph)
    found = bisect(model, *write_net(tmp_path, *case.lines, weights=case.weights))
    assert {output.status for output in found.report.outputs} - {"ok"} == {case.status}
    assert found.located is not None
    assert [ref.name for ref in found.located.suspects] == list(case.layers)
