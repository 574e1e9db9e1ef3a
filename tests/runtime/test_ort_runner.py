from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.runtime.ort import OrtRunner, read_model

MODEL = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 18]> g (float[2] a, float[2] b) => (float[2] z, float[2] y)'
    "<float[2] w = {1, 2}> { y = Sub(a, b) z = Mul(y, w) }"
)
A, B = np.array([5, 7], np.float32), np.array([1, 10], np.float32)


def test_outputs_by_name_from_memory_and_from_a_file(tmp_path: Path) -> None:
    onnx.save(MODEL, tmp_path / "m.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    for model in (MODEL.SerializeToString(), tmp_path / "m.onnx"):
        runner = OrtRunner(model)
        assert (runner.input_names(), runner.output_names()) == (["a", "b"], ["z", "y"])
        outputs = runner.run({"b": B, "a": A})
        assert list(outputs) == ["z", "y"]
        np.testing.assert_array_equal(outputs["y"], A - B)
        np.testing.assert_array_equal(outputs["z"], (A - B) * [1, 2])


def test_a_model_that_it_refuses(tmp_path: Path) -> None:
    unknown = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[2] a) => (float[2] y) {y = Foo(a)}'
    )
    with pytest.raises(RunError, match=r"ONNX Runtime refuses the model: .*Foo"):
        OrtRunner(unknown.SerializeToString())
    with pytest.raises(RunError, match="ONNX Runtime refuses the model"):
        OrtRunner(b"junk")
    with pytest.raises(RunError, match=r"ONNX Runtime refuses .*missing\.onnx"):
        OrtRunner(tmp_path / "missing.onnx")


@pytest.mark.parametrize(
    "feeds", [{"a": A}, {"a": A, "b": B[:1]}, {"a": A, "b": B.astype(np.int64)}, {"a": A, "b": None}]
)
def test_feeds_that_it_does_not_take(feeds: dict[str, np.ndarray]) -> None:
    with pytest.raises(RunError, match="ONNX Runtime failed on the model"):
        OrtRunner(MODEL.SerializeToString()).run(feeds)


@pytest.mark.parametrize("is_link", [False, True])
def test_weights_stay_in_the_file_of_a_model_that_is_changed(is_link: bool, tmp_path: Path) -> None:
    text = "g (float[1,64] x) => (float[1,64] y) { a = MatMul(x, w) b = MatMul(a, v) y = Add(b, c) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    w, v, c = (np.random.default_rng(0).standard_normal(shape).astype("f4") for shape in ((64, 64), (64, 64), (64,)))
    model.graph.initializer.extend([onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(c, "c")])
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["v"], value=onnx.numpy_helper.from_array(v)))
    path = tmp_path / "a model.onnx"
    onnx.save(model, path)
    if is_link:
        (tmp_path / "links").mkdir()
        (tmp_path / "links" / "m.onnx").symlink_to(path)
        path = tmp_path / "links" / "m.onnx"
    read = read_model(path)
    assert [len(tensor.external_data) > 0 for tensor in read.graph.initializer] == [not is_link, False]
    x = np.ones((1, 64), np.float32)
    for plain in (False, True):
        found = OrtRunner(path, outputs=["b", "y"], plain=plain).run({"x": x})
        np.testing.assert_allclose(found["b"], x @ w @ v, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found["y"], found["b"] + c, rtol=1e-6)
