"""Additions of other installed packages by entry points: passes, importers, custom layers (see docs/plugins.md)."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from onnx2ncnn_opt import passes
from onnx2ncnn_opt.errors import Error, UsageError, plugged
from onnx2ncnn_opt.ir.custom import custom_layer
from onnx2ncnn_opt.ir.layers import with_custom
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.onnx.registry import OnnxOp, registered
from onnx2ncnn_opt.rewrite.rule import GraphPass, Pass, Rewrite

PASSES_GROUP = "onnx2ncnn_opt.passes"
LAYERS_GROUP = "onnx2ncnn_opt.layers"
OPS_GROUP = "onnx2ncnn_opt.ops"


@cache
def installed_passes() -> tuple[Pass, ...]:
    """Return the passes of installed packages, in the order of the entry points' names.

    Raises UsageError, naming the package, for an entry point that cannot be loaded or is not a pass, and for a name
    that another pass has.
    """
    installed: list[Pass] = []
    names = {p.name for p in passes.PASSES}
    for point, item in _items(PASSES_GROUP, (Rewrite, GraphPass), "a pass"):
        if item.name in names:
            raise UsageError(f"{_origin(point)}: there is a pass called {item.name} already")
        names.add(item.name)
        installed.append(item)
    return tuple(installed)


@cache
def installed_layers() -> tuple[LayerSpec, ...]:
    """Return the custom layers of installed packages. Raises UsageError as above."""
    layers: list[LayerSpec] = []
    for point, item in _items(LAYERS_GROUP, LayerSpec, "a LayerSpec"):
        try:
            with plugged(f"{_origin(point)}: its declaration", Error):
                with_custom([item])
        except Error as error:
            raise UsageError(f"{_origin(point)}: {error}") from error
        layers.append(item)
    return tuple(layers)


@cache
def installed_ops() -> tuple[OnnxOp, ...]:
    """Return the importers of installed packages; loading registers them. Raises UsageError as above."""
    importers: dict[tuple[str, int], OnnxOp] = {}
    for point, item in _items(OPS_GROUP, object, "an importer"):
        ops = registered(item)
        if not ops:
            raise UsageError(f"{_origin(point)} is not an importer made with @onnx_op, but {type(item).__name__}")
        for op in ops:
            if parameter := op.unannotated:
                raise UsageError(f"{_origin(point)}: the importer of {op.qualified_name} does not annotate {parameter}")
            if (op.qualified_name, op.since) in importers:
                raise UsageError(f"{_origin(point)}: there is an importer of {op.qualified_name} already")
            importers[op.qualified_name, op.since] = op
    return tuple(importers.values())


def layer_types(custom: Iterable[str | LayerSpec] = ()) -> Mapping[str, LayerSpec]:
    """Return the table of layers with the layers of installed packages and then `custom`; the last declaration wins."""
    declared = [custom_layer(item) if isinstance(item, str) else item for item in custom]
    for item in declared:
        if not isinstance(item, LayerSpec):
            raise UsageError(f"custom has to be a list of layers such as 'TYPE:COUNTS', and {item!r:.80} is none")
    return with_custom((*installed_layers(), *declared))


def pipeline() -> tuple[Pass, ...]:
    """Return all passes: first the passes of other packages, before ours can change the layers that they match."""
    return (*installed_passes(), *passes.PASSES)


def select(only: Collection[str] = (), skip: Collection[str] = ()) -> tuple[Pass, ...]:
    """Return the passes named in `only` (all if it is empty) and not in `skip`, in the order of the pipeline.

    Raises UsageError for a name that no pass has.
    """
    every = pipeline()
    excluded = passes.select(only, every) if only else ()
    return tuple(p for p in passes.select(skip, every) if p not in excluded)


_declared = cache(entry_points)  # reading them takes a measurable part of a small conversion


def _items(group: str, kinds: type | tuple[type, ...], what: str) -> Iterator[tuple[EntryPoint, Any]]:
    """Yield each object of a group, which has to be of `kinds`; an entry point may be a list or tuple of objects."""
    for point in sorted(_declared().select(group=group), key=lambda point: (point.name, point.value)):
        with plugged(f"{_origin(point)} cannot be loaded: its import"):
            loaded = point.load()
        for item in loaded if isinstance(loaded, (list, tuple)) else (loaded,):
            if not isinstance(item, kinds):
                raise UsageError(f"{_origin(point)} is not {what}, but {type(item).__name__}")
            yield point, item


def _origin(point: EntryPoint) -> str:
    package = point.dist.name if point.dist else "an installed package"
    return f"the plug-in {point.name} ({point.value}) of {package}"
