"""The shapes of a net's blobs: from its files, by inference, and as far as passes may rely on them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from onnx2ncnn_opt.errors import ShapeError, UsageError
from onnx2ncnn_opt.ir.dim import Dim, is_fixed, symbol
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.ir.spec import SHAPE_HINTS_ID
from onnx2ncnn_opt.manifest import Manifest, read_manifest
from onnx2ncnn_opt.param.files import bin_beside
from onnx2ncnn_opt.param.pnnx import shapes_beside
from onnx2ncnn_opt.report.words import number_of


def manifest_of(path: Path, graph: Graph) -> Manifest | None:
    """Return the manifest NET.json of NET.param or NET.param.bin, None unless it has the net's inputs and outputs."""
    try:
        manifest = read_manifest(bin_beside(path).with_suffix(".json"))
    except UsageError:  # the file is missing, or not a manifest
        return None
    blobs = [{blob.name for blob in graph.inputs}, {blob.name for blob in graph.outputs}]
    named = [{entry.blob for entry in entries} for entries in (manifest.inputs, manifest.outputs)]
    return manifest if blobs == named else None


def shapes_of_pnnx(param: Path, graph: Graph, given: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return pnnx's shapes of inputs without a shape in the net or in `given`."""
    _, shapes = shapes_beside(param)
    open_inputs = {blob.name for blob in graph.inputs if not is_fixed(blob.shape)} - set(given)
    return {name: shape for name, shape in shapes.items() if name in open_inputs and 1 <= len(shape) <= 5}


def without_batches(graph: Graph, sizes: dict[str, tuple[int, ...]], given: Mapping[str, Sequence[int]]) -> list[str]:
    """Remove a leading 1, the batch, from given shapes that the net cannot take with it; return these inputs."""
    batched = [name for name, shape in given.items() if len(shape) > 1 and shape[0] == 1 and name in sizes]
    whole = [name for name in batched if len(sizes[name]) > 4]
    if not whole and not infer_shapes(graph, sizes):
        return []
    for names in (batched, *([name] for name in batched)):
        tried = {**sizes, **{name: sizes[name][1:] for name in names}}
        if set(whole) <= set(names) and not infer_shapes(graph, tried):
            sizes.update(tried)
            return list(names)
    return []


def shape_notes(
    graph: Graph,
    sizes: Mapping[str, Sequence[int]],
    pnnx_shapes: Mapping[str, Sequence[int]],
    batched: Sequence[str],
    param: Path,
) -> Iterator[str]:
    """Yield notes on the shapes and the layers."""
    path, _ = shapes_beside(param) if pnnx_shapes else (None, {})
    if path is not None:
        yield f"from {path.name}: {', '.join(f'{name}:{_text(sizes[name])}' for name in pnnx_shapes if name in sizes)}"
    for name in batched:
        if name not in pnnx_shapes:
            yield f"{name}:{_text((1, *sizes[name]))} is a batch of one, {name}:{_text(sizes[name])}"
    unknown = Counter(layer.type for layer in graph if layer.spec is None)
    for kind, count in unknown.items():
        layers = number_of(count, "layer")
        yield f"ncnn has no layer type {kind} ({layers}): the net loads only where a program registers it"


def _text(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def bound_shapes(graph: Graph, given: Mapping[str, Sequence[int]], *, partial: bool) -> dict[str, tuple[int, ...]]:
    """Return the known shapes of inputs: the given ones, else those in the Input layers."""
    if not partial:
        check_known(graph, given)
    sizes = {blob.name: blob.shape for blob in graph.inputs if is_fixed(blob.shape)}
    return {**sizes, **{blob.name: tuple(given[blob.name]) for blob in graph.inputs if blob.name in given}}


def check_known(graph: Graph, given: Mapping[str, Sequence[int]]) -> None:
    """Raise UsageError for an unknown input, or for a shape that no blob can have."""
    names = [blob.name for blob in graph.inputs]
    for name, shape in given.items():
        if name not in names:
            raise UsageError(f"no input is called '{name}'; inputs are: {', '.join(names)}")
        is_batched = len(shape) == 5 and shape[0] == 1
        if not (1 <= len(shape) <= 4 or is_batched) or not all(size > 0 for size in shape):
            raise UsageError(f"'{name}' cannot have the shape {_text(shape)}: a blob has 1 to 4 sizes above 0")


def infer_net(graph: Graph, shapes: Mapping[str, Sequence[int]], batches: Mapping[str, int] | None = None) -> None:
    """Infer the shapes of all blobs from those of the inputs: `shapes` by name, else those in the Input layers.

    `batches` are the inputs' batch counts other than 1; without them, a leading 1 in `shapes` may be the batch. Raises
    UsageError if `shapes` do not fit the net's inputs.
    """
    sizes = bound_shapes(graph, shapes, partial=False)
    if batches is None:
        without_batches(graph, sizes, shapes)
    infer_shapes(graph, sizes, batches)


def infer_shapes(graph: Graph, sizes: Mapping[str, Sequence[Dim]], batches: Mapping[str, Dim] | None = None) -> str:
    """Infer the shapes of all blobs from `sizes`, those of the inputs; shapes that depend on others are unknown.

    Returns the problem of the first layer that cannot take its inputs, or "".
    """
    problems = [_infer_layer(layer, sizes, batches or {}) for layer in graph]
    return next(filter(None, problems), "")


def _infer_layer(layer: Layer, sizes: Mapping[str, Sequence[Dim]], batches: Mapping[str, Dim]) -> str:
    if layer.type == "Input":
        for blob in layer.outputs:
            shape = sizes.get(blob.name)
            blob.shape, blob.batch = tuple(shape) if shape else None, batches.get(blob.name, 1)
        return ""
    try:
        assign_shapes(layer)
    except ShapeError as error:
        for blob in layer.outputs:
            blob.shape, blob.batch = None, 1
        return str(error)
    return ""


def open_shapes(graph: Graph, sizes: Mapping[str, Sequence[int]]) -> None:
    """Replace sizes by symbols, because programs may feed other sizes than those in the Input layers.

    Channels of images and volumes stay, because convolutions fix them, and sizes of 1 stay, because ncnn treats these
    differently. So a symbol is assumed not to be 1. If it is 1 at the stated sizes (an image of 32 rows that is halved
    five times), the shape becomes unknown. If a Reshape makes the batch an axis, the batch count becomes a symbol.
    """
    stated = {blob: blob.shape for layer in graph for blob in layer.outputs}
    symbols = {
        name: tuple(
            size if size == 1 or (axis == 0 and len(shape) > 2) else symbol(f"{name}.{axis}")
            for axis, size in enumerate(shape)
        )
        for name, shape in sizes.items()
    }
    values = {f"{name}.{axis}": size for name, shape in sizes.items() for axis, size in enumerate(shape)}
    is_axis = any(layer.type == "Reshape" and "input_batch_axis" in layer.params for layer in graph)
    batches = {blob.name: symbol(f"{blob.name}.batch") for blob in graph.inputs} if is_axis else {}
    values |= {f"{name}.batch": 1 for name in batches}

    def is_safe(blob: Blob) -> bool:
        shape, expected = blob.shape or (), stated[blob] or ()
        if len(shape) != len(expected):
            return False
        return all(
            size == number if isinstance(size, int) else size.subs(values) == number != 1
            for size, number in zip(shape, expected, strict=True)
        )

    for layer in graph:
        _infer_layer(layer, symbols, batches)
        for blob in layer.outputs:
            if not is_safe(blob):
                blob.shape = None


def add_hints(graph: Graph) -> None:
    """Add parameter 30 to all layers with known output shapes; the writer fills in the shapes."""
    for layer in graph:
        if layer.outputs and layer.type != "Split" and all(is_fixed(blob.shape) for blob in layer.outputs):
            layer.params["shape_hints" if layer.spec else SHAPE_HINTS_ID] = ()
