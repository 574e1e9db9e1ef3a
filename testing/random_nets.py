"""Random nets for the round trips: every layer type of the table, custom layers, every encoding of weights."""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import GraphError
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.spec import Param
from onnx2ncnn_opt.ir.weight import Encoding, Weight
from onnx2ncnn_opt.param.binary import Block, weight_blocks

TYPES = sorted(set(LAYERS) - {"Input", "Split"})
FLOATS = (0.0, -0.0, 1.0, 0.1, -2.5e-9, 1e-45, 3.4028234663852886e38, 16777216.0, 1.17549435e-38)
STRINGS = ("", "0w,1h", "*(0w,2), -1", "1w", 'a"b', "ö" * 127)
NAMES = ("x", "x_0", "x_split", "a/b:0", "0=1", "ö", "x\x1cy", "-1", '"')
CODES = {
    "quantize_term": (0, 101, 400, 411, 602, 800),
    "int8_scale_term": (0, 0, 1, 2, 101),
    "op_type": (0, 1, 2),
    "operation": (0, 3),
    "activation_type": (0, 1, 6),
}
ELEMENTS_AT_MOST = 600


def random_graph(rng: Random) -> Graph:
    """Return a graph that can be written: blobs with many uses, used outputs, and tensors with several names."""
    graph = Graph()
    blobs: list[Blob] = []
    names = _names(rng)
    for i in range(rng.randint(1, 2)):
        blob = Blob(next(names), (2, 3, 4) if rng.random() < 0.5 else None)
        graph.add(Layer("Input", f"in{i}", (), [blob], {"w": 4, "h": 3, "c": 2} if blob.shape else {}))
        blobs.append(blob)
    aliases: list[Blob] = []
    for i in range(rng.randint(0, 9)):
        kind = rng.random()
        if kind < 0.1:
            alias = Blob(next(names))
            graph.add(Layer("Split", f"split{i}", [rng.choice(blobs)], [alias]))
            aliases.append(alias)
            continue
        layer = _custom_layer(rng, i, blobs, names) if kind < 0.2 else _layer(rng, i, blobs, names)
        graph.add(layer)
        blobs.extend(layer.outputs)
    chosen = [blob for blob in blobs if not blob.is_input and rng.random() < 0.3]
    graph.outputs = rng.sample([*chosen, *aliases], len(chosen) + len(aliases))
    return graph


def _names(rng: Random) -> Iterator[str]:
    yield from rng.sample(NAMES, len(NAMES))
    number = 0
    while True:
        yield f"b{number}"
        number += 1


def _custom_layer(rng: Random, number: int, blobs: list[Blob], names: Iterator[str]) -> Layer:
    params: dict[str | int, Any] = {}
    for id in rng.sample(range(30), rng.randint(0, 4)):
        params[id] = rng.choice((7, -1.5, "text, more", (1, 2), (0.5, -3.0), ()))
    inputs = rng.choices(blobs, k=rng.randint(0, 3))
    return Layer("Mine", f"custom{number}", inputs, [Blob(next(names)) for _ in range(rng.randint(0, 2))], params)


def _layer(rng: Random, number: int, blobs: list[Blob], names: Iterator[str]) -> Layer:
    """Return a layer of a random type; its parameters need not make sense, but its weights fit them."""
    while True:
        spec = LAYERS[rng.choice(TYPES)]
        params: dict[str | int, Any] = {}
        for param in spec.by_name.values():
            if param.name != "shape_hints" and rng.random() < 0.4:
                params[param.name] = _value(rng, param)
        if rng.random() < 0.1:
            params[29] = params.get(29, 3)
        layer = Layer(spec.type, f"{spec.type} {number}", params=params)
        try:
            blocks = weight_blocks(layer)
        except GraphError:
            continue
        if sum(block.count for block in blocks) <= ELEMENTS_AT_MOST:
            break
    for block in blocks:
        layer.weights[block.name] = _weight(rng, block, layer)
    least, most = spec.inputs
    single = spec.is_one_blob_only(layer)
    count = 1 if single else rng.randint(least, max(least, 2 if most is None else most))
    least, most = spec.outputs
    tops = 1 if single else rng.randint(least, max(least, 3 if most is None else most))
    layer.inputs = tuple(rng.choices(blobs, k=count))
    layer.outputs = tuple(Blob(next(names)) for _ in range(tops))
    if rng.random() < 0.3:
        for blob in layer.outputs:
            blob.shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 4)))
        layer.params["shape_hints"] = (0,) * 4 * len(layer.outputs)
    return layer


def _value(rng: Random, param: Param) -> Any:
    if param.kind == "int":
        return rng.choice(CODES.get(param.name, (0, 1, 1, 2, 3, 4, 8)))
    if param.kind == "float":
        return rng.choice(FLOATS)
    if param.kind == "string":
        return rng.choice(STRINGS)
    elements = FLOATS if param.kind == "float[]" else (0, 1, -233, 2**31 - 1, -(2**31))
    return tuple(rng.choices(elements, k=rng.randint(0, 4)))


def _weight(rng: Random, block: Block, layer: Layer) -> Weight:
    bits = np.random.default_rng(rng.getrandbits(32))

    def some(dtype: str) -> Any:
        return np.frombuffer(bits.bytes(block.count * np.dtype(dtype).itemsize), dtype)

    if block.packed:
        return Weight(some("u1"), Encoding.BYTES)
    if not block.tagged:
        return Weight(some(rng.choice(("f4", "i4"))))
    known = layer.spec.by_name if layer.spec else {}
    takes_int8 = any(layer[name] for name in ("int8_scale_term", "quantize_term") if name in known)
    encoding = rng.choice([e for e in Encoding if e is not Encoding.BYTES and (takes_int8 or e is not Encoding.INT8)])
    if encoding is Encoding.TABLE:
        table = np.frombuffer(bits.bytes(1024), "f4")
        return Weight(some("u1"), encoding, table, tag=rng.choice((1, 0xFFFFFFFF, 0x01306B48)))
    dtype = {Encoding.FP16: "f2", Encoding.BF16: "u2", Encoding.INT8: "i1"}.get(encoding, "f4")
    return Weight(some(dtype), encoding)
