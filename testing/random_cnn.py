"""Random nets of the layers that the passes know, built from lists of small numbers that hypothesis can shrink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.param.binary import weight_blocks

Step = tuple[int, int, int]


class CnnBuilder:
    """Adds one layer after another; every step reads a recent blob, or an older one."""

    def __init__(self, seed: int) -> None:
        self.graph, self.rng = Graph(), np.random.default_rng(seed)
        self.blobs = [self.add("Input", w=6, h=5, c=4)]

    def build(self, steps: Sequence[Step], outputs: Sequence[int]) -> Graph:
        """Return the net of these steps; its outputs are the blobs without consumers, and some with consumers."""
        for kind, which, variant in steps:
            rule = RULES[kind % len(RULES)]
            x = self.blobs[-1 - (0, 0, 0, 0, 0, 1, 1, 2)[which % 8] % len(self.blobs)]
            self.blobs.append(rule(self, x, variant))
        free = [blob for blob in self.blobs if not blob.uses and not blob.is_input]
        inner = [blob for i in outputs if not (blob := self.blobs[i % len(self.blobs)]).is_input]
        self.graph.outputs = [*free, *inner]
        return self.graph

    def add(self, type: str, *inputs: Blob, tops: int = 1, **params: Any) -> Blob:
        """Add a layer with random weights; return its first output."""
        name = f"{type.lower()}_{len(self.graph)}"
        outputs = [Blob(f"{name}_{i}") for i in range(tops)]
        layer = self.graph.add(Layer(type, name, inputs, outputs))
        layer.params.update(params)
        for block in weight_blocks(layer):
            values = self.rng.uniform(0.5, 1.5, block.count)
            if block.name not in ("var_data", "data"):
                values *= self.rng.choice([-1, 1], block.count)
            # Sums over a kernel keep the size of their terms.
            values /= np.sqrt(block.count / 6) if block.name == "weight_data" else 1
            layer.weights[block.name] = values.astype(np.float32)
        assign_shapes(layer)
        return layer.outputs[0]


def _channels(x: Blob) -> int:
    assert x.shape
    size = x.shape[0]
    assert isinstance(size, int)
    return size


def _convolution(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    c, bias = _channels(x), variant >> 3 & 1
    leaky = {"activation_type": 2, "activation_params": (0.1,)}
    activation: dict[str, Any] = {"activation_type": 1} if variant == 1 else leaky if variant == 2 else {}
    if len(x.shape or ()) == 1:
        return net.add("InnerProduct", x, num_output=4, bias_term=bias, weight_data_size=4 * c, **activation)
    size = 3 * 3 * c * c
    kernel: dict[str, Any] = {"num_output": c, "kernel_w": 3, "pad_left": 1, "bias_term": bias}
    if variant % 3 == 0:
        return net.add("Convolution", x, **kernel, **activation, weight_data_size=size)
    if variant % 3 == 1:
        return net.add("ConvolutionDepthWise", x, **kernel, **activation, weight_data_size=9 * c, group=c)
    if variant % 2:
        return net.add("DeconvolutionDepthWise", x, **kernel, **activation, weight_data_size=9 * c, group=c)
    return net.add("Deconvolution", x, **kernel, **activation, weight_data_size=size)


def _batchnorm(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    return net.add("BatchNorm", x, channels=_channels(x), eps=1e-3)


def _scale(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    return net.add("Scale", x, scale_data_size=_channels(x), bias_term=variant & 1)


def _constant(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    """Add an operator with a constant of any form: a scalar, one value per channel, row or column, or all."""
    assert x.shape
    c, *inner = x.shape
    forms: list[dict[str, Any]] = [{"w": 1}, {"w": c}]
    if inner:
        h, w = inner
        forms += [{"w": 1, "h": 1, "c": c}, {"w": w}, {"w": w, "h": h, "c": c}, {"w": 1, "h": h, "c": c}]
    constant = net.add("MemoryData", **forms[variant % len(forms)])
    operands = (x, constant) if variant & 8 else (constant, x)
    return net.add("BinaryOp", *operands, op_type=(0, 1, 2, 4, 7)[variant % 5])


def _scalar(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    return net.add(
        "BinaryOp", x, op_type=(0, 1, 2, 3, 7)[variant % 5], with_scalar=1, b=(0.75, -1.25, 2.0)[variant % 3]
    )


def _activation(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("ReLU", {}),
        ("ReLU", {"slope": 0.1}),
        ("Clip", {"min": -1.0, "max": 1.5}),
        ("Sigmoid", {}),
        ("Mish", {}),
        ("HardSwish", {}),
        ("PReLU", {"num_slope": 1}),
        ("PReLU", {"num_slope": _channels(x)}),
        ("Dropout", {"scale": 0.5}),
    )
    type, params = kinds[variant % len(kinds)]
    return net.add(type, x, **params)


def _gate(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    if variant % 3 == 0:
        return net.add("BinaryOp", x, net.add("Sigmoid", x), op_type=2)
    if variant % 3 == 1:
        return net.add("BinaryOp", net.add("HardSigmoid", x, alpha=1 / 6), x, op_type=2)
    clipped = net.add("Clip", net.add("BinaryOp", x, op_type=0, with_scalar=1, b=3.0), min=0.0, max=6.0)
    return net.add("BinaryOp", net.add("BinaryOp", x, clipped, op_type=2), op_type=3, with_scalar=1, b=6.0)


def _sum(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    """Add the sum of two blobs, with or without factors; of the same shape if there is another such blob."""
    others = [blob for blob in net.blobs if blob.shape == x.shape]
    y = others[variant % len(others)]
    if variant & 1:
        x = net.add("BinaryOp", x, op_type=2, with_scalar=1, b=0.5)
    if variant & 2:
        y = net.add("BinaryOp", y, op_type=2, with_scalar=1, b=-0.75)
    return net.add("BinaryOp", x, y, op_type=0)


def _pool(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    if len(x.shape or ()) == 1:
        return net.add("Flatten", x)
    return net.add("Pooling", x, kernel_w=1 if variant & 1 else 2, pooling_type=variant >> 1 & 1, pad_mode=1)


def _dropout(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    return net.add("Dropout", x)


def _noop(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    if variant & 1:
        return net.add("Noop", x)
    net.add("Noop", x, net.blobs[variant % len(net.blobs)], tops=2)
    return net.graph.layers[-1].outputs[1] if net.graph.layers[-1].outputs[1].shape == x.shape else x


def _head(net: CnnBuilder, x: Blob, variant: int) -> Blob:
    if len(x.shape or ()) == 1:
        return net.add("Dropout", x, scale=0.5)
    pooled = net.add("Pooling", x, pooling_type=1, global_pooling=1)
    flat = net.add("Flatten", pooled) if variant & 1 else net.add("Reshape", pooled, w=-1)
    dense = net.add("InnerProduct", flat, num_output=4, bias_term=1, weight_data_size=4 * _channels(x))
    return net.add("Dropout", dense, scale=0.5) if variant & 2 else dense


RULES = (
    *(_convolution,) * 4,
    *(_batchnorm, _constant, _scalar, _scale, _activation) * 2,
    *(_gate, _sum, _pool, _dropout, _noop, _head),
)
