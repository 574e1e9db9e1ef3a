"""Times of int8 layers relative to float, for emulated devices, which cannot be timed.

They were measured, by us or in ncnn's issues, and rounded up to the slowest kernel. Other layers have no known time.
"""

from collections.abc import Mapping

# An x86 CPU with AVX2 and no VNNI, one thread: 3x3 of 64 channels at 56x56 and of 256 at 14x14, 1x1 from 64 to 256
# channels, and Gemms of 1 and 197 rows by 768x3072. Cortex-A76, one thread, whole nets: mobilenet 18.3 -> 13.9 ms for
# 1x1 and depthwise, googlenet 50.6 -> 46.1 for 3x3.
_AVX2 = {"Convolution": 0.89, "Gemm": 0.93}
_A76 = {"Convolution": 0.91, "ConvolutionDepthWise": 0.76}
_TIMES: Mapping[str, Mapping[str, float]] = {"x86_64": _AVX2, "AMD64": _AVX2, "aarch64": _A76, "arm64": _A76}


def time_in_int8(machine: str, type: str) -> float | None:
    """Return the time of a layer in int8 relative to float; None if it was not measured."""
    return _TIMES.get(machine, {}).get(type)
