"""What pnnx makes of ONNX's own cases, a few for each operator, in the real ncnn: writes fixtures/pnnx_ops.tsv.

    pip install pnnx
    python -m scripts.measure.pnnx_ops [-k OPERATOR]

The cases are those of scripts/fixtures/conformance.py that have one node, with weights and shapes as initializers: for
each operator some of float32 numbers, spread evenly over all of them. pnnx's net is judged as `verify` judges any net,
which tries every way to feed it, but against the suite's own outputs, to 1e-3 of the largest value. The outcome is

    right      every output is the suite's
    wrong      some output is not, or ncnn crashes
    no net     pnnx gives up, or writes what ncnn does not load

docs/ops.md shows it beside each operator (scripts/generate_docs.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.onnx.ops import all_ops
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.verify import verify_net
from testing.conformance import Case, collect

TABLE = Path(__file__).parents[2] / "fixtures" / "pnnx_ops.tsv"
CASES = 2  # of each operator
TIMEOUT = 60

_NAMES = {"float32": "f32", "float64": "f64", "float16": "f16", "int64": "i64", "int32": "i32", "int8": "i8"}
_NAMES |= {"uint8": "u8", "int16": "i16", "bool": "i32"}


def chosen(cases: Sequence[Case]) -> list[Case]:
    """Some cases of one operator: with constants where there are any, of float32 numbers if some are."""
    # Of both variants of a case the one with constants comes last.
    variants = {case.name.removesuffix(" (constants)"): case for case in cases if case.feeds}
    runnable = [case for case in variants.values() if all(map(_is_numbers, case.feeds.values()))]
    floats = [case for case in runnable if all(array.dtype == np.float32 for array in case.feeds.values())]
    known = floats or runnable
    places = np.linspace(0, len(known) - 1, min(CASES, len(known))).round().astype(int)
    return [known[i] for i in places]


def _is_numbers(array: object) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.name in _NAMES and array.ndim > 0 and array.size > 0


def answered(case: Case) -> bytes:
    """A model with the inputs and outputs of the case that gives the suite's outputs, whatever it is fed."""
    names = [value.name for value in case.model.graph.output]
    arrays = [numpy_helper.from_array(np.asarray(a), f"{n}_") for n, a in zip(names, case.expected, strict=True)]
    inputs = [value for value in case.model.graph.input if value.name in case.feeds]
    nodes = [helper.make_node("Identity", [f"{name}_"], [name]) for name in names]
    outputs = [helper.make_tensor_value_info(n, a.data_type, a.dims) for n, a in zip(names, arrays, strict=True)]
    graph = helper.make_graph(nodes, "answers", inputs, outputs, arrays)
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10).SerializeToString()
    )


def judge(case: Case, pnnx: str, folder: Path) -> str:
    """The outcome of one case."""
    for path in folder.iterdir():
        path.unlink()
    onnx.save(case.model, folder / "m.onnx")
    shapes = ",".join(f"[{','.join(map(str, array.shape))}]{_NAMES[array.dtype.name]}" for array in case.feeds.values())
    command = [pnnx, "m.onnx", "fp16=0", f"inputshape={shapes}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return "no net"
    param, bin = folder / "m.ncnn.param", folder / "m.ncnn.bin"
    if done.returncode or not param.exists():
        return "no net"
    try:
        report = verify_net(answered(case), param, bin, verification=Verification(feeds=case.feeds, timeout=TIMEOUT))
    except Error:  # other inputs than the model's
        return "wrong"
    statuses = {output.status for output in report.outputs}
    return "right" if statuses == {"ok"} else "no net" if "refused" in statuses else "wrong"


def main() -> int:
    """Run the cases and write the table; returns the exit code."""
    parser = argparse.ArgumentParser(description="ONNX's cases through pnnx and ncnn")
    parser.add_argument("-k", dest="operator", default="", help="only this operator; prints outcomes")
    options = parser.parse_args()
    package = find_spec("pnnx")
    if package is None or package.origin is None:
        print("there is no pnnx; pip install pnnx", file=sys.stderr)
        return 1
    os.nice(10)
    program = str(Path(package.origin).with_name("pnnx"))
    wanted = {op.name for op in all_ops() if not op.domain}
    by_operator: dict[str, list[Case]] = {}
    for case in collect():
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type in wanted and options.operator in ("", nodes[0].op_type):
            by_operator.setdefault(nodes[0].op_type, []).append(case)
    lines = [f"operator\tcase\twith pnnx {version('pnnx')}"]
    with tempfile.TemporaryDirectory(prefix="pnnx-") as folder:
        for operator, cases in sorted(by_operator.items()):
            for case in chosen(cases):
                lines.append(f"{operator}\t{case.name}\t{judge(case, program, Path(folder))}")
                print(lines[-1], flush=True)
    if not options.operator:
        TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
