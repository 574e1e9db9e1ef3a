"""Dynamic dimensions with different names that must be equal, found by running the model.

Example: torch gives the length of the cache a new name in every layer, but the model runs only if all are equal.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt.errors import Error, RunError
from onnx2ncnn_opt.inputs.draws import LENGTHS, Total, draw_inputs, dynamic_sizes, totals
from onnx2ncnn_opt.inputs.input_uses import Uses
from onnx2ncnn_opt.ir.dim import Dim, Sym, named, names_in, symbol
from onnx2ncnn_opt.onnx.read.given import GivenShapes
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.runtime.ort import OrtRunner


class EqualSizes(NamedTuple):
    """Groups of `names` of dynamic dimensions that must be equal; `shapes` of inputs with one name for each group.

    `model` is the loaded model if there are no groups.
    """

    names: tuple[tuple[str, ...], ...]
    shapes: GivenShapes
    model: LoadedModel | None


def equal_sizes(
    model: Path | bytes,
    *,
    shapes: GivenShapes | None = None,
    values: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
) -> EqualSizes:
    """Return the dynamic dimensions that must be equal, because ONNX Runtime refuses other sizes.

    Candidates are on the same axis of inputs with equal types, ranks and other sizes. They must be equal if a change of
    one candidate makes the model fail, and the same change of all does not.
    """
    loaded = load_model(model, shapes=shapes, values=values, outputs=outputs)
    groups = _candidates(loaded)
    if not groups:
        return EqualSizes((), shapes or {}, loaded)
    try:
        runner = OrtRunner(model, outputs=outputs, values=loaded.values, threads=None)  # verification has one like it
    except RunError:  # conversion or verification will report it
        return EqualSizes((), shapes or {}, loaded)
    runs = partial(runs_at, runner, loaded)
    base = _base(loaded, groups, runs)
    equal = [] if base is None else [names for group in groups if (names := _equal(group, *base, runs))]
    first: dict[str, Dim] = {name: symbol(names[0]) for names in equal for name in names[1:]}
    renamed: dict[str, Sequence[Any]] = dict(shapes or {})
    for info in loaded.inputs:
        if not names_in(info.shape).isdisjoint(first):
            renamed[info.name] = list(named(info.shape, first))
    return EqualSizes(tuple(equal), renamed, None if equal else loaded)


def _candidates(model: LoadedModel) -> list[list[str]]:
    groups: dict[tuple[object, ...], dict[str, None]] = {}
    for value, info in zip(model.graph.inputs, model.inputs, strict=True):
        if Uses.of(value, model).is_counted:  # the importer knows its length; a cache in a buffer can have others
            continue
        for axis, dim in enumerate(info.shape):
            if isinstance(dim, Sym) and dim == symbol(str(dim)):
                others = tuple(size if isinstance(size, int) else None for size in info.shape)
                groups.setdefault((info.dtype, axis, others), {})[str(dim)] = None
    return [list(names) for names in groups.values() if len(names) > 1]


def _base(
    model: LoadedModel, groups: Sequence[Sequence[str]], runs: Callable[[Mapping[str, int]], bool]
) -> tuple[dict[str, int], Total | None] | None:
    """Return sizes at which the model runs, if possible different ones in a group, and the sum of two others."""
    for total, lengths in product(totals(list(dynamic_sizes(model))), LENGTHS[1:3]):
        sizes = dynamic_sizes(model, lengths, total=total)
        for chosen in (sizes, sizes | {name: sizes[group[0]] for group in groups for name in group}):
            if runs(chosen):
                return chosen, total
    return None


def _equal(
    group: Sequence[str], sizes: Mapping[str, int], total: Total | None, runs: Callable[[Mapping[str, int]], bool]
) -> tuple[str, ...]:
    """Return the names of a group that must be equal, or no names."""

    def runs_longer(names: Sequence[str]) -> bool:
        """Return True if the model runs with these sizes larger by one; try also with a larger total."""
        options = [names] if total is None or total.name in names else [names, [*names, total.name]]
        return any(runs({name: size + (name in option) for name, size in sizes.items()}) for option in options)

    fixed = [name for name in group if not runs_longer([name])]
    if len(fixed) < 2 or len({sizes[name] for name in fixed}) > 1:
        return ()
    return tuple(fixed) if runs_longer(fixed) else ()


def runs_at(
    runner: OrtRunner, model: LoadedModel, sizes: Mapping[str, int], values: Mapping[str, Any] = MappingProxyType({})
) -> bool:
    """Return True if the model runs at these sizes, with `values` in all elements of some inputs."""
    try:
        drawn = draw_inputs(model, sizes)
        runner.run({**drawn, **{name: np.full_like(drawn[name], value) for name, value in values.items()}})
    except Error:
        return False
    return True
