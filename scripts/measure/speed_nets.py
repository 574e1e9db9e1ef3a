"""Exports nets of sequences and of volumes, as they are built in the field, to time them with measure_speed.py.

    pip install torch==2.13.0 onnx
    python -m scripts.measure.speed_nets FOLDER

Weights are random. Sizes are those that such nets have in practice, at the lower end.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """A block of HiFi-GAN: pairs of a dilated convolution and another one, each pair with a shortcut."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        pads = [(kernel - 1) * dilation // 2 for dilation in (1, 3, 5)]
        self.first = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=p) for d, p in zip((1, 3, 5), pads, strict=True)
        )
        self.second = nn.ModuleList(nn.Conv1d(channels, channels, kernel, padding=kernel // 2) for _ in pads)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of x and of what the pairs add."""
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(functional.leaky_relu(first(functional.leaky_relu(x, 0.1)), 0.1))
        return x


class Vocoder(nn.Module):
    """The generator of HiFi-GAN (V2: 128 channels)."""

    def __init__(self, rates: tuple[int, ...], kernels: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        super().__init__()
        sizes = [128 >> i for i in range(len(rates) + 1)]
        self.before, self.after = nn.Conv1d(80, 128, 7, padding=3), nn.Conv1d(sizes[-1], 1, 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(i, o, k, r, padding=(k - r) // 2)
            for i, o, k, r in zip(sizes, sizes[1:], kernels, rates, strict=False)
        )
        self.blocks = nn.ModuleList(nn.ModuleList(Residual(size, k) for k in blocks) for size in sizes[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Samples (1, 1, t * product of the rates) of a spectrogram (1, 80, t)."""
        x = self.before(x)
        for up, blocks in zip(self.ups, self.blocks, strict=True):
            x = up(functional.leaky_relu(x, 0.1))
            x = torch.stack([block(x) for block in blocks]).mean(0) if len(blocks) > 1 else blocks[0](x)
        return torch.tanh(self.after(functional.leaky_relu(x, 0.1)))


class ConformerConvolution(nn.Module):
    """The convolution module of a Conformer, which reads and gives (1, t, channels)."""

    def __init__(self, channels: int = 144, kernel: int = 31) -> None:
        super().__init__()
        self.norm, self.batch_norm = nn.LayerNorm(channels), nn.BatchNorm1d(channels)
        self.gate = nn.Conv1d(channels, 2 * channels, 1)
        self.depthwise = nn.Conv1d(channels, channels, kernel, padding=kernel // 2, groups=channels)
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x and what the module adds."""
        y = functional.glu(self.gate(self.norm(x).transpose(1, 2)), 1)
        y = self.out(functional.silu(self.batch_norm(self.depthwise(y))))
        return x + y.transpose(1, 2)


class Conformer(nn.Module):
    """A block of a Conformer: half a feed-forward layer, attention, convolution, half a feed-forward layer."""

    def __init__(self, channels: int = 144) -> None:
        super().__init__()
        self.feed = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(channels), nn.Linear(channels, 4 * channels), nn.SiLU(), nn.Linear(4 * channels, channels)
            )
            for _ in range(2)
        )
        self.norm, self.last = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.heads, self.qkv, self.out = 4, nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.convolution = ConformerConvolution(channels)

    def forward(self, x: Tensor) -> Tensor:
        """(1, t, channels) of (1, t, channels)."""
        x = x + 0.5 * self.feed[0](x)
        q, k, v = (t.reshape(*t.shape[:2], self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v)
        x = self.convolution(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.last(x + 0.5 * self.feed[1](x))


class Wav2Vec(nn.Module):
    """The feature encoder of wav2vec 2.0 with 256 channels, and its convolution of positions."""

    def __init__(self, channels: int = 256) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (kernel, stride) in enumerate([(10, 5), *[(3, 2)] * 4, *[(2, 2)] * 2]):
            layers.append(nn.Conv1d(channels if i else 1, channels, kernel, stride, bias=False))
            layers += [nn.GELU()] if i else [nn.GroupNorm(channels, channels), nn.GELU()]
        self.features, self.norm = nn.Sequential(*layers), nn.LayerNorm(channels)
        self.projection = nn.Linear(channels, channels)
        self.positions = nn.Conv1d(channels, channels, 128, padding=64, groups=16)

    def forward(self, x: Tensor) -> Tensor:
        """(1, t / 320, channels) of samples (1, 1, t)."""
        x = self.projection(self.norm(self.features(x).transpose(1, 2)))
        return x + functional.gelu(self.positions(x.transpose(1, 2))[..., :-1]).transpose(1, 2)


def heartbeat() -> nn.Module:
    """A classifier of electrocardiograms."""
    sizes = (12, 32, 64, 128, 128)
    blocks = [
        nn.Sequential(nn.Conv1d(i, o, 7, padding=3), nn.BatchNorm1d(o), nn.ReLU(), nn.MaxPool1d(2))
        for i, o in pairwise(sizes)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 5))


def twice(inputs: int, outputs: int) -> nn.Module:
    """The two convolutions of a level of a U-Net."""
    pairs = ((inputs, outputs), (outputs, outputs))
    parts = [(nn.Conv3d(i, o, 3, padding=1), nn.BatchNorm3d(o), nn.ReLU()) for i, o in pairs]
    return nn.Sequential(*(part for three in parts for part in three))


class VolumeUNet(nn.Module):
    """A 3-D U-Net of three levels."""

    def __init__(self, c: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([twice(1, c), twice(c, 2 * c), twice(2 * c, 4 * c)])
        self.ups = nn.ModuleList([nn.ConvTranspose3d(4 * c, 2 * c, 2, 2), nn.ConvTranspose3d(2 * c, c, 2, 2)])
        self.merge = nn.ModuleList([twice(4 * c, 2 * c), twice(2 * c, c)])
        self.out = nn.Conv3d(c, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A class for each voxel."""
        skips = []
        for i, level in enumerate(self.down):
            x = level(functional.max_pool3d(x, 2) if i else x)
            skips.append(x)
        for up, merge, skip in zip(self.ups, self.merge, skips[1::-1], strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.out(x)


def c3d() -> nn.Module:
    """C3D with half of its channels, on half of its height and width."""
    layers: list[nn.Module] = []
    for inputs, outputs, pool in (
        *((3, 32, (1, 2, 2)), (32, 64, 2), (64, 128, 0), (128, 128, 2)),
        *((128, 256, 0), (256, 256, 2)),
    ):
        layers += [nn.Conv3d(inputs, outputs, 3, padding=1), nn.ReLU(), *([nn.MaxPool3d(pool)] if pool else [])]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 2 * 3 * 3, 101))


def meshnet(channels: int = 21) -> nn.Module:
    """MeshNet, which segments brains with dilated convolutions."""
    layers: list[nn.Module] = []
    for i, dilation in enumerate((1, 1, 2, 4, 8, 1)):
        layers += [nn.Conv3d(channels if i else 1, channels, 3, padding=dilation, dilation=dilation)]
        layers += [nn.BatchNorm3d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv3d(channels, 3, 1))


class VideoPatches(nn.Module):
    """The patch embedding of video Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.norm = nn.Conv3d(3, 96, (2, 4, 4), (2, 4, 4)), nn.LayerNorm(96)

    def forward(self, x: Tensor) -> Tensor:
        """(1, t / 2, h / 4, w / 4, 96) of a film."""
        return self.norm(self.projection(x).permute(0, 2, 3, 4, 1))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "hifigan_v2": (lambda: Vocoder((8, 8, 2, 2), (16, 16, 4, 4), (3, 7, 11)), (1, 80, 100)),
    "hifigan_small": (lambda: Vocoder((8, 2), (16, 4), (3,)), (1, 80, 100)),
    "conformer": (lambda: nn.Sequential(Conformer(), Conformer()), (1, 200, 144)),
    "conformer_convolution": (ConformerConvolution, (1, 200, 144)),
    "wav2vec": (Wav2Vec, (1, 1, 16000)),
    "ecg": (heartbeat, (1, 12, 1000)),
    "unet3d": (VolumeUNet, (1, 1, 16, 64, 64)),
    "c3d": (c3d, (1, 3, 16, 56, 56)),
    "meshnet": (meshnet, (1, 1, 32, 32, 32)),
    "video_patches": (VideoPatches, (1, 3, 8, 112, 112)),
}


def main() -> None:
    """Export every net."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name, (make, shape) in NETS.items():
        torch.manual_seed(0)
        model = make().eval()
        names = {"input_names": ["in0"], "output_names": ["out0"]}
        torch.onnx.export(model, torch.randn(shape), folder / f"{name}.onnx", dynamo=False, opset_version=17, **names)
        print(name)


if __name__ == "__main__":
    main()
