"""The tables of docs/special-values.md: what layers make of NaN, infinities and zeros, on the CPU and by Vulkan.

`--on qemu-x86_64:Haswell` (AVX2), `--on qemu-x86_64:Nehalem` (SSE) and `--on qemu-aarch64` look at other CPUs.
"""

from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from testing.handmade import write_net
from testing.machine import is_arm

NAN, INF = np.nan, np.inf
Numbers = float | tuple[float, ...]
LENGTH = 23  # two vectors, a half and a quarter one, and a tail
# Layer and parameters, an operand, and all results: on x86, on aarch64, by Vulkan. A CPU has one result in vectors, and
# may have another in what is left of a row. Those of x86 are a set over SSE, AVX2 and AVX-512: the tests run on any.
FACTS = [
    ("Threshold", "0=0", NAN, 0, 0, 0),
    ("Threshold", "0=-1", NAN, 0, 0, 0),
    ("UnaryOp", "0=20", NAN, (0, 1), (0, 1), 0),
    ("Shrink", "0=0 1=0", NAN, 0, (0, NAN), NAN),
    ("Clip", "0=-1 1=1", INF, 1, 1, 1),
    ("Clip", "0=-1 1=1", NAN, (-1, 1, NAN), (-1, NAN), -1),
    ("UnaryOp", "0=18", 3e9, (3e9, -(2**31)), 3e9, 3e9),  # -2**31 on x86 without AVX
    ("UnaryOp", "0=19", INF, (INF, -(2**31)), INF, INF),
    ("BinaryOp", "0=4 1=1 2=0.5", NAN, (0.5, NAN), (0.5, NAN), 0.5),
    ("ReLU", "", NAN, (0, NAN), (0, NAN), 0),
    ("BinaryOp", "0=2 1=1 2=0", NAN, NAN, NAN, 0),
    ("BinaryOp", "0=8 1=1 2=1", 0, (NAN, INF), INF, INF),
    ("UnaryOp", "0=15", 0, (NAN, INF), INF, INF),
    ("UnaryOp", "0=15", INF, (NAN, 0), 0, 0),
    ("UnaryOp", "0=8", 0, (-INF, NAN), (-INF, NAN), -INF),
    ("Log", "", 0, -INF, -INF, -INF),
    ("UnaryOp", "0=5", -1, NAN, NAN, NAN),
    ("UnaryOp", "0=5", 1e-39, (3.16228e-20, -INF), 3.16228e-20, 3.16228e-20),  # see rewrite/square_roots.py
    ("UnaryOp", "0=13", 2, NAN, (2**-11, NAN), NAN),
    ("UnaryOp", "0=6", 0, NAN, (NAN, INF), INF),
    ("UnaryOp", "0=14", INF, (NAN, np.pi / 2), np.pi / 2, np.pi / 2),
    ("UnaryOp", "0=7", INF, (2.4061e38, INF), (2.4061e38, INF), INF),
    ("UnaryOp", "0=7", NAN, (0, 2.4061e38, NAN), NAN, NAN),
    ("BinaryOp", "0=8 1=1 2=1", INF, (NAN, 0), 0, 0),
    ("HardSigmoid", "", NAN, (0, NAN), (NAN, 1), 0),
    ("TanH", "", NAN, (-1, NAN), NAN, -1),
    ("Sigmoid", "", NAN, (0, 4.156e-39, NAN), NAN, NAN),
    ("Reshape", "0=-1", NAN, NAN, NAN, NAN),
    ("Reshape", "0=-1", INF, INF, INF, INF),
]
# In fp16, on aarch64 and by Vulkan: numbers of layers (`LayerSpec.half`), and what is rounded between layers. The CPU
# rounds the inputs of a discrete GPU, and has its own way for what is left of a row (seen on an NVIDIA H100).
HALF_FACTS = [
    ("BinaryOp", "0=2 1=1 2=1e5", 2e-3, INF, INF),
    ("HardSigmoid", "0=1e5 1=0.5", 2e-6, (1, NAN), (1, 0)),
    ("Reduction", "0=0 1=1 2=1e5 4=1 5=1", 2e-4, 460, INF),
    ("Dropout", "0=1e5", 2e-3, 200, INF),
    ("BinaryOp", "0=0 1=1 2=0", 1000.25, (1000, 1000.5), (1000, 1000.5)),
    ("BinaryOp", "0=0 1=1 2=0", 1e-5, (1.00136e-5, 0), (1.00136e-5, 0)),
    ("Reduction", "0=3 1=1 4=1 5=1", 30000, 30000, INF),  # a mean: Vulkan adds up in fp16, unless bit 1 forbids it
    ("Reduction", "0=3 1=1 4=1 5=1 31=1", 30000, 30000, 30000),
]


