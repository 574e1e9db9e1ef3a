"""Inputs to verify with: drawn from a seed so that they mean something to the model, or read from a file."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.onnx.binding import InputInfo
from onnx2ncnn_opt.onnx.given import parsed_size
from onnx2ncnn_opt.onnx.load import LoadedModel

Array = NDArray[Any]


class Total(NamedTuple):
    """An open size that is the sum of others."""

    name: str
    parts: tuple[str, str]


class Lengths(NamedTuple):
    """Sizes for axes that the model leaves open, by what they look like; never square, so that a mix-up shows."""

    outer: int
    batch: int
    length: int
    width: int
    tokens: int


# First such that suit most models: one image or sentence, long enough for a network that halves five times, short
# enough for the tables of small language models. Then odd ones, and others for models that do not take these.
LENGTHS = (
    Lengths(1, 2, 64, 96, 16),
    Lengths(3, 3, 45, 77, 11),
    Lengths(2, 1, 96, 64, 8),
    Lengths(4, 3, 128, 160, 32),
    Lengths(2, 2, 224, 256, 24),
)

LARGEST_INPUT = 2**30

# Nodes whose output has the values of these inputs (all of them where None), moved about.
_MOVES: dict[str, tuple[int, ...] | None] = {
    "Cast": (0,),
    "Concat": None,
    "Expand": (0,),
    "Flatten": (0,),
    "Gather": (0,),
    "Identity": (0,),
    "Reshape": (0,),
    "Slice": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "Tile": (0,),
    "Transpose": (0,),
    "Unsqueeze": (0,),
    "Where": (1, 2),
}
# Nodes that take an input as index into another.
_INDEXES = {"Gather": 1, "GatherElements": 1}
# Functions that are real numbers on an interval only.
_DOMAINS = {
    "Acos": (-0.9, 0.9),
    "Acosh": (1.1, 4.0),
    "Asin": (-0.9, 0.9),
    "Atanh": (-0.9, 0.9),
    "Log": (0.1, 4.0),
    "ReduceLogSum": (0.1, 4.0),
    "Sqrt": (0.0, 4.0),
}


def draw_inputs(
    model: LoadedModel,
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    lengths: Lengths = LENGTHS[0],
    batches: Collection[str] = (),
) -> dict[str, Array]:
    """An array for every input of the model, the same for the same seed.

    1. What ends as an index into a table lies within the table; 0 where the table's size is unknown.
    2. What ends in a function with a bounded domain (Sqrt, Log, ...) lies inside it.
    3. Other floats are N(0,1).
    4. 8 bit integers, which are mostly images, fill their range.
    5. Other integers and bools are taken for masks: 0 or 1. Each row starts with 1, 0: a row without a 1 has no
       softmax, and one without a 0 does not tell a mask that works from one that is ignored.

    `sizes` gives values to the model's symbolic sizes; those left are `lengths`: its batch for names of `batches`, its
    outer on an outermost axis, else its tokens where an integer input has them, its width on the last of four axes, and
    its length elsewhere.

    Raises:
        UsageError: an input is of a type that cannot be drawn, or absurdly large.
    """
    known = open_sizes(model, lengths, batches) | dict(sizes or {})
    values = {value.name: value for value in model.graph.inputs}
    return {
        info.name: _draw(info, values[info.name], _shape(info, known), np.random.default_rng([seed, position]))
        for position, info in enumerate(model.inputs)
    }


def load_inputs(path: Path, model: LoadedModel) -> dict[str, Array]:
    """Inputs from an .npz file: by name, or in the file's order where no name in it is an input's.

    Raises:
        UsageError: the file cannot be read or does not fit the model.
    """
    try:
        with path.open("rb") as file:
            data = np.load(file, allow_pickle=False)
            if not isinstance(data, np.lib.npyio.NpzFile):
                raise UsageError(f"{path} is no .npz file; write one with numpy.savez(path, name=array, ...)")
            arrays = {name: data[name] for name in data.files}
    # MemoryError: an array that says that it is larger than any memory.
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: no inputs can be read from it: {error}") from error
    names = [info.name for info in model.inputs]
    if len(arrays) == len(names) and not set(arrays) & set(names):
        arrays = dict(zip(names, arrays.values(), strict=True))
    try:
        return check_inputs(arrays, model)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def check_inputs(arrays: Mapping[str, Array], model: LoadedModel) -> dict[str, Array]:
    """The arrays in the model's order and element types; raises UsageError where they do not fit its inputs.

    Inputs that are bound to a value may be among them, with that value.
    """
    names = [info.name for info in model.inputs]
    for name, value in model.values.items():
        if name in arrays and not np.array_equal(arrays[name], value):
            raise UsageError(f"input {name} is bound to {value.tolist()!r:.80}, but an array of other values is given")
    arrays = {name: array for name, array in arrays.items() if name not in model.values}
    if set(arrays) != set(names):
        raise UsageError(f"the model has the inputs {', '.join(names)}; given are {', '.join(arrays) or 'none'}")
    sizes: dict[str, int] = {}
    checked = {}
    for info in model.inputs:
        array, dtype = np.asarray(arrays[info.name]), _dtype(info)
        fits = len(array.shape) == len(info.shape) and all(
            size == (sizes.setdefault(str(dim), size) if isinstance(dim, Sym) else dim)
            for size, dim in zip(array.shape, info.shape, strict=True)
        )
        if not fits:
            raise UsageError(f"the model takes {info}, not an array of shape {list(array.shape)}")
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise UsageError(f"the model takes {info}, not an array of {array.dtype}")
        checked[info.name] = array.astype(dtype)
    return checked


def open_sizes(
    model: LoadedModel, lengths: Lengths, batches: Collection[str] = (), total: Total | None = None
) -> dict[str, int]:
    """A value for every size that the model leaves open.

    A name that says a size in others (``past + n``) is taken at its word; `total` is one that only the model knows.
    """
    sizes: dict[str, int] = {}
    for info in sorted(model.inputs, key=lambda info: info.dtype.is_floating_point()):
        for axis, dim in enumerate(info.shape):
            if isinstance(dim, Sym):
                is_float = info.dtype.is_floating_point()
                length = lengths.tokens if not is_float else lengths.width if axis == 3 else lengths.length
                for name in sorted(dim.names()):
                    sizes.setdefault(name, lengths.batch if name in batches else length if axis else lengths.outer)
    for name in sizes:
        size = parsed_size(name, {other: sizes[other] for other in sizes if other != name})
        if isinstance(size, int) and size > 0:
            sizes[name] = size
    if total is not None:
        sizes[total.name] = sum(sizes[part] for part in total.parts)
    return sizes


def totals(sizes: Collection[str]) -> Iterator[Total]:
    """Sizes that may be the sum of two others, as the length of a mask is of what is new and what was before."""
    for name in reversed(list(sizes)):
        for parts in combinations([other for other in sizes if other != name], 2):
            yield Total(name, parts)


def _shape(info: InputInfo, sizes: Mapping[str, int]) -> tuple[int, ...]:
    shape = tuple(dim.subs(sizes) if isinstance(dim, Sym) else dim for dim in info.shape)
    fixed = tuple(dim for dim in shape if isinstance(dim, int))
    if len(fixed) < len(shape) or not 0 < math.prod(fixed) <= LARGEST_INPUT:
        raise UsageError(f"no inputs can be made up for {info}; give other sizes with --shape, or --inputs")
    return fixed


def _dtype(info: InputInfo) -> np.dtype[Any]:
    dtype = np.dtype(info.dtype.numpy())
    if dtype.kind not in "biuf" and info.dtype != onnx_ir.DataType.BFLOAT16:
        raise UsageError(f"input {info} is of a type that ncnn has nothing for")
    return dtype


def _draw(info: InputInfo, value: onnx_ir.Value, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    dtype = _dtype(info)
    uses = list(_uses(value))
    limits = [_size_of_axis(node) for node, index in uses if _INDEXES.get(node.op_type) == index]
    domains = [_DOMAINS[node.op_type] for node, index in uses if index == 0 and node.op_type in _DOMAINS]
    if limits:
        array: Any = rng.integers(0, min(limits), shape)
    elif dtype.kind in "fV":
        array = rng.uniform(*domains[0], shape) if domains else rng.standard_normal(shape)
    elif dtype.kind in "iu" and dtype.itemsize == 1:
        array = rng.integers(np.iinfo(dtype).min, int(np.iinfo(dtype).max) + 1, shape)
    else:
        array = rng.integers(0, 2, shape)
        if shape:
            array[..., 0] = 1
            array[..., 1:2] = 0
    return np.asarray(array).astype(dtype)


def _uses(value: onnx_ir.Value) -> Iterator[tuple[onnx_ir.Node, int]]:
    """Every node that takes the values of `value`, perhaps moved about, and as which of its inputs."""
    seen, left = {value}, [value]
    while left:
        for node, index in left.pop().uses():
            yield node, index
            if node.op_type in _MOVES and index in (_MOVES[node.op_type] or (index,)):
                left += [output for output in node.outputs if output not in seen]
                seen.update(node.outputs)


def _size_of_axis(node: onnx_ir.Node) -> int:
    """How many entries a Gather chooses from; 1 where nothing tells."""
    table, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    # Exporters leave out the shapes between a table and its Gather where the table is quantised.
    while table is not None and table.shape is None and (made_by := table.producer()) is not None:
        if made_by.op_type not in ("Cast", "DequantizeLinear", "Identity"):
            break
        table = made_by.inputs[0]
    shape = table.shape if table is not None else None
    if shape is None or not -len(shape) <= axis < len(shape):
        return 1
    size = shape[axis]
    return size if isinstance(size, int) and size > 0 else 1
