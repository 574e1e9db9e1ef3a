"""Export small PyTorch constructs with torch's exporters, for scripts/run_snippets.py.

    pip install torch==2.13.0 onnxscript
    python scripts/snippets.py FOLDER [-k PART]

Every snippet gives NUMBER.dyn.onnx (dynamo=True, opset 20: torch's default), NUMBER.ts.onnx (TorchScript, opset 17),
some NUMBER.new.onnx (dynamo=True, opset 23), and NUMBER.npz with the inputs and what torch computes of them; NAMES.tsv
says which number is whose, and why an exporter refused. What is there already is not exported again.

A snippet is an expression of x, y and z, or a module, which is applied to them. After `where` stand its modules and
constants:

    F.linear(x, w) where w = randn(8, 4)
"""
# ruff: noqa: D102 - the docstring of a module says what its forward computes

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from export_fixtures import clean
from torch import Tensor, nn

Inputs = tuple[Any, ...]  # of each input the shape, if it is of N(0,1), or the tensor itself
Entry = str | tuple[str, Inputs]


def randn(*shape: int) -> Tensor:
    """Weights and constants: of few bits, so that files of them pack well."""
    return (torch.randn(*shape) * 32).round() / 64


def integers(high: int, *shape: int) -> Tensor:
    """Indices below `high`."""
    return torch.randint(high, shape)


def bools(*shape: int) -> Tensor:
    """A mask that leaves something in each row."""
    mask = torch.rand(*shape) > 0.4
    mask[..., 0] = True
    return mask


def positive(*shape: int) -> Tensor:
    """Numbers that have a logarithm."""
    return torch.rand(*shape) + 0.1


def causal(size: int) -> Tensor:
    """The mask of 0 and -inf of a decoder."""
    return nn.Transformer.generate_square_subsequent_mask(size)


IMAGE: Inputs = ((1, 3, 12, 14),)
TOKENS: Inputs = ((1, 6, 16),)
BATCH: Inputs = ((2, 6, 16),)
TWO: Inputs = ((2, 3, 8), (2, 3, 8))
VECTORS: Inputs = ((4, 10),)
HEADS: Inputs = ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8))


class Focus(nn.Module):
    """YOLOv5's first layer: four interleaved quarters as channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)


class WindowPartition(nn.Module):
    """Swin's windows as batch, and back; with a cyclic shift."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n, h, w, c = x.shape
        shifted = torch.roll(x, (-2, -2), (1, 2))
        windows = shifted.view(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        back = windows.view(n, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return windows, torch.roll(back * 2, (2, 2), (1, 2))


class FusedQKV(nn.Module):
    """Self-attention of one projection, its parts taken as `way` says."""

    def __init__(self, way: str, *, bias: bool = True) -> None:
        super().__init__()
        self.way, self.qkv, self.out = way, nn.Linear(16, 48, bias=bias), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        if self.way == "unbind 0":
            q, k, v = self.qkv(x).reshape(n, t, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.way == "unbind 2":
            q, k, v = (part.transpose(1, 2) for part in self.qkv(x).reshape(n, t, 3, 4, 4).unbind(2))
        elif self.way == "chunk":
            q, k, v = (part.view(n, t, 4, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        else:
            parts = self.qkv(x).view(n, t, 4, 12).transpose(1, 2)
            q, k, v = parts.split(4, -1)
            weights = (q * 0.5 @ k.transpose(-2, -1)).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c))


def angles(length: int, size: int) -> Tensor:
    """The angle of each position and pair."""
    return torch.outer(torch.arange(float(length)), 100.0 ** -(torch.arange(0.0, size, 2) / size))


class RotateHalf(nn.Module):
    """Rotary embedding as in Llama: the pairs are the two halves."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.register_buffer("cos", torch.cat([angles(length, size).cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles(length, size).sin()] * 2, -1))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat([-right, left], -1) * self.sin


class RotatePairs(nn.Module):
    """Rotary embedding as in GPT-J: the pairs are neighbours."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.register_buffer("cos", angles(length, size).cos())
        self.register_buffer("sin", angles(length, size).sin())

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * self.cos - odd * self.sin, even * self.sin + odd * self.cos], -1).flatten(-2)


class Alibi(nn.Module):
    """Scores with a penalty that grows with the distance."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, length = q.shape[1], q.shape[2]
        slopes = 2.0 ** -torch.arange(1.0, heads + 1)
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        bias = slopes[:, None, None] * -distance.abs()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class RelativeBias(nn.Module):
    """Swin's attention: a table of biases by distance, and a mask for each window."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.table = nn.Parameter(randn(11, 4))
        position = torch.arange(6)
        self.register_buffer("index", position[:, None] - position[None, :] + 5)
        self.register_buffer("mask", torch.where(torch.rand(2, 6, 6) > 0.3, 0.0, -100.0))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, 4, 4).permute(2, 0, 3, 1, 4)
        scores = q * 0.5 @ k.transpose(-2, -1)
        scores = scores + self.table[self.index.view(-1)].view(t, t, 4).permute(2, 0, 1)
        scores = scores.view(-1, 2, 4, t, t) + self.mask[:, None]
        return (scores.view(n, 4, t, t).softmax(-1) @ v).transpose(1, 2).reshape(n, t, c)


class ChannelNorm(nn.Module):
    """ConvNeXt's normalisation over channels, written by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(size)), nn.Parameter(randn(size))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * ((x - mean) / torch.sqrt(variance + 1e-6)) + self.bias[:, None, None]


class HandRMSNorm(nn.Module):
    """Llama's normalisation by the root mean square."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class ChannelShuffle(nn.Module):
    """ShuffleNet's shuffle, by views."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class SqueezeExcite(nn.Module):
    """A gate for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))[:, :, None, None]


class PatchMerge(nn.Module):
    """Swin's downsampling: four neighbours as channels, a norm and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(32), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.norm(torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)))


class Boxes(nn.Module):
    """A detector's decoding: a grid of cells, in-place assignment of slices."""

    def forward(self, x: Tensor) -> Tensor:
        ys, xs = torch.meshgrid(torch.arange(12.0), torch.arange(14.0), indexing="ij")
        y = x.sigmoid().permute(0, 2, 3, 1).clone()
        y[..., 0] = (y[..., 0] * 2 + xs) * 8
        y[..., 1] = (y[..., 1] * 2 + ys) * 8
        return y.view(x.shape[0], -1, 3)


