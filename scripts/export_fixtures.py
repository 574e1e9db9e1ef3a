"""Export the models of fixtures/models with both of torch's exporters.

    pip install torch==2.13.0 torchvision==0.28.0 timm==1.0.31 onnxscript
    python scripts/export_fixtures.py [NAME...]

Each model gives NAME.dyn.onnx (dynamo=True, opset 20), NAME.ts.onnx (TorchScript, opset 17) and, if it has batch
normalisation, NAME.tsbn.onnx (TorchScript without folding, so that BatchNormalization stays; of skeletons only some).
Small hand-written models are kept whole, architectures of torchvision and timm as skeletons (see refill.py). Weights
are seeded.
"""
# ruff: noqa: D102 - the docstring of a module says what its forward computes

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from refill import draw, strip
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

FOLDER = Path(__file__).resolve().parent.parent / "fixtures" / "models"


def conv(i: int, o: int, k: int = 3, stride: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Convolution, batch normalisation, activation."""
    pad = k // 2
    return nn.Sequential(nn.Conv2d(i, o, k, stride, pad, groups=groups, bias=False), nn.BatchNorm2d(o), act())


class Residual(nn.Module):
    """ResNet's basic block, and its bottleneck with a strided shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.a = nn.Sequential(conv(16, 16), conv(16, 16, act=nn.Identity))
        self.b = nn.Sequential(conv(16, 8, 1), conv(8, 8, 3, 2), conv(8, 32, 1, act=nn.Identity))
        self.shortcut = conv(16, 32, 1, 2, act=nn.Identity)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.a(x) + x)
        return self.head(F.relu(self.b(x) + self.shortcut(x)))