def column(device: NcnnWorker) -> int:
    """Return the column of FACTS."""
    return 2 if device.target.vulkan else int(is_arm(device))


def made_of(operand: float, layer: str, folder: Path, worker: NcnnWorker, mode: str = "fp32") -> Array:
    """Return a layer's output, with its parameters, for a row of one number."""
    net = write_net(folder, "Input in 0 1 x", layer)
    return NcnnRunner(*net, mode=mode, worker=worker).run({"x": np.full(LENGTH, operand, np.float32)})["y"]


def are_known(result: Array, known: Numbers, relative: float = 0) -> bool:
    """Return True for each number that is one of the known ones."""
    columns = np.atleast_1d(np.array(known, np.float32))[:, np.newaxis]
    return bool(np.isclose(result, columns, rtol=relative, atol=0, equal_nan=True).any(axis=0).all())


@pytest.mark.parametrize(("layer", "params", "operand", "x86", "aarch64", "vulkan"), FACTS)
def test_fact(
    layer: str,
    params: str,
    operand: float,
    x86: Numbers,
    aarch64: Numbers,
    vulkan: float,
    device: NcnnWorker,
    tmp_path: Path,
) -> None:
    result = made_of(operand, f"{layer} it 1 1 x y {params}", tmp_path, device)
    assert are_known(result, (x86, aarch64, vulkan)[column(device)], 1e-4), result


@pytest.mark.parametrize(("layer", "params", "operand", "aarch64", "vulkan"), HALF_FACTS)
def test_half_fact(
    layer: str, params: str, operand: float, aarch64: Numbers, vulkan: Numbers, device: NcnnWorker, tmp_path: Path
) -> None:
    if "fp16" in device.start().greeting:
        pytest.skip("fp16 arithmetic (this CPU has none)")
    result = made_of(operand, f"{layer} it 1 1 x y {params}", tmp_path, device, "fp16")
    assert are_known(result, (aarch64, vulkan)[column(device) - 1], 1e-2 if operand < 1 else 0), result


def test_gridsample_copies(device: NcnnWorker, tmp_path: Path) -> None:
    """In mode nearest, for 4-D Mats, NaN beside numbers and numbers beside NaN."""
    net = write_net(tmp_path, "Input a 0 1 x", "Input b 0 1 g", "GridSample it 2 1 x g y 0=2 1=2 3=1")
    sides = np.stack([np.resize([1, NAN, INF], LENGTH), np.resize([NAN, 2, 3, -INF], LENGTH)]).astype(np.float32)
    chosen = np.arange(LENGTH) % 2
    along = (2 * np.arange(LENGTH) + 1) / LENGTH - 1
    grid = np.stack([along, np.zeros(LENGTH), chosen - 0.5]).astype(np.float32)
    feeds: dict[str, Array] = {"x": sides.reshape(1, 2, 1, -1), "g": grid.reshape(3, 1, 1, -1)}
    result = NcnnRunner(*net, worker=device).run(feeds)["y"]
    np.testing.assert_array_equal(result.reshape(-1), sides[chosen, np.arange(LENGTH)])
