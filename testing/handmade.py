"""Nets written by hand, so that tests of runtime/ and verification/ do not depend on the rest of this package."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_net(folder: Path, *lines: str, weights: bytes = b"", stem: str = "net") -> tuple[Path, Path]:
    """Write a .param of these layer lines, with the header's counts, and a .bin; return both paths."""
    blobs = {name for line in lines for name in line.split()[4 : 4 + sum(map(int, line.split()[2:4]))]}
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
