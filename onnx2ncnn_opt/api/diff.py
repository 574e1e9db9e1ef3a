"""The differences of two nets in layers, parameters, weights and connections, without names. No net is run."""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.errors import UsageError, check_options
from onnx2ncnn_opt.ir.correspondence import corresponding, parameters, plain_value
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.ir.weight import Weight, digest
from onnx2ncnn_opt.param.files import PathLike, bin_beside, read_net
from onnx2ncnn_opt.rewrite.events import LayerRef, refs


@dataclass(frozen=True)
class ParamChange:
    """A changed parameter, by ncnn's name (its number if the type is unknown); None if the layer lacks it."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a .bin: its number of elements, its encoding, and the SHA-256 of the stored data."""

    elements: int
    encoding: str
    sha256: str


@dataclass(frozen=True)
class WeightChange:
    """A changed weight of a layer; None if the layer lacks it.

    `max_abs` is the largest difference of two elements, `largest` the largest absolute value before; both are None
    if the numbers of elements differ, or no element is finite in both nets. `not_finite` counts elements that are NaN
    or infinite in one net, and have another value in the other.
    """

    name: str
    before: StoredWeight | None
    after: StoredWeight | None
    max_abs: float | None = None
    largest: float | None = None
    not_finite: int = 0


@dataclass(frozen=True)
class InputChange:
    """An input with other producers in the two nets, None without one; `..._output` is the producer's output index."""

    index: int
    before: LayerRef | None
    before_output: int
    after: LayerRef | None
    after_output: int


@dataclass(frozen=True)
class OutputChange:
    """An output of a layer that is an output of only one net; its name there, and None for the other net."""

    index: int
    before: str | None
    after: str | None


@dataclass(frozen=True)
class LayerChange:
    """A layer that both nets have, and its differences."""

    before: LayerRef
    after: LayerRef
    params: tuple[ParamChange, ...]
    weights: tuple[WeightChange, ...]
    inputs: tuple[InputChange, ...]
    outputs: tuple[OutputChange, ...]


@dataclass(frozen=True)
class Renamed:
    """An input or output of the net (`kind`) with another name."""

    kind: str
    before: str
    after: str


@dataclass(frozen=True)
class NetDiff:
    """The differences of net `b` from net `a`.

    `layers` are counts, without Splits. `gone` are layers of only `a`, `added` of only `b`, `changed` are layers of
    both that differ. `renamed` are inputs and outputs with other names, which do not count as a difference.
    """

    a: str
    b: str
    layers: tuple[int, int]
    gone: tuple[LayerRef, ...]
    added: tuple[LayerRef, ...]
    changed: tuple[LayerChange, ...]
    renamed: tuple[Renamed, ...]

    @property
    def equal(self) -> bool:
        """True if both nets are equal except for names."""
        return not (self.gone or self.added or self.changed)


def diff(
    a: PathLike, b: PathLike, bins: tuple[PathLike, PathLike] | None = None, *, custom: Collection[str | LayerSpec] = ()
) -> NetDiff:
    """Compare two nets, whose .param files may be text or binary.

    `bins` are their weights, by default NET.bin next to NET.param. `custom` declares layers that ncnn lacks, see
    `ir.custom.custom_layer`.

    Raises ParamError, BinError and UsageError for files that are broken or missing.
    """
    check_options(a=a, b=b, bins=bins, custom=custom)
    for bin in bins or ():
        check_options(bin=bin)
    types = entry_points.layer_types(custom)
    graphs = [
        _graph(param, bin, types) for param, bin in zip((a, b), bins or (bin_beside(a), bin_beside(b)), strict=True)
    ]
    return diff_graphs(*graphs, names=(os.fspath(a), os.fspath(b)))


def _graph(param: PathLike, bin: PathLike, types: Mapping[str, LayerSpec]) -> Graph:
    if not Path(bin).is_file():
        raise UsageError(f"{os.fspath(param)}: there are no weights at {os.fspath(bin)}; give both nets' with --bins")
    return read_net(param, bin, types).graph


