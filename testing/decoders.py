"""A small decoder with caches: the ONNX model, and its net with a manifest, written by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from onnx2ncnn_opt.manifest import Cache, Entry, LayerCount, Manifest, Source, file_hash
from testing.handmade import raw, tagged, write_net
from testing.models import parsed

VOCABULARY, POSITIONS = 50, 64
_SHAPES = {
    "words": (VOCABULARY, 16),
    "places": (POSITIONS, 16),
    "head": (16, 50),
    "wq": (16, 16),
    "wk": (16, 8),
    "wv": (16, 8),
}

# Two heads on one group of keys and values.
MODEL = """
(int64[1, S] input_ids, int64[1, T] attention_mask, int64[1, S] position_ids,
 float[1, 1, P, 8] past_key, float[1, 1, P, 8] past_value)
    => (float[1, S, 50] logits, float[1, 1, T, 8] present_key, float[1, 1, T, 8] present_value)
<int64[4] heads = {1, -1, 2, 8}, int64[4] group = {1, -1, 1, 8}, int64[3] joined = {1, -1, 16}, int64[1] one = {1},
 int64[1] two = {2}, float unit = {1.0}, float far = {10000.0}, float scale = {0.35355338}, float zero = {0.0}>
{
    word = Gather(words, input_ids)
    place = Gather(places, position_ids)
    x = Add(word, place)
    q0 = MatMul(x, wq)
    k0 = MatMul(x, wk)
    v0 = MatMul(x, wv)
    q1 = Reshape(q0, heads)
    k1 = Reshape(k0, group)
    v1 = Reshape(v0, group)
    q = Transpose<perm = [0, 2, 1, 3]>(q1)
    k = Transpose<perm = [0, 2, 1, 3]>(k1)
    v = Transpose<perm = [0, 2, 1, 3]>(v1)
    present_key = Concat<axis = 2>(past_key, k)
    present_value = Concat<axis = 2>(past_value, v)
    kt = Transpose<perm = [0, 1, 3, 2]>(present_key)
    s0 = MatMul(q, kt)
    s1 = Mul(s0, scale)
    seen = Cast<to = 1>(attention_mask)
    axis = Squeeze(one)
    count = CumSum(seen, axis)
    own = Cast<to = 1>(position_ids)
    rows = Unsqueeze(own, two)
    columns = Unsqueeze(count, one)
    gap0 = Sub(rows, columns)
    gap1 = Add(gap0, unit)
    gap2 = Min(gap1, zero)
    bias = Mul(gap2, far)
    mask = Unsqueeze(bias, one)
    s2 = Add(s1, mask)
    p = Softmax<axis = -1>(s2)
    o0 = MatMul(p, present_value)
    o1 = Transpose<perm = [0, 2, 1, 3]>(o0)
    o2 = Reshape(o1, joined)
    y = Add(x, o2)
    logits = MatMul(y, head)
}
"""

NET = (
    "Input input_ids 0 1 input_ids",
    "Input attention_mask 0 1 attention_mask",
    "Input position_ids 0 1 position_ids",
    "Input caches 0 2 past_key past_value",
    "Split s0 1 2 position_ids pos0 pos1 31=23",
    "Embed words 1 1 input_ids word 0=16 1=50 3=800",
    "Embed places 1 1 pos0 place 0=16 1=64 3=1024",
    "BinaryOp x 2 1 word place x",
    "Split s1 1 4 x x0 x1 x2 x3",
    "Gemm q 1 1 x0 q0 3=1 5=1 6=1 8=16 9=16 10=-1",
    "Gemm k 1 1 x1 k0 3=1 5=1 6=1 8=8 9=16 10=-1",
    "Gemm v 1 1 x2 v0 3=1 5=1 6=1 8=8 9=16 10=-1",
    "Reshape q1 1 1 q0 q1 0=8 1=2 2=-1",
    "Reshape k1 1 1 k0 k1 0=8 1=1 2=-1",
    "Reshape v1 1 1 v0 v1 0=8 1=1 2=-1",
    "Permute q2 1 1 q1 q 0=2",
    "Permute k2 1 1 k1 k 0=2",
    "Permute v2 1 1 v1 v 0=2",
    "Dequantize seen 1 1 attention_mask seen 0=1 31=23",
    "CumulativeSum count 1 1 seen count",
    "Dequantize own 1 1 pos1 own 0=1 31=23",
    "Reshape rows 1 1 own rows 0=1 1=-1",
    "Reshape columns 1 1 count columns 0=-1 1=1",
    "BinaryOp gap0 2 1 rows columns gap0 0=1",
    "BinaryOp gap1 1 1 gap0 gap1 0=0 1=1 2=1.0",
    "BinaryOp gap2 1 1 gap1 gap2 0=5 1=1 2=0.0",
    "BinaryOp mask 1 1 gap2 mask 0=2 1=1 2=10000.0",
    "SDPA attention 6 3 q k v mask past_key past_value o0 present_key present_value 5=1 6=0.35355338 7=1",
    "Permute o1 1 1 o0 o1 0=2",
    "Reshape o2 1 1 o1 o2 0=16 1=-1",
    "BinaryOp y 2 1 x3 o2 y",
    "Gemm head 1 1 y logits 3=1 5=1 6=1 8=50 9=16 10=-1",
)


def weights_of(seed: int = 0) -> dict[str, np.ndarray]:
    """Return the model's weights by name."""
    random = np.random.default_rng(seed)
    return {name: (random.standard_normal(size) * 0.6).astype(np.float32) for name, size in _SHAPES.items()}


