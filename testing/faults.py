"""Faults planted in right nets, one at a time, and their detection by verification and bisection."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnx2ncnn_opt.api.bisect import Bisection, bisect
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.net_shapes import infer_net
from onnx2ncnn_opt.errors import Error, RefusalError
from onnx2ncnn_opt.inputs.draws import Draw, draw_inputs
from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.manifest import Entry, LayerCount, Manifest, Source
from onnx2ncnn_opt.onnx.read.exported import reference
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.param.files import read_net, write_net
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verdict.errors import INFINITE
from onnx2ncnn_opt.verdict.rules import ORDER
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.model_accuracy import Rounding
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.outputs import input_slots
from onnx2ncnn_opt.verification.report import VerifyReport
from testing import present
from testing.compared import way
from testing.exports import MODELS as EXPORTS
from testing.exports import refilled
from testing.formulas import evaluate, layer_of
from testing.models import parsed
from testing.op_cases import fill_weights, load_cases

ROOT = Path(__file__).parents[1]

NO_EFFECT, SERIOUS = 1e-6, 1e-2
# Draws that verification does not take, to find out whether a fault that it missed has an effect.
SCALES = (0.01, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
FLAT_SCALES = (1.0, 8.0)
DRAWS_EACH = 6

# Models with what fixtures have little of: guards, branches that seldom act, tables, integers.
_TEXT = """
guarded log: (float[2,3,7] x) => (float[2,3,7] y) <float z = {0}> { c = Greater(x, z) l = Log(x) y = Where(c, l, z) }
clipped: (float[1,4,9,11] x) => (float[1,4,9,11] y) <float a = {0}, float b = {6}> { r = Add(x, a) y = Clip(r, a, b) }
hard swish: (float[1,4,9,11] x) => (float[1,4,9,11] y) { y = HardSwish(x) }
seldom: (float[6,33] x) => (float[6,33] y) <float k = {5}, float m = {3}>
   { c = Greater(x, k) b = Mul(x, m) y = Where(c, b, x) }
table: (int64[1,12] i) => (float[1,12,8] y) <float[700,8] w> { y = Gather(w, i) }
two tables: (int64[1,16] i, int64[1,16] j) => (float[1,16,8] y) <float[90,8] w, float[16,8] v>
   { a = Gather(w, i) b = Gather(v, j) y = Add(a, b) }
mask: (float[1,2,10,8] q, float[1,2,10,8] k, int64[1,10] m) => (float[1,2,10,8] y) <float one = {1}, float low =
  {-10000}, int64[2] a = {1, 2}>
   { f = Cast<to = 1>(m) n = Sub(one, f) p = Mul(n, low) u = Unsqueeze(p, a) t = Transpose<perm = [0,1,3,2]>(k) s =
  MatMul(q, t) z = Add(s, u) e = Softmax<axis = -1>(z) y = MatMul(e, q) }
bytes: (uint8[1,3,8,12] x) => (float[1,3,8,12] y) <float s = {0.0039}, float o = {0.5}>
   { f = Cast<to = 1>(x) g = Mul(f, s) y = Sub(g, o) }
decoder: (float[1,3,8,12] x) => (uint8[1,3,8,12] y) <float s = {255}, float a = {0}, float b = {1}>
   { g = Sigmoid(x) h = Clip(g, a, b) i = Mul(h, s) y = Cast<to = 2>(i) }
quotient: (float[3,13] x, float[3,13] w) => (float[3,13] y) <float e = {0.001}>
   { a = Abs(w) d = Add(a, e) y = Div(x, d) }
norms: (float[2,5,17] x) => (float[2,5,17] y) <float[17] g, float[17] b>
   { y = LayerNormalization<epsilon = 0.00001>(x, g, b) }
pieces: (float[1,8,10,6] x) => (float[1,3,8,6] y) <int64[2] s = {2, 1}, int64[2] e = {5, 9}, int64[2] a = {1, 2}>
   { y = Slice(x, s, e, a) }
rounded: (float[4,21] x) => (float[4,21] y) { a = Round(x) b = Floor(x) y = Sub(a, b) }
chosen: (float[4,21] x) => (int64[4] y, float[4,3] v) <int64[1] k = {3}>
   { y = ArgMax<axis = 1, keepdims = 0>(x) v, i = TopK(x, k) }
