"""Run every tail operator on random inputs, in NumPy and in C++, and compare the bits.

    python -m scripts.fuzz.tail [COUNT] [OPERATOR ...]

The programs are the cases of ONNX's conformance suite that have one operator. A run draws other sizes (0 among them)
and other numbers: few levels with ties, NaN, infinities, -0, the ends of integer types, or any. Indices, axes and
shapes stay in their range most of the time. Where NumPy refuses the arrays, the C++ function has to refuse them too.
COUNT runs have to compute something; the others come on top.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import Error, ModelError
from onnx2ncnn_opt.tail.program import Program
from onnx2ncnn_opt.tail.reader import read_tail
from onnx2ncnn_opt.tail.registry import TAIL_OPS
from testing.conformance import Case, collect
from testing.tails import Library, of_any_size, random_feeds, same_bits

_MOST_RUNS = 20  # for each run that computes something


def main() -> int:
    """Print the runs that differ, and a line for each operator."""
    np.set_printoptions(threshold=40)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    names = sys.argv[2:] or sorted(TAIL_OPS)
    cases: dict[str, list[tuple[Case, Program]]] = {name: [] for name in names}
    for case in collect():
        [operator, *others] = [node.op_type for node in case.model.graph.node]
        if operator in cases and not others and not case.model.graph.initializer:
            try:
                program = read_tail(case.model.SerializeToString())
            except ModelError:
                continue
            cases[operator].append((case, of_any_size(program)))
    different = 0
    for name, items in cases.items():
        programs = {f"{name}{i}": program for i, (_, program) in enumerate(items)}
        with tempfile.TemporaryDirectory() as folder:
            ends = _run(Library(Path(folder), programs, "-O1"), name, items, count)
        different += ends["different"]
        print(f"{name}: {dict(ends)}" if items else f"{name}: no case", flush=True)
    print(f"{different} runs differ")
    return int(different > 0)


def _run(library: Library, name: str, cases: list[tuple[Case, Program]], count: int) -> Counter[str]:
    ends, chosen = Counter[str](), Random(name)
    draw = np.random.default_rng(chosen.randrange(2**32))
    while cases and ends["same"] + ends["different"] < count and ends.total() < _MOST_RUNS * count:
        number = chosen.randrange(len(cases))
        case, program = cases[number]
        feeds = random_feeds(case.feeds, program, chosen, draw)
        found = library.run(f"{name}{number}", feeds)
        try:
            expected: Mapping[str, NDArray[Any]] | None = program.run(feeds)
        except Error:
            expected = None
        if expected is None or isinstance(found, int):
            end = "refused" if expected is None and isinstance(found, int) else "different"
        else:
            end = "same" if all(same_bits(found[key], array) for key, array in expected.items()) else "different"
        ends[end] += 1
        if end == "different" and ends[end] <= 3:
            print(f"{name} of {case.name} {dict(program.nodes[0].attributes)}: {feeds}")
            print(_first_difference(expected, found))
    return ends


def _first_difference(expected: Mapping[str, NDArray[Any]] | None, found: Mapping[str, NDArray[Any]] | int) -> str:
    if expected is None or isinstance(found, int):
        return f"  NumPy {expected}\n  C++ {found}"
    for key, ours in expected.items():
        theirs = found[key]
        if ours.shape != theirs.shape:
            return f"  {key}: NumPy {ours.shape}, C++ {theirs.shape}"
        for at in np.ndindex(ours.shape):
            if not same_bits(ours[at].reshape(1), theirs[at].reshape(1)):
                return f"  {key}{list(at)}: NumPy {ours[at]!r}, C++ {theirs[at]!r}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
