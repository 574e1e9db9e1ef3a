"""Operators that become layers of their own on request (docs/plugins.md, Custom operators)."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.errors import Error, RunError, UnsupportedError, UsageError, VerificationError
from onnx2ncnn_opt.ir.dim import symbol
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.runtime.base import Feed, Fetch
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker

HEAD = '<ir_version: 8, opset_import: ["" : 17, "made.up" : 1]> g '
OP = "made.up::Op"
H, W = symbol("H"), symbol("W")


def model(body: str, functions: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + body + functions)


def layers(conversion: Conversion, kind: str = "Op") -> list[Layer]:
    return [layer for layer in conversion.graph if layer.type == kind]


def params(body: str, request: str = OP) -> list[dict[Any, Any]]:
    text = f"(float[1, 8] x) => (float[1, 8] y) <float[1, 8] a> {{ {body} }}"
    conversion = lower(model(text), custom=[request])
    return [dict(layer.params) for layer in layers(conversion)]


def test_attributes_are_numbered_by_name() -> None:
    body = 'a = made.up.Op<b = [1, 2], c = [0.5, 1.0], a = 3, e = "sum", d = 2.0>(x) y = made.up.Op<d = 1.5>(a)'
    assert params(body) == [{0: 3, 1: (1, 2), 2: (0.5, 1.0), 3: 2.0, 4: "sum"}, {3: 1.5}]


def test_attributes_are_numbered_as_listed() -> None:
    body = "a = made.up.Op<beta = 1, alpha = 2>(x) y = made.up.Op<alpha = 3>(a)"
    assert params(body, f"{OP}:beta,alpha,gamma") == [{0: 1, 1: 2}, {1: 3}]


def test_the_file_and_the_messages() -> None:
    from onnx2ncnn_opt.param.text import format_param

    text = "(float[1, 3, 4, 5] x) => (float[1, 7] y) <float[2, 2] w = {1, 2, 3, 4}> { y = made.up.Op<k = [0.5]>(x, w) }"
    conversion = lower(model(text), custom=[f"{OP}=My.Layer"])
    assert [line.split() for line in format_param(conversion.graph).splitlines()[2:]] == [
        ["Input", "x", "0", "1", "x", "0=5", "1=4", "2=3"],
        ["MemoryData", "y_const", "0", "1", "y_const", "0=2", "1=2"],
        ["My.Layer", "y", "2", "1", "x", "y_const", "y", "-23300=1,0.5"],
    ]
    assert [str(op) for op in conversion.custom] == ["made.up::Op is My.Layer (0=k)"]
    with pytest.raises(VerificationError, match="what custom operators compute is not known here"):
        conversion.verify()


@pytest.mark.parametrize(
    ("shape", "batch_axes", "mat"),
    [
        ("[1, 3, 4, 5]", {}, ((3, 4, 5), 1)),
        ("[2, 3, 4, 5]", {}, ((2, 3, 4, 5), 1)),
        ("[2, 3, 4, 5]", {"x": 0}, ((3, 4, 5), 2)),
        ("[2, 3, 4, 5]", {"x": 2}, ((2, 3, 5), 4)),
        ("[1, 3, 4, 5]", {"x": None}, ((3, 4, 5), 1)),
        ("[3, 2, 3, 4, 5]", {}, ((2, 3, 4, 5), 3)),
        ("[6]", {}, ((6,), 1)),
        ("", {}, ((1,), 1)),
    ],
)
def test_layout_of_inputs_and_outputs(shape: str, batch_axes: dict[str, int | None], mat: tuple[Any, int]) -> None:
    text = f"(float{shape} x) => (float{shape} y) <float{shape} b> {{ a = Neg(x) b = made.up.Op(a) y = Abs(b) }}"
    (layer,) = layers(lower(model(text), custom=[OP], batch_axes=batch_axes))
    for blob in (*layer.inputs, *layer.outputs):
        assert (blob.shape, blob.batch) == mat


def test_axes_are_in_order_and_the_net_computes(tmp_path: Path, worker: NcnnWorker) -> None:
    """With a type that ncnn has in place of the custom one: the layers around it fit."""
    text = (
        "(float[2, 4, 5, 3] x) => (float[2, 5, 12] y) <int64[3] s = {2, 5, 12}, float[2, 4, 3, 5] b>"
        "{ a = Transpose<perm = [0, 1, 3, 2]>(x) b = made.up.Op<slope = 0.25>(a)"
        "c = Transpose<perm = [0, 3, 2, 1]>(b) y = Reshape(c, s) }"
    )
    conversion = lower(model(text), custom=[OP], batch_axes={"x": 0})
    files = conversion.save(tmp_path / "net")
    param = files.param.read_text()
    assert param.count("\nOp ") == 1
    files.param.write_text(param.replace("\nOp ", "\nReLU "))
    x = np.random.default_rng(0).standard_normal((2, 4, 5, 3)).astype(np.float32)
    runner = NcnnRunner(files.param, files.bin, timeout=60, worker=worker)
    result = runner.run({"x": Feed(x, 0)}, [Fetch("y", 0)])["y"]
    a = x.transpose(0, 1, 3, 2)
    expected = np.where(a < 0, a * np.float32(0.25), a).transpose(0, 3, 2, 1).reshape(2, 5, 12)
    np.testing.assert_array_equal(result, expected)


def test_dynamic_sizes_are_those_of_the_inputs() -> None:
    text = (
        "(float[N, 3, H, W] x) => (float[N, 6, H, W] y) <float[N, 6, H, W] a>"
        "{ c = Neg(x) a = made.up.Op(c) y = Relu(a) }"
    )
    (layer,) = layers(lower(model(text), custom=[OP], batch_axes={"x": 0}))
    assert [str(size) for size in layer.outputs[0].shape or ()] == ["6", "H", "W"]
    assert str(layer.outputs[0].batch) == "N"
    (layer,) = layers(lower(model(text), custom=[OP], shapes={"x": (2, 3, 8, 9)}, batch_axes={"x": 0}))
    assert (layer.outputs[0].shape, layer.outputs[0].batch) == ((6, 8, 9), 2)


def declare(result: onnx.ModelProto, name: str, size: str | None) -> onnx.ModelProto:
    """The model with another size of a value's axis 2: those that torch writes are not in ONNX's text syntax."""
    (value,) = [value for value in (*result.graph.value_info, *result.graph.output) if value.name == name]
    value.type.tensor_type.shape.dim[2].CopyFrom(onnx.TensorShapeProto.Dimension(dim_param=size))
    return result


@pytest.mark.parametrize(
    ("size", "computed"),
    [
        ("((H + 1)//2)", str((H + 1) // 2)),
        ("2*W - 2", str(2 * W - 2)),
        ("H*W", str(H * W)),
        ("(H - 1)//W", str((H - 1) // W)),
        ("H", "H"),
        ("Op/Op_output_0_dim_2", "a.2"),  # TorchScript's name for any size
        ("Max(1, H)", "a.2"),
        ("-H", str(-H)),
        ("H//0", "a.2"),
        ("1.5*H", "a.2"),
        ("s0", "a.2"),
        (None, "a.2"),
    ],
)
def test_sizes_as_torch_declares_them(size: str | None, computed: str) -> None:
    text = "(float[1, 3, H, W] x) => (float[1, 3, A, W] y) <float[1, 3, A, W] a> { a = made.up.Op(x) y = Relu(a) }"
    (layer,) = layers(lower(declare(model(text), "a", size), custom=[OP]))
    assert [str(size) for size in layer.outputs[0].shape or ()] == ["3", computed, "W"]


def test_a_size_that_only_a_run_tells() -> None:
    head = "(float[1, 3, H, W] x) => (float[B, C] y) <float[1, 3, A, W] a, int64[2] s, int64[1] two = {2}"
    flat = lower(model(head + ", int64[2] t = {3, -1}> { a = made.up.Op(x) y = Reshape(a, t) }"), custom=[OP])
    (reshape,) = layers(flat, "Reshape")
    assert (reshape["w"], reshape["h"]) == (-1, 3)
    asked = "> { a = made.up.Op(x) n = Shape<start = 2, end = 3>(a) s = Concat<axis = 0>(n, two) y = Expand(two, s) }"
    with pytest.raises(UnsupportedError, match=r"the size a.2 cannot be computed from those of the inputs"):
        lower(model(head.replace("float[B, C] y", "int64[B, C] y") + asked), custom=[OP], tail="never")


# A program with a layer of its own: two inputs, two outputs, numbers, lists and all.
PROGRAM = """
import sys
import ncnn
import numpy as np

