"""The exported models in fixtures/models: whole, small, of no place, and skeletons that refill."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import pytest

from onnx2ncnn_opt.errors import ModelError
from onnx2ncnn_opt.onnx.read.load import load_model
from testing.exports import MODELS, ROOT, SKELETONS, refilled
from testing.skeletons import refill, strip

NAMES = [path.name.removesuffix(".onnx") for path in MODELS]


def test_both_exporters_and_a_bounded_size() -> None:
    stems = {name.split(".")[0] for name in NAMES}
    assert {f"{stem}.{kind}" for stem in stems for kind in ("dyn", "ts")} <= set(NAMES)
    assert sum(path.stat().st_size for path in MODELS) < 6_000_000
    assert all(path.stat().st_size < 200_000 for path in set(MODELS) - set(SKELETONS))
    readme = (ROOT / "fixtures" / "models" / "README.md").read_text()
    assert [stem for stem in stems if f"`{stem}`" not in readme] == []


@pytest.mark.parametrize("path", MODELS, ids=NAMES)
def test_names_its_exporter_and_no_path(path: Path) -> None:
    assert not re.search(rb"/(home|root|work|tmp|usr|site-packages)/", path.read_bytes())
    model = onnx.load(path)
    kind = path.name.split(".")[1]
    assert {opset.domain: opset.version for opset in model.opset_import}[""] == (20 if kind == "dyn" else 17)
    assert f"{model.producer_name} {model.producer_version}".startswith("pytorch 2.13")
    assert kind != "tsbn" or any(node.op_type == "BatchNormalization" for node in model.graph.node)


@pytest.mark.parametrize("path", SKELETONS, ids=lambda path: path.stem)
def test_a_skeleton_is_refused_until_it_is_refilled(path: Path) -> None:
    with pytest.raises(ModelError, match="holds 0 bytes"):
        load_model(path)


def test_stripping_a_refilled_skeleton_gives_the_same_weights() -> None:
    path = ROOT / "fixtures" / "models" / "resnet18.tsbn.onnx"
    model = refilled(path)
    again = refill(strip(onnx.ModelProto.FromString(model.SerializeToString())))
    for a, b in zip(model.graph.initializer, again.graph.initializer, strict=True):
        # The factors are measured in float32 and rounded to float16 once more.
        np.testing.assert_allclose(onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b), rtol=1e-3)


@pytest.mark.parametrize("name", ["resnet18.ts", "mobilenet_v3_small.dyn", "shufflenet_v2_x1_0.tsbn"])
def test_the_input_is_felt_at_the_end(name: str) -> None:
    """Weights that drown the signal would hide errors of the first layers."""
    data = refilled(ROOT / "fixtures" / "models" / f"{name}.onnx").SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    [declared] = session.get_inputs()
    rng = np.random.default_rng(0)
    a, b = (session.run(None, {declared.name: rng.standard_normal(declared.shape, np.float32)})[0] for _ in range(2))
    assert np.isfinite(a).all()
    assert np.abs(a - b).max() > 0.05 * np.abs(a).max()
