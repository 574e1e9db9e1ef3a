"""The last steps before a graph is written: check the release, store weights in 16 bits, set feature masks."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import get_args

from onnx2ncnn_opt.errors import Unsupported, UnsupportedError, UsageError
from onnx2ncnn_opt.ir.dim import Dim
from onnx2ncnn_opt.ir.features import Device, MasksFor
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.releases import too_new
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.param.storage import Storage, own_storage, plan_storage
from onnx2ncnn_opt.rewrite.prove_masks import Mask, prove_masks, put_masks


def finish(
    graph: Graph,
    *,
    encoding: Encoding | None = None,
    keeps_storage: bool = False,
    masks: MasksFor = True,
    integers: Collection[Blob] = (),
    minimum: Mapping[Dim, int] = MappingProxyType({}),
) -> tuple[Storage | None, tuple[Mask, ...]]:
    """Store weights in 16 bits, order the outputs, and set the masks that the graph proves.

    Return the storage plan and the masks.

    `encoding` is the format of the weights. Without it, `keeps_storage` gives 16 bits again to weights that passes
    computed only from 16-bit weights. `integers` are blobs that hold integers for the caller, `minimum` has the
    least values of sizes that the net is right for. Raises UsageError for an unknown device in `masks`.
    """
    if not isinstance(masks, bool) and masks not in get_args(Device):
        raise UsageError(f"masks have to be True, False, {' or '.join(map(repr, get_args(Device)))}, not {masks!r:.80}")
    plan = plan_storage(graph, encoding) if encoding else own_storage(graph) if keeps_storage else None
    if plan:
        plan.apply()
    _order_outputs(graph)
    proved = prove_masks(graph, integers=integers, wanted=masks, minimum=minimum)
    put_masks(graph, ((layer, mask.features) for layer, mask in proved.items()))
    return plan, tuple(proved.values())


def _order_outputs(graph: Graph) -> None:
    """Move layers so that ncnn lists the outputs in the graph's order, unless an output needs a later one.

    ncnn lists the blobs that no layer reads, in the order of the file (`Net::output_names`).
    """
    layers = graph.layers
    places = {layer: place for place, layer in enumerate(layers)}
    ends = [places[_computed(blob).known_producer] for blob in graph.outputs]
    if ends == sorted(ends):
        return
    ordered = dict.fromkeys(layer for layer in layers if layer.type == "Input")

    def before(layer: Layer) -> list[Layer]:
        return [each for blob in layer.inputs if (each := blob.known_producer) not in ordered]

    for end in ends:
        ordered |= dict.fromkeys(sorted(reached([layers[end]], before), key=places.__getitem__))
    graph.order((*ordered, *(layer for layer in layers if layer not in ordered)))


def _computed(blob: Blob) -> Blob:
    """Return the tensor that a Split only gives a name."""
    producer = blob.producer
    return _computed(producer.input) if producer and producer.type == "Split" else blob


def name_blobs(graph: Graph, blob_names: str, places: Mapping[Blob, int] | None = None) -> None:
    """Choose the names of blobs in the file: "pnnx" is in0, in1, ..., out0, out1, ..., and numbers for other blobs.

    "onnx" keeps the blobs' names. `places` has the place of each output among the model's; of a net with a tail, other
    outputs are tail0, tail1, ...
    """
    if blob_names == "pnnx":
        places = {blob: i for i, blob in enumerate(graph.outputs)} if places is None else places
        inner = [blob for blob in graph.outputs if blob not in places]
        ends = {blob: f"out{place}" for blob, place in places.items()}
        ends |= {blob: f"tail{i}" for i, blob in enumerate(inner)}
        graph.file_names = ends | {blob: f"in{i}" for i, blob in enumerate(graph.inputs)}  # which may also be outputs


def require_release(graph: Graph, release: int) -> None:
    """Raise UnsupportedError if an ncnn release lacks layers of the graph; the error names all of them."""
    nodes = [
        Unsupported(", ".join(layer.origin) or layer.name, layer.type, reason)
        for layer in graph
        if (reason := too_new(layer, release)) is not None
    ]
    if nodes:
        raise UnsupportedError(nodes)
