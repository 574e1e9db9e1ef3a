import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.onnx.edit.model import read_model
from onnx2ncnn_opt.runtime.ort import SHARED, OrtRunner, OrtWorker
from testing.models import parsed, serialized

MODEL = parsed(
    "(float[2] a, float[2] b) => (float[2] z, float[2] y) <float[2] w = {1, 2}> { y = Sub(a, b) z = Mul(y, w) }"
)
A, B = np.array([5, 7], np.float32), np.array([1, 10], np.float32)


def test_outputs_by_name_from_memory_and_from_a_file(tmp_path: Path) -> None:
    onnx.save(MODEL, tmp_path / "m.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    for model in (MODEL.SerializeToString(), tmp_path / "m.onnx"):
        runner = OrtRunner(model)
        assert runner.input_names() == ["a", "b"]
        outputs = runner.run({"b": B, "a": A})
        assert list(outputs) == ["z", "y"]
        np.testing.assert_array_equal(outputs["y"], A - B)
        np.testing.assert_array_equal(outputs["z"], (A - B) * [1, 2])


def test_nodes_in_any_order() -> None:
    """ONNX demands an order, ONNX Runtime does not. A branch may name its own values like later ones outside."""
    text = """(float[2] a, bool c) => (float[2] z) {
        z = Neg(y)
        y = Add(x, w)
        w = If(c) <then_branch = n () => (float[2] u) { y = Abs(x) u = Exp(y) },
                   else_branch = m () => (float[2] v) { v = Identity(x) }>
        x = Relu(a)
    }"""
    feeds = {"a": A, "c": np.array(False)}
    for outputs in ([], ["y"], ["z"]):
        read = read_model(parsed(text).SerializeToString(), outputs)
        assert [node.outputs[0].name for node in read.graph] == ["x", "w", "y", "z"][: 3 if outputs == ["y"] else 4]
    np.testing.assert_array_equal(OrtRunner(parsed(text).SerializeToString(), outputs=["y"]).run(feeds)["y"], 2 * A)


def test_external_data_that_is_written_again(tmp_path: Path) -> None:
    """ONNX Runtime folds the sum of the weights when it loads the model."""
    model = parsed("(float[2] a) => (float[2] z) <float[2] w = {0, 0}> { f = Add(w, w) z = Mul(a, f) }")
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(A, "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    for weights in (A, B):
        weights.tofile(tmp_path / "weights")
        np.testing.assert_array_equal(OrtRunner(tmp_path / "m.onnx").run({"a": A})["z"], 2 * A * weights)


def test_threads_take_turns() -> None:
    def run(number: int) -> bool:
        models = [OrtRunner(MODEL.SerializeToString()) for _ in range(3)]
        return all((each.run({"a": A * number, "b": B})["y"] == A * number - B).all() for each in models * 5)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(8)))


def test_a_model_that_it_refuses(tmp_path: Path) -> None:
    for model, said in (
        (serialized("(float[2] a) => (float[2] y) { y = Foo(a) }"), "the model: .*Foo"),
        (b"junk", "the model"),
        (tmp_path / "missing.onnx", r".*missing\.onnx"),
    ):
        with pytest.raises(RunError, match=f"ONNX Runtime refuses {said}"):
            OrtRunner(model)


@pytest.mark.parametrize(
    "feeds", [{"a": A}, {"a": A, "b": B[:1]}, {"a": A, "b": B.astype(np.int64)}, {"a": A, "b": None}]
)
def test_feeds_that_it_does_not_take(feeds: dict[str, np.ndarray]) -> None:
    with pytest.raises(RunError, match="ONNX Runtime failed on the model"):
        OrtRunner(MODEL.SerializeToString()).run(feeds)