class Op(ncnn.Layer):
    def __init__(self):
        super().__init__()
        self.one_blob_only = False

    def load_param(self, params):
        self.alpha = params.get(0, 0.0)
        self.step = params.get(1, 0)
        return 0

    def forward(self, bottoms, tops, options):
        x, w = (np.array(bottom) for bottom in bottoms)
        tops[0].clone_from(ncnn.Mat(np.ascontiguousarray((x * self.alpha + w[:, None, None])[:, :: self.step])))
        tops[1].clone_from(ncnn.Mat(x.sum(0)))
        return 0

kept = []
def create():
    kept.append(Op())
    return kept[-1]

param, bin, folder = sys.argv[1:]
net = ncnn.Net()
net.register_custom_layer("Op", create, lambda layer: None)
assert net.load_param(param) == 0 and net.load_model(bin) == 0
extractor = net.create_extractor()
extractor.input("x", ncnn.Mat(np.load(f"{folder}/x.npy")).clone())
for name in ("y", "z"):
    code, mat = extractor.extract(name)
    assert code == 0
    np.save(f"{folder}/{name}.npy", np.array(mat))
"""


def test_a_program_runs_the_net(tmp_path: Path) -> None:
    """What torch 2.13 makes of a `torch.library` operator with fake implementation and `custom_translation_table`."""
    text = (
        "(float[n, 3, h, 8] x) => (float[n, 4, A, 8] y, float[n, h, 8] z)"
        "<float[2, 3, 1, 1] w, float[2] shift = {0.5, -1.5}, float[n, 2, A, 8] a, float[n, h, 8] b>"
        "{ c = Conv(x, w) r = Relu(c) a, b = made.up.Op<alpha = 0.5, step = 2>(r, shift)"
        "d = Neg(a) y = Concat<axis = 1>(a, d) z = Tanh(b) }"
    )
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 7, 8)).astype("f4"), rng.standard_normal((2, 3)).astype("f4")
    source = declare(declare(model(text), "a", "((h + 1)//2)"), "y", "((h + 1)//2)")
    source.graph.initializer.append(numpy_helper.from_array(w.reshape(2, 3, 1, 1), "w"))
    del source.graph.value_info[[value.name for value in source.graph.value_info].index("w")]
    files = lower(source, custom=[OP]).save(tmp_path / "net")
    np.save(tmp_path / "x.npy", x)
    subprocess.run([sys.executable, "-c", PROGRAM, files.param, files.bin, tmp_path], check=True, timeout=60)
    r = np.maximum(np.tensordot(w, x, 1), 0)
    a = (r * np.float32(0.5) + np.array([0.5, -1.5], np.float32)[:, None, None])[:, ::2]
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), np.concatenate([a, -a]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.load(tmp_path / "z.npy"), np.tanh(r.sum(0)), rtol=1e-5, atol=1e-5)


def test_ncnn_names_the_unregistered_layer(tmp_path: Path, worker: NcnnWorker) -> None:
    files = lower(model("(float[1, 8] x) => (float[1, 8] y) { y = made.up.Op(x) }"), custom=[OP]).save(tmp_path / "n")
    with pytest.raises(RunError, match="layer Op not exists or registered"):
        NcnnRunner(files.param, files.bin, timeout=60, worker=worker).run({}, [])


def test_several_outputs_and_one_without_readers() -> None:
    text = "(float[1, 8] x) => (float[1, 4] y) <float[1, 4] c> { a, b, c = made.up.Op(x) y = Relu(c) }"
    (layer,) = layers(lower(model(text), custom=[OP]))
    assert [blob.name for blob in layer.outputs] == ["a_out", "a_out_1", "c"]
    assert [blob.shape for blob in layer.outputs] == [None, None, (4,)]


def test_operators_of_onnx_and_local_functions() -> None:
    text = "(float[1, 8] x) => (int64[2, 8] y) { y = NonZero(x) }"
    assert layers(lower(model(text), custom=["NonZero=Mine"]), "Mine")
    assert layers(lower(model(text), custom=["ai.onnx::NonZero=Mine"]), "Mine")
    function = '<domain: "made.up", opset_import: ["" : 17]> Op (x) => (y) { y = Relu(x) }'
    text = "(float[1, 8] x) => (float[1, 8] y) { y = made.up.Op(x) }"
    assert not layers(lower(model(text, function)))
    assert layers(lower(model(text, function), custom=[OP]))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("made.up::Op=", "names no operator"),
        ("made.up::Op:a b", "names no operator"),
        ("made.up::Op=ReLU", "ncnn has a layer ReLU itself; give it another type: made.up::Op=ReLU=MyReLU"),
        ("made.up::Op:a,a", "names an attribute twice"),
        ("made.up::Ob", r"the model has no made.up::Ob; it has made.up::Op"),
        ("Sin=My", "the model has no Sin; it has made.up::Op"),
    ],
)
def test_requests_that_make_no_sense(request_: str, message: str) -> None:
    text = "(float[1, 8] x) => (float[1, 8] y) { y = made.up.Op(x) }"
    with pytest.raises(UsageError, match=message):
        lower(model(text), custom=[request_])
    with pytest.raises(UsageError, match=r"two requests for made.up::Op"):
        lower(model(text), custom=[OP, f"{OP}=My"])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "(float[1, 8] x) => (float[1, 8] y) { y = made.up.Op<b = 1>(x) }",
            "b is not among those that --custom lists: a",
        ),
        ("(float[1, 8] x) => (float[1, 8] y) { y = made.up.Op<a = 4294967296>(x) }", "a is 4294967296: not a 32-bit"),
        ('(float[1, 8] x) => (float[1, 8] y) { y = made.up.Op<a = ["p"]>(x) }', "a is STRINGS"),
        ("(float[1, 8] x) => (float y) { a = made.up.Op(x) y = Relu(a) }", "does not say which shape its output a has"),
        ("(float[1, 8] x) => (float[M, 8] y) { y = made.up.Op(x) }", "does not say which shape its output y has"),
        ("(float[1, 8] x) => (float[1, 8] y) { y = made.up.Op(, x) }", "left out before others"),
        (
            "(float[4, 8] x) => (float[1, 8] y) <int64[6] s = {1, 2, 2, 2, 2, 2}>"
            "{ r = Reshape(x, s) y = made.up.Op(r) }",
            "has rank 6",
        ),
        ("(float[1, 8] x) => (float[2, 2, 2, 2, 2] y) { y = made.up.Op(x) }", "its output y has rank 5"),
    ],
)
def test_operators_that_cannot_be_a_layer(body: str, reason: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        lower(model(body), custom=[f"{OP}:a"])
    assert reason in str(error.value)


def test_a_batch_that_gets_lost() -> None:
    text = "(float[3, 8] x) => (float[8] y) { y = made.up.Op(x) }"
    with pytest.raises(UnsupportedError, match="y has no axis 0 of 3, which is the batch of its inputs"):
        lower(model(text), custom=[OP], batch_axes={"x": 0})
    text = "(float[3, 8] x, float[2, 8] z) => (float[3, 8] y) { y = made.up.Op(x, z) }"
    with pytest.raises(UnsupportedError, match="batches of 2 and 3"):
        lower(model(text), custom=[OP], batch_axes={"x": 0, "z": 0})


def test_without_the_request_it_is_refused() -> None:
    with pytest.raises(Error, match=r"made.up::Op 'y': ncnn has no equivalent of this operator"):
        lower(model("(float[1, 8] x) => (float[1, 8] y) { y = made.up.Op(x) }"))