maximum: (float[4,21] x, float[4,21] w) => (float[4,21] y) { a = Max(x, w) b = Min(x, w) y = Sub(a, b) }
"""
MODELS = dict(re.findall(r"^(\w.*?): (.*(?:\n  .*)*)", _TEXT, re.MULTILINE))


def models() -> Iterator[tuple[str, Any]]:
    """Yield the models to plant faults in, by name."""
    for name, text in MODELS.items():
        model = parsed(text, 19)
        fill_weights(model, 11)
        yield name, model
    yield from ((path.stem, refilled(path)) for path in EXPORTS if ".ts" not in path.stem or "bn" in path.stem)
    chosen = ("convolution", "elementwise", "logic", "matrix", "normalization", "pooling", "reduction", "resize")
    for number, case in enumerate(load_cases()):
        if case.file in chosen and number % 7 == 0 and not case.result.startswith("refused"):
            yield str(case), case.model()


Rng = np.random.Generator
# A fault takes a layer and returns what stands in its place, None where it has no such thing.
Fault = Callable[[Layer, Rng], Layer | None]


def _element(which: Callable[[int, Rng], int]) -> Fault:
    def fault(layer: Layer, rng: Rng) -> Layer | None:
        for name, weight in layer.weights.stored_items():
            if weight.is_float and weight.data.dtype == np.float32 and weight.array.size:
                array = np.array(weight.array)
                at, flat = which(array.size, rng), array.reshape(-1)
                flat[at] += np.float32(max(0.5 * np.abs(flat).max(), 1e-3)) * (1 if flat[at] >= 0 else -1)
                return layer.having(weights={name: array})
        return None

    return fault


def _rows_swapped(layer: Layer, rng: Rng) -> Layer | None:
    rows = layer["num_output"] if "num_output" in layer.params else 0
    weight = dict(layer.weights.stored_items()).get("weight_data")
    if not rows or rows < 2 or weight is None or weight.array.size % rows or layer.type == "Embed":
        return None
    array = np.array(weight.array).reshape(rows, -1)
    a, b = rng.choice(rows, 2, replace=False)
    array[[a, b]] = array[[b, a]]
    return layer.having(weights={"weight_data": array.reshape(weight.array.shape)})


def _table_row(layer: Layer, rng: Rng) -> Layer | None:
    if layer.type != "Embed":
        return None
    array = np.array(dict(layer.weights.stored_items())["weight_data"].array).reshape(layer["input_dim"], -1)
    array[int(rng.integers(len(array)))] *= -1
    return layer.having(weights={"weight_data": array.reshape(-1)})


def _no_bias(layer: Layer, rng: Rng) -> Layer | None:
    weights = dict(layer.weights.stored_items())
    name = next((n for n in ("bias_data", "beta_data", "C_data") if n in weights and weights[n].array.any()), None)
    return layer.having(weights={name: np.zeros_like(weights[name].array)}) if name else None


def _params(types: Sequence[str], change: Callable[[Layer, Rng], Mapping[str, Any] | None]) -> Fault:
    def fault(layer: Layer, rng: Rng) -> Layer | None:
        if layer.type not in types:
            return None
        changed = change(layer, rng)
        return layer.having(**changed) if changed else None

    return fault


def _padding(layer: Layer, rng: Rng) -> dict[str, Any] | None:
    if layer.type == "Padding":
        left, right = layer["left"], layer["right"]
        return {"left": right, "right": left} if left != right else {"left": left + 1, "right": right - 1}
    left, right = layer["pad_left"], layer["pad_right"]
    if left <= 0 and right <= 0:
        return None
    return {"pad_left": left + 1, "pad_right": right - 1} if right > 0 else {"pad_left": left - 1, "pad_right": 1}


def _axis(layer: Layer, rng: Rng) -> dict[str, Any] | None:
    rank = len(layer.inputs[0].shape or ())
    axes = [axis for axis in range(rank) if axis not in (layer["axis"], layer["axis"] + rank)]
    return {"axis": int(rng.choice(axes))} if axes else None


def _scaled(*names: str, by: float) -> Callable[[Layer, Rng], dict[str, Any] | None]:
    def change(layer: Layer, rng: Rng) -> dict[str, Any] | None:
        found = [name for name in names if name in layer.params and isinstance(layer[name], float) and layer[name]]
        return {found[0]: layer[found[0]] * by} if found else None

    return change


def _operands(layer: Layer, rng: Rng) -> dict[str, Any] | None:
    swapped = {1: 7, 7: 1, 3: 8, 8: 3, 6: 9, 9: 6}
    return {"op_type": swapped[layer["op_type"]]} if layer["op_type"] in swapped else None


def _operation(layer: Layer, rng: Rng) -> dict[str, Any] | None:
    other = {0: 1, 2: 0, 4: 5, 5: 4} if layer.type == "BinaryOp" else {2: 18, 18: 2, 0: 1, 9: 10, 3: 18, 16: 14}
    return {"op_type": other[layer["op_type"]]} if layer["op_type"] in other else None


def _bound(layer: Layer, rng: Rng) -> dict[str, Any] | None:
    name = "max" if abs(layer["max"]) < INFINITE / 2 else "min"
    return {name: layer[name] - 0.1} if abs(layer[name]) < INFINITE / 2 else None


def _slice(layer: Layer, rng: Rng) -> dict[str, Any] | None:
    if layer.type == "Slice":
        sizes = list(layer["slices"])
        if len(sizes) < 2 or sizes[0] <= 1 or any(size < 0 for size in sizes[:2]):
            return None
        return {"slices": (sizes[0] - 1, sizes[1] + 1, *sizes[2:])}
    starts, ends = list(layer["starts"]), list(layer["ends"])
    if not starts or len(starts) != len(ends) or not starts[0]:
        return None
    return {"starts": (starts[0] - 1, *starts[1:]), "ends": (ends[0] - 1, *ends[1:])}


def _mode(layer: Layer, rng: Rng) -> dict[str, Any] | None:
    if layer.type == "Interp":
        return {"align_corner": 1 - layer["align_corner"]} if layer["resize_type"] > 1 else None
    if layer.type == "GELU":
        return {"fast_gelu": 1 - layer["fast_gelu"]}
    if layer.type == "Reduction":
        return {"operation": {0: 3, 3: 4, 4: 5, 5: 4}.get(layer["operation"], 3)}
    if layer["pooling_type"] == 1 and (layer["pad_left"] or layer["pad_top"]):
        return {"avgpool_count_include_pad": 1 - layer["avgpool_count_include_pad"]}
    return {"pooling_type": 1 - layer["pooling_type"]}


def _attention(layer: Layer, rng: Rng) -> dict[str, Any] | None:
    if layer.type == "SDPA" or rng.random() < 0.5:
        width = (layer.inputs[0].shape or (1,))[-1]
        assert isinstance(width, int)
        return {"scale": (layer["scale"] or 1 / np.sqrt(width)) * 1.1}
    return {"num_heads": layer["num_heads"] // 2} if layer["num_heads"] % 2 == 0 else None


def _inputs_swapped(layer: Layer, rng: Rng) -> Layer | None:
    if len(layer.inputs) < 2 or layer.type not in ("Concat", "SDPA", "MatMul", "Gemm"):
        return None
    first, second, *others = layer.inputs
    return layer.having(inputs=(second, first, *others)) if first is not second else None


# What is added after a layer, as a formula of its output x; c is a constant that is 1, and 1.1 in the last element.
ADDED = {
    "wrong in the last element only": "c * x",
    "NaN at zero": "SQUARE(x) / x",
    "wrong below zero only": "ReLU(x, slope=1.03)",
    "a branch that seldom acts": "Clip(x, min=-3.4028234663852886e38, max=4.5)",
    "wrong for large numbers only": "Clip(x, min=-20.0, max=20.0)",
    "another rounding": "FLOOR(x * 32.0) * 0.03125",
}
_CONV = ("Convolution", "ConvolutionDepthWise", "Convolution1D", "Convolution3D", "Deconvolution", "InnerProduct")
FAULTS: dict[str, Fault] = {
    "one weight": _element(lambda size, rng: int(rng.integers(size))),
    "the last weight": _element(lambda size, rng: size - 1),
    "two rows of weights swapped": _rows_swapped,
    "a row of a table": _table_row,
    "dropped bias": _no_bias,
    "moved padding": _params((*_CONV[:-1], "ConvolutionDepthWise1D", "Padding"), _padding),
    "another axis": _params(("Concat", "Softmax", "Slice"), _axis),
    "missing activation": _params(
        (*_CONV, "ConvolutionDepthWise1D"),
        lambda layer, rng: {"activation_type": 0, "activation_params": None} if layer["activation_type"] else None,
    ),
    "slope": _params(("ReLU",), lambda layer, rng: {"slope": layer["slope"] + 0.02}),
    "eps": _params(("BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RMSNorm"), _scaled("eps", by=1e4)),
    "alpha or beta": _params(
        ("HardSigmoid", "HardSwish", "ELU", "Gemm", "Reduction"), _scaled("alpha", "beta", "coeff", by=1.1)
    ),
    "scalar operand": _params(
        ("BinaryOp",), lambda layer, rng: {"b": layer["b"] * 1.03 + 0.01} if layer["with_scalar"] else None
    ),
    "swapped operands": _params(("BinaryOp",), _operands),
    "another operation": _params(("BinaryOp", "UnaryOp"), _operation),
    "bound of a clip": _params(("Clip",), _bound),
    "slice off by one": _params(("Crop", "Slice"), _slice),
    "mode of pooling, resizing, reduction": _params(("Pooling", "Interp", "GELU", "Reduction"), _mode),
    "another permutation": _params(
        ("Permute",),
        lambda layer, rng: {
            "order_type": (layer["order_type"] + 1) % (2 if len(layer.inputs[0].shape or ()) == 2 else 6)
        },
    ),
    "scale or heads of attention": _params(("SDPA", "MultiHeadAttention"), _attention),
    "swapped inputs": _inputs_swapped,
}
_ALONE = (
    *("ReLU", "Sigmoid", "TanH", "Clip", "HardSwish", "HardSigmoid", "Swish", "GELU", "BatchNorm", "LayerNorm"),
    *("UnaryOp", "BinaryOp", "PReLU", "Dropout", "Softmax", "Threshold", "ShuffleChannel"),
)
DELETED = "deleted layer"
_DRAWS = 100  # of a fault of a layer


# Faults that are none in fp32 on x86: the mode that shows them, and what is added. HardSigmoid(sqrt(-1)) is 0 on x86
# and NaN on aarch64; a product with 2^17 and 2^-17 changes no bit of a float32.
DEVICE_FAULTS = {
    "NaN on aarch64 only": ("fp32", "HardSigmoid(SQRT(x * 0.0 + -1.0)) + x"),
    "overflow in fp16": ("fp16", "x * 131072.0 * 7.62939453125e-06"),
}

# A fault of the .param: how its text changes, and the names of the layers of which one is to be named.
Change = tuple[Callable[[str], str], set[str]]


def _renamed_input(graph: Graph, blob: Blob) -> Change:
    assert blob.producer is not None
    return lambda text: _renamed(text, {blob.name: "another_name"}), {blob.producer.name}


def _deleted_output(graph: Graph, blob: Blob) -> Change:
    assert blob.producer is not None
    graph.outputs = [output for output in graph.outputs if output is not blob]
    name = blob.producer.name
    if blob.users:  # it stays a blob
        return lambda text: _renamed(text, {blob.name: "no_output"}), {name}
    before = {read.producer.name for read in blob.producer.inputs if read.producer}
    graph.remove(blob.producer)
    return lambda text: text, {name, *before}


def _missing_split(graph: Graph, blob: Blob) -> Change:
    assert blob.producer is not None

    def unsplit(text: str) -> str:
        lines = text.splitlines()
        number = next(i for i, line in enumerate(lines) if line.startswith("Split ") and line.split()[4] == blob.name)
        _, _, _, count, _, *tops = lines.pop(number).split()
        layers, blobs = map(int, lines[1].split())
        lines[1] = f"{layers - 1} {blobs - int(count)}"
        return _renamed("\n".join(lines), dict.fromkeys(tops, blob.name))

    return unsplit, {blob.producer.name, *(user.name for user in blob.users)}


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Return a .param in which blobs have other names."""
    lines = text.splitlines()
    for number, line in enumerate(lines[2:], 2):
        words = line.split()
        end = 4 + int(words[2]) + int(words[3])
        lines[number] = " ".join([*words[:4], *(names.get(word, word) for word in words[4:end]), *words[end:]])
    return "\n".join(lines) + "\n"


