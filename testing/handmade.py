"""Nets written by hand, so that tests of runtime/ and verification/ do not depend on the rest of this package."""

from pathlib import Path

import numpy as np

# A net; one that kills ncnn, because nothing splits x, and the second ReLU works in place on a blob that the first one
# has freed; and one that takes many seconds, for a Softmax over 1.6e9 elements.
RELU = ("Input in 0 1 x", "ReLU relu 1 1 x y")
CRASH = ("Input in 0 1 x", "ReLU one 1 1 x y", "ReLU two 1 1 x z")
ENDLESS = ("Input in 0 1 x", "Padding a 1 1 x y 0=20000 1=20000 2=20000 3=20000", "Softmax b 1 1 y z 0=1 1=1")


def write_net(folder: Path, *lines: str, weights: bytes = b"", stem: str = "net") -> tuple[Path, Path]:
    """Write a .param of these layer lines, with the header's counts, and a .bin; return both paths."""
    blobs = {name for line in lines for name in line.split()[4 : 4 + sum(map(int, line.split()[2:4]))]}
    folder.mkdir(exist_ok=True)
    param, bin = folder / f"{stem}.param", folder / f"{stem}.bin"
    param.write_text(f"7767517\n{len(lines)} {len(blobs)}\n" + "\n".join(lines) + "\n")
    bin.write_bytes(weights)
    return param, bin


def raw(*values: object) -> bytes:
    """Return float32 weights without a tag, as biases and MemoryData are stored."""
    return b"".join(np.asarray(value, np.float32).tobytes() for value in values)


def tagged(*values: object) -> bytes:
    """Return float32 weights after the tag of uncompressed data, as kernels are stored."""
    return b"".join(bytes(4) + np.asarray(value, np.float32).tobytes() for value in values)
