"""Times of int8 kernels relative to float, for emulated devices, which cannot be timed.

Each number was measured, by us or in ncnn's issues, and rounded up. Kernels without an entry have no known time.
"""

from collections.abc import Mapping

from onnx2ncnn_opt.ir.graph import Layer

# An x86 CPU with AVX2 and no VNNI, one thread: 3x3 of 64 channels at 56x56 and of 256 at 14x14, 1x1 from 64 to 256
# channels, and a Gemm of 197 rows by 768x3072.
_AVX2 = {"3x3": 0.89, "3x3 of stride 2": 0.70, "1x1": 0.85, "Gemm": 0.73, "Gemm of one row": 0.93}
_AVX2 |= {"Gemm, one scale": 0.52, "Gemm of one row, one scale": 0.43}
# Cortex-A76, one thread, whole nets: mobilenet 18.3 -> 13.9 ms for 1x1 and depthwise, googlenet 50.6 -> 46.1 for 3x3.
_A76 = {"3x3": 0.91, "3x3 of stride 2": 0.91, "1x1": 0.76, "depthwise": 0.76}
_KERNELS: Mapping[str, Mapping[str, float]] = {"x86_64": _AVX2, "AMD64": _AVX2, "aarch64": _A76, "arm64": _A76}


def time_in_int8(machine: str, layer: Layer, *, whole: bool) -> float | None:
    """Return the time of a layer's int8 form relative to float; None if it was not measured."""
    return _KERNELS.get(machine, {}).get(_kind(layer, whole))


def _kind(layer: Layer, whole: bool) -> str:
    if layer.type == "Convolution":
        sides = {layer["kernel_w"], layer["kernel_h"]}
        stride = " of stride 2" if sides == {3} and layer["stride_w"] == 2 else ""
        return "x".join(str(layer[f"kernel_{axis}"]) for axis in "wh") + stride
    if layer.type == "ConvolutionDepthWise":
        return "depthwise" if layer["group"] == layer["num_output"] else "grouped"
    shape = layer.outputs[0].shape
    row = " of one row" if shape is not None and len(shape) > 1 and shape[-2] == 1 else ""
    return f"{layer.type}{row}{', one scale' if whole else ''}"
