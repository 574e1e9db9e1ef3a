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
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import Error, ModelError
from onnx2ncnn_opt.onnx.tail.program import Program
from onnx2ncnn_opt.onnx.tail.registry import TAIL_OPS
from testing.conformance import Case, collect
from testing.tails import Library, same_bits

_MOST_RUNS = 20  # for each run that computes something
_SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0)


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
                program = Program.read(case.model.SerializeToString())
            except ModelError:
                continue
            free = [tuple(p._replace(shape=(None,) * len(p.shape)) for p in ports) for ports in _ports(program)]
            cases[operator].append((case, replace(program, inputs=free[0], outputs=free[1])))
    different = 0
    for name, items in cases.items():
        programs = {f"{name}{i}": program for i, (_, program) in enumerate(items)}
        with tempfile.TemporaryDirectory() as folder:
            ends = _run(Library(Path(folder), programs, "-O1"), name, items, count)
        different += ends["different"]
        print(f"{name}: {dict(ends)}" if items else f"{name}: no case", flush=True)
    print(f"{different} runs differ")
    return int(different > 0)


def _ports(program: Program) -> tuple[Any, Any]:
    return program.inputs, program.outputs


def _run(library: Library, name: str, cases: list[tuple[Case, Program]], count: int) -> Counter[str]:
    ends, chosen = Counter[str](), Random(name)
    draw = np.random.default_rng(chosen.randrange(2**32))
    while cases and ends["same"] + ends["different"] < count and ends.total() < _MOST_RUNS * count:
        number = chosen.randrange(len(cases))
        case, program = cases[number]
        feeds = _feeds(case, program, chosen, draw)
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


def _feeds(case: Case, program: Program, chosen: Random, draw: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Return other arrays: one new size for each old one."""
    node = program.nodes[0]
    lists = {name for name, item in zip(node.inputs, node.op.declared(len(node.inputs)), strict=True) if item.is_list}
    sizes: dict[int, int] = {}
    for port in program.inputs:
        for size in np.shape(case.feeds[port.name]) if port.name not in lists else ():
            keeps = chosen.random() < 0.5 or size == 1
            sizes.setdefault(size, size if keeps else chosen.choice([0, 1, 2, 3, 5, 9]))
    feeds = {}
    for port in program.inputs:
        old = np.asarray(case.feeds[port.name])
        if port.name in lists:
            values = [sizes.get(int(v), int(v)) if chosen.random() < 0.7 else int(v) for v in old.ravel()]
            if values and chosen.random() < 0.2:
                values[chosen.randrange(len(values))] += chosen.choice([-1, 1])
            feeds[port.name] = np.array(values, old.dtype).reshape(old.shape)
        else:
            shape = tuple(sizes[size] for size in old.shape)
            feeds[port.name] = _numbers(old, shape, chosen, draw)
    return feeds


def _numbers(old: NDArray[Any], shape: tuple[int, ...], chosen: Random, draw: np.random.Generator) -> NDArray[Any]:
    if old.dtype == bool:
        return draw.random(shape) < chosen.choice([0, 0.5, 1])
    kind = chosen.random()
    if kind < 0.3 and old.size:
        return np.asarray(draw.choice(old.ravel(), shape))
    if old.dtype.kind in "iu":
        ends = np.iinfo(old.dtype)
        low, high = (ends.min, ends.max) if kind < 0.4 else (max(ends.min, -4), 5)
        return draw.integers(low, high, shape, old.dtype, endpoint=True)
    numbers = draw.integers(-3, 4, shape).astype(old.dtype) if kind < 0.6 else draw.normal(size=shape).astype(old.dtype)
    if kind > 0.8:
        numbers = np.asarray(np.abs(numbers))
    if chosen.random() < 0.4:
        numbers = np.where(draw.random(shape) < 0.2, draw.choice(np.array(_SPECIAL, old.dtype), shape), numbers)
    return np.asarray(numbers)


if __name__ == "__main__":
    sys.exit(main())