@pytest.mark.parametrize("is_link", [False, True])
def test_weights_stay_in_the_file_of_a_model_that_is_changed(is_link: bool, tmp_path: Path) -> None:
    text = "(float[1,64] x) => (float[1,64] y) { a = MatMul(x, w) b = MatMul(a, v) y = Add(b, c) }"
    w, v, c = (np.random.default_rng(0).standard_normal(shape).astype("f4") for shape in ((64, 64), (64, 64), (64,)))
    model = parsed(text, w=w, c=c)
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["v"], value=onnx.numpy_helper.from_array(v)))
    path = tmp_path / "a model.onnx"
    onnx.save(model, path)
    if is_link:
        (tmp_path / "links").mkdir()
        (tmp_path / "links" / "m.onnx").symlink_to(path)
        path = tmp_path / "links" / "m.onnx"
    read = read_model(path)
    weights = [value.const_value for value in read.graph.initializers.values()]
    assert [isinstance(tensor, onnx_ir.ExternalTensor) for tensor in weights] == [not is_link, False]
    x = np.ones((1, 64), np.float32)
    for plain in (False, True):
        found = OrtRunner(path, outputs=["b", "y"], plain=plain).run({"x": x})
        np.testing.assert_allclose(found["b"], x @ w @ v, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found["y"], found["b"] + c, rtol=1e-6)


@pytest.fixture(
    scope="module", params=["this machine", pytest.param("Haswell", marks=pytest.mark.needs("other x86 CPUs"))]
)
def processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run ONNX Runtime on this machine's CPU, and on an emulated one that has no VNNI."""
    if request.param != "Haswell":
        yield
        return
    python = tmp_path_factory.mktemp("emulated") / "python"
    python.write_text(f'#!/bin/sh\nexec qemu-x86_64-static -cpu Haswell {sys.executable} "$@" 2>/dev/null\n')
    python.chmod(0o755)
    SHARED.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        SHARED.start()
    yield
    SHARED.close()


