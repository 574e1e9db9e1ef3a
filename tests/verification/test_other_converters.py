"""What ncnnoptimize and pnnx are known to make wrong, in small nets: `verify` finds it, `bisect` names the layer.

The table in docs/find-faults.md says where each comes from.
"""

import re
from pathlib import Path
from string import Template

import numpy as np
import pytest

from onnx2ncnn_opt.api.bisect import bisect
from testing import present
from testing.handmade import raw, tagged, write_net
from testing.models import write_model

KERNEL = "float[2, 3, 1, 1] w = {0.5, -0.25, 0.125, 0.3, 0.2, -0.7}"
MATRIX = "float[3, 2] w = {0.5, 0.3, -0.25, 0.2, 0.125, -0.7}"
W = np.array([[0.5, -0.25, 0.125], [0.3, 0.2, -0.7]], np.float32)
HALF = np.array([[np.inf, -0.25, 0.125], [0.3, 0.2, -0.7]], np.float16)
WEIGHTS = {
    "a batch normalization goes into a convolution with an activation": (
        tagged(W * np.array([[2], [1.5]], np.float32)) + raw([0.0, -1.375])
    ),
    "an activation replaces that of a convolution": tagged(W) + raw([0.0, 0.0]),
    "a constant of the rows is added to the columns": tagged(W) + raw([1.0, 2.0]),
    "the scale of a dropout goes through an activation": tagged(W * np.float32(0.5)),
    "a weight beyond the range of fp16": bytes([0x47, 0x6B, 0x30, 0x01]) + HALF.tobytes(),
    "a constant is added to a convolution under its activation": tagged(W) + raw([1.0, -2.0]),
    "a constant of channels becomes a bias": tagged(W) + raw([1.0, 2.0]),
}
# The fault, what verification says, and the layers of which one is to blame; a model, and the wrong net for it, without
# its Input of x.
CASES = """
## a batch normalization goes into a convolution with an activation: mismatch of c
(float[1, 3, 4, 5] x) => (float[1, 2, 4, 5] y) <$KERNEL, float[2] s = {2, 3}, float[2] b = {1, -1}, float[2] m = {0.5,
    0.25}, float[2] v = {1, 4}>
    { k = Conv(x, w) r = Relu(k) y = BatchNormalization<epsilon = 0.0>(r, s, b, m, v) }
Convolution c 1 1 x y 0=2 1=1 5=1 6=6 9=1
## an activation replaces that of a convolution: mismatch of c
(float[1, 3, 4, 5] x) => (float[1, 2, 4, 5] y) <$KERNEL> { k = Conv(x, w) s = Sigmoid(k) y = Relu(s) }
Convolution c 1 1 x y 0=2 1=1 5=1 6=6 9=1
## a constant of the rows is added to the columns: mismatch of c
(float[2, 3] x) => (float[2, 2] y) <$MATRIX, float[2, 1] b = {1, 2}> { k = MatMul(x, w) y = Add(k, b) }
InnerProduct c 1 1 x y 0=2 1=1 2=6
## the scale of a dropout goes through an activation: mismatch of c
(float[2, 3] x) => (float[2, 2] y) <$MATRIX, float h = {0.5}> { k = MatMul(x, w) s = Sigmoid(k) y = Mul(s, h) }
InnerProduct c 1 1 x y 0=2 1=0 2=6 9=4
## a Flatten of rows is left out: shape of r
(float[1, 2, 3] x) => (float[1, 6] y) { r = Relu(x) y = Flatten(r) }
ReLU r 1 1 x y
## an output that a Split gave is gone: missing of n
(float[1, 2, 3] x) => (float[1, 2, 3] y, float[1, 2, 3] z) { y = Neg(x) z = Relu(y) }
UnaryOp n 1 1 x 1 0=1
ReLU r 1 1 1 z
## the kept dims of a mean are dropped: shape of p
(float[1, 3, 4, 5] x) => (float[1, 3, 4, 1] y) <int64[1] a = {3}> { r = Relu(x) y = ReduceMean(r, a) }
ReLU r 1 1 x 1
Pooling p 1 1 1 y 0=1 4=1
## parameters of a Shrink are not written: mismatch of s
(float[1, 3, 4, 5] x) => (float[1, 3, 4, 5] y) { r = Neg(x) y = Shrink<bias = 0.2, lambd = 0.9>(r) }
UnaryOp n 1 1 x 1 0=1
Shrink s 1 1 1 y
## parameters of a SELU are not written: mismatch of s
(float[1, 3, 4, 5] x) => (float[1, 3, 4, 5] y) { r = Neg(x) y = Selu<alpha = 1.2, gamma = 2.0>(r) }
UnaryOp n 1 1 x 1 0=1
SELU s 1 1 1 y
## a weight beyond the range of fp16: nan of c
(float[2, 3] x) => (float[2, 2] y) <float[3, 2] w = {100000.0, 0.3, -0.25, 0.2, 0.125, -0.7}>
    { r = Relu(x) y = MatMul(r, w) }
ReLU r 1 1 x 1
InnerProduct c 1 1 1 y 0=2 1=0 2=6
## a mean over no axes is no mean: shape of m
(float[1, 3, 4, 5] x) => (float[1, 3, 4, 1] y) <int64[1] a = {-1}> { r = Relu(x) y = ReduceMean(r, a) }
ReLU r 1 1 x 1
Noop m 1 1 1 y
## the third operand of a Max is dropped: mismatch of m
(float[1, 9] a, float[1, 9] b, float[1, 9] c) => (float[1, 9] y) { y = Max(a, b, c) }
Input a 0 1 a
Input b 0 1 b
Input c 0 1 c
BinaryOp m 2 1 a b y 0=4
## rows are repeated as a whole in place of one by one: mismatch of t
(float[1, 2, 3] x) => (float[1, 4, 3] y) <int64[4] i = {0, 0, 1, 1}> { r = Relu(x) y = Gather<axis = 1>(r, i) }
ReLU r 1 1 x 1
Tile t 1 1 1 y 0=0 1=2
## padding counts in an average: mismatch of p
(float[1, 2, 6, 6] x) => (float[1, 2, 3, 3] y)
    { r = Relu(x) y = AveragePool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 0, 0]>(r) }
ReLU r 1 1 x 1
Pooling p 1 1 1 y 0=1 1=3 2=2 3=1 14=0 15=0 5=1 6=1
## nearest-exact is taken for nearest: mismatch of i
(float[1, 2, 4, 4] x) => (float[1, 2, 6, 6] y) <float[4] s = {1, 1, 1.5, 1.5}>
    { r = Relu(x) y = Resize<mode = "nearest", coordinate_transformation_mode = "half_pixel", nearest_mode =
    "round_prefer_ceil">(r, , s) }
ReLU r 1 1 x 1
Interp i 1 1 1 y 0=1 3=6 4=6
## a constant is added to a convolution under its activation: mismatch of c
(float[1, 3, 4, 5] x) => (float[1, 2, 4, 5] y) <$KERNEL, float[1, 2, 1, 1] b = {1, -2}>
    { k = Conv(x, w) r = Relu(k) y = Add(r, b) }
Convolution c 1 1 x y 0=2 1=1 5=1 6=6 9=1
## a constant of channels becomes a bias: shape of c
(float[4, 3] x) => (float[2, 4, 2] y) <$MATRIX, float[2, 1, 1] b = {1, 2}> { k = MatMul(x, w) y = Add(k, b) }
InnerProduct c 1 1 x y 0=2 1=1 2=6
## a sum of unequal shapes becomes an Eltwise: shape of e
(float[2, 1, 1] x, float[2, 4, 5] z) => (float[2, 4, 5] y) <float s = {2}> { a = Mul(x, s) y = Add(a, z) }
Input j 0 1 z
Eltwise e 2 1 x z y 0=1 -23301=2,2.0,1.0
## the Reshape before a BinaryOp is left out: shape of m
(float[4] x, float[7, 4] z) => (float[4, 7, 4] y) <int64[3] s = {4, 1, 1}> { r = Reshape(x, s) y = Mul(r, z) }
Input j 0 1 z
BinaryOp m 2 1 x z y 0=2
## the axes of a Flip are not written: mismatch of f
(float[1, 3, 4, 5] x) => (float[1, 3, 4, 5] y) <int64[1] b = {-1}, int64[1] e = {-9}, int64[1] a = {3}>
    { y = Slice(x, b, e, a, b) }
Flip f 1 1 x y
## a Slice has no sizes: crashed of s
(float[1, 4, 5] x) => (float[1, 2, 5] y) { a, b = Split<axis = 1, num_outputs = 2>(x) s = Sigmoid(b) y = Mul(a, s) }
Slice s 1 2 x a b 1=0
Sigmoid g 1 1 b c
BinaryOp m 2 1 a c y 0=2
## a LayerNorm over channels is one over each image: mismatch of l
(float[1, 3, 4, 5] x) => (float[1, 3, 4, 5] y) <int64[3] a = {1, 2, 3}, float p = {0.00001}>
    { r = Relu(x) n = ReduceMean(r, a) d = Sub(r, n) q = Mul(d, d) v = ReduceMean(q, a) e = Add(v, p) s = Sqrt(e) y =
    Div(d, s) }
ReLU r 1 1 x 1
LayerNorm l 1 1 1 y 0=20 1=1e-5 2=0
## the mean of an RMSNorm is none: mismatch of s, d
(float[1, 3, 4, 5] x) => (float[1, 3, 4, 5] y) <int64[1] a = {-1}, float p = {0.00001}>
    { q = Mul(x, x) v = ReduceMean(q, a) e = Add(v, p) s = Sqrt(e) y = Div(x, s) }
Split t 1 3 x x0 x1 x2
BinaryOp q 2 1 x0 x1 1 0=2
BinaryOp e 1 1 1 2 0=0 1=1 2=1e-5
UnaryOp s 1 1 2 3 0=5
BinaryOp d 2 1 x2 3 y 0=3
"""
PARTS = re.compile(r"(.*): (\w+) of (.*)\n(\(.*(?:\n    .*)*)\n((?:.+\n)+)")


@pytest.mark.parametrize("case", CASES.split("## ")[1:], ids=lambda case: case.partition(":")[0])
def test_it_is_found_and_located(tmp_path: Path, case: str) -> None:
    title, status, layers, graph, lines = present(PARTS.match(case)).groups()
    model = write_model(tmp_path, Template(graph).substitute(KERNEL=KERNEL, MATRIX=MATRIX))
    inputs = ["Input in 0 1 x"] if " x" in graph.partition(")")[0] else []
    net = write_net(tmp_path, *inputs, *lines.splitlines(), weights=WEIGHTS.get(title, b""))
    found = bisect(model, *net)
    assert {output.status for output in found.report.outputs} - {"ok"} == {status}
    assert [ref.name for ref in present(found.located).suspects] == layers.split(", ")
