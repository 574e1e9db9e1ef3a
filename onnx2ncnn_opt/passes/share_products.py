from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from onnx2ncnn_opt.ir.codes import BinaryOp
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.weight import Array, Encoding, Weight, digest
from onnx2ncnn_opt.passes._gemm import is_shared
from onnx2ncnn_opt.rewrite.rule import Miss, Replacement, graph_pass

_PARAMS = {"transB": 1}


@graph_pass(exact=False, purpose="recurrent cells that are no LSTM, GRU or RNN, whose steps are written out")
def share_products(graph: Graph) -> Iterator[Replacement | Miss]:
    """x ── InnerProduct, y ── InnerProduct (same weights), ...   ⇒   x, MemoryData ── MatMul, y, MemoryData ── MatMul

    Only where the copies of the weights take much space: MatMul packs them anew, and takes three to six times as long.
    """
    for layers in _grouped(
        filter(_is_plain, graph.layers), lambda layer: (layer["num_output"], layer["weight_data_size"])
    ):
        # Weights are only read where enough layers have as many.
        for equal in _grouped(layers, lambda layer: digest(layer.weights.stored("weight_data"))):
            yield _shared(equal)


def _grouped(layers: Iterable[Layer], key: Callable[[Layer], Hashable]) -> list[list[Layer]]:
    """Layers of one key, where they are so many that they read one constant."""
    groups: dict[Hashable, list[Layer]] = defaultdict(list)
    for layer in layers:
        groups[key(layer)].append(layer)
    return [group for group in groups.values() if is_shared(group[0]["weight_data_size"], len(group))]


def _is_plain(layer: Layer) -> bool:
    """Whether a layer is a product of rows and a matrix, with nothing else in it but a bias."""
    if layer.type != "InnerProduct" or layer["activation_type"] or layer["int8_scale_term"] or layer["featmask"]:
        return False
    shape, columns = layer.inputs[0].shape, layer["weight_data_size"] // max(layer["num_output"], 1)
    is_rows = shape is not None and len(shape) <= 2 and shape[-1] == columns
    return is_rows and all(block.encoding is Encoding.FP32 for _, block in layer.weights.stored_items())


def _shared(layers: Sequence[Layer]) -> Replacement:
    """A MatMul of one constant for each layer, and the sum with a bias."""
    columns = layers[0]["weight_data_size"] // layers[0]["num_output"]
    made: dict[Hashable, Layer] = {}
    takes: dict[Layer, Layer] = {}
    products: list[tuple[Layer, Layer]] = []
    for layer in layers:
        matrix = _constant(made, layer.weights["weight_data"].reshape(-1, columns), f"{layer.name}_weight")
        takes[layer] = Layer("MatMul", layer.name, (layer.inputs[0], matrix), (), _PARAMS)
        if layer["bias_term"]:
            bias = _constant(made, layer.weights["bias_data"], f"{layer.name}_bias")
            blob = Blob(f"{layer.output.name}_product", layer.output.shape, layer.output.batch)
            product = Layer("MatMul", f"{layer.name}_product", (layer.inputs[0], matrix), (blob,), _PARAMS)
            products.append((product, layer))
            takes[layer] = Layer("BinaryOp", layer.name, (blob, bias), (), {"op_type": BinaryOp.ADD})
    constants = [(constant, layers[0]) for constant in made.values()]
    return Replacement(tuple(layers), takes=takes, added=[*constants, *products])


def _constant(made: dict[Hashable, Layer], array: Array, name: str) -> Blob:
    """The blob of a constant, which is made once."""
    sizes = dict(zip(("w", "h"), reversed(array.shape), strict=False))
    key = array.shape, digest(Weight(array))
    if key not in made:
        made[key] = Layer("MemoryData", name, (), (Blob(name, array.shape),), sizes, {"data": array})
    return made[key].output
