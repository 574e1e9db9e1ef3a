"""Random valid ONNX models through `convert`: ncnn computes ONNX Runtime's results, or the model is refused.

    python -m scripts.fuzz.models [--kind any] [--count 10000] [--seed 0] [--first 0] [--reasons] [--verify]
    python -m scripts.fuzz.models --only N [--kind any] [--seed 0]     one model, cut down to what goes wrong

The models (testing/generators.py has their kinds) are made of any operators that fit, on one to three inputs
of any rank; every third has dynamic sizes and runs at three of each. Each is converted without and with passes, runs in
ncnn (with passes also without packing and related kernels), and is compared at the tolerance of `verify`; it is
converted again, which has to give the same bytes, and its net goes through `optimize`, which has to find nothing to
do, or nothing wrong where it knows less: how many images there are. Outcomes:

    right
    refused          the converter names a reason (--reasons counts them)
    ill-conditioned  outputs differ, but rounding each value in the model changes them as much
    unproven         with --verify: `verify` finds nothing to compare
    ALARM            with --verify: `verify` calls the right net wrong
    WRONG, CRASH, TRACEBACK, SLOW, UNSTABLE    never
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from scripts.fuzz import campaign
from testing.fuzz_models import Fuzzer, guarded, shrunk
from testing.generators import GENERATORS
from testing.random_models import RandomModel


def child(given: argparse.Namespace) -> None:
    """Judge a run of models."""
    warnings.simplefilter("error")
    with NcnnWorker() as worker, tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), worker, is_verified=given.verify)
        campaign.answer(given, lambda number: guarded(fuzzer, GENERATORS[given.kind](given.seed, number)))


def show(model: RandomModel, is_verified: bool) -> int:
    """Judge one model, and print it without the parts that do not matter."""
    with NcnnWorker() as worker, tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), worker, is_verified=is_verified)
        outcome = guarded(fuzzer, model)
        print(outcome.kind, outcome.reason)
        if not outcome.is_bad and outcome.kind != "refused":
            return 0
        model = shrunk(fuzzer, model, outcome.kind)
        print(guarded(fuzzer, model).reason)
        print(f"opset {model.opset}, inputs {_shapes(model, model.inputs)}, outputs {_shapes(model, model.outputs)}")
        for node in model.nodes:
            small = {name: model.constants[name] for name in node.input if name in model.constants}
            said = {name: a.tolist() if a.size < 9 else f"{a.dtype}{list(a.shape)}" for name, a in small.items()}
            attributes = {a.name: _value(a) for a in node.attribute}
            print(f"  {', '.join(node.output)} = {node.op_type}({', '.join(node.input)}) {attributes} {said}")
    return int(outcome.is_bad)


def _value(attribute: Any) -> Any:
    import onnx

    return onnx.helper.get_attribute_value(attribute)


def _shapes(model: RandomModel, names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(f"{n}: {[f'{a.dtype}{list(a.shape)}' for a in model.values[n]]}" for n in names)


def main() -> int:
    """Run the command line."""
    parser = campaign.arguments(__doc__, 10_000)
    parser.add_argument("--kind", choices=GENERATORS, default="any")
    parser.add_argument("--verify", action="store_true", help="verify what is right, as `convert` does")
    parser.add_argument("--reasons", action="store_true", help="say how often each reason to refuse came")
    parser.add_argument("--only", type=int, help="one model, cut down to what goes wrong")
    given = parser.parse_args()
    if given.child:
        child(given)
        return 0
    if given.only is not None:
        return show(GENERATORS[given.kind](given.seed, given.only), given.verify)
    passed = ["--seed", str(given.seed), "--kind", given.kind, *["--verify"] * given.verify]
    outcomes = campaign.in_children("scripts.fuzz.models", campaign.numbers(given), passed)
    return campaign.report(outcomes, reasons=given.reasons)


if __name__ == "__main__":
    sys.exit(main())
