"""Tails as compiled C++: many programs in one shared library."""

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.tail.header import header
from onnx2ncnn_opt.tail.program import Node, Port, Program

CLANG = shutil.which("clang++")
COMPILER = shutil.which("c++") or shutil.which("g++") or CLANG
FLAGS = (
    "-std=c++11",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wno-sign-conversion",
    "-Werror",
    "-fno-exceptions",
    "-fno-rtti",
)
_SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0)


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("rank", ctypes.c_int64), ("shape", ctypes.c_int64 * 8))


class Library:
    """Programs as one shared library, by name."""

    def __init__(
        self, folder: Path, programs: Mapping[str, Program], *flags: str, compiler: str | None = COMPILER
    ) -> None:
        assert compiler
        self.programs = programs
        source, binary = folder / "tails.cpp", folder / "tails.so"
        text = []
        for name, program in programs.items():
            (folder / f"{name}.tail.h").write_text(header(program, name))
            text.append(f'#define {name.upper()}_TAIL_IMPLEMENTATION\n#include "{name}.tail.h"\n')
        source.write_text("".join(text))
        command = [compiler, *FLAGS, *(flags or ("-O1",)), "-shared", "-fPIC", str(source), "-o", str(binary)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or done.stderr:
            raise AssertionError(done.stderr[:20000])
        self._library = ctypes.CDLL(str(binary))
        self._free = ctypes.CDLL(None).free
        self._free.argtypes = [ctypes.c_void_p]

    def run(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]] | int:
        """Return the outputs, or the code of an error."""
        program = self.programs[name]
        inputs, outputs = (_Tensor * (len(program.inputs) or 1))(), (_Tensor * len(program.outputs))()
        kept = []
        for tensor, port in zip(inputs, program.inputs, strict=False):
            array = np.ascontiguousarray(arrays[port.name]).reshape(np.shape(arrays[port.name]))
            kept.append(array)
            tensor.data, tensor.rank = array.ctypes.data, array.ndim
            tensor.shape[: array.ndim] = list(array.shape)
        memory = ctypes.c_void_p()
        code = getattr(self._library, f"{name}_tail")(inputs, outputs, ctypes.byref(memory))
        if code:
            assert not memory.value
            return int(code)
        results = {}
        for tensor, port in zip(outputs, program.outputs, strict=True):
            shape = tuple(tensor.shape[: tensor.rank])
            size = int(np.prod(shape)) * np.dtype(port.dtype).itemsize
            data = ctypes.string_at(tensor.data, size)
            results[port.name] = np.frombuffer(data, port.dtype).reshape(shape)
        self._free(memory)
        return results


def merged(programs: Sequence[Program]) -> Program:
    """Return one program of many, whose names begin with their number, as `3.x`."""
    inputs, outputs, nodes = [], [], []
    constants: dict[str, NDArray[Any]] = {}
    for i, program in enumerate(programs):

        def named(names: Sequence[str], i: int = i) -> tuple[str, ...]:
            return tuple(f"{i}.{name}" if name else "" for name in names)

        inputs += [Port(f"{i}.{name}", dtype, shape) for name, dtype, shape in program.inputs]
        outputs += [Port(f"{i}.{name}", dtype, shape) for name, dtype, shape in program.outputs]
        constants |= {f"{i}.{name}": array for name, array in program.constants.items()}
        nodes += [
            Node(n.operator, f"{i}.{n.name}", named(n.inputs), named(n.outputs), n.attributes) for n in program.nodes
        ]
    return Program(tuple(inputs), tuple(outputs), constants, tuple(nodes))


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Return True if arrays have the same bits; all NaNs count as equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind != "f":
        return bool(np.array_equal(a, b))
    return bool(np.all((a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))))


def of_any_size(program: Program) -> Program:
    """Return a program that takes arrays of all sizes."""
    ports = (program.inputs, program.outputs)
    inputs, outputs = (tuple(port._replace(shape=(None,) * len(port.shape)) for port in part) for part in ports)
    return replace(program, inputs=inputs, outputs=outputs)


def random_feeds(
    feeds: Mapping[str, NDArray[Any]], program: Program, chosen: Random, draw: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Return other arrays for a program of one node: one new size for each old one, 0 among them."""
    node = program.nodes[0]
    lists = {name for name, item in zip(node.inputs, node.op.declared(len(node.inputs)), strict=True) if item.is_list}
    sizes: dict[int, int] = {}
    for port in program.inputs:
        for size in np.shape(feeds[port.name]) if port.name not in lists else ():
            keeps = chosen.random() < 0.5 or size == 1
            sizes.setdefault(size, size if keeps else chosen.choice([0, 1, 2, 3, 5, 9]))
    found = {}
    for port in program.inputs:
        old = np.asarray(feeds[port.name])
        if port.name in lists:
            values = [sizes.get(int(v), int(v)) if chosen.random() < 0.7 else int(v) for v in old.ravel()]
            if values and chosen.random() < 0.2:
                values[chosen.randrange(len(values))] += chosen.choice([-9, -1, 1, 9])
            found[port.name] = np.array(values, old.dtype).reshape(old.shape)
        else:
            shape = tuple(sizes[size] for size in old.shape)
            found[port.name] = _numbers(old, shape, chosen, draw)
    return found


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