def diff_graphs(a: Graph, b: Graph, *, names: tuple[str, str] = ("", "")) -> NetDiff:
    """Compare two nets in memory, like `diff`; `names` are their names in the result."""
    pairs = corresponding(a, b)
    matched = set(pairs.values())
    changes = (_change(x, pairs[x], pairs) for x in a if x in pairs)
    return NetDiff(
        *names,
        layers=(len(a), len(b)),
        gone=refs(tuple(layer for layer in a if layer not in pairs)),
        added=refs(tuple(layer for layer in b if layer not in matched)),
        changed=tuple(c for c in changes if c.params or c.weights or c.inputs or c.outputs),
        renamed=tuple(_renamed(pairs)),
    )


def _change(x: Layer, y: Layer, pairs: Mapping[Layer, Layer]) -> LayerChange:
    before, after = refs((x, y))
    return LayerChange(
        before, after, tuple(_params(x, y)), tuple(_weights(x, y)), tuple(_inputs(x, y, pairs)), tuple(_outputs(x, y))
    )


def _params(x: Layer, y: Layer) -> Iterator[ParamChange]:
    for name in {**parameters(x), **parameters(y)}:
        before, after = (_param(layer, name) for layer in (x, y))
        if before != after:
            yield ParamChange(name, before, after)


def _param(layer: Layer, name: str) -> Any:
    """Return the value that ncnn uses: the default if the layer has none, for a known type."""
    if layer.spec is not None and name in layer.spec.by_name:
        return plain_value(layer, name, layer[name])
    return parameters(layer).get(name)


def _weights(x: Layer, y: Layer) -> Iterator[WeightChange]:
    for name in dict.fromkeys((*x.weights, *y.weights)):
        before, after = (layer.weights.stored(name) if name in layer.weights else None for layer in (x, y))
        if before is None or after is None:
            yield WeightChange(name, _stored(before), _stored(after))
        elif digest(before) != digest(after):
            yield WeightChange(name, _stored(before), _stored(after), *_distance(before, after))


def _stored(weight: Weight | None) -> StoredWeight | None:
    return None if weight is None else StoredWeight(weight.data.size, weight.encoding.value, digest(weight))


def _distance(before: Weight, after: Weight) -> tuple[float | None, float | None, int]:
    if before.data.size != after.data.size:
        return None, None, 0
    x, y = (weight.array.reshape(-1) for weight in (before, after))
    finite = np.isfinite(x) & np.isfinite(y)
    one_sided = int((~finite & (x != y) & ~(np.isnan(x) & np.isnan(y))).sum())
    if not finite.any():
        return None, None, one_sided
    x, y = x[finite].astype(np.float64), y[finite].astype(np.float64)
    return float(np.abs(x - y).max()), float(np.abs(x).max()), one_sided


def _inputs(x: Layer, y: Layer, pairs: Mapping[Layer, Layer]) -> Iterator[InputChange]:
    for index, (mine, theirs) in enumerate(zip_longest(x.inputs, y.inputs)):
        before, after = _source(mine), _source(theirs)
        if before and after and pairs.get(before[0]) is after[0] and before[1] == after[1]:
            continue
        yield InputChange(index, *_reference(before), *_reference(after))


def _source(blob: Blob | None) -> tuple[Layer, int] | None:
    if blob is None or blob.producer is None:
        return None
    return blob.producer, blob.producer.outputs.index(blob)


def _reference(source: tuple[Layer, int] | None) -> tuple[LayerRef | None, int]:
    return (refs((source[0],))[0], source[1]) if source else (None, 0)


def _outputs(x: Layer, y: Layer) -> Iterator[OutputChange]:
    for index, (mine, theirs) in enumerate(zip_longest(x.outputs, y.outputs)):
        before, after = (blob.name if blob is not None and blob.is_output else None for blob in (mine, theirs))
        if (before is None) != (after is None):
            yield OutputChange(index, before, after)


def _renamed(pairs: Mapping[Layer, Layer]) -> Iterator[Renamed]:
    for x, y in pairs.items():
        for mine, theirs in zip(x.outputs, y.outputs, strict=False):
            if mine.name != theirs.name:
                if mine.is_input and theirs.is_input:
                    yield Renamed("input", mine.name, theirs.name)
                elif mine.is_output and theirs.is_output:
                    yield Renamed("output", mine.name, theirs.name)