def _deletable(graph: Graph) -> list[Blob]:
    """Return outputs that can be deleted from a net that has others."""
    # What a Reshape alone gives has the same numbers before it, under a name that is as good to other converters.
    alone = [b for b in graph.outputs if b.producer and len(b.producer.outputs) == 1 and b.producer.type != "Reshape"]
    return alone if len(graph.outputs) > 1 else []


def _shared(graph: Graph) -> list[Blob]:
    """Return the blobs that a Split gives to several layers."""
    return [blob for layer in graph for blob in layer.outputs if len(blob.users) > 1 and not blob.is_output]


# The blobs that a fault of the file can be about, and the fault.
BROKEN: dict[str, tuple[Callable[[Graph], list[Blob]], Callable[[Graph, Blob], Change]]] = {
    "renamed input": (lambda graph: list(graph.inputs), _renamed_input),
    "deleted output": (_deletable, _deleted_output),
    "missing Split": (_shared, _missing_split),
}


@dataclass(frozen=True)
class Planted:
    """A fault in a net of so many layers: its class, its layer, its outcome, and whether it was `named`.

    `rule` is the rule that refused it, or the last one that accepted an output.
    """

    kind: str
    net: str
    layer: str
    outcome: str
    detail: str = ""
    layers: int = 0
    named: str = ""
    converter: str = "ours"
    rule: str = ""


