"""Dynamic dimensions of different names that are one: found by running the model, where its exporter did not tell.

torch names the lengths of a cache anew for every layer, though a model runs only where all of them are equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from onnx2ncnn_opt.errors import Error, RunError
from onnx2ncnn_opt.ir.dim import Dim, Sym, symbol
from onnx2ncnn_opt.onnx.read.given import GivenShapes
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verification.inputs import LENGTHS, Total, Uses, draw_inputs, dynamic_sizes, totals


@dataclass(frozen=True)
class EqualSizes:
    """`names` of dynamic dimensions that have to be equal, each tuple one size; `shapes` of inputs that say so.

    `model` is the model as it was loaded, if there are none.
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
    """Return the dynamic dimensions that must be equal, or ONNX Runtime refuses the model.

    Candidates stand on the same axis of inputs of one type and rank, whose other sizes are the same. One is tied if the
    model does not run with it alone changed, but does with all of them changed.
    """
    loaded = load_model(model, shapes=shapes, values=values, outputs=outputs)
    groups = _candidates(loaded)
    if not groups:
        return EqualSizes((), shapes or {}, loaded)
    try:
        runner = OrtRunner(model, outputs=outputs, values=loaded.values, threads=None)  # as those of the verification
    except RunError:  # why will be told when it is converted or verified
        return EqualSizes((), shapes or {}, loaded)
    trial = _Trial(loaded, runner)
    found = trial.base()
    tied = [] if found is None else [names for group in groups if (names := trial.tied(group, *found))]
    one: dict[str, Dim] = {name: symbol(names[0]) for names in tied for name in names[1:]}
    named: dict[str, Sequence[Any]] = dict(shapes or {})
    for info in loaded.inputs:
        if any(isinstance(dim, Sym) and not dim.names().isdisjoint(one) for dim in info.shape):
            named[info.name] = [dim.subs(one) if isinstance(dim, Sym) else dim for dim in info.shape]
    return EqualSizes(tuple(tied), named, None if tied else loaded)


def _candidates(model: LoadedModel) -> list[list[str]]:
    alike: dict[tuple[object, ...], dict[str, None]] = {}
    for value, info in zip(model.graph.inputs, model.inputs, strict=True):
        if Uses.of(value, model).is_counted:  # the importer tells, and a cache that is a buffer would take other sizes
            continue
        for axis, dim in enumerate(info.shape):
            if isinstance(dim, Sym) and dim == symbol(str(dim)):
                others = tuple(size if isinstance(size, int) else None for size in info.shape)
                alike.setdefault((info.dtype, axis, others), {})[str(dim)] = None
    return [list(names) for names in alike.values() if len(names) > 1]


@dataclass(frozen=True)
class _Trial:
    """A model that is run at many sizes."""

    _model: LoadedModel
    _runner: OrtRunner

    def base(self) -> tuple[dict[str, int], Total | None] | None:
        """Return sizes at which the model runs, and which of them is the sum of two others; None if none were found."""
        names = list(dynamic_sizes(self._model))
        for total, lengths in product(totals(names), LENGTHS[1:3]):
            sizes = dynamic_sizes(self._model, lengths, total=total)
            if self._runs(sizes):
                return sizes, total
        return None

    def tied(self, group: Sequence[str], sizes: Mapping[str, int], total: Total | None) -> tuple[str, ...]:
        """Return the names of a group that have to be equal; none if fewer than two have to."""
        alone = [name for name in group if not self._runs_longer(sizes, [name], total)]
        if len(alone) < 2 or len({sizes[name] for name in alone}) > 1:
            return ()
        return tuple(alone) if self._runs_longer(sizes, alone, total) else ()

    def _runs_longer(self, sizes: Mapping[str, int], names: Sequence[str], total: Total | None) -> bool:
        """Return True if the model runs with these sizes larger by one; one that may be their sum may grow, too."""
        options = [names] if total is None or total.name in names else [names, [*names, total.name]]
        return any(self._runs({name: size + (name in option) for name, size in sizes.items()}) for option in options)

    def _runs(self, sizes: Mapping[str, int]) -> bool:
        try:
            self._runner.run(draw_inputs(self._model, sizes))
        except Error:
            return False
        return True
