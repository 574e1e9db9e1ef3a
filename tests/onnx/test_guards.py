"""The guards of fixtures/guards.md on devices: lengths, zeros, both numeric modes, packing on and off."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.runtime.base import Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.targets import LOCAL
from testing.models import parsed

TEXT = (Path(__file__).parents[2] / "fixtures" / "guards.md").read_text(encoding="utf-8")
GUARDS = dict(re.findall(r"^## ([^\n]*)\n\n```onnx\n(.*?)```", TEXT, re.MULTILINE | re.DOTALL))
CONSTANTS = {"zero": 0.0, "one": 1.0, "half": 0.5, "two": 2.0, "tenth": 0.1, "hundred": 100.0, "minus": -1.0}
NUMBERS = np.array([0, -0.0, 1, -1, 0.5, 2, -2, 1e-3, 30, -30, 0.25, 3], np.float32)
SOME_LENGTHS = (1, 3, 33)
# Of the largest number that a guard gives here, or of 1: fp16 has 11 bits, of which functions lose two or three.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1.6e-1}
ROUNDING = {"fp32": 2.0**-21, "fp16": 2.0**-10, "bf16": 2.0**-7}
# ncnn's acos of 1 is 0.0005 on ARM.
ROUGH = {"Where over Acos": 1e-3}
LARGEST_HALF = 65504.0


def model(body: str, length: int) -> onnx.ModelProto:
    lines = [f"{name} = Constant<value_float = {number}>()" for name, number in CONSTANTS.items()]
    lines += ["ninf = Constant<value_float = -inf>()", "low = Constant<value_float = -3.4028234663852886e38>()"]
    lines += ["above = Greater(x, zero)", *body.strip().splitlines()]
    text = "\n".join(lines)
    shape = f"float[2,{length}]"
    return parsed(f"({shape} x, {shape} z) => ({shape} y) {{\n{text}\n}}", 20)


def inputs(length: int) -> dict[str, Array]:
    """Two rows of each input; of z, the second row is all 0, and masked where a guard masks."""
    x = np.resize(NUMBERS, (2, length))
    z = np.resize(NUMBERS[::-1], (2, length)).copy()
    z[1] = 0
    return {"x": x, "z": z}


def computation(source: onnx.ModelProto, feeds: Mapping[str, Array], stem: Path) -> Callable[..., Array]:
    """Convert a model of one output; the result runs it on a device, in a numeric mode."""
    conversion = lower(source, tail="never")
    files = conversion.save(stem)
    manifest = conversion.manifest()
    given = {entry.blob: Feed(feeds[entry.name], entry.batch_axis) for entry in manifest.inputs}
    (out,) = manifest.outputs

    def compute(worker: NcnnWorker, mode: str, *, exact: bool = False) -> Array:
        runner = NcnnRunner(files.param, files.bin, mode=mode, exact=exact, worker=worker)
        return runner.run(given, [Fetch(out.blob, out.batch_axis)])[out.blob]

    return compute


@pytest.mark.parametrize("title", list(GUARDS))
def test_guard(title: str, device: NcnnWorker, tmp_path: Path, thorough: bool) -> None:
    lengths: Sequence[int] = range(1, 34) if thorough else SOME_LENGTHS
    is_gpu = device.target.vulkan
    if is_gpu:
        lengths = lengths[-1:]  # its shaders compute each element alone, and take long to compile
    wrong = []
    for length in lengths:
        source = model(GUARDS[title], length)
        feeds = inputs(length)
        (wanted,) = OrtRunner(source.SerializeToString()).run(feeds).values()
        compute = computation(source, feeds, tmp_path / f"net{length}")
        for mode in ("fp32",) if device.target == LOCAL else TOLERANCE:
            for exact in (False,) if is_gpu else (False, True):  # exact is without packing
                result = compute(device, mode, exact=exact)
                if not is_right(result.reshape(wanted.shape), wanted, mode, ROUGH.get(title, 0.0)):
                    wrong.append(f"{mode} length {length}: {result} instead of {wanted}")
    assert not wrong, "\n".join(wrong)


TABLE = np.sin(np.arange(3000 * 8, dtype=np.float32) ** 1.5).reshape(3000, 8)
INTEGERS = {
    "indexes that are moved": ("int64[2,6] i", "s = Constant<value_ints=[3,4]>() r = Reshape(i,s) y = Gather(t,r)"),
    "indexes and their number": (
        "int64[1,N] i",
        "z = Constant<value_ints=[0]>() n = Shape<start=1>(i) p = Slice(t,z,n,z) r = Gather(t,i) y = Add(r,p)",
    ),
    "indexes that are computed": ("int64[1,6] i", "k = Constant<value_int=100>() r = Add(i,k) y = Gather(t,r)"),
    "large indexes compared": (
        "int64[1,6] i",
        "k = Constant<value_int=2899>() r = Equal(i,k) y = Cast<to=1>(r)",
    ),
    "a choice of any length": (
        "float[1,N] i",
        "h = Constant<value_float=500.0>() m = Less(i,h) k = Neg(i) y = Where(m,i,k)",
    ),
    "a row that a finite fill hides": (
        "bool[1,N] i",
        "zero = Constant<value_float=0.0>() low = Constant<value_float=-3.4028234663852886e38>() "
        "a = Where(i,zero,low) f = Cast<to=1>(i) s = Add(f,a) p = Softmax(s) e = IsNaN(p) y = Where(e,zero,p)",
    ),
    "positions in a window": ("int64[1,N] i", "d = Sub(i,p) a = Abs(d) m = LessOrEqual(a,two) y = Cast<to=1>(m)"),
    "positions in blocks": ("int64[1,N] i", "a = Div(i,ten) b = Div(p,ten) m = Equal(a,b) y = Cast<to=1>(m)"),
    "positions in two parts": (
        "int64[1,N] i",
        "a = Slice(i,zs,one,one) b = Slice(i,one,n,one) c = Concat<axis=1>(b,a) d = Sub(c,i) m = Greater(d,two) "
        "y = Cast<to=1>(m)",
    ),
    "positions before a length": (
        "float[1,N] i",
        "f = Cast<to=1>(n) a = ReduceMax(i) b = Mul(a,f) c = Round(b) k = Cast<to=7>(c) m = Less(p,k) "
        "y = Cast<to=1>(m)",
    ),
    "sines of positions": ("int64[1,N] i", "f = Cast<to=1>(i) a = Mul(f,third) y = Sin(a)"),
    "squared distances of positions": (
        "float[1,N] i",
        "q = Transpose(p) e = Slice(q,minus,n,zs) d = Sub(p,e) f = Cast<to=1>(d) g = Mul(f,f) h = Neg(g) y = Exp(h)",
    ),
}
POSITIONS = """two = Constant<value_int=2>() ten = Constant<value_int=10>() one = Constant<value_ints=[1]>()
    z = Constant<value_int=0>() zs = Constant<value_ints=[0]>() minus = Constant<value_ints=[-3]>()
    third = Constant<value_float=0.3333>() n = Shape<start=1>(i) s = Squeeze(n) o = Constant<value_int=1>()
    row = Range(z,s,o) p = Unsqueeze(row,zs)"""


@pytest.mark.parametrize("title", list(INTEGERS))
def test_integers(title: str, device: NcnnWorker, tmp_path: Path) -> None:
    """Integers keep their bits, indexes and whole numbers what they are, where a net computes in fp16."""
    given, body = INTEGERS[title]
    body = POSITIONS * ("position" in title) + body
    source = parsed(f"({given}) => (float[] y) <float[3000,8] t> {{ {body} }}", 20)
    source.graph.initializer.append(numpy_helper.from_array(TABLE, "t"))
    numbers = np.array([[2898, 2899, 2900, 7, 1, 2048]])
    feeds = {"i": np.concatenate([numbers, numbers[:, ::-1]]) if "2,6" in given else numbers}
    if "any" in title:
        feeds = {"i": np.resize(np.arange(0, 2000, 37), (1, 5000)).astype(np.float32)}
    if "position" in title:  # those of the integers are off by -3 to 3
        feeds["i"] = np.arange(3000)[None] + np.resize(np.arange(-3, 4), 3000)
    if given.startswith("float[1,N]") and "position" in title:
        feeds["i"] = np.full((1, 3000), 0.98666, np.float32)
    if "hides" in title:
        feeds["i"] = np.zeros((1, 6), np.bool_)
    if "computed" in title:
        feeds["i"] = feeds["i"] - 1
    (wanted,) = OrtRunner(source.SerializeToString()).run(feeds).values()
    compute = computation(source, feeds, tmp_path / "net")
    for mode in ROUNDING:
        result = compute(device, mode)
        size = float(np.abs(wanted[np.isfinite(wanted)]).max())
        # SSE reduces an argument of 1000 by a period in float32, whose last bit is 6e-5 there.
        allowed = max(ROUNDING[mode] * size, 2**-13 if "sines" in title else 0)
        np.testing.assert_allclose(result.reshape(wanted.shape), wanted, rtol=0, atol=allowed, err_msg=mode)


# The shape of an input, its shape here, and a permutation: c stays the outermost axis, and w * h * d is odd.
MOVES = {
    "an image": ("1,8,7,7", (1, 8, 7, 7), (0, 1, 3, 2)),
    "an image of any size": ("1,8,h,w", (1, 8, 7, 5), (0, 1, 3, 2)),
    "any number of channels": ("n,45,3", (4, 45, 3), (0, 2, 1)),
    **{
        f"a volume, {axes}": ("1,4,3,5,7", (1, 4, 3, 5, 7), (0, 1, *axes))
        for axes in ((2, 4, 3), (3, 2, 4), (3, 4, 2), (4, 2, 3), (4, 3, 2))
    },
}


@pytest.mark.parametrize("title", list(MOVES))
def test_moves(title: str, device: NcnnWorker, tmp_path: Path) -> None:
    """Channels of an odd number of elements are permuted as in the model, in 16 bits as well."""
    declared, shape, perm = MOVES[title]
    nodes = f"r = Relu(x) t = Transpose<perm = {list(perm)}>(r) y = Neg(t)"
    source = parsed(f"(float[{declared}] x) => (float[] y) {{ {nodes} }}", 18)
    x = np.resize(np.arange(1, 250, dtype=np.float32), shape)  # which fp16 and bf16 hold
    compute = computation(source, {"x": x}, tmp_path / "net")
    (param,) = tmp_path.glob("*.param")
    assert "Permute" in param.read_text()
    for mode in ROUNDING:
        result = compute(device, mode)
        wanted = -x.transpose(perm)
        np.testing.assert_array_equal(result.reshape(wanted.shape), wanted, err_msg=mode)


IMAGES = {
    "a side that is no power of 2": ("1,3,4,100", 'y = Resize<mode="linear">(x,,,s)', [1, 3, 8, 150]),
    "a long side": ("1,3,4,700", 'y = Resize<mode="linear">(x,,,s)', [1, 3, 8, 1400]),
    "nearest pixels of a long side": (
        "1,3,4,1500",
        'y = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(x,,,s)',
        [1, 3, 4, 3000],
    ),
    "a large image": ("1,4,600,700", "b = Sub(w,w) y = InstanceNormalization(x,w,b)", [4]),
    "large groups": ("1,8,300,300", "b = Sub(w,w) y = GroupNormalization<num_groups=2>(x,w,b)", [8]),
}


@pytest.mark.parametrize("title", list(IMAGES))
def test_images(title: str, device: NcnnWorker, tmp_path: Path) -> None:
    """Vulkan computes coordinates in fp16, and adds up 262,140 numbers."""
    declared, nodes, sizes = IMAGES[title]
    source = parsed(f"(float[{declared}] x) => (float[] y) {{ {nodes} }}", 21)
    source.graph.initializer.append(numpy_helper.from_array(np.array(sizes), "s"))
    source.graph.initializer.append(numpy_helper.from_array(np.ones(sizes[0], np.float32), "w"))
    x = np.random.default_rng(0).standard_normal([int(size) for size in declared.split(",")], np.float32)
    (wanted,) = OrtRunner(source.SerializeToString()).run({"x": x}).values()
    compute = computation(source, {"x": x}, tmp_path / "net")
    for mode in ("fp32", "fp16"):
        result = compute(device, mode)
        np.testing.assert_allclose(result.reshape(wanted.shape), wanted, rtol=0, atol=5 * TOLERANCE[mode], err_msg=mode)


def is_right(actual: Any, wanted: Array, mode: str, rough: float) -> bool:
    """NaN and infinities where the model has them; numbers beyond those of fp16 may be infinite in it."""
    scale = max(float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0)), 1.0)
    with np.errstate(invalid="ignore"):
        near = np.abs(actual - wanted) <= max(TOLERANCE[mode], rough) * scale
        beyond = (np.abs(wanted) > LARGEST_HALF) & (np.abs(actual) >= LARGEST_HALF) & (actual * wanted > 0)
    same = (actual == wanted) | (np.isnan(actual) & np.isnan(wanted))
    return bool((same | near | (beyond if mode == "fp16" else False)).all())