def places(graph: Graph, kind: str) -> list[int]:
    """Return the numbers of the layers where a fault can be planted; of the blobs, for a fault of the file."""
    if kind in BROKEN:
        return list(range(len(BROKEN[kind][0](graph))))
    rng = np.random.default_rng(0)
    found = []
    for number, layer in enumerate(graph):
        if kind in FAULTS:
            fits = layer.type not in ("Input", "Split") and FAULTS[kind](layer, rng) is not None
        elif kind == DELETED:
            fits = layer.type in _ALONE and len(layer.inputs) <= 2 and layer.inputs[0].shape == layer.output.shape
            fits = fits and not layer.inputs[0].is_input
        elif kind in DEVICE_FAULTS:
            fits = len(layer.outputs) == 1 and layer.type in _CONV and layer.output.shape is not None
        else:
            fits = len(layer.outputs) == 1 and layer.type not in ("MemoryData", "Split", "Embed")
            fits = fits and not _holds_integers(layer) and ("c" not in ADDED[kind].split() or _is_small(layer.output))
        if fits:
            found.append(number)
    return found


def _holds_integers(layer: Layer) -> bool:
    return any(user.type in ("Embed", "Dequantize", "Cast") for user in layer.output.users) or layer.type == "Cast"


def plant(graph: Graph, kind: str, place: int, rng: Rng) -> str:
    """Plant a fault of a layer, and say where."""
    layer = graph.layers[place]
    where = f"{layer.type} '{layer.name}'"
    if kind in FAULTS:
        drawn = (FAULTS[kind](layer, rng) for _ in range(_DRAWS))  # some draws change nothing, such as a weight of 0
        new = next(each for each in drawn if each is not None)
        graph.replace(layer, new)
    elif kind == DELETED:
        graph.replace(layer, Layer("Noop", layer.name, layer.inputs[:1]))
    elif kind in DEVICE_FAULTS:
        _insert(graph, layer, DEVICE_FAULTS[kind][1])
    else:
        _insert(graph, layer, ADDED[kind])
    return where