def model_of(text: str = MODEL) -> onnx.ModelProto:
    """Return a model of these lines, which may be changed, with the weights that it reads."""
    proto = parsed(text, 17)
    read = {name for node in proto.graph.node for name in node.input}
    weights = weights_of()
    proto.graph.initializer.extend(numpy_helper.from_array(weights[name], name) for name in weights if name in read)
    return proto


def decoder(folder: Path, *lines: str, seed: int = 0) -> tuple[Path, Path, Path]:
    """Write the model and its net, or one of other `lines`; return the paths of model, .param and .bin."""
    random = np.random.default_rng(seed)
    weights = {name: (random.standard_normal(size) * 0.6).astype(np.float32) for name, size in _SHAPES.items()}
    proto = parsed(MODEL, 17)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    folder.mkdir(exist_ok=True)
    model = folder / "decoder.onnx"
    onnx.save(proto, model)
    order = tagged(weights["words"]), tagged(weights["places"])
    gemms = (tagged(weights[name].T) for name in ("wq", "wk", "wv"))
    data = b"".join([*order, *gemms, raw(1.0), raw(1.0), tagged(weights["head"].T)])
    param, bin = write_net(folder, *(lines or NET), weights=data)
    (folder / "net.json").write_text(_manifest(model).to_json())
    return model, param, bin


def _manifest(model: Path) -> Manifest:
    caches = {role: Cache("attention", role, f"past_{role}", f"present_{role}") for role in ("key", "value")}
    integers = {"input_ids": "S", "attention_mask": "T", "position_ids": "S"}
    tables = {"input_ids": VOCABULARY, "position_ids": POSITIONS}
    inputs = [Entry(n, n, (1, size), "int64", 0, "int32", table=tables.get(n)) for n, size in integers.items()]
    inputs += [Entry(c.in_, c.in_, (1, 1, "P", 8), "float32", 0, cache=c) for c in caches.values()]
    outputs = [Entry("logits", "logits", (1, "S", VOCABULARY), "float32", 0)]
    outputs += [Entry(c.out, c.out, (1, 1, "T", 8), "float32", 0, cache=c) for c in caches.values()]
    counts = LayerCount(len(NET), len(NET))
    source = Source(file_hash(model), 17)
    return Manifest(tuple(inputs), tuple(outputs), source, "by hand", "20261020", counts, ())
