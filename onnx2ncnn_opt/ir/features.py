"""The features of ncnn that parameter 31 (featmask) of a layer switches off, for that layer alone."""

from enum import IntFlag
from typing import Literal, TypeAlias

# A kind of device that computes in fp16, and the kinds that get masks: all, none, or one.
Device: TypeAlias = Literal["arm", "vulkan"]
MasksFor: TypeAlias = bool | Device


class Feature(IntFlag):
    """A bit of the feature mask: it switches off `Option`'s field of that name for the layer (ncnn's net.cpp).

    - NO_FP16_ARITHMETIC: blobs and weights stay in 16 bits, sums and functions are computed in 32. On ARM that also
      means packs of 4 instead of 8, and no winograd and no sgemm for 16 bit convolutions.
    - NO_FP16_STORAGE: the layer reads and writes 32 bits, but ncnn does not convert its inputs. So every input must
      have 32 bits already (`rewrite.prove_masks`): with 16 bits, results are wrong on ARM and Vulkan, or ncnn crashes.
    - NO_BF16_STORAGE: the same for bf16, which is off by default.
    - NO_INT8: ncnn refuses quantised layers, unless they have float weights.
    - NO_VULKAN: the layer runs on the CPU, in 32 bits if its input is; its inputs come down from the GPU.
    - NO_SGEMM, NO_WINOGRAD: convolutions are computed in another way. Winograd in fp16 costs 1e-2 and more of the
      largest value on ARM; without it a layer takes 1.5 to 2 times as long.
    - SINGLE_THREAD: the layer runs on one thread.
    """

    NO_FP16_ARITHMETIC = 1 << 0
    NO_FP16_STORAGE = 1 << 1
    NO_BF16_STORAGE = 1 << 2
    NO_INT8 = 1 << 3
    NO_VULKAN = 1 << 4
    NO_SGEMM = 1 << 5
    NO_WINOGRAD = 1 << 6
    SINGLE_THREAD = 1 << 7


# 32 bits throughout, on a CPU and next to a GPU.
FP32 = Feature.NO_FP16_ARITHMETIC | Feature.NO_FP16_STORAGE | Feature.NO_VULKAN

TEXT = {feature: str(feature.name).lower().replace("_", " ") for feature in Feature}
TEXT |= {Feature.NO_VULKAN: "no Vulkan", Feature.SINGLE_THREAD: "one thread"}


def features_of(mask: int) -> str:
    """Return the features that a mask switches off, in words."""
    return ", ".join(text for feature, text in TEXT.items() if mask & feature)
