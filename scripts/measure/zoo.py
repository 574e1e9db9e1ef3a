"""Models of torchvision, timm and transformers, and some by hand: exported, converted and verified.

    pip install torch==2.13.0 torchvision==0.28.0 timm==1.0.31 transformers==5.23.0 onnxscript
    python -m scripts.measure.zoo [-e ts|dyn|tsbn] [-o RESULTS.tsv] [--keep FOLDER] [REGEX]

Nothing is downloaded: weights are random, and those that a model starts with at one value are spread, so that no branch
is without effect. A line is a model, the exporter, `right`, `refused`, `wrong`, or `failed`, the number of layers, and
the seconds; then the reason if it is not right. An exporter that fails says nothing about the converter: `-`.
The models by hand are nets of sequences and of volumes, as small as they are in practice. --keep keeps the ONNX models,
for speed.py and pnnx.py.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.nn import functional

SECONDS = 600
RESULTS = {0: "right", 1: "refused", 3: "wrong"}

TORCHVISION = """
    alexnet vgg11_bn mnasnet0_5 efficientnet_v2_s resnext50_32x4d wide_resnet50_2 inception_v3 densenet161 squeezenet1_0
    shufflenet_v2_x0_5 convnext_tiny swin_t swin_v2_t vit_b_16 googlenet regnet_x_400mf mobilenet_v3_large maxvit_t
    fcn_resnet50 deeplabv3_resnet50 lraspp_mobilenet_v3_large s3d mc3_18 r2plus1d_18 swin3d_t mvit_v2_s
"""
TIMM = """
    beit_base_patch16_224 cait_xxs24_224 coat_lite_tiny coat_tiny coatnet_rmlp_nano_rw_224 convit_tiny convmixer_768_32
    convnextv2_atto crossvit_tiny_240 cs3darknet_s cspresnet50 davit_tiny deit3_small_patch16_224 densenetblur121d dla34
    dm_nfnet_f0 dpn68b eca_halonext26ts eca_nfnet_l0 edgenext_xx_small efficientformer_l1 efficientformerv2_s0
    efficientnet_es efficientvit_b0 efficientvit_m0 ese_vovnet19b_dw eva02_tiny_patch14_224 fasternet_t0 fastvit_sa12
    focalnet_tiny_srf gcresnet33ts gcvit_xxtiny gernet_s ghostnetv2_100 gmixer_12_224 gmlp_ti16_224 halonet26t
    hardcorenas_a hgnetv2_b0 hiera_tiny_224 hrnet_w18_small inception_next_atto inception_v4 lambda_resnet26t lcnet_035
    legacy_seresnet18 legacy_xception levit_256d mambaout_femto maxvit_tiny_tf_224 maxxvit_rmlp_nano_rw_256 mixnet_s
    mnasnet_small mobilenetv4_conv_small mobilenetv4_hybrid_medium mobileone_s0 mobilevitv2_050 mvitv2_tiny nasnetalarge
    nest_tiny nextvit_small nf_regnet_b0 pit_ti_224 pnasnet5large poolformer_s12 pvt_v2_b0 regnety_002 regnetz_005
    repghostnet_050 repvit_m0_9 res2net50_26w_4s resmlp_12_224 resnest14d resnetblur18 resnetv2_18 rexnet_100
    samvit_base_patch16_224 selecsls42 sequencer2d_s seresnext26t_32x4d shvit_s1 skresnet18 starnet_s050 swiftformer_xs
    swin_s3_tiny_224 swinv2_cr_tiny_ns_224 swinv2_tiny_window8_256 tf_efficientnetv2_b0 tinynet_e tiny_vit_5m_224
    tnt_s_patch16_224 tresnet_m twins_pcpvt_small twins_svt_small visformer_tiny vit_relpos_small_patch16_224
    vit_small_patch14_reg4_dinov2 vit_small_patch16_rope_224 volo_d1_224 vovnet39a xception41 xcit_nano_12_p16_224
"""
TEXT = """
    albert bart bert bloom camembert codegen cohere convbert deberta deberta-v2 distilbert electra falcon fnet gemma
    gemma2 gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite llama mistral modernbert mpnet mpt olmo2 opt phi phi3 qwen2
    qwen3 rembert roberta roformer smollm3 squeezebert stablelm starcoder2 xlm-roberta xlnet
"""
IMAGES = "beit bit data2vec-vision deit dinov2 focalnet ijepa pvt_v2 segformer swin swinv2 vit vit_msn"
SOUNDS = "data2vec-audio hubert sew unispeech wav2vec2 wav2vec2-conformer wavlm"
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "image_size": 64,
    "patch_size": 16,
    "pad_token_id": 0,
    "use_cache": False,
}
FEW: tuple[dict[str, Any], ...] = {"depths": (1, 1, 2, 1)}, {"depths": (1, 1, 1, 1)}, {"depth": 2}, {}

Model = tuple[nn.Module, tuple[Tensor, ...]]


class First(nn.Module):
    """The first result of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the first output, also if the model returns a tuple or a dictionary."""
        result = self.model(*inputs)
        if isinstance(result, dict):
            result = tuple(result.values())
        return result if isinstance(result, Tensor) else result[0]


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
        """Return the sum of x and the outputs of the pairs."""
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
        """Return samples (1, 1, t * product of the rates) for a spectrogram (1, 80, t)."""
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
        """Return the sum of x and the module's output."""
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
    """Return a classifier of electrocardiograms."""
    sizes = (12, 32, 64, 128, 128)
    blocks = [
        nn.Sequential(nn.Conv1d(i, o, 7, padding=3), nn.BatchNorm1d(o), nn.ReLU(), nn.MaxPool1d(2))
        for i, o in pairwise(sizes)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 5))