def _is_small(blob: Blob) -> bool:
    """Return True if a MemoryData can have the shape of a blob."""
    shape = blob.shape or ()
    return 0 < len(shape) <= 3 and all(isinstance(size, int) for size in shape)


def _insert(graph: Graph, layer: Layer, formula: str) -> None:
    """Put the layers of a formula after another; its readers read the last of them, which has the output's name."""
    old, users = layer.output, list(layer.output.users)
    following = graph.layers[graph.layers.index(layer) + 1 :]

    def make(operator: str, *operands: Any, **params: Any) -> Blob:
        type, inputs, params = layer_of(operator, *operands, **params)
        name = f"planted{len(graph)}"
        new = Layer(type, f"{layer.name}.{name}", inputs, (Blob(f"{old.name}.{name}", old.shape, old.batch),), params)
        return graph.add(new, before=following[0] if following else None).output

    names = {"x": old}
    if "c" in formula.split():
        shape = known(old.shape or ())
        names["c"] = make("MemoryData", **dict(zip(("w", "h", "c"), reversed(shape), strict=False)))
        data = np.ones(shape, np.float32)
        data.reshape(-1)[-1] = 1.1
        present(names["c"].producer).weights["data"] = data
    blob: Blob = evaluate(formula, names, float, make)
    for user in users:
        graph.set_inputs(user, [blob if read is old else read for read in user.inputs])
    if old.is_output:
        graph.outputs = [blob if output is old else output for output in graph.outputs]
        old.name, blob.name = f"{old.name}.right", old.name


