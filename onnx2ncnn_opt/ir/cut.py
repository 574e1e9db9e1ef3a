"""Cutting a part out of a graph, and removing unused layers."""

from collections.abc import Collection, Iterable, Mapping

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import Shape, by_axis, is_fixed
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer


def cut(graph: Graph, starts: Mapping[str, Blob], ends: Mapping[str, Blob]) -> None:
    """Keep only the layers that compute `ends` from `starts`, both given by their names in the subnet.

    A start becomes an input; it keeps its shape if that is known. The net's own inputs stay if they are still needed.
    Without ends, the outputs are those of the net that depend on the starts. Raises UsageError if a start does not lead
    to any end.
    """
    for name in sorted(set(starts) & set(ends)):
        raise UsageError(f"'{name}' cannot be both start and end")
    if ends:
        graph.outputs = [_output(graph, name, blob) for name, blob in ends.items()]
    elif starts:
        after = computed_from(graph, starts.values()) - {*starts.values()}
        graph.outputs = [blob for blob in graph.outputs if blob in after]
    new = {name: _input(graph, name, blob) for name, blob in starts.items() if not blob.is_input}
    drop_unused(graph, but=())
    for name, blob in {**starts, **new}.items():
        if blob.producer is None or blob.producer.graph is not graph or not blob.uses:
            wanted = ", ".join(output.name for output in graph.outputs)
            raise UsageError(f"--start {name}: the net does not need it to compute {wanted}")


def drop_unused(graph: Graph, *, but: Collection[str] = ("Input",)) -> None:
    """Remove the layers whose outputs are all unused, but layers of some types."""
    for layer in reversed(graph):
        if layer.type not in but and not layer.is_used:
            graph.remove(layer)


def computed_from(graph: Graph, blobs: Iterable[Blob]) -> set[Blob]:
    """Return these blobs, and all blobs computed from them."""
    computed = set(blobs)
    for layer in graph:
        if not computed.isdisjoint(layer.inputs):
            computed.update(layer.outputs)
    return computed


def _output(graph: Graph, name: str, blob: Blob) -> Blob:
    """Return the blob that has this name as an output of the subnet."""
    if blob.is_input:
        raise UsageError(f"--end {name}: this is an input of the net, so there is nothing to compute")
    if blob.name != name:  # a Split's top: the same tensor under another name
        blob = graph.add(Layer("Split", f"end_{name}", [blob], [Blob(name, blob.shape, blob.batch)])).output
    return blob


def _input(graph: Graph, name: str, blob: Blob) -> Blob:
    """Return a new input that replaces a blob."""
    new = Blob(name, blob.shape, blob.batch)
    if blob.name == name:
        blob.name = f"{name}_before_start"
    graph.add(Layer("Input", name, (), [new], input_params(blob.shape)), before=blob.producer)
    graph.redirect(blob, new)
    return new


def input_params(shape: Shape | None) -> dict[str, int]:
    """Return the parameters of an Input of this shape; none if a size is dynamic."""
    return by_axis(shape) if is_fixed(shape) else {}