def twice(inputs: int, outputs: int) -> nn.Module:
    """Return the two convolutions of a level of a U-Net."""
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
        """Return a class for each voxel."""
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


SEQUENCES_AND_VOLUMES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
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


def models() -> Iterator[tuple[str, Callable[[], Model]]]:
    """Yield every model by its name, with a function that makes it and its inputs."""
    yield from ((name, partial(from_torchvision, name)) for name in TORCHVISION.split())
    yield from ((name, partial(from_timm, name)) for name in TIMM.split())
    for kind, names in (("text", TEXT), ("image", IMAGES), ("sound", SOUNDS)):
        yield from ((f"hf-{name}", partial(from_transformers, name, kind)) for name in names.split())
    yield from ((name, partial(by_hand, name)) for name in SEQUENCES_AND_VOLUMES)


def by_hand(name: str) -> Model:
    """Return a net of sequences or volumes, with random inputs."""
    make, shape = SEQUENCES_AND_VOLUMES[name]
    return make(), (torch.randn(shape),)


def from_torchvision(name: str) -> Model:
    """Return a model as it is, on an image or a short film."""
    zoo = torchvision.models
    options = {"weights_backbone": None} if name in zoo.list_models(zoo.segmentation) else {}
    frames = (16,) if name in zoo.list_models(zoo.video) else ()
    size = 64 if frames and name != "mvit_v2_s" else 224
    return First(zoo.get_model(name, weights=None, **options)), (torch.randn(1, 3, *frames, size, size),)


def from_timm(name: str) -> Model:
    """Return a model with as few blocks as possible, on images of the size that it takes."""
    for options in FEW:
        try:
            model = timm.create_model(name, pretrained=False, **options)
        except (TypeError, AssertionError, IndexError, RuntimeError, ValueError):  # it does not have this option
            continue
        return First(model), (torch.randn(1, *model.default_cfg["input_size"]),)
    raise ValueError(f"{name} cannot be made")


def from_transformers(name: str, kind: str) -> Model:
    """Return a tiny model of a family: no heads, and inputs of one item."""
    config = transformers.AutoConfig.for_model(name, **TINY)
    inputs = {"text": torch.randint(3, 100, (1, 12)), "image": torch.randn(1, 3, 64, 64), "sound": torch.randn(1, 4000)}
    return First(transformers.AutoModel.from_config(config)), (inputs[kind],)


def spread(model: nn.Module) -> None:
    """Spread weights that all have one value, and the statistics of batch normalisation."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) / 2 + 0.75)
            elif tensor.is_floating_point() and tensor.numel() > 1 and (tensor == tensor.reshape(-1)[0]).all():
                tensor.add_(torch.randn(tensor.shape, generator=generator) / 10)


def export(model: nn.Module, inputs: tuple[Tensor, ...], exporter: str, path: Path) -> None:
    """Write a model as one of torch's exporters does; `tsbn` keeps its batch normalisation."""
    options: dict[str, Any] = {"dynamo": True, "external_data": False} if exporter == "dyn" else {}
    if exporter != "dyn":
        options = {"dynamo": False, "opset_version": 17}
    if exporter == "tsbn":
        options |= {"do_constant_folding": False, "training": torch.onnx.TrainingMode.PRESERVE}
    torch.onnx.export(model, inputs, str(path), verbose=False, **options)


def convert(path: Path) -> tuple[str, str, str]:
    """Return the result, the number of layers, and the last message if the result is not right."""
    command = ["onnx2ncnn-opt", "convert", str(path), "-o", str(path.with_suffix(""))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "failed", "", f"more than {SECONDS} s"
    layers = re.search(r"^layers: .*-> (\d+)", done.stdout, re.MULTILINE)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    result = "failed" if "Traceback" in done.stderr else RESULTS.get(done.returncode, "failed")
    return result, layers[1] if layers else "", "" if result == "right" else said[-1].strip()


def main() -> None:
    """Convert and verify the models whose names match."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("regex", nargs="?", default=".", type=re.compile)
    parser.add_argument("-e", "--exporter", choices=("ts", "dyn", "tsbn"), default="ts")
    parser.add_argument("-o", "--output", type=argparse.FileType("w"), default=sys.stdout)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the ONNX models there")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, make in models():
        if not arguments.regex.search(name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path, started = Path(folder) / f"{name}.onnx", time.monotonic()
            torch.manual_seed(0)
            try:
                model, inputs = make()
                spread(model.eval())
                export(model, inputs, arguments.exporter, path)
            except Exception as error:  # whatever a model or an exporter may raise
                row = ("-", "", f"not exported: {type(error).__name__}")
            else:
                started = time.monotonic()
                row = convert(path)
                if arguments.keep:
                    arguments.keep.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, arguments.keep / f"{name}.{arguments.exporter}.onnx")
            seconds = f"{time.monotonic() - started:.1f}"
        print(name, arguments.exporter, *row[:2], seconds, row[2], sep="\t", file=arguments.output, flush=True)


if __name__ == "__main__":
    main()