@dataclass(frozen=True)
class Subject:
    """A right net: the model, the files, the manifest that it is verified with, and one to run it by."""

    name: str
    model: Path | bytes
    loaded: LoadedModel
    net: tuple[Path, Path]
    manifest: Manifest | None
    slots: Manifest

    def how(self, on: str | None = None, mode: str = "fp32") -> Verification:
        """Return the options of a verification in a mode on a device."""
        return Verification(shapes=self.loaded.given, on=on, modes=(mode,), timeout=60)

    def verified(self, net: tuple[Path, Path], worker: NcnnWorker, how: Verification) -> VerifyReport:
        """Verify a net of the model."""
        return verify_net(self.model, *net, how, manifest=self.manifest, worker=None if how.on else worker)


def converted(name: str, model: Any, folder: Path, worker: NcnnWorker) -> Subject | None:
    """Return our net of a model, if it is right."""
    conversion = lower(model)
    files, manifest = conversion.save(folder / "right"), conversion.manifest()
    net = files.param, files.bin
    subject = Subject(name, reference(conversion.source), conversion.model, net, manifest, manifest)
    return subject if subject.verified(net, worker, subject.how()).ok else None


_PNNX_TYPES = {"float32": "f32", "int64": "i64", "int32": "i32"}


def converted_by_pnnx(name: str, model: Any, folder: Path, worker: NcnnWorker, pnnx: Path) -> Subject | None:
    """Return pnnx's net of a model, if it makes a right one."""
    path = model if isinstance(model, Path) else folder / "model.onnx"
    if path is not model:
        onnx.save(model, path)
    feeds = draw_inputs(load_model(path))
    if any(array.dtype.name not in _PNNX_TYPES for array in feeds.values()):
        return None
    (work := folder / "pnnx").mkdir()
    (work / "m.onnx").symlink_to(path.resolve())
    shapes = [f"[{','.join(map(str, array.shape))}]{_PNNX_TYPES[array.dtype.name]}" for array in feeds.values()]
    command = [str(pnnx), "m.onnx", f"inputshape={','.join(shapes)}", "fp16=0"]
    subprocess.run(command, cwd=work, capture_output=True, check=False, timeout=300)
    param, bin = work / "m.ncnn.param", work / "m.ncnn.bin"
    if not param.exists() or not bin.exists():
        return None
    given = {key: array.shape for key, array in feeds.items()}
    report = verify_net(path, param, bin, verification=Verification(shapes=given, timeout=60), worker=worker)
    if not report.ok:
        return None
    way = input_slots(None, feeds, [blob.name for blob in read_net(param, bin).graph.inputs])[0]
    inputs = [Entry(s.name, s.blob, feeds[s.name].shape, feeds[s.name].dtype.name, s.batch_axis) for s in way]
    outputs = [Entry(o.name, o.blob or "", (1,), "float32", 0) for o in report.outputs]
    slots = Manifest(tuple(inputs), tuple(outputs), Source(None, 1), "pnnx", "", LayerCount(1, 1), ())
    return Subject(name, path, load_model(path, shapes=given), (param, bin), None, slots)