class Inverted(nn.Module):
    """MobileNetV3's inverted residuals: depthwise, squeeze-and-excitation, hardswish; one with SiLU and ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 16, 3, 2, act=nn.Hardswish)
        self.expand, self.deep = conv(16, 48, 1, act=nn.Hardswish), conv(48, 48, 5, groups=48, act=nn.Hardswish)
        self.squeeze, self.excite = nn.Conv2d(48, 12, 1), nn.Conv2d(12, 48, 1)
        self.project = conv(48, 16, 1, act=nn.Identity)
        self.second = nn.Sequential(conv(16, 32, 1, act=nn.SiLU), conv(32, 32, 3, 2, 32, act=nn.ReLU6))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.deep(self.expand(x))
        scale = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        x = x + self.project(y * scale)
        return self.fc(self.second(x).mean([2, 3])).softmax(-1)


class UNet(nn.Module):
    """Down and up again: transposed convolution, bilinear and nearest interpolation, skips by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.d0, self.d1, self.d2 = conv(3, 8), conv(8, 16), conv(16, 32)
        self.up1 = nn.ConvTranspose2d(32, 16, 2, 2)
        self.u1, self.u0, self.out = conv(32, 16), conv(24, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.d0(x)
        b = self.d1(F.max_pool2d(a, 2))
        c = self.d2(F.avg_pool2d(b, 2))
        b = self.u1(torch.cat([self.up1(c), b], 1))
        up = F.interpolate(b, scale_factor=2.0, mode="bilinear", align_corners=False)
        a = self.u0(torch.cat([up, a], 1))
        return F.interpolate(torch.sigmoid(self.out(a)), scale_factor=2.0, mode="nearest")


class Shuffle(nn.Module):
    """ShuffleNetV2's unit: split, branch, concatenate, shuffle channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 24, 3, 2)
        self.branch = nn.Sequential(conv(12, 12, 1), conv(12, 12, 3, groups=12, act=nn.Identity), conv(12, 12, 1))
        self.fc = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            a, b = x.chunk(2, 1)
            x = torch.cat([a, self.branch(b)], 1)
            n, c, h, w = x.shape
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.fc(x.mean([2, 3]))


class Detector(nn.Module):
    """A YOLO-like head on two scales: C2f split, SPPF pools, box distribution by softmax, decoded to one array."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 3, 2, act=nn.SiLU), conv(16, 32, 3, 2, act=nn.SiLU))
        self.inner = conv(16, 16, act=nn.SiLU)
        self.mix = conv(48, 32, 1, act=nn.SiLU)
        self.down = conv(32, 32, 3, 2, act=nn.SiLU)
        self.sppf = conv(96, 32, 1, act=nn.SiLU)
        self.heads = nn.ModuleList(nn.Conv2d(32, 4 * 8 + 3, 1) for _ in range(2))
        ys, xs = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        fine = torch.stack([xs, ys]).flatten(1) + 0.5
        self.register_buffer("anchors", torch.cat([fine, fine.view(2, 16, 16)[:, ::2, ::2].flatten(1)], 1))
        self.register_buffer("bins", torch.arange(8.0).view(1, 8, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        a, b = x.split([16, 16], 1)
        x = self.mix(torch.cat([a, b, self.inner(b)], 1))
        y = self.down(x)
        p = F.max_pool2d(y, 5, 1, 2)
        y = self.sppf(torch.cat([y, p, F.max_pool2d(p, 5, 1, 2)], 1))
        x = x + F.interpolate(y, size=(16, 16), mode="nearest")
        flat = torch.cat([head(z).flatten(2) for head, z in zip(self.heads, (x, y), strict=True)], 2)
        box, score = flat.split([32, 3], 1)
        distances = (box.view(len(box), 4, 8, -1).transpose(1, 2).softmax(1) * self.bins).sum(1)
        corner, other = self.anchors - distances[:, :2], self.anchors + distances[:, 2:]
        boxes = torch.cat([(corner + other) / 2, other - corner], 1)
        return boxes.permute(0, 2, 1), score.sigmoid()


class SuperResolution(nn.Module):
    """ESPCN with PReLU, LeakyReLU and pixel shuffle, on top of the interpolated input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(3, 16, 5, padding=2),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Conv2d(16, 12, 3, 1, 1),
        )
        self.prelu = nn.PReLU(16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.b(self.prelu(self.a(x))), 0.1)
        y = F.pixel_shuffle(self.c(y), 2)
        return (y + F.interpolate(x, scale_factor=2.0, mode="bilinear")).clamp(0, 1)


class Temporal(nn.Module):
    """A 1-D network: dilated, strided and causal convolutions with GELU, transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn = nn.Conv1d(20, 24, 5, 2, 2), nn.BatchNorm1d(24)
        self.b = nn.Conv1d(24, 24, 3, dilation=2)
        self.c = nn.Conv1d(24, 24, 3, padding=1, groups=24)
        self.up, self.fc = nn.ConvTranspose1d(24, 16, 4, 2, 1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.a(x)))
        x = x + F.gelu(self.b(F.pad(x, (4, 0))))
        x = self.up(F.elu(self.c(F.avg_pool1d(x, 2))))
        return self.fc(x.transpose(1, 2)).log_softmax(-1)


class Video(nn.Module):
    """A 3-D network: (2+1)-D convolutions, 3-D pools."""

    def __init__(self) -> None:
        super().__init__()
        self.space = nn.Conv3d(3, 12, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False)
        self.time = nn.Conv3d(12, 16, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.bn1, self.bn2 = nn.BatchNorm3d(12), nn.BatchNorm3d(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn2(self.time(F.relu(self.bn1(self.space(x))))))
        return self.fc(F.adaptive_avg_pool3d(F.max_pool3d(x, 2), 1).flatten(1))


class Style(nn.Module):
    """Style transfer: reflection padding, instance normalisation, upsampling, tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 9), nn.Conv2d(8, 16, 3, 2), nn.Conv2d(16, 3, 3)
        self.n1, self.n2 = nn.InstanceNorm2d(8, affine=True), nn.InstanceNorm2d(16, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.n1(self.a(F.pad(x, (4, 4, 4, 4), mode="reflect"))))
        x = F.relu(self.n2(self.b(F.pad(x, (1, 1, 1, 1), mode="reflect"))))
        x = F.interpolate(x, scale_factor=2.0)
        return torch.tanh(self.c(F.pad(x, (1, 1, 1, 1), mode="replicate"))) * 0.5 + 0.5


class Siamese(nn.Module):
    """Two images through shared weights: distance and cosine of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(3, 8, 3, 2), conv(8, 16, 3, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 16)
        )

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.body(left), self.body(right)
        cosine = (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1, keepdim=True)
        return (a - b).abs().sum(1, keepdim=True), cosine


class Attention(nn.Module):
    """A patch embedding and one transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 8, 8)
        self.position = nn.Parameter(torch.randn(1, 16, 32) * 0.02)
        self.n1, self.n2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        n, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(n, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c))
        x = x + self.mlp(self.n2(x))
        return self.head(x.mean(1))


class Restore(nn.Module):
    """NAFNet's block: channel layer normalisation written by hand, simple gates, channel attention."""

    def __init__(self) -> None:
        super().__init__()
        self.intro, self.end = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.weight, self.bias = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16) * 0.1)
        self.a, self.b = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.attend, self.c = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.beta = nn.Parameter(torch.rand(1, 16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.intro(x)
        mean = y.mean(1, keepdim=True)
        variance = (y - mean).pow(2).mean(1, keepdim=True)
        z = self.weight.view(1, 16, 1, 1) * (y - mean) / (variance + 1e-6).sqrt() + self.bias.view(1, 16, 1, 1)
        left, right = self.b(self.a(z)).chunk(2, 1)
        z = left * right
        z = z * self.attend(F.adaptive_avg_pool2d(z, 1))
        return self.end(y + self.c(z) * self.beta) + x


class Dense(nn.Module):
    """DenseNet's layers: batch normalisation and ReLU before the convolution, everything concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, 8, 3, padding=1, bias=False)) for c in (16, 24, 32)
        )
        self.last, self.fc = nn.BatchNorm2d(40), nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        x = F.avg_pool2d(F.relu(self.last(x)), 3, 2, 1, ceil_mode=True, count_include_pad=False)
        return self.fc(F.adaptive_max_pool2d(x, 1).flatten(1))


def recurred(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """All states and the last one of a recurrent cell, for TorchScript to keep as a loop over lists."""
    h = torch.zeros_like(x[:, 0])
    states: list[Tensor] = []
    for step in x.unbind(1):
        h = torch.tanh(step + h @ weight)
        states.append(h)
    return torch.stack(states, 1), h


class Loops(nn.Module):
    """A recurrent cell: loops over lists for TorchScript, scan and while_loop for dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(8, 12), nn.Parameter(torch.randn(12, 12) / 4)
        self.recurred = torch.jit.script(recurred)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner(x)
        if not torch.compiler.is_exporting():
            states, last = self.recurred(x, self.weight)
            return states, last

        def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(row + h @ self.weight)
            return h, h.clone()

        last, states = scan(step, torch.zeros_like(x[:, 0]), x, dim=1)
        _, last = while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 2), (torch.tensor(0), last / 8))
        return states, last


