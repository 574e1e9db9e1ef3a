"""The lines of a .param file for a graph: its layers, and a Split for every blob with more than one use.

ncnn frees a blob after a layer has read it. If a second layer or the caller reads it, ncnn crashes or gives nonsense.
In the graph, a blob may have any number of users; there, a Split layer only gives a tensor further public names.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from onnx2ncnn_opt.errors import GraphError
from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.param.names import MAX_NAME_BYTES, clean_name, safe_names


class Line(NamedTuple):
    """One layer of the file; a Split has the `layer` None and a `featmask`."""

    type: str
    name: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    layer: Layer | None = None
    featmask: int = 0


class Listing(NamedTuple):
    """The lines of a file, and the names of blobs in it: of the graph's inputs and outputs, and of inner blobs."""

    lines: tuple[Line, ...]
    names: Mapping[Blob, str]
    inner_names: Mapping[Blob, str]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs in ncnn's order, that of the lines: the tops that no layer reads."""
        read = {name for line in self.lines for name in line.bottoms}
        return tuple(name for line in self.lines for name in line.tops if name not in read)

    @property
    def tops(self) -> dict[Blob, str]:
        """The names under which layers of the graph write their blobs."""
        layers = [(line.layer.outputs, line.tops) for line in self.lines if line.layer is not None]
        return {blob: top for outputs, tops in layers for blob, top in zip(outputs, tops, strict=True)}


@dataclass(eq=False)
class _BlobNames:
    """A blob and the names that Split layers give it."""

    blob: Blob
    users: list[Layer] = field(default_factory=list)  # each once: a layer may read one blob several times
    public: list[Blob] = field(default_factory=list)  # its names that are outputs of the graph
    bottoms: dict[Layer, str] = field(default_factory=dict)


def list_layers(graph: Graph) -> Listing:
    """Return the lines for a graph, which stays unchanged.

    A tensor with several uses gets one Split after its producer. If the tensor is an output, a top of the Split has the
    public name, because ncnn cannot extract a blob that a layer has consumed. The tops for layers are ``x_0``,
    ``x_1``, ... in the order of the layers. Names that ncnn cannot read are replaced.

    Raises GraphError for an input that layers read and that is also an output under the same name.
    """
    tensors = _tensors(graph)
    pool = NamePool(limit=MAX_NAME_BYTES)
    public = list(dict.fromkeys((*graph.inputs, *graph.outputs)))
    wanted = graph.file_names
    names = dict(zip(public, safe_names((wanted.get(blob, blob.name) for blob in public), pool), strict=True))
    inner = [t.blob for blob, t in tensors.items() if blob is t.blob and not t.public and blob not in names]
    inner_wanted = (str(number) if wanted else blob.name for number, blob in enumerate(inner))
    inner_names = dict(zip(inner, safe_names(inner_wanted, pool), strict=True))
    lines = tuple(_lines(graph, tensors, {**names, **inner_names}, pool))
    return Listing(lines, names, inner_names)


def count_layers(graph: Graph) -> int:
    """Return the number of layers in the .param of a graph, Splits included."""
    return len(list_layers(graph).lines)


def _is_alias(layer: Layer) -> bool:
    """Return True for a Split that gives public names, False for a file's Split with one reader."""
    return layer.type == "Split" and any(b.is_output or not b.users for b in layer.outputs)


def _tensors(graph: Graph) -> dict[Blob, _BlobNames]:
    tensors: dict[Blob, _BlobNames] = {}
    for layer in graph:
        for blob in layer.inputs:
            if blob not in tensors:
                raise GraphError(f"layer '{layer.name}' uses '{blob.name}' before anything produces it")
        if not _is_alias(layer):
            for tensor in dict.fromkeys(tensors[blob] for blob in layer.inputs):
                tensor.users.append(layer)
        for blob in layer.outputs:
            tensor = tensors[blob] = tensors[layer.input] if _is_alias(layer) else _BlobNames(blob)
            if blob.is_output:
                tensor.public.append(blob)
    return tensors


def _lines(
    graph: Graph, tensors: Mapping[Blob, _BlobNames], names: Mapping[Blob, str], pool: NamePool
) -> Iterator[Line]:
    for layer in graph:
        if _is_alias(layer):
            continue
        named = [_name_uses(tensors[blob], names, pool) for blob in layer.outputs]
        bottoms = tuple(tensors[blob].bottoms[layer] for blob in layer.inputs)
        yield Line(layer.type, clean_name(layer.name), bottoms, tuple(top for top, _ in named), layer)
        for blob, (top, split) in zip(layer.outputs, named, strict=True):
            if split:
                yield Line("Split", clean_name(f"split_{top}"), (top,), split, featmask=_split_mask(tensors[blob]))


def _split_mask(tensor: _BlobNames) -> int:
    """Return the feature mask of a Split: if a reader needs 32 bits, the blob has them, and the Split keeps them."""
    layer = tensor.blob.producer
    gives_int8 = layer is not None and "top_blob_int8_scales" in layer.weights  # ncnn uploads no int8 blob to a GPU
    mask = layer["featmask"] & Feature.NO_VULKAN if layer and gives_int8 else 0
    if tensor.users and all(user["featmask"] & Feature.NO_VULKAN for user in tensor.users):
        mask |= Feature.NO_VULKAN
    for user in tensor.users:
        if user["featmask"] & (Feature.NO_FP16_STORAGE | Feature.NO_BF16_STORAGE):
            mask |= user["featmask"] & (FP32 | Feature.NO_BF16_STORAGE)
        elif user.type == "Embed" and user.inputs[0] is tensor.blob:
            mask |= FP32 | Feature.NO_BF16_STORAGE  # the blob holds integers
    return mask


def _name_uses(tensor: _BlobNames, names: Mapping[Blob, str], pool: NamePool) -> tuple[str, tuple[str, ...]]:
    """Return the name that the producer gives a tensor, and the tops of its Split, if it needs one."""
    blob, users = tensor.blob, tensor.users
    if blob.is_input:
        top = base = names[blob]
        ends = [names[public] for public in tensor.public if public is not blob]
        if blob.is_output and (users or ends):
            raise GraphError(
                f"the input '{blob.name}' is used and is an output as well, which ncnn cannot return under one name: "
                "give the output another name with a Split layer"
            )
        needs_split = len(users) > 1 or bool(ends)
    else:
        ends = [names[public] for public in tensor.public]
        top = base = ends[0] if ends else names[blob]
        needs_split = len(users) + len(ends) > 1
        if needs_split and ends:
            top = pool.take(clean_name(f"{base}_split"))
    if not needs_split:
        tensor.bottoms = dict.fromkeys(users, top)
        return top, ()
    tensor.bottoms = {user: pool.take(clean_name(f"{base}_{i}")) for i, user in enumerate(users)}
    return top, (*tensor.bottoms.values(), *ends)