def verdict(subject: Subject, wrong: tuple[Path, Path], worker: NcnnWorker, numbers: Sequence[int]) -> tuple[str, str]:
    """Judge a missed fault by its effect on other inputs."""
    sizes = {str(dim): 5 for info in subject.loaded.inputs for dim in info.shape if not isinstance(dim, int)}
    draws = [Draw(1000 + number, scale) for scale in SCALES for number in numbers]
    draws += [Draw(1000 + number, scale, flat=number % 4) for scale in FLAT_SCALES for number in numbers]
    fed = []
    for draw in draws:
        swept = {entry.name: draw.seed * 97 for entry in subject.slots.inputs}
        fed.append(draw_inputs(subject.loaded, sizes, draw=draw, swept=swept))
    runners = [NcnnRunner(*net, worker=worker) for net in (subject.net, wrong)]
    # One net after the other, because the worker holds one.
    results = [[runner.extract(*way(subject.slots, feeds)) for feeds in fed] for runner in runners]
    model, rounding = OrtRunner(subject.model), Rounding(subject.model, (), {})
    worst = 0.0
    for draw, feeds, expected, found in zip(draws, fed, *results, strict=True):
        spread = cache(partial(_spread, rounding, model, feeds))
        for entry in subject.slots.outputs:
            try:
                off = _off(expected[entry.blob], found[entry.blob], entry.name, spread)
            except RefusalError:  # the model does not take these sizes
                continue
            if off >= SERIOUS:
                return "SERIOUS", f"{off:.2g} at {draw}"
            worst = max(worst, off)
    return ("small" if worst > NO_EFFECT else "without effect"), f"{worst:.1g}"