class Loop(nn.Module):
    """A recurrence that exporters unroll."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 8)
        steps = []
        for step in x.unbind(1):
            h = self.cell(step, h)
            steps.append(h)
        return torch.stack(steps, 1)


SNIPPETS: dict[str, tuple[Inputs, list[Entry]]] = {
    "convolution": (
        IMAGE,
        [
            "nn.Conv2d(3, 4, 3)",
            "nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)",
            "nn.Conv2d(3, 4, (3, 5), stride=(1, 2), padding=(0, 2), dilation=(2, 1))",
            "nn.Conv2d(3, 4, 4, padding='same')",
            "nn.Conv2d(3, 4, 3, padding='valid')",
            "nn.Conv2d(3, 6, 3, groups=3)",
            "nn.Conv2d(3, 4, 3, padding=1, padding_mode='reflect')",
            "nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode='circular')",
            "nn.Conv2d(3, 4, 3, padding=1, padding_mode='replicate')",
            "nn.Conv2d(3, 4, 3, padding=1, padding_mode='zeros', dilation=2)",
            ("nn.Conv2d(4, 6, 3, groups=2)", ((2, 4, 8, 9),)),
            ("nn.Conv2d(4, 4, 1)", ((4, 8, 9),)),
            ("nn.Conv1d(4, 6, 3, stride=2, padding=1)", ((1, 4, 15),)),
            ("nn.Conv1d(4, 6, 3, padding='same', dilation=2)", ((2, 4, 15),)),
            ("nn.Conv1d(4, 4, 5, groups=4, padding=2)", ((1, 4, 15),)),
            ("nn.Conv1d(4, 4, 3, padding=2, padding_mode='circular')", ((1, 4, 15),)),
            ("nn.Conv3d(2, 3, 3)", ((1, 2, 5, 6, 7),)),
            ("nn.Conv3d(2, 4, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1), groups=2)", ((1, 2, 4, 6, 7),)),
            ("nn.Conv3d(2, 3, 3, padding='same')", ((2, 2, 4, 5, 6),)),
            ("F.conv2d(x, y)", ((1, 3, 8, 9), (4, 3, 3, 3))),
            ("F.conv2d(x, y.view(3, 1, 3, 3), groups=3)", ((1, 3, 8, 9), (3, 9))),
            ("F.conv1d(x, y, padding=1)", ((1, 3, 8), (4, 3, 3))),
            "nn.ConvTranspose2d(3, 4, 2, stride=2)",
            "nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1)",
            "nn.ConvTranspose2d(3, 6, 3, groups=3, dilation=2, bias=False)",
            "nn.ConvTranspose2d(3, 4, (2, 3), stride=(2, 1), padding=(0, 1))",
            ("nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1)", ((1, 4, 9),)),
            ("nn.ConvTranspose1d(4, 4, 3, stride=3, output_padding=2, groups=2)", ((2, 4, 9),)),
            ("nn.ConvTranspose3d(2, 3, 2, stride=2)", ((1, 2, 3, 4, 5),)),
            ("nn.ConvTranspose3d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2)", ((1, 2, 3, 4, 5),)),
            "m(x, output_size=(24, 28)) where m = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)",
            "n(m(x)) where m = nn.Conv2d(3, 4, 3, bias=False); n = nn.BatchNorm2d(4)",
            "m(F.pad(x, (1, 0, 2, 1))) where m = nn.Conv2d(3, 4, 3)",
            "m(x) where m = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))",
            ("nn.Linear(16, 5)", TOKENS),
            ("nn.Linear(16, 5, bias=False)", ((16,),)),
            ("nn.Linear(10, 5)", VECTORS),
            ("nn.Linear(8, 5)", ((2, 3, 4, 8),)),
            ("nn.Linear(4, 5)", ((2, 2, 3, 3, 4),)),
            ("nn.Bilinear(8, 8, 5)", TWO),
            ("F.bilinear(x, y, w) where w = randn(5, 8, 8)", TWO),
            ("nn.Identity()", TOKENS),
            ("nn.Flatten()", IMAGE),
            ("nn.Flatten(0, 1)", IMAGE),
            ("nn.Unflatten(1, (2, 5))", VECTORS),
            ("nn.Dropout(0.5)", TOKENS),
        ],
    ),
    "normalization": (
        IMAGE,
        [
            "nn.BatchNorm2d(3)",
            "nn.BatchNorm2d(3, affine=False)",
            "nn.BatchNorm2d(3, track_running_stats=False)",
            ("nn.BatchNorm1d(10)", VECTORS),
            ("nn.BatchNorm1d(6)", TOKENS),
            ("nn.BatchNorm3d(2)", ((1, 2, 3, 4, 5),)),
            ("nn.LayerNorm(16)", TOKENS),
            ("nn.LayerNorm(16)", BATCH),
            ("nn.LayerNorm(16, elementwise_affine=False)", TOKENS),
            ("nn.LayerNorm(16, bias=False)", TOKENS),
            ("nn.LayerNorm((6, 16))", BATCH),
            "nn.LayerNorm([3, 12, 14])",
            ("nn.LayerNorm([3, 12, 14])", ((2, 3, 12, 14),)),
            "m(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) where m = nn.LayerNorm(3)",
            ("m(x) where m = ChannelNorm(6)", ((1, 6, 5, 7),)),
            ("m(x) where m = ChannelNorm(6)", ((2, 6, 5, 7),)),
            ("nn.GroupNorm(3, 6)", ((1, 6, 5, 7),)),
            ("nn.GroupNorm(1, 6)", ((2, 6, 5, 7),)),
            ("nn.GroupNorm(6, 6, affine=False)", ((1, 6, 5, 7),)),
            ("nn.GroupNorm(2, 6)", TOKENS),
            ("nn.GroupNorm(2, 4)", ((1, 4, 3, 4, 5),)),
            "nn.InstanceNorm2d(3)",
            "nn.InstanceNorm2d(3, affine=True)",
            "nn.InstanceNorm2d(3, affine=True, track_running_stats=True)",
            ("nn.InstanceNorm1d(6)", TOKENS),
            ("nn.InstanceNorm1d(6, affine=True)", BATCH),
            ("nn.InstanceNorm3d(2, affine=True)", ((1, 2, 3, 4, 5),)),
            ("nn.RMSNorm(16)", TOKENS),
            ("nn.RMSNorm((6, 16), eps=1e-5)", BATCH),
            ("nn.RMSNorm(16, elementwise_affine=False)", TOKENS),
            ("m(x) where m = HandRMSNorm(16)", BATCH),
            ("nn.LocalResponseNorm(3)", ((1, 6, 5, 7),)),
            ("nn.LocalResponseNorm(4, alpha=0.1, beta=0.5, k=2.0)", ((2, 6, 5, 7),)),
            ("F.normalize(x, dim=1)", IMAGE),
            ("F.normalize(x, dim=-1)", TOKENS),
            ("F.normalize(x, p=1, dim=2)", IMAGE),
            ("F.normalize(x, p=3, dim=-1)", TOKENS),
            ("F.normalize(x, dim=0)", VECTORS),
            ("F.layer_norm(x, (16,), y, z)", ((2, 6, 16), (16,), (16,))),
            "(x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1e-5)",
            "(x - m) / s where m = randn(3, 1, 1); s = positive(3, 1, 1)",
            ("m(x) where m = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))", TOKENS),
        ],
    ),
    "activation": (
        IMAGE,
        [
            "nn.ReLU()",
            "nn.ReLU6()",
            "nn.LeakyReLU(0.2)",
            "nn.PReLU()",
            "nn.PReLU(3)",
            ("nn.PReLU(10)", VECTORS),
            ("nn.PReLU(6)", TOKENS),
            "nn.RReLU()",
            "nn.ELU(0.5)",
            "nn.SELU()",
            "nn.CELU(0.7)",
            "nn.GELU()",
            "nn.GELU('tanh')",
            "nn.Sigmoid()",
            "nn.LogSigmoid()",
            "nn.Tanh()",
            "nn.Tanhshrink()",
            "nn.Softplus()",
            "nn.Softplus(beta=2, threshold=1)",
            "nn.Softsign()",
            "nn.Softshrink(0.3)",
            "nn.Hardshrink(0.3)",
            "nn.Hardsigmoid()",
            "nn.Hardswish()",
            "nn.Hardtanh(-0.5, 0.7)",
            "nn.SiLU()",
            "nn.Mish()",
            "nn.Threshold(0.1, -3.0)",
            "nn.Softmin(1)",
            "nn.Softmax(1)",
            "nn.Softmax2d()",
            ("nn.Softmax(-1)", BATCH),
            ("nn.Softmax(0)", VECTORS),
            ("nn.Softmax(0)", ((10,),)),
            "nn.LogSoftmax(1)",
            ("nn.LogSoftmax(-1)", BATCH),
            ("nn.GLU()", TOKENS),
            ("nn.GLU(1)", ((1, 6, 5, 7),)),
            ("nn.GLU(1)", ((2, 6, 5),)),
            "x * torch.sigmoid(x)",
            "x * torch.sigmoid(1.702 * x)",
            "x * torch.tanh(F.softplus(x))",
            "x * F.relu6(x + 3) / 6",
            "0.5 * x * (1 + torch.erf(x / 2**0.5))",
            "0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))",
            "F.relu(x, inplace=True)",
            "torch.clamp(x, min=0)",
            "torch.clamp(x, max=0.5)",
            "x.clamp(-0.5, 0.5)",
            "torch.celu(x)",
            "F.rrelu(x)",
            ("F.gumbel_softmax(x, dim=-1) * 0 + x", TOKENS),
        ],
    ),
    "pooling": (
        IMAGE,
        [
            "nn.MaxPool2d(2)",
            "nn.MaxPool2d(3, 2, 1)",
            "nn.MaxPool2d(3, 2, ceil_mode=True)",
            "nn.MaxPool2d((3, 2), stride=(1, 2), padding=(1, 0))",
            "nn.MaxPool2d(3, 1, dilation=2)",
            "nn.MaxPool2d(5, 3, 2, ceil_mode=True)",
            ("nn.MaxPool1d(3, 2)", ((1, 4, 15),)),
            ("nn.MaxPool1d(2, ceil_mode=True)", ((2, 4, 15),)),
            ("nn.MaxPool3d(2)", ((1, 2, 4, 6, 7),)),
            ("nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1))", ((1, 2, 4, 6, 7),)),
            "F.max_pool2d(x, 2, return_indices=True)",
            "F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)",
            "nn.AvgPool2d(2)",
            "nn.AvgPool2d(3, 2, 1)",
            "nn.AvgPool2d(3, 2, 1, count_include_pad=False)",
            "nn.AvgPool2d(3, 2, ceil_mode=True)",
            "nn.AvgPool2d(3, 2, 1, ceil_mode=True)",
            "nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)",
            "nn.AvgPool2d(5, 3, 2, ceil_mode=True)",
            "nn.AvgPool2d(2, divisor_override=3)",
            ("nn.AvgPool1d(3, 2, 1)", ((1, 4, 15),)),
            ("nn.AvgPool1d(4, ceil_mode=True)", ((2, 4, 15),)),
            ("nn.AvgPool3d(2)", ((1, 2, 4, 6, 7),)),
            ("nn.AvgPool3d(3, 2, 1, ceil_mode=True, count_include_pad=False)", ((1, 2, 4, 6, 7),)),
            "nn.AdaptiveAvgPool2d(1)",
            "nn.AdaptiveAvgPool2d((4, 7))",
            "nn.AdaptiveAvgPool2d(5)",
            "nn.AdaptiveAvgPool2d((None, 1))",
            ("nn.AdaptiveAvgPool1d(5)", ((1, 4, 15),)),
            ("nn.AdaptiveAvgPool1d(4)", ((1, 4, 15),)),
            ("nn.AdaptiveAvgPool3d(1)", ((1, 2, 4, 6, 7),)),
            ("nn.AdaptiveAvgPool3d((2, 3, 7))", ((1, 2, 4, 6, 7),)),
            "nn.AdaptiveMaxPool2d(1)",
            "nn.AdaptiveMaxPool2d((3, 7))",
            "nn.AdaptiveMaxPool2d((5, 4))",
            ("nn.AdaptiveMaxPool1d(1)", ((1, 4, 15),)),
            ("nn.AdaptiveMaxPool1d(5)", ((1, 4, 15),)),
            ("nn.AdaptiveMaxPool3d(2)", ((1, 2, 4, 6, 8),)),
            "nn.LPPool2d(2, 3)",
            "nn.LPPool2d(3, 2, ceil_mode=True)",
            ("nn.LPPool1d(2, 3, stride=2)", ((1, 4, 15),)),
            "nn.FractionalMaxPool2d(3, output_size=(5, 6))",
            ("nn.MaxPool2d(2)", ((3, 12, 14),)),
            ("nn.AvgPool2d(2)", ((2, 3, 12, 14),)),
        ],
    ),
    "padding": (
        IMAGE,
        [
            "nn.ZeroPad2d((1, 2, 0, 3))",
            "nn.ConstantPad2d(2, 1.5)",
            "nn.ReflectionPad2d((1, 2, 3, 0))",
            "nn.ReplicationPad2d((1, 2, 3, 0))",
            "nn.CircularPad2d((1, 2, 3, 0))",
            ("nn.ConstantPad1d((1, 2), -1.0)", TOKENS),
            ("nn.ReflectionPad1d(2)", TOKENS),
            ("nn.ReplicationPad1d((3, 1))", BATCH),
            ("nn.CircularPad1d((2, 1))", TOKENS),
            ("nn.ReplicationPad3d(1)", ((1, 2, 3, 4, 5),)),
            ("nn.ReflectionPad3d(1)", ((1, 2, 3, 4, 5),)),
            ("nn.ConstantPad3d((1, 0, 2, 1, 0, 1), 0.5)", ((1, 2, 3, 4, 5),)),
            ("nn.CircularPad3d(1)", ((1, 2, 3, 4, 5),)),
            "F.pad(x, (-1, 2, 1, -2))",
            "F.pad(x, (0, 0, 0, 0, 1, 2))",
            "F.pad(x, (1, 1, 1, 1, 0, 2), value=-3.0)",
            "F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))",
            ("F.pad(x, (0, 0, 1, 0))[:, :-1]", TOKENS),
            ("F.pad(x, (2, 2), mode='reflect')", VECTORS),
        ],
    ),
    "resize": (
        IMAGE,
        [
            "F.interpolate(x, scale_factor=2)",
            "F.interpolate(x, scale_factor=1.5)",
            "F.interpolate(x, size=(7, 9))",
            "F.interpolate(x, scale_factor=(0.5, 2.0))",
            "F.interpolate(x, scale_factor=2, mode='nearest-exact')",
            "F.interpolate(x, scale_factor=1.5, mode='nearest-exact')",
            "F.interpolate(x, size=(7, 9), mode='nearest-exact')",
            "F.interpolate(x, scale_factor=2.0, mode='bilinear')",
            "F.interpolate(x, scale_factor=2.0, mode='bilinear', align_corners=True)",
            "F.interpolate(x, size=(7, 9), mode='bilinear')",
            "F.interpolate(x, size=(7, 9), mode='bilinear', align_corners=True)",
            "F.interpolate(x, size=(7, 9), mode='bilinear', antialias=True)",
            "F.interpolate(x, scale_factor=1.3, mode='bilinear')",
            "F.interpolate(x, scale_factor=1.3, mode='bilinear', recompute_scale_factor=True)",
            "F.interpolate(x, scale_factor=2.0, mode='bicubic')",
            "F.interpolate(x, size=(7, 20), mode='bicubic', align_corners=True)",
            "F.interpolate(x, size=(7, 9), mode='bicubic', antialias=True)",
            "F.interpolate(x, scale_factor=0.7, mode='bicubic')",
            "F.interpolate(x, size=(6, 7), mode='area')",
            "F.interpolate(x, size=(5, 9), mode='area')",
            ("F.interpolate(x, scale_factor=2)", ((1, 4, 9),)),
            ("F.interpolate(x, size=13, mode='linear')", ((2, 4, 9),)),
            ("F.interpolate(x, scale_factor=2.0, mode='linear', align_corners=True)", ((1, 4, 9),)),
            ("F.interpolate(x, scale_factor=1.5, mode='nearest-exact')", ((1, 4, 9),)),
            ("F.interpolate(x, scale_factor=2)", ((1, 2, 3, 4, 5),)),
            ("F.interpolate(x, size=(4, 6, 7), mode='trilinear')", ((1, 2, 3, 4, 5),)),
            ("F.interpolate(x, scale_factor=2.0, mode='trilinear', align_corners=True)", ((1, 2, 3, 4, 5),)),
            "nn.Upsample(scale_factor=2)",
            "nn.Upsample(scale_factor=(2, 3), mode='bilinear')",
            "nn.UpsamplingBilinear2d(scale_factor=2)",
            "F.interpolate(x, size=x.shape[2:], mode='bilinear')",
            ("F.interpolate(x, size=y.shape[2:], mode='bilinear') + y", ((1, 3, 6, 7), (1, 3, 12, 14))),
            "F.grid_sample(x, g, align_corners=False) where g = randn(1, 5, 6, 2)",
            ("F.grid_sample(x, y, align_corners=True)", ((1, 3, 6, 7), (1, 5, 4, 2))),
            ("F.grid_sample(x, y, padding_mode='border', align_corners=False)", ((1, 3, 6, 7), (1, 5, 4, 2))),
            ("F.grid_sample(x, y, padding_mode='reflection', align_corners=False)", ((1, 3, 6, 7), (1, 5, 4, 2))),
            ("F.grid_sample(x, y, mode='bicubic', align_corners=False)", ((1, 3, 6, 7), (1, 5, 4, 2))),
            "F.grid_sample(x, g, mode='nearest', align_corners=False) where g = randn(1, 5, 6, 2)",
            "F.grid_sample(x, F.affine_grid(t, (1, 3, 6, 7), align_corners=False)) where t = randn(1, 2, 3)",
            ("F.grid_sample(x, F.affine_grid(y, (2, 3, 5, 6)), align_corners=False)", ((2, 3, 6, 7), (2, 2, 3))),
            ("F.affine_grid(x, (1, 3, 5, 6), align_corners=True)", ((1, 2, 3),)),
            ("F.affine_grid(x, (1, 2, 3, 4, 5), align_corners=False)", ((1, 3, 4),)),
        ],
    ),
    "attention": (
        BATCH,
        [
            "m(x, x, x)[0] where m = nn.MultiheadAttention(16, 4, batch_first=True)",
            "m(x, x, x, need_weights=False)[0] where m = nn.MultiheadAttention(16, 4, batch_first=True)",
            "m(x, x, x) where m = nn.MultiheadAttention(16, 4, batch_first=True)",
            "m(x, x, x, average_attn_weights=False) where m = nn.MultiheadAttention(16, 2, batch_first=True)",
            "m(x, x, x)[0] where m = nn.MultiheadAttention(16, 4)",
            ("m(x, x, x)[0] where m = nn.MultiheadAttention(16, 4)", ((6, 1, 16),)),
            ("m(x, x, x)[0] where m = nn.MultiheadAttention(16, 4)", ((6, 16),)),
            "m(x, x, x)[0] where m = nn.MultiheadAttention(16, 4, bias=False, batch_first=True)",
            "m(x, x, x, attn_mask=a)[0] where m = nn.MultiheadAttention(16, 4, batch_first=True); a = causal(6)",
            (
                "m(x, x, x, attn_mask=y)[0] where m = nn.MultiheadAttention(16, 4, batch_first=True)",
                ((2, 6, 16), (6, 6)),
            ),
            (
                "m(x, x, x, key_padding_mask=y)[0] where m = nn.MultiheadAttention(16, 4, batch_first=True)",
                ((2, 6, 16), ~bools(2, 6)),
            ),
            (
                "m(x, y, y)[0] where m = nn.MultiheadAttention(16, 4, kdim=8, vdim=8, batch_first=True)",
                ((2, 6, 16), (2, 5, 8)),
            ),
            ("m(x, y, y)[0] where m = nn.MultiheadAttention(16, 4)", ((6, 1, 16), (5, 1, 16))),
            "m(x, x, x)[0] where m = nn.MultiheadAttention(16, 4, add_bias_kv=True, batch_first=True)",
            "m(x, x, x)[0] where m = nn.MultiheadAttention(16, 4, add_zero_attn=True, batch_first=True)",
            "m(x) where m = FusedQKV('unbind 0')",
            ("m(x) where m = FusedQKV('unbind 0', bias=False)", TOKENS),
            "m(x) where m = FusedQKV('unbind 2')",
            "m(x) where m = FusedQKV('chunk')",
            "m(x) where m = FusedQKV('split heads')",
            ("F.scaled_dot_product_attention(x, y, z)", HEADS),
            ("F.scaled_dot_product_attention(x, y, z, is_causal=True)", HEADS),
            ("F.scaled_dot_product_attention(x, y, z, scale=0.3)", HEADS),
            ("F.scaled_dot_product_attention(x, y, z, attn_mask=a) where a = randn(6, 6)", HEADS),
            ("F.scaled_dot_product_attention(x, y, z, attn_mask=a) where a = bools(6, 6)", HEADS),
            ("F.scaled_dot_product_attention(x, x, y, attn_mask=z)", ((2, 4, 6, 8), (2, 4, 6, 8), (2, 1, 6, 6))),
            ("F.scaled_dot_product_attention(x, x, y, attn_mask=z)", ((2, 4, 6, 8), (2, 4, 6, 8), bools(2, 1, 6, 6))),
            ("F.scaled_dot_product_attention(x, x, y, attn_mask=z)", ((2, 4, 6, 8), (2, 4, 6, 8), bools(6, 6))),
            ("F.scaled_dot_product_attention(x, y, y, enable_gqa=True)", ((1, 4, 6, 8), (1, 2, 6, 8))),
            ("F.scaled_dot_product_attention(x, y, z)", ((2, 6, 8), (2, 5, 8), (2, 5, 3))),
            ("F.scaled_dot_product_attention(x, y, z)", ((1, 4, 6, 8), (1, 4, 3, 8), (1, 4, 3, 8))),
            ("F.scaled_dot_product_attention(x, y, z)", ((6, 8), (5, 8), (5, 8))),
            ("(x @ y.transpose(-2, -1) / 8**0.5).softmax(-1) @ z", HEADS),
            ("(x @ y.mT * 0.3).masked_fill(a, -1e9).softmax(-1) @ z where a = bools(6, 6)", HEADS),
            ("(x @ y.mT).masked_fill(a, float('-inf')).softmax(-1) @ z where a = torch.ones(6, 6).triu(1) > 0", HEADS),
            ("torch.einsum('bhid,bhjd->bhij', x, y).softmax(-1)", HEADS[:2]),
            ("nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)", BATCH),
            ("nn.TransformerEncoderLayer(16, 4, 24, activation='gelu', norm_first=True, batch_first=True)", TOKENS),
            ("nn.TransformerEncoderLayer(16, 4, 24)", ((6, 2, 16),)),
            (
                "m(x, src_mask=a) where m = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True); a = causal(6)",
                BATCH,
            ),
            (
                "m(x, src_key_padding_mask=y) where m = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)",
                ((2, 6, 16), ~bools(2, 6)),
            ),
            ("nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2)", TOKENS),
            ("m(x, y) where m = nn.TransformerDecoderLayer(16, 4, 24, batch_first=True)", ((2, 6, 16), (2, 5, 16))),
            (
                "m(x, y, tgt_mask=a) where m = nn.TransformerDecoderLayer(16, 4, 24); a = causal(6)",
                ((6, 1, 16), (5, 1, 16)),
            ),
            (
                "m(x, y) where m = nn.Transformer(16, 4, 1, 1, 24, batch_first=True)",
                ((1, 6, 16), (1, 5, 16)),
            ),
            ("m(x) where m = RotateHalf(6, 8)", HEADS[:1]),
            ("m(x) where m = RotateHalf(6, 8)", ((1, 4, 6, 8),)),
            ("m(x) where m = RotatePairs(6, 8)", HEADS[:1]),
            ("m(x) where m = RotatePairs(6, 8)", ((1, 4, 6, 8),)),
            ("F.scaled_dot_product_attention(m(x), m(y), z, is_causal=True) where m = RotateHalf(6, 8)", HEADS),
            ("m(x, y, z) where m = Alibi()", HEADS),
            ("m(x) where m = RelativeBias()", BATCH),
            ("m(x) where m = WindowPartition()", ((1, 8, 12, 3),)),
            ("m(x) where m = WindowPartition()", ((2, 8, 8, 3),)),
            ("m(x) where m = PatchMerge()", ((1, 6, 4, 8),)),
            ("torch.cat([c.expand(x.shape[0], -1, -1), x], 1)[:, 0] where c = randn(1, 1, 16)", BATCH),
        ],
    ),
    "recurrent": (
        BATCH,
        [
            "nn.RNN(16, 8)",
            "nn.RNN(16, 8, nonlinearity='relu', batch_first=True)",
            "nn.RNN(16, 8, num_layers=2, bidirectional=True)",
            "nn.LSTM(16, 8)",
            "nn.LSTM(16, 8, batch_first=True)",
            "nn.LSTM(16, 8, batch_first=True, bias=False)",
            "nn.LSTM(16, 8, num_layers=2, bidirectional=True, batch_first=True)",
            "nn.LSTM(16, 8, proj_size=5, batch_first=True)",
            ("nn.LSTM(16, 8, batch_first=True)", TOKENS),
            ("nn.LSTM(16, 8)", ((6, 16),)),
            ("m(x, (y, z)) where m = nn.LSTM(16, 8)", ((6, 1, 16), (1, 1, 8), (1, 1, 8))),
            ("m(x, (y, z)) where m = nn.LSTM(16, 8, bidirectional=True)", ((6, 2, 16), (2, 2, 8), (2, 2, 8))),
            ("m(x)[0] where m = nn.LSTM(16, 8, bidirectional=True, batch_first=True)", TOKENS),
            ("m(x)[1][0][-1] where m = nn.LSTM(16, 8, batch_first=True)", TOKENS),
            ("m(x)[0][:, -1] where m = nn.LSTM(16, 8, batch_first=True)", BATCH),
            "nn.GRU(16, 8)",
            "nn.GRU(16, 8, batch_first=True)",
            "nn.GRU(16, 8, num_layers=2, bidirectional=True)",
            ("nn.GRU(16, 8, bidirectional=True, batch_first=True)", TOKENS),
            ("nn.GRU(16, 8, bias=False)", ((6, 1, 16),)),
            ("m(x, y) where m = nn.GRU(16, 8)", ((6, 1, 16), (1, 1, 8))),
            ("m(x, h) where m = nn.GRU(16, 8); h = randn(1, 2, 8)", ((6, 2, 16),)),
            ("m(x)[1].squeeze(0) where m = nn.GRU(16, 8, batch_first=True)", TOKENS),
            ("nn.RNNCell(16, 8)", ((2, 16),)),
            ("m(x, y) where m = nn.GRUCell(16, 8)", ((2, 16), (2, 8))),
            ("m(x, (y, z)) where m = nn.LSTMCell(16, 8)", ((2, 16), (2, 8), (2, 8))),
            ("m(x) where m = Loop()", BATCH),
        ],
    ),
    "embedding": (
        (integers(10, 1, 6),),
        [
            "nn.Embedding(10, 8)",
            "nn.Embedding(10, 8, padding_idx=0)",
            ("nn.Embedding(10, 8)", (integers(10, 2, 6),)),
            ("nn.Embedding(10, 8)", (integers(10, 6),)),
            ("nn.Embedding(10, 8)", (integers(10, 2, 3, 2),)),
            ("nn.Embedding(10, 8)", (integers(10, 1, 6).int(),)),
            "m(x) * 4 + p[: x.shape[1]] where m = nn.Embedding(10, 8); p = randn(9, 8)",
            "m(x) + n(torch.arange(x.shape[1])) where m = nn.Embedding(10, 8); n = nn.Embedding(9, 8)",
            "m(x).mean(1) where m = nn.Embedding(10, 8)",
            ("nn.EmbeddingBag(10, 8)", (integers(10, 2, 6),)),
            ("nn.EmbeddingBag(10, 8, mode='sum')", (integers(10, 2, 6),)),
            ("nn.EmbeddingBag(10, 8, mode='max')", (integers(10, 2, 6),)),
            "F.one_hot(x, 10)",
            "F.one_hot(x, 10).float() @ w where w = randn(10, 4)",
            "m(x) * (x != 0).unsqueeze(-1) where m = nn.Embedding(10, 8)",
            "m(x) @ m.weight.t() where m = nn.Embedding(10, 8)",
        ],
    ),
    "indexing": (
        IMAGE,
        [
            "x[0]",
            "x[:, 1]",
            "x[..., -1]",
            "x[:, :2]",
            "x[:, -2:]",
            "x[..., ::2]",
            "x[:, :, 1::3, ::2]",
            "x[:, :, 2:-2, 3:-1]",
            "x[:, [0, 2]]",
            "x[:, [2, 0, 0, 1]]",
            "x[..., [5, 3, 1]]",
            "x[:, :, [0, 1], [2, 3]]",
            "x[:, None, :, 0]",
            "x[:, :, None]",
            "x[0, 1, ..., None]",
            "x[:, torch.tensor([0, 2])]",
            "x[..., torch.tensor([True, False] * 7)]",
            "x.select(1, 2)",
            "x.narrow(2, 3, 4)",
            "x.index_select(3, torch.tensor([0, 5, 5, 13]))",
            "x.flip(3)",
            "x.flip(2, 3)",
            "x.flip(1)",
            "torch.fliplr(x)",
            "torch.rot90(x, 1, (2, 3))",
            "torch.rot90(x, 2, (2, 3))",
            "x.roll(2, 3)",
            "x.roll((1, -3), (1, 2))",
            "x.roll(5)",
            "torch.take(x, torch.tensor([0, 7, 100]))",
            "x.diagonal(dim1=2, dim2=3)",
            "torch.diagonal(x, 1, 2, 3)",
            "torch.diag_embed(x[0, 0])",
            "x.gather(3, i) where i = integers(14, 1, 3, 12, 4)",
            "torch.take_along_dim(x, i, 1) where i = integers(3, 1, 2, 12, 14)",
            ("x.gather(1, y)", ((4, 10), integers(10, 4, 3))),
            ("x[y]", ((4, 10), integers(4, 3))),
            ("x[:, y]", ((4, 10), integers(10, 3))),
            ("x.index_select(1, y)", ((4, 10), integers(10, 3))),
            ("x[torch.arange(2), y]", ((2, 6, 16), integers(6, 2))),
            ("x[x > 0]", VECTORS),
            ("x.masked_select(y)", ((4, 10), bools(4, 10))),
            ("x.nonzero()", VECTORS),
            ("x.unique()", VECTORS),
            "x.scatter(1, i, 0.5) where i = integers(3, 1, 1, 12, 14)",
            "x.scatter_add(1, i, x) where i = torch.zeros(1, 3, 12, 14, dtype=torch.long)",
            "x.index_fill(1, torch.tensor([0, 2]), 1.5)",
            "x.index_add(1, torch.tensor([0, 2]), s) where s = randn(1, 2, 12, 14)",
            "x.index_copy(1, torch.tensor([2, 0]), s) where s = randn(1, 2, 12, 14)",
            ("x.slice_scatter(y, 1, 2, 8, 2)", ((4, 10), (4, 3))),
            ("x.select_scatter(y, 1, 3)", ((4, 10), (4,))),
            "x.masked_fill(x > 0.5, 0.1)",
            "m(x) where m = Focus()",
            ("m(x) where m = Focus()", ((2, 3, 8, 10),)),
            "m(x) where m = Boxes()",
            "x[:, :, ::2].contiguous().view(1, -1)",
            ("x[:, -1]", BATCH),
            ("x[-1]", BATCH),
            ("x[1:, :, ::3]", BATCH),
            ("x[:, 0::2] * x[:, 1::2]", BATCH),
        ],
    ),
    "reduction": (
        IMAGE,
        [
            "x.mean()",
            "x.mean(1)",
            "x.mean(-1, keepdim=True)",
            "x.mean((2, 3))",
            "x.mean((2, 3), keepdim=True)",
            "x.mean((0, 2, 3))",
            "x.mean(0)",
            "x.sum()",
            "x.sum(1, keepdim=True)",
            "x.sum((1, 3))",
            "x.pow(2).sum(1)",
            "x.var(-1)",
            "x.var((2, 3), keepdim=True)",
            "x.var(1, unbiased=False)",
            "x.var()",
            "x.std(-1)",
            "x.std((1, 2), correction=0)",
            "torch.var_mean(x, 1)",
            "torch.std_mean(x, (2, 3), keepdim=True)",
            "x.max()",
            "x.min()",
            "x.max(1).values",
            "x.max(1)",
            "x.min(-1, keepdim=True)",
            "x.amax(1)",
            "x.amax((2, 3), keepdim=True)",
            "x.amin(-1)",
            "torch.aminmax(x, dim=1)",
            "x.argmax(1)",
            "x.argmax()",
            "x.argmax(-1, keepdim=True)",
            "x.argmin(1)",
            "x.prod(1)",
            "x.prod()",
            "x.norm()",
            "x.norm(dim=1)",
            "x.norm(p=1, dim=-1)",
            "x.norm(p=3, dim=(2, 3))",
            "x.norm(p=float('inf'), dim=1)",
            "torch.linalg.vector_norm(x, dim=1, keepdim=True)",
            "torch.linalg.norm(x, dim=(2, 3))",
            "x.logsumexp(1)",
            "x.logsumexp((2, 3))",
            "x.cumsum(1)",
            "x.cumsum(-1)",
            "x.cumprod(1)",
            "x.cummax(1).values",
            "x.logcumsumexp(1)",
            "x.diff()",
            "x.all(1)",
            "(x > 0).any(-1)",
            "(x > 0).all()",
            "(x > 0).sum((1, 2))",
            "x.count_nonzero(1)",
            "x.median(-1).values",
            "x.nanmean(1)",
            "x.topk(1, 1)",
            ("x.topk(1)", VECTORS),
            ("x.topk(3)", VECTORS),
            ("x.sort()", VECTORS),
            ("x.argsort(1)", VECTORS),
            ("x.kthvalue(2)", VECTORS),
            ("x.mean(1)", BATCH),
            ("x.mean(0)", BATCH),
            ("x.sum((0, 2))", BATCH),
            ("x.sum(0)", ((10,),)),
            ("x.softmax(1).mean(2).argmax(1)", BATCH),
        ],
    ),
    "views": (
        IMAGE,
        [
            "x.view(1, -1)",
            "x.reshape(3, 12, 14)",
            "x.reshape(1, 3, 4, 3, 14).permute(0, 2, 1, 3, 4)",
            "x.view(1, 3, 6, 2, 7, 2).permute(0, 3, 5, 1, 2, 4).reshape(1, 12, 6, 7)",
            "x.view(1, 3, 6, 2, 7, 2).permute(0, 2, 4, 3, 5, 1)",
            ("x.permute(5, 1, 3, 0, 4, 2)", ((2, 3, 2, 3, 2, 2),)),
            "x.permute(0, 2, 3, 1)",
            "x.permute(3, 1, 0, 2)",
            "x.transpose(1, 3)",
            "x.flatten(2).transpose(1, 2)",
            "x.movedim(1, -1)",
            "x.swapaxes(2, 3)",
            ("x.t()", VECTORS),
            ("x.mT", BATCH),
            "x.squeeze()",
            "x.squeeze(0)",
            "x.unsqueeze(0)",
            "x.unsqueeze(-1)",
            ("F.pixel_shuffle(x, 2)", ((1, 8, 3, 4),)),
            ("F.pixel_shuffle(x, 2)", ((2, 8, 3, 4),)),
            "F.pixel_unshuffle(x, 2)",
            ("F.channel_shuffle(x, 2)", ((1, 6, 4, 5),)),
            ("m(x) where m = ChannelShuffle()", ((1, 6, 4, 5),)),
            ("m(x) where m = ChannelShuffle()", ((2, 6, 4, 5),)),
            ("m(x) where m = SqueezeExcite()", ((1, 8, 4, 5),)),
            "F.unfold(x, 3)",
            "F.unfold(x, (2, 3), dilation=2, padding=1, stride=2)",
            ("F.unfold(x, 3)", ((2, 3, 6, 7),)),
            ("F.fold(x, (6, 7), 3)", ((1, 18, 20),)),
            ("F.fold(x, (6, 8), 2, stride=2)", ((1, 8, 12),)),
            "x.unfold(2, 4, 4)",
            "x.unfold(3, 3, 2)",
            "x.repeat(1, 2, 1, 1)",
            "x.repeat(2, 1, 3, 1)",
            "x.repeat(2, 1, 1, 1, 1)",
            "x.repeat_interleave(2, 1)",
            "x.repeat_interleave(3, -1)",
            "x.repeat_interleave(2)",
            "torch.tile(x, (2, 2))",
            "x[:, :1].expand(-1, 3, -1, -1)",
            "x.unsqueeze(2).expand(1, 3, 4, 12, 14)",
            "x.mean(1, keepdim=True).expand_as(x)",
            "x.chunk(2, 2)",
            "x.chunk(3, -1)",
            "x.split(5, 2)",
            "x.split([1, 2], 1)",
            "torch.tensor_split(x, 4, 3)",
            "torch.cat([x, x * 2], 1)",
            "torch.cat([x, x * 2], 0)",
            "torch.cat([x, x * 2], -1)",
            "torch.stack([x, x * 2])",
            "torch.stack([x, x * 2], 1)",
            "torch.stack([x, x * 2], -1)",
            "torch.hstack([x, x])",
            "torch.stack(x.unbind(1)[::-1], 1)",
            "x.unbind(1)",
            ("torch.meshgrid(x, y, indexing='ij')", ((4,), (5,))),
            ("torch.meshgrid(x, y, indexing='xy')", ((4,), (5,))),
            ("torch.cartesian_prod(x, y)", ((4,), (5,))),
            "x.tril()",
            "x.triu(1)",
            ("x.tril(-1)", ((2, 5, 5),)),
            "x.new_zeros(1, 3, 12, 14) + x",
            "torch.zeros_like(x) + x",
            "torch.full_like(x, 2.0) * x",
            "torch.ones(12, 14) + x",
            "torch.arange(14) * x",
            "torch.linspace(0, 1, 14) * x",
            ("torch.eye(6) @ x", BATCH),
            "torch.broadcast_to(x[:, :, :1], x.shape)",
            "torch.atleast_3d(x)",
            "torch.block_diag(x[0, 0], x[0, 1])",
            ("x.view(-1, 4, 4).transpose(0, 1).reshape(4, -1)", BATCH),
        ],
    ),
    "matrix": (
        TWO,
        [
            "x @ y.mT",
            "torch.bmm(x, y.transpose(1, 2))",
            ("x @ y", ((8,), (8,))),
            ("x @ y", ((8,), (8, 5))),
            ("x @ y", ((5, 8), (8,))),
            ("x @ y", ((5, 8), (8, 4))),
            ("x @ y", ((2, 5, 8), (8,))),
            ("x @ y", ((8,), (2, 8, 5))),
            ("x @ y", ((2, 5, 8), (8, 4))),
            ("x @ y", ((5, 8), (2, 8, 4))),
            ("x @ y", ((2, 3, 5, 8), (8, 4))),
            ("x @ y", ((2, 3, 5, 8), (3, 8, 4))),
            ("x @ y", ((2, 1, 5, 8), (1, 3, 8, 4))),
            ("x @ y", ((2, 2, 1, 5, 8), (2, 3, 8, 4))),
            ("x @ w where w = randn(8, 4)", ((2, 3, 5, 8),)),
            ("w @ x where w = randn(4, 5)", ((2, 3, 5, 8),)),
            ("x @ w where w = randn(2, 8, 4)", ((2, 5, 8),)),
            ("torch.addmm(x, y, z)", ((4,), (5, 8), (8, 4))),
            ("torch.addmm(x, y, z, beta=0.5, alpha=2)", ((5, 4), (5, 8), (8, 4))),
            ("torch.baddbmm(x, y, z, alpha=0.5)", ((2, 5, 4), (2, 5, 8), (2, 8, 4))),
            ("torch.addbmm(x, y, z)", ((5, 4), (2, 5, 8), (2, 8, 4))),
            ("torch.outer(x, y)", ((4,), (5,))),
            ("torch.dot(x, y)", ((5,), (5,))),
            ("torch.mv(x, y)", ((4, 5), (5,))),
            ("torch.kron(x, y)", ((2, 3), (3, 2))),
            ("torch.tensordot(x, y, dims=2)", ((2, 3, 4), (3, 4, 5))),
            ("torch.tensordot(x, y, dims=([0], [1]))", ((2, 3, 4), (3, 2))),
            ("torch.chain_matmul(x, y, z)", ((2, 3), (3, 4), (4, 2))),
            ("torch.einsum('bij,bjk->bik', x, y)", ((2, 3, 4), (2, 4, 5))),
            ("torch.einsum('bij,bkj->bik', x, y)", TWO),
            ("torch.einsum('bij,bij->b', x, y)", TWO),
            ("torch.einsum('bij->bji', x)", TWO[:1]),
            ("torch.einsum('bij->b', x)", TWO[:1]),
            ("torch.einsum('ii->i', x)", ((5, 5),)),
            ("torch.einsum('ii', x)", ((5, 5),)),
            ("torch.einsum('i,j->ij', x, y)", ((4,), (5,))),
            ("torch.einsum('nchw,oc->nohw', x, w) where w = randn(5, 3)", IMAGE),
            ("torch.einsum('bthd,bshd->bhts', x, y)", ((2, 6, 4, 8), (2, 6, 4, 8))),
            ("torch.einsum('...ij,...jk->...ik', x, y)", ((2, 3, 4, 5), (2, 3, 5, 4))),
            ("torch.einsum('ncij,nkij,nckl->nijl', x, y, z)", ((1, 2, 3, 4), (1, 5, 3, 4), (1, 2, 5, 3))),
            ("F.cosine_similarity(x, y, dim=-1)", TWO),
            ("F.cosine_similarity(x, y, dim=1)", TWO),
            ("F.pairwise_distance(x, y)", ((4, 10), (4, 10))),
            ("F.pairwise_distance(x, y, p=1, keepdim=True)", ((4, 10), (4, 10))),
            ("torch.cdist(x, y)", TWO),
            ("torch.cdist(x, y, p=1)", TWO),
            ("torch.cdist(x, y, compute_mode='donot_use_mm_for_euclid_dist')", TWO),
            ("torch.linalg.det(x)", ((3, 3),)),
            ("torch.trace(x)", ((4, 4),)),
            ("torch.cross(x, y, dim=-1)", ((4, 3), (4, 3))),
            ("torch.inverse(x)", ((3, 3),)),
            ("x.view(2, 64).mm(w) where w = randn(64, 3)", ((2, 4, 4, 4),)),
            ("F.linear(x, w) where w = randn(5, 8)", TWO[:1]),
            ("F.linear(x, y)", ((2, 3, 8), (5, 8))),
        ],
    ),
    "elementwise": (
        TWO,
        [
            "x + y",
            "x - y * 2",
            "x / (y.abs() + 1)",
            "1 - x",
            "2 / (x.abs() + 1)",
            "x.add(y, alpha=0.5)",
            "torch.rsub(x, y, alpha=2)",
            "torch.where(x > y, x, y)",
            "torch.where(x > 0, x, 0.1 * x)",
            "torch.where(x > 0, 1.0, -1.0)",
            "torch.where(y > 0, x, torch.tensor(float('-inf'))).softmax(-1)",
            "x.masked_fill(y > 0, 0.5)",
            "x.masked_fill(m, float('-inf')) where m = bools(3, 8)",
            ("torch.where(x, y, z)", (bools(2, 3, 8), (2, 3, 8), (2, 3, 8))),
            ("torch.where(x, y, z)", (bools(3, 1), (2, 3, 8), (8,))),
            "torch.maximum(x, y)",
            "torch.minimum(x, y)",
            "torch.fmax(x, y)",
            "torch.clamp(x, y - 1, y + 1)",
            "torch.clamp(x, min=y)",
            "x > y",
            "x >= y",
            "x < 0.5",
            "x <= y",
            "x == y",
            "x != y",
            "(x > 0) & (y > 0)",
            "(x > 0) | (y > 0)",
            "(x > 0) ^ (y > 0)",
            "~(x > 0)",
            "torch.logical_and(x > 0, y > 0)",
            "torch.logical_not(x)",
            "torch.logical_xor(x > 0, y > 0)",
            "(x > 0).float() * y",
            "((x > y) * 1.0).mean(1)",
            "torch.isnan(x)",
            "torch.isinf(x)",
            "torch.isfinite(x)",
            "torch.isclose(x, y)",
            "torch.nan_to_num(x)",
            "x % 0.7",
            "torch.remainder(x, y.abs() + 0.5)",
            "torch.fmod(x, y.abs() + 0.5)",
            "torch.fmod(x, 0.7)",
            "torch.floor_divide(x, y.abs() + 0.5)",
            "x // 0.5",
            "torch.div(x, y.abs() + 1, rounding_mode='trunc')",
            "x ** 2",
            "x ** 3",
            "x.abs() ** 0.5",
            "(x.abs() + 0.1) ** -0.5",
            "x ** -2",
            "2 ** x",
            "(x.abs() + 0.1) ** y",
            "torch.pow(0.5, x)",
            "torch.atan2(x, y)",
            "torch.hypot(x, y)",
            "torch.lerp(x, y, 0.3)",
            ("torch.lerp(x, y, z)", ((2, 3, 8), (2, 3, 8), (2, 3, 8))),
            ("torch.addcmul(x, y, z, value=0.5)", ((2, 3, 8), (2, 3, 8), (2, 3, 8))),
            ("torch.addcdiv(x, y, z, value=0.5)", ((2, 3, 8), (2, 3, 8), positive(2, 3, 8))),
            "torch.logaddexp(x, y)",
            "torch.logaddexp2(x, y)",
            "torch.copysign(x, y)",
            "torch.heaviside(x, y)",
            "torch.xlogy(x, y.abs() + 0.1)",
            "torch.dist(x, y)",
            "F.mse_loss(x, y)",
            "F.l1_loss(x, y)",
            "F.smooth_l1_loss(x, y)",
            "F.huber_loss(x, y, delta=0.5)",
            "F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction='batchmean')",
            "F.binary_cross_entropy_with_logits(x, y)",
            ("F.cross_entropy(x, y)", ((4, 10), integers(10, 4))),
            ("F.nll_loss(x.log_softmax(1), y)", ((4, 10), integers(10, 4))),
            ("x + y", ((2, 3, 8), (8,))),
            ("x + y", ((2, 3, 8), (3, 1))),
            ("x + y", ((2, 1, 8), (1, 3, 1))),
            ("x * y", ((1, 3, 4, 5), (1, 3, 1, 1))),
            ("x * y", ((2, 3, 4, 5), (2, 1, 4, 5))),
            ("x * y", ((2, 1, 4, 1), (3, 1, 5))),
            ("x - y", ((1, 3, 4, 5), ())),
            ("x[:, :, None] - y[:, None]", TWO),
        ],
    ),
    "functions": (
        TWO[:1],
        [
            "x.abs()",
            "x.neg()",
            "x.sign()",
            "torch.sgn(x)",
            "x.round()",
            "torch.round(x, decimals=2)",
            "x.trunc()",
            "x.fix()",
            "x.frac()",
            "x.floor()",
            "x.ceil()",
            "x.exp()",
            "x.exp2()",
            "x.expm1()",
            "torch.log(x.abs() + 0.1)",
            "torch.log2(x.abs() + 0.1)",
            "torch.log10(x.abs() + 0.1)",
            "torch.log1p(x.abs())",
            "x.abs().sqrt()",
            "torch.rsqrt(x.abs() + 0.1)",
            "x.square()",
            "torch.reciprocal(x.abs() + 1)",
            "x.sin()",
            "x.cos()",
            "x.tan()",
            "torch.asin(x.clamp(-0.9, 0.9))",
            "torch.acos(x.clamp(-0.9, 0.9))",
            "x.atan()",
            "x.sinh()",
            "x.cosh()",
            "x.asinh()",
            "torch.acosh(x.abs() + 1.1)",
            "torch.atanh(x.clamp(-0.9, 0.9))",
            "x.erf()",
            "x.erfc()",
            "torch.special.expit(x)",
            "torch.logit(x.sigmoid())",
            "torch.logit(x, eps=0.1)",
            "torch.special.entr(x.sigmoid())",
            "torch.sinc(x)",
            "torch.deg2rad(x)",
            "x.positive()",
            "torch.signbit(x)",
            "x.lgamma()",
            "x.clip(0.1)",
            "torch.quantile(x, 0.5, dim=-1)",
            "torch.bucketize(x, b) where b = torch.tensor([-1.0, 0.0, 1.0])",
            "torch.histc(x)",
            "torch.rand_like(x) * 0 + x",
            "F.dropout(x, 0.5, training=False)",
            "F.alpha_dropout(x, 0.5, training=False)",
        ],
    ),
    "types": (
        TOKENS,
        [
            "x.int()",
            "x.long().float()",
            "x.to(torch.int32) + 1",
            "x.bool()",
            "(x * 4).to(torch.uint8).float()",
            "x.half().float()",
            "x.double()",
            "x.double().mean(1).float()",
            "m(x.half()) where m = nn.Linear(16, 4).half()",
            ("nn.Linear(16, 4).half()", (torch.randn(1, 6, 16).half(),)),
            ("nn.Conv2d(3, 4, 3).half()", (torch.randn(1, 3, 8, 9).half(),)),
            (
                "m(x) where m = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4), nn.GELU()).half()",
                (torch.randn(1, 6, 16).half(),),
            ),
            ("nn.Linear(16, 4).double()", (torch.randn(1, 6, 16).double(),)),
            ("nn.Linear(16, 4).bfloat16()", (torch.randn(1, 6, 16).bfloat16(),)),
            ("x + 1", (integers(10, 2, 6),)),
            ("x * 3 - 2", (integers(10, 6).int(),)),
            ("x // 3", (integers(10, 2, 6),)),
            ("x % 3", (integers(10, 2, 6),)),
            ("x / 3", (integers(10, 2, 6),)),
            ("x == 3", (integers(10, 2, 6),)),
            ("x.float() / 255", (integers(256, 1, 3, 8, 8).to(torch.uint8),)),
            ("x & y", (integers(8, 6), integers(8, 6))),
            ("x << 2", (integers(8, 6),)),
            ("~x", (bools(2, 6),)),
            ("x & y", (bools(2, 6), bools(2, 6))),
            ("x.float()", (bools(2, 6),)),
            ("(1.0 - x[:, None, None].float()) * -10000.0", (integers(2, 2, 6),)),
            ("x.sum(1)", (integers(10, 2, 6),)),
            ("x.cumsum(1)", (integers(10, 2, 6),)),
            ("x.max(1).values", (integers(10, 2, 6),)),
            ("torch.fft.rfft(x).real", ((2, 8),)),
            ("torch.fft.fft2(x).abs()", ((4, 8),)),
            ("torch.view_as_complex(x).abs()", ((4, 8, 2),)),
            ("torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y))", ((4, 8, 2), (4, 8, 2))),
            ("torch.stft(x, 16, 8, window=w, return_complex=False) where w = torch.hann_window(16)", ((1, 64),)),
            ("torch.stft(x, 16, 8, window=w, return_complex=True).abs() where w = torch.hann_window(16)", ((1, 64),)),
            ("torch.stft(x, 16, 4, center=False, return_complex=False)", ((2, 64),)),
            ("torch.istft(torch.view_as_complex(x), 16, 8, window=w) where w = torch.hann_window(16)", ((1, 9, 9, 2),)),
        ],
    ),
    "ports": (
        IMAGE,
        [
            "(x, x + 1)",
            "(x + 1, x + 1)",
            "(x.relu(), torch.ones(2, 3))",
            "torch.ones(2, 3) + 0 * x.sum()",
            "x.sum() * 2",
            "x.shape[2] * x",
            "torch.tensor(x.shape[1:])",
            "(x.mean((1, 2, 3)), x.amax((1, 2, 3)))",
            ("x * 2", ((),)),
            ("x.relu()", ((1,),)),
            ("x.relu()", ((5,),)),
            ("x.relu()", ((2, 2, 2, 2, 2, 3),)),
            ("x + y * z", ((2, 3), (2, 3), (2, 3))),
            ("(x, y)", ((2, 3), (2, 3))),
            ("nn.Conv2d(3, 4, 3)", ((3, 3, 8, 9),)),
            ("m(x).flatten(1) where m = nn.Conv2d(3, 4, 3)", ((2, 3, 8, 9),)),
            ("(m(x).mean((2, 3)) @ w).softmax(-1) where m = nn.Conv2d(3, 4, 3); w = randn(4, 5)", ((3, 3, 8, 9),)),
            ("{'a': x, 'b': (x * 2, [x * 3])}", ((2, 3),)),
            ("x.cpu().detach().clone()", ((2, 3),)),
            ("x.type_as(y) + y.to(x)", ((2, 3), (2, 3))),
            ("x if x.shape[0] > 1 else x * 2", ((2, 3),)),
        ],
    ),
}

RENEWED = ("attention", "normalization")  # groups that the newer opset has operators for

# What is in scope of a snippet.
_SCOPE: dict[str, Any] = {name: value for name, value in globals().items() if not name.startswith("__")}


class Snippet(nn.Module):
    """A snippet as module."""

    def __init__(self, text: str) -> None:
        super().__init__()
        body, _, definitions = text.partition(" where ")
        if body.startswith("nn."):
            body, definitions = "m(*[i for i in (x, y, z) if i is not None])", f"m = {body}"
        self.code, self.names = compile(body, "<snippet>", "eval"), []
        for definition in filter(None, definitions.split("; ")):
            name, _, value = definition.partition(" = ")
            part = eval(value, _SCOPE)
            self.names.append(name)
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                self.add_module(name, part)

    def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Any:
        parts = {name: getattr(self, name) for name in self.names}
        return eval(self.code, {**_SCOPE, **parts, "x": x, "y": y, "z": z})


def entries() -> Iterator[tuple[str, str, Inputs, tuple[str, ...]]]:
    """Name, text, inputs and variants of every snippet."""
    for title, (common, group) in SNIPPETS.items():
        variants = ("dyn", "ts", "new") if title in RENEWED else ("dyn", "ts")
        for entry in group:
            text, inputs = (entry, common) if isinstance(entry, str) else entry
            yield f"{text} | {', '.join(map(_described, inputs))}", text, inputs, variants


def _described(given: Any) -> str:
    shape = "x".join(map(str, given.shape if isinstance(given, Tensor) else given)) or "scalar"
    return f"{shape} {str(given.dtype).removeprefix('torch.')}" if isinstance(given, Tensor) else shape


def build(text: str, inputs: Inputs) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module in evaluation mode, its weights of few bits and its statistics not those it starts with."""
    torch.manual_seed(0)
    module = Snippet(text).eval()
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if "running_var" in name:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
            elif "running_mean" in name or (tensor.ndim == 1 and isinstance(tensor, nn.Parameter)):
                tensor.copy_(torch.randn_like(tensor).mul(16).round() / 64 + (0.75 if name.endswith("weight") else 0))
            elif isinstance(tensor, nn.Parameter):
                tensor.copy_(tensor.mul(64).round() / 64)
    return module, tuple(i if isinstance(i, Tensor) else torch.randn(i) for i in inputs)


