"""Deep models of small images; `scripts.fuzz.faults` makes nets of 10 to 1,000 layers from them.

    python -m scripts.fuzz.deep_models FOLDER 2 8 30 90 180 250

writes deep3.onnx, ..., of so many blocks each: residual, squeeze and excite, depthwise, split, attention's MLP, pooled,
normalised ones, drawn by the number.
"""

import re
import sys
from pathlib import Path

import numpy as np
import onnx

# {x} goes in, {o} comes out; names of weights say their shapes.
BLOCKS = (
    "{o}n = InstanceNormalization({x}, {o}b8, {o}c8) {o} = Mul({o}n, half)",
    "{o}a = Conv<pads = [1,1,1,1]>({x}, {o}w8x8x3x3, {o}b8) {o}r = Relu({o}a) {o}c = Conv({o}r, {o}v8x8x1x1, {o}c8) "
    "{o}d = Add({o}c, {x}) {o} = Relu({o}d)",
    "{o}g = GlobalAveragePool({x}) {o}a = Conv({o}g, {o}w8x8x1x1, {o}b8) {o}r = Relu({o}a) "
    "{o}c = Conv({o}r, {o}v8x8x1x1, {o}c8) {o}s = Sigmoid({o}c) {o} = Mul({x}, {o}s)",
    "{o}a = Conv<pads = [1,1,1,1], group = 8>({x}, {o}w8x1x3x3, {o}b8) {o}h = HardSwish({o}a) "
    "{o}c = Conv({o}h, {o}v8x8x1x1, {o}c8) {o} = Add({x}, {o}c)",
    "{o}p, {o}q = Split<axis = 1, num_outputs = 2>({x}) {o}a = Conv<pads = [1,1,0,1], strides = [1,1]>({o}q, "
    "{o}w4x4x2x3, {o}b4) {o}t = Tanh({o}a) {o} = Concat<axis = 1>({o}t, {o}p)",
    "{o}f = Reshape({x}, flat) {o}t = Transpose<perm = [0,2,1]>({o}f) {o}n = LayerNormalization({o}t, {o}b8, {o}c8) "
    "{o}m = MatMul({o}n, {o}w8x8) {o}e = Gelu({o}m) {o}l = MatMul({o}e, {o}v8x8) "
    "{o}u = Transpose<perm = [0,2,1]>({o}l) {o}i = Reshape({o}u, image) {o} = Add({x}, {o}i)",
    "{o}a = MaxPool<kernel_shape = [2,2], strides = [2,2]>({x}) {o}c = Conv<pads = [1,1,1,1]>({o}a, {o}w8x8x3x3, {o}b8)"
    ' {o}e = LeakyRelu<alpha = 0.1>({o}c) {o}z = Resize<mode = "nearest">({o}e, , twice) {o} = Add({o}z, {x})',
)
GRAPH = (
    '<ir_version: 9, opset_import: ["": 20]> g (float[1,8,8,8] x) => (float[1,8,8,8] y, float[1,8,1,1] z) <int64[3] '
    "flat = {{1,8,64}}, int64[4] image = {{1,8,8,8}}, float[4] twice = {{1,1,2,2}}, float half = {{0.5}}> {{ {body} "
    "y = Add({last}, x) z = GlobalAveragePool({last}) }}"
)


def deep_model(blocks: int) -> onnx.ModelProto:
    """Return a model of so many blocks, the same for the same number; every eighth block normalises."""
    rng = np.random.default_rng(blocks)
    names = ["x", *(f"n{number}_" for number in range(blocks))]
    kinds = [int(rng.integers(1, len(BLOCKS))) if number % 8 else 0 for number in range(blocks)]
    body = " ".join(BLOCKS[kind].format(x=x, o=o) for kind, x, o in zip(kinds, names, names[1:], strict=False))
    model = onnx.parser.parse_model(GRAPH.format(body=body, last=names[-1]))
    for name in dict.fromkeys(re.findall(r"n\d+_[bcvw]\d[\dx]*", body)):
        shape = tuple(map(int, name.split("_")[1][1:].split("x")))
        scale = 0.5 / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 0.2
        array = rng.standard_normal(shape).astype(np.float32) * np.float32(scale)
        array += np.float32(0.5 if len(shape) == 1 and "_b" in name else 0.0)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for count in map(int, sys.argv[2:]):
        onnx.save(deep_model(count), folder / f"deep{count}.onnx")