def _spread(rounding: Rounding, model: OrtRunner, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
    return rounding.spread(feeds, model.run(feeds))


def _off(a: Array | Failure, b: Array | Failure, name: str, spread: Callable[[], Mapping[str, Array]]) -> float:
    """Return the largest error of an output that rounding does not explain, relative to the largest number.

    It is infinite if the output fails, or has special values elsewhere.
    """
    if isinstance(a, Failure):
        return 0.0
    if isinstance(b, Failure) or a.shape != b.shape:
        return np.inf
    regular = np.abs(a) < INFINITE
    others = regular != (np.abs(b) < INFINITE)
    if others.any() and np.isfinite(spread()[name].reshape(a.shape)[others]).any():
        return np.inf
    regular &= ~others
    if not regular.any() or a.dtype != np.float32:
        return 0.0
    error, largest = np.abs(a - b)[regular], max(float(np.abs(a[regular]).max()), 1e-20)
    if error.max() > NO_EFFECT * largest:
        error = np.maximum(error - spread()[name].reshape(a.shape)[regular], 0.0)
    return float(error.max() / largest)


@dataclass(frozen=True)
class Campaign:
    """The plan for faults: up to `each` of a class in a net, up to `most` in a net, of classes whose names match.

    `bisects` says that the faulty layer has to be named as well; `on` is the device for DEVICE_FAULTS, and `pnnx` makes
    the nets. `keep` is a folder for all nets and an ncnn-check.toml about them: `check` fails all but "right_...".
    """

    worker: NcnnWorker
    each: int = 1
    seed: int = 0
    most: int = sys.maxsize
    bisects: bool = False
    on: str | None = None
    pnnx: Path | None = None
    kinds: str = ""
    keep: Path | None = None

    def run(self, chosen: Iterable[tuple[str, Any]]) -> Iterator[Planted]:
        """Plant faults in the nets of models, and yield the outcome of each."""
        for name, model in chosen:
            with tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-") as folder:
                try:
                    subject = self.subject(name, model, Path(folder))
                except (Error, subprocess.TimeoutExpired):
                    continue
                if subject is not None:
                    self.kept(subject, f"right_{name}", subject.net)
                    yield from islice(self.faults(subject, Path(folder)), self.most)

    def kept(self, subject: Subject, stem: str, net: tuple[Path, Path]) -> None:
        """Copy a net and its model to the folder for them, if there is one."""
        if self.keep is None:
            return
        stem = re.sub(r"\W+", "_", stem)
        for folder in ("models", "nets"):
            (self.keep / folder).mkdir(parents=True, exist_ok=True)
        (self.keep / "ncnn-check.toml").write_text('models = ["models/*.onnx"]\nnet = "nets/{stem}.param"\n')
        model = subject.model if isinstance(subject.model, bytes) else subject.model.read_bytes()
        (self.keep / "models" / f"{stem}.onnx").write_bytes(model)
        for path in net:
            shutil.copyfile(path, self.keep / "nets" / f"{stem}{path.suffix}")
        if subject.manifest is not None:
            (self.keep / "nets" / f"{stem}.json").write_text(subject.manifest.to_json())

    def subject(self, name: str, model: Any, folder: Path) -> Subject | None:
        """Return the right net."""
        if self.pnnx is None:
            return converted(name, model, folder, self.worker)
        return converted_by_pnnx(name, model, folder, self.worker, self.pnnx)

    def faults(self, subject: Subject, folder: Path) -> Iterator[Planted]:
        """Yield all faults of a net; if there is a limit, of classes in a random order."""
        kinds = [*FAULTS, *ADDED, DELETED, *(BROKEN if self.bisects or self.keep else ())]
        kinds += DEVICE_FAULTS if self.on else ()
        kinds = [kind for kind in kinds if re.search(self.kinds, kind)]
        if self.most < sys.maxsize:
            np.random.default_rng([self.seed, *subject.name.encode()]).shuffle(kinds)
        for kind in kinds:
            rng = np.random.default_rng([self.seed, len(kind), *subject.name.encode()])
            found = places(_graph(subject), kind)
            for place in sorted(rng.choice(found, min(self.each, len(found)), replace=False)) if found else ():
                if (planted := self.fault(subject, folder, kind, int(place), rng)) is not None:
                    yield planted

    def fault(self, subject: Subject, folder: Path, kind: str, place: int, rng: Rng) -> Planted | None:
        """Plant one fault, and check whether it is caught; return None if it cannot be a fault in this net."""
        graph, paths = _graph(subject), (folder / "wrong.param", folder / "wrong.bin")
        layers = sum(layer.type not in ("Input", "Split") for layer in graph)
        on, mode = (self.on, DEVICE_FAULTS[kind][0]) if kind in DEVICE_FAULTS else (None, "fp32")
        if kind == "renamed input" and subject.manifest is None:  # other converters' inputs may have any name
            return None
        change: Change | None = None
        if kind in BROKEN:
            blobs, broken = BROKEN[kind]
            change = broken(graph, blobs(graph)[place])
            blamed, where = change[1], ", ".join(sorted(change[1]))
        else:
            layer, before = graph.layers[place], {layer.name for layer in graph}
            # Of a layer that is gone, only those can be named that read what it should have given.
            readers = {user.name for user in layer.output.users} if kind == DELETED else set()
            where = plant(graph, kind, place, rng)
            blamed = {layer.name, *readers, *({layer.name for layer in graph} - before)}
        how = subject.how(on, mode)
        if on and not subject.verified(subject.net, self.worker, how).ok:
            return None
        converter = "pnnx" if self.pnnx else "ours"
        planted = Planted(kind, subject.name, where, "caught", layers=layers, converter=converter)
        try:
            write_net(graph, *paths)
            if change is not None:
                paths[0].write_text(change[0](paths[0].read_text()))
            self.kept(subject, f"{subject.name} {kind} {place}", paths)
            if self.bisects:
                found = bisect(subject.model, *paths, manifest=subject.manifest, verification=how)
                report = found.report
                planted = replace(planted, detail=str(found.located), named=_named(found, blamed))
            else:
                report = subject.verified(paths, self.worker, how)
                worst = max(report.outputs, key=lambda output: (output.status != "ok", ORDER.get(output.rule, 0)))
                planted = replace(planted, detail=worst.message, rule=worst.rule)
        except Error as error:
            return replace(planted, detail=str(error).splitlines()[0], named="NOT NAMED" if self.bisects else "")
        if not report.ok:
            return planted
        outcome, detail = ("SERIOUS", "not seen") if on else verdict(subject, paths, self.worker, range(DRAWS_EACH))
        return replace(planted, outcome=outcome, detail=detail, named="")


def _named(found: Bisection, blamed: set[str]) -> str:
    """Return True if bisection named one of the layers to blame."""
    located = found.located
    if located is not None and blamed.issuperset(ref.name for ref in located.suspects):
        return "named"
    return "one of several" if located and any(ref.name in blamed for ref in located.suspects) else "NOT NAMED"


def _graph(subject: Subject) -> Graph:
    graph = read_net(*subject.net).graph
    axes = {entry.blob: entry.shape[entry.batch_axis] for entry in subject.slots.inputs if entry.batch_axis is not None}
    infer_net(graph, {}, {blob: size for blob, size in axes.items() if isinstance(size, int)})
    return graph


OUTCOMES = {
    "caught": "caught",
    "without effect": "without effect",
    "small": "missed, below 1 %",
    "SERIOUS": "missed, 1 % or more",
}
NAMED = ("named", "one of several", "NOT NAMED")