VARIANTS: dict[str, dict[str, Any]] = {
    "dyn": {"opset_version": 20, "dynamo": True, "external_data": False},
    "new": {"opset_version": 23, "dynamo": True, "external_data": False},
    "ts": {"opset_version": 17, "dynamo": False},
}


def flat(outputs: Any) -> list[Tensor]:
    """The tensors of nested outputs in the order of the exporters."""
    if isinstance(outputs, Tensor):
        return [outputs]
    parts = outputs.values() if isinstance(outputs, dict) else outputs
    return [tensor for part in parts for tensor in flat(part)]


def array(tensor: Tensor) -> Any:
    """As numpy has it; bfloat16 as float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()


def export(folder: Path, number: int, text: str, inputs: Inputs, variants: tuple[str, ...]) -> dict[str, str]:
    """Write the files of a snippet; the exporters' complaints by variant."""
    stem = f"{number:03}"
    failures = {}
    program = None  # both opsets of the newer exporter start from it
    for variant in variants:
        options = VARIANTS[variant]
        path = folder / f"{stem}.{variant}.onnx"
        module, arguments = build(text, inputs)
        names = [f"in{i}" for i in range(len(arguments))]
        try:
            if options["dynamo"] and program is None:
                program = torch.export.export(module, arguments, strict=False)
            torch.onnx.export(
                program if options["dynamo"] else module,
                arguments,
                str(path),
                input_names=names,
                verbose=False,
                **options,
            )
            model = onnx.load(path)
            clean(model)
            onnx.save(model, path)
        except Exception as error:  # an exporter may fail in any way
            path.unlink(missing_ok=True)
            failures[variant] = " ".join(f"{type(error).__name__}: {error}".split())[:120]
    module, arguments = build(text, inputs)
    feeds = {f"in{i}": array(tensor) for i, tensor in enumerate(arguments)}
    results = {f"out{i}": array(tensor) for i, tensor in enumerate(flat(module(*arguments)))}
    np.savez(folder / f"{stem}.npz", **feeds, **results)
    return failures


def main() -> None:
    """Export the snippets whose name contains PART, or all."""
    parser = argparse.ArgumentParser(description="PyTorch constructs as ONNX models")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", dest="part", default="", help="only snippets whose name contains this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    table = options.folder / "NAMES.tsv"
    known = dict(line.split("\t", 1) for line in table.read_text().splitlines()) if table.exists() else {}
    for name, text, inputs, variants in entries():
        if name in known or options.part not in name:
            continue
        number = len(known)
        with contextlib.redirect_stdout(io.StringIO()):
            failures = export(options.folder, number, text, inputs, variants)
        known[name] = f"{number:03}\t{'; '.join(f'{variant}: {why}' for variant, why in failures.items())}"
        with table.open("a") as file:
            file.write(f"{name}\t{known[name]}\n")
        print(f"{number:03} {name} {failures or ''}", flush=True)


if __name__ == "__main__":
    main()
