import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import onnx2ncnn_opt
from testing.handmade import write_net
from testing.models import write_model

GRAPH = "(float[1, 4] x) => (float[1, 4] y) { y = Relu(x) }"


def test_every_exported_name_exists() -> None:
    for name in onnx2ncnn_opt.__all__:
        assert getattr(onnx2ncnn_opt, name).__name__ == name if name != "__version__" else onnx2ncnn_opt.__version__
    assert set(onnx2ncnn_opt.__all__) <= set(dir(onnx2ncnn_opt))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        onnx2ncnn_opt.nothing  # noqa: B018


def test_importing_modules_does_not_shadow_functions() -> None:
    """A room of the package of the same name would take a function's place as soon as anybody imports it."""
    names = sorted(set(onnx2ncnn_opt.__all__) - {"__version__"})
    modules = sorted(
        ".".join(path.relative_to(Path(onnx2ncnn_opt.__file__).parents[1]).with_suffix("").parts)
        for path in Path(onnx2ncnn_opt.__file__).parent.glob("*/*.py")
        if not path.stem.startswith("_")
    )
    code = f"import importlib, onnx2ncnn_opt\nfor m in {modules}: importlib.import_module(m)\n"
    code += f"for n in {names}: assert callable(getattr(onnx2ncnn_opt, n)), n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_package_loads_none_of_it() -> None:
    code = "import sys, onnx2ncnn_opt; assert not [m for m in sys.modules if m.startswith(('numpy', 'onnx.', 'click'))]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_verify_takes_a_net_by_its_param_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path, GRAPH)
    param, _ = write_net(tmp_path, "Input in 0 1 x", "ReLU r 1 1 x y")
    assert onnx2ncnn_opt.verify(model, param).ok
    param, bin = write_net(tmp_path, "Input in 0 1 x", "TanH r 1 1 x y")
    how = onnx2ncnn_opt.Verification(feeds={"x": np.array([[1, 2, -3, 4]], np.float32)})
    report = onnx2ncnn_opt.verify(model.read_bytes(), param, bin, verification=how)
    assert [output.status for output in report.outputs] == ["mismatch"]


def test_verify_says_why_it_does_not_use_the_manifest_beside_the_net(tmp_path: Path) -> None:
    model = write_model(tmp_path, GRAPH)
    files = onnx2ncnn_opt.convert(model).save(tmp_path / "net")
    assert onnx2ncnn_opt.verify(model, files.param).manifest is not None
    write_model(tmp_path, GRAPH.replace("Relu", "Tanh"))
    report = onnx2ncnn_opt.verify(model, files.param)
    assert (report.manifest, report.ok) == (None, False)
    assert "was written for another model" in report.notes[0]