IMAGE = (1, 3, 64, 64)
Model = tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]

SMALL: dict[str, Model] = {
    "residual": (Residual, (IMAGE,)),
    "inverted": (Inverted, (IMAGE,)),
    "unet": (UNet, ((1, 3, 48, 64),)),
    "shuffle": (Shuffle, (IMAGE,)),
    "detector": (Detector, (IMAGE,)),
    "superres": (SuperResolution, ((1, 3, 24, 32),)),
    "temporal": (Temporal, ((1, 20, 64),)),
    "video": (Video, ((1, 3, 8, 32, 32),)),
    "style": (Style, ((1, 3, 48, 64),)),
    "siamese": (Siamese, (IMAGE, IMAGE)),
    "attention": (Attention, ((1, 3, 32, 32),)),
    "restore": (Restore, ((1, 3, 32, 48),)),
    "dense": (Dense, (IMAGE,)),
    "loops": (Loops, ((1, 5, 8),)),
}

# The same models with axes left open: input axis -> name.
OPEN: dict[str, tuple[str, dict[int, str]]] = {
    "residual-batch": ("residual", {0: "batch"}),
    "superres-hw": ("superres", {2: "h", 3: "w"}),
    "unet-hw": ("unet", {2: "h", 3: "w"}),
}


def torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A constructor of one of torchvision's architectures, without weights."""

    def make() -> nn.Module:
        from torchvision import models

        model: nn.Module = models.get_model(name, weights=None, **options)
        return First(model) if "deeplab" in name else model

    return make


def timm(name: str) -> Callable[[], nn.Module]:
    """A constructor of one of timm's architectures, without weights."""

    def make() -> nn.Module:
        import timm as library

        model: nn.Module = library.create_model(name, pretrained=False)
        return model

    return make


