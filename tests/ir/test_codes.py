"""The codes of ncnn's parameters against what ncnn computes."""

from pathlib import Path

import numpy as np

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from testing.handmade import write_net


def test_exchanged_operations(tmp_path: Path) -> None:
    """Each operation and the one it names on exchanged operands; the same operation on them where they commute."""
    copies = {x: [f"{x}{i}" for i in range(2 * len(BinaryOp))] for x in "ab"}
    lines = [f"Input {x} 0 1 {x}\nSplit {x}s 1 {len(names)} {x} {' '.join(names)}" for x, names in copies.items()]
    lines = [line for pair in lines for line in pair.split("\n")]
    for code in BinaryOp:
        (a, b), (c, d) = ((f"a{i}", f"b{i}") for i in (2 * code, 2 * code + 1))
        lines.append(f"BinaryOp n{code.value} 2 1 {a} {b} n{code.value} 0={code.value}")
        lines.append(f"BinaryOp x{code.value} 2 1 {d} {c} x{code.value} 0={code.exchanged.value}")
    rng = np.random.default_rng(0)
    feeds = {x: rng.uniform(0.5, 4, 32).astype(np.float32) for x in "ab"}
    with NcnnRunner(*write_net(tmp_path, *lines)) as runner:
        results = runner.run(feeds)
    for code in BinaryOp:
        np.testing.assert_allclose(results[f"n{code.value}"], results[f"x{code.value}"], rtol=1e-5, err_msg=code.name)
        assert np.ptp(results[f"n{code.value}"]) > 0