_QUANTISED = "q = QuantizeLinear(x, s, zu) d = DequantizeLinear(q, s, zu)"


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(
    "nodes",
    [
        "y = MatMulInteger(a, b, zu, zs)",
        "c = MatMulInteger(a, b, zu, zs) d = MatMulInteger(a, b, zu, zs) e = Sub(c, d) y = Add(c, e)",
        "y = com.microsoft.QGemm(a, s, zu, b, s, zs, , t, zu)",
        "y = QLinearMatMul(a, s, zu, b, s, zs, t, zu)",
        f"{_QUANTISED} e = DequantizeLinear(b, s, zs) f = MatMul(d, e) y = QuantizeLinear(f, t, zu)",
    ],
)
def test_products_of_8_bits_do_not_saturate(nodes: str) -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(150, 256, (8, 64)).astype(np.uint8)
    b = rng.choice(np.array([-128, 127, 127], np.int8), (64, 16))
    scales = "float s = {0.0078125}, float t = {0.5}, uint8 zu = {3}, int8 zs = {0}"
    model = parsed(f"(uint8[8,64] a, float[8,64] x) => (uint8[8,16] y) <{scales}> {{ {nodes} }}", 17, b=b)
    if "MatMulInteger" in nodes:
        model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    unused = "x" if "(a, " in nodes else "a"
    del model.graph.input[[value.name for value in model.graph.input].index(unused)]
    feeds = {"a": a} if unused == "x" else {"x": (a - np.float32(3)) / np.float32(128)}
    sums = (a.astype(np.int64) - 3) @ b.astype(np.int64)
    expected = sums if "MatMulInteger" in nodes else np.clip(np.rint(sums / 2.0**13) + 3, 0, 255)
    data = model.SerializeToString()
    np.testing.assert_array_equal(OrtRunner(data).run(feeds)["y"], expected)
    with closing(OrtWorker()) as worker:
        fast = OrtRunner(data, fast=True, worker=worker).run(feeds)["y"].astype(int)
    assert np.abs(fast - expected).max() <= 1, "times are those of right results; ties may go the other way"


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(
    ("node", "kind"),
    [
        ("MatMulInteger(a, b, zu, zb)", "int32"),
        ("MatMulInteger(a, b)", "int32"),
        ("QLinearMatMul(a, s, zu, b, s, zb, t, zu)", "uint8"),
        ("QLinearConv(a, s, zu, b, s, zs, t, zu)", "uint8"),
    ],
)
def test_products_of_two_computed_operands_do_not_saturate(node: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(150, 256, (8, 64)), rng.choice(np.array([-128, 127, 127]), (64, 16))
    has_zeros, is_conv = "zu" in node, "Conv" in node
    sums = (a - 3 * has_zeros) @ (b - 5 * ("zb" in node))
    expected = sums if kind == "int32" else np.clip(np.rint(sums / 2.0**13) + 3, 0, 255)
    if is_conv:
        a, b, expected = a[..., None], b.T[..., None], expected[..., None]
    scales = "float s = {0.0078125}, float t = {0.5}, uint8 zu = {3}, int8 zb = {5}, int8 zs = {0}"
    inputs = f"uint8{list(a.shape)} a, int8{list(b.shape)} b"
    graph = f"({inputs}) => ({kind}[{'A,B,C' if is_conv else 'A,B'}] y) <{scales}> {{ y = {node} }}"
    feeds = {"a": a.astype(np.uint8), "b": b.astype(np.int8)}
    np.testing.assert_array_equal(OrtRunner(serialized(graph, 17)).run(feeds)["y"], expected)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_quantised_convolutions_do_not_saturate(kind: str) -> None:
    rng = np.random.default_rng(0)
    zero = 0 if kind == "int8" else 128
    x = rng.choice(np.array([-128, 127, 127]), (1, 32, 5, 5))
    w = rng.choice(np.array([-127, 127, 127]), (8, 32, 1, 1)).astype(np.int8)
    scales = f"float s = {{0.0078125}}, float t = {{1.0}}, {kind} z = {{{zero}}}, int8 zw = {{0}}"
    graph = f"({kind}[1,32,5,5] a) => ({kind}[1,8,5,5] y) <{scales}> {{ y = QLinearConv(a, s, z, w, s, zw, t, z) }}"
    sums = np.einsum("nchw,oc->nohw", x, w[:, :, 0, 0].astype(int))
    expected = np.clip(np.rint(sums / 2.0**14) + zero, *((-128, 127) if kind == "int8" else (0, 255)))
    found = OrtRunner(serialized(graph, 17, w=w)).run({"a": (x + zero).astype(kind)})["y"]
    np.testing.assert_array_equal(found, expected)


def test_products_of_int8_are_unchanged() -> None:
    """ONNX Runtime has no QGemm of int8 and uint8, which it makes of this one where it avoids saturation."""
    scales = "float s = {0.0078125}, float t = {0.5}, int8 z = {0}"
    graph = f"(int8[8,64] a) => (int8[8,16] y) <{scales}> {{ y = com.microsoft.QGemm(a, s, z, b, s, z, , t, z) }}"
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((8, 64), (64, 16)))
    expected = np.clip(np.rint(a.astype(np.int64) @ b.astype(np.int64) / 2.0**13), -128, 127)
    np.testing.assert_array_equal(OrtRunner(serialized(graph, 17, b=b)).run({"a": a})["y"], expected)


def test_runners_of_a_file_share_its_session(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(MODEL, path)
    with closing(OrtWorker()) as worker:
        first, second = OrtRunner(path, worker=worker), OrtRunner(path, worker=worker)
        assert len(worker._held) == 1
        first.close()
        np.testing.assert_array_equal(second.run({"a": A, "b": B})["y"], A - B)
        path.write_bytes(serialized("(float[2] a, float[2] b) => (float[2] y) { y = Mul(a, b) }"))
        np.testing.assert_array_equal(OrtRunner(path, worker=worker).run({"a": A, "b": B})["y"], A * B)