class First(nn.Module):
    """The entry "out" of a model that returns a dictionary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x)["out"]
        return result


UNFOLDED = {"mobilenet_v3_small", "r3d_18", "resnet18", "shufflenet_v2_x1_0"}  # skeletons that also give .tsbn

SKELETONS: dict[str, Model] = {
    "deeplabv3_mobilenet_v3_large": (
        torchvision("deeplabv3_mobilenet_v3_large", aux_loss=False, weights_backbone=None),
        ((1, 3, 96, 128),),
    ),
    "efficientnet_b0": (torchvision("efficientnet_b0"), ((1, 3, 128, 128),)),
    "ghostnet_100": (timm("ghostnet_100"), ((1, 3, 128, 128),)),
    "googlenet": (torchvision("googlenet", aux_logits=False, init_weights=True), ((1, 3, 96, 96),)),
    "mobilenet_v3_small": (torchvision("mobilenet_v3_small"), ((1, 3, 128, 128),)),
    "r3d_18": (torchvision("r3d_18"), ((1, 3, 8, 32, 32),)),
    "regnet_y_400mf": (torchvision("regnet_y_400mf"), ((1, 3, 96, 96),)),
    "repvgg_a0": (timm("repvgg_a0"), ((1, 3, 96, 96),)),
    "resnet18": (torchvision("resnet18"), ((1, 3, 96, 96),)),
    "shufflenet_v2_x1_0": (torchvision("shufflenet_v2_x1_0"), ((1, 3, 96, 96),)),
    "squeezenet1_1": (torchvision("squeezenet1_1"), ((1, 3, 96, 96),)),
}


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)


def seeded(make: Callable[[], nn.Module], shapes: tuple[tuple[int, ...], ...]) -> nn.Module:
    """The model in evaluation mode, with weights that carry the signal to the end as a trained model's do.

    Kernels are drawn by refill.draw, so that a skeleton gives them back; batch statistics are those of random inputs.
    """
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for seed, module in enumerate(m for m in model.modules() if isinstance(m, WEIGHTED)):
            weight = module.weight
            std = (2 / weight[0].numel()) ** 0.5
            weight.copy_(torch.from_numpy(draw(seed, tuple(weight.shape))) * std)
        for module in model.modules():
            if isinstance(module, NORMS):
                nn.init.uniform_(module.weight, 0.8, 1.2)
                nn.init.normal_(module.bias, 0, 0.1)
                module.momentum = 1.0
        model.train()(*(torch.randn(4, *shape[1:]) for shape in shapes))
    return model.eval()


def export(name: str, model: Model, axes: dict[int, str], *, whole: bool) -> None:
    """Write NAME.dyn, NAME.ts and, with batch normalisation, NAME.tsbn."""
    make, shapes = model
    module, inputs = seeded(make, shapes), tuple(torch.randn(shape) for shape in shapes)
    outputs = module(*inputs)
    names: dict[str, Any] = {
        "input_names": [f"in{i}" for i in range(len(inputs))],
        "output_names": [f"out{i}" for i in range(1 if isinstance(outputs, Tensor) else len(outputs))],
    }
    torchscript: dict[str, Any] = {"opset_version": 17, "dynamo": False}
    if axes:
        torchscript["dynamic_axes"] = {"in0": axes}
    variants: dict[str, dict[str, Any]] = {
        "dyn": {
            "opset_version": 20,
            "dynamo": True,
            "external_data": False,
            "dynamic_shapes": (dict.fromkeys(axes, torch.export.Dim.DYNAMIC),) if axes else None,
        },
        "ts": torchscript,
    }
    if (whole or name in UNFOLDED) and any(isinstance(m, NORMS) for m in module.modules()):
        preserve = torch.onnx.TrainingMode.PRESERVE
        variants["tsbn"] = {**torchscript, "do_constant_folding": False, "training": preserve}
    for variant, options in variants.items():
        path = FOLDER / f"{name}.{variant}.onnx"
        torch.onnx.export(module, inputs, str(path), verbose=False, **names, **options)
        proto = onnx.load(path)
        clean(proto)
        onnx.save(proto if whole else strip(proto), path)
        print(f"{path.name}: {path.stat().st_size} bytes", flush=True)


def clean(model: onnx.ModelProto) -> None:
    """Drop what tells where the model was made: dynamo keeps a stack trace with each node."""
    _clean(model.graph)
    del model.metadata_props[:]


def _clean(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        kept = [entry for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.ClearField("doc_string")
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _clean(attribute.g)
    for value in (*graph.value_info, *graph.input, *graph.output):
        del value.metadata_props[:]
    for tensor in graph.initializer:
        del tensor.metadata_props[:]
    del graph.metadata_props[:]


def main() -> None:
    """Export the models named on the command line, or all."""
    warnings.simplefilter("ignore")
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = set(sys.argv[1:])
    for table, whole in ((SMALL, True), (SKELETONS, False)):
        for name, model in table.items():
            if not wanted or name in wanted:
                export(name, model, {}, whole=whole)
    for name, (base, axes) in OPEN.items():
        if not wanted or name in wanted:
            export(name, SMALL[base], axes, whole=True)


if __name__ == "__main__":
    main()
