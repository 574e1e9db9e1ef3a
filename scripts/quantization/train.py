"""Train three small nets on drawn shapes, and export them for measurements of quantisation.

    pip install torch==2.13.0 onnx
    python -m scripts.quantization.train FOLDER [-k NAME]

FOLDER gets resnet.onnx, mobile.onnx and vit.onnx (input x [1, 3, 32, 32], output scores [1, 10]), and the data:
calibration.npz with x [128, 3, 32, 32], and test.npz with x [512, 3, 32, 32] and labels [512]. A net takes about a
minute on one core. One thread and fixed seeds: the same machine trains the same nets.
"""
# ruff: noqa: D102 - the docstring of a module says what its forward computes

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onnx2ncnn_opt.runtime.base import Array

SIZE, CLASSES = 32, 10
_EPOCHS, _BATCH, _SAMPLES = 4, 32, 6144


def drawn(count: int, seed: int) -> tuple[Array, Array]:
    """Return images [count, 3, 32, 32] of a shape on a noisy ground, and the shapes' numbers."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    ys, xs = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    images = np.empty((count, 3, SIZE, SIZE), np.float32)
    for image, label in zip(images, labels, strict=True):
        angle, radius = rng.uniform(-0.4, 0.4), rng.uniform(6, 12)
        middle_y, middle_x = rng.uniform(12, 20, 2)
        y, x = (ys - middle_y) / radius, (xs - middle_x) / radius
        y, x = y * np.cos(angle) - x * np.sin(angle), y * np.sin(angle) + x * np.cos(angle)
        inside = _masks(y, x)[label]
        ground, colour = rng.uniform(-1, 1, (2, 3))
        colour += np.sign(colour - ground) * 0.3
        image[:] = np.where(inside, colour[:, None, None], ground[:, None, None])
        image += rng.normal(0, rng.uniform(0.05, 0.4), image.shape)
    return images, labels


def _masks(y: Array, x: Array) -> list[Array]:
    """Return the pixels of each shape, in units of its radius."""
    size, largest = np.hypot(y, x), np.maximum(abs(y), abs(x))
    return [
        size < 1,
        (size < 1) & (size > 0.6),
        largest < 0.85,
        (largest < 0.85) & (largest > 0.5),
        (abs(x) < 0.9) & (y > -0.8) & (y < 0.8) & (abs(x) < (y + 0.8) / 1.6),
        (np.minimum(abs(y), abs(x)) < 0.25) & (largest < 1),
        (largest < 0.9) & (np.floor((y + 1) * 3) % 2 == 0),
        (largest < 0.9) & (np.floor((x + 1) * 3) % 2 == 0),
        (largest < 0.9) & ((np.floor((y + 1) * 2.5) + np.floor((x + 1) * 2.5)) % 2 == 0),
        abs(y) + abs(x) < 1,
    ]


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv(inputs, outputs, 3, stride), nn.ReLU(), *_conv(outputs, outputs, 3))
        is_same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_conv(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Inverted(nn.Module):
    """A depthwise convolution between two of 1x1."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = 4 * inputs
        layers = [*_conv(inputs, inner, 1), nn.ReLU6(), *_conv(inner, inner, 3, stride, inner), nn.ReLU6()]
        self.body = nn.Sequential(*layers, *_conv(inner, outputs, 1))
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + x if self.is_residual else self.body(x)


class Block(nn.Module):
    """Attention and two linear layers, each on normalised tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5, -1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(count, tokens, width))
        return x + self.mlp(self.norms[1](x))


class Vit(nn.Module):
    """Two convolutions to 64 tokens, four blocks, and the mean of all tokens."""

    def __init__(self, width: int = 96, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Sequential(*_conv(3, width // 2, 3, 2), nn.ReLU(), *_conv(width // 2, width, 3, 2))
        self.places = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def _end(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]


def resnet() -> nn.Module:
    """Return a net of five residual blocks."""
    blocks = [Residual(a, b, s) for a, b, s in [(32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]]
    return nn.Sequential(*_conv(3, 32, 3, 2), nn.ReLU(), *blocks, *_end(128))


def mobile() -> nn.Module:
    """Return a net of inverted residual blocks."""
    sizes = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1)]
    blocks = [Inverted(a, b, s) for a, b, s in sizes]
    return nn.Sequential(*_conv(3, 16, 3, 2), nn.ReLU6(), *blocks, *_conv(40, 128, 1), nn.ReLU6(), *_end(128))


NETS = {"resnet": resnet, "mobile": mobile, "vit": Vit}


def trained(name: str, images: Array, labels: Array) -> nn.Module:
    """Return a net, trained."""
    torch.manual_seed(0)
    net = NETS[name]()
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    steps = _EPOCHS * (len(x) // _BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3 if name != "vit" else 1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3 if name != "vit" else 2e-3, steps)
    for _ in range(_EPOCHS):
        for part in torch.randperm(len(x)).split(_BATCH):
            if len(part) < _BATCH:
                continue
            optimizer.zero_grad()
            F.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def main() -> None:
    """Train and export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", dest="part", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    test, test_labels = drawn(512, seed=2)
    np.savez(arguments.folder / "calibration.npz", x=drawn(128, seed=1)[0])
    np.savez(arguments.folder / "test.npz", x=test, labels=test_labels)
    images, labels = drawn(_SAMPLES, seed=0)
    for name in (name for name in NETS if arguments.part in name):
        net = trained(name, images, labels)
        with torch.no_grad():
            right = (net(torch.from_numpy(test)).argmax(1).numpy() == test_labels).mean()
        print(f"{name}: {right:.1%} of the test images are right", flush=True)
        path = arguments.folder / f"{name}.onnx"
        options = {"input_names": ["x"], "output_names": ["scores"], "opset_version": 17, "dynamo": False}
        torch.onnx.export(net, (torch.zeros(1, 3, SIZE, SIZE),), path, **options)


if __name__ == "__main__":
    main()
