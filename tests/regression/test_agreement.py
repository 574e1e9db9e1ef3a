"""SQNR and top-1 agreement as limits of `check`, for int8 nets of this package and of others."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt import quantize
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.regression.config import read_config
from onnx2ncnn_opt.regression.result import ModelResult
from onnx2ncnn_opt.regression.run import check
from testing.projects import failed, measured, save_graph, write_project
from tests.quantization.test_quantize import cnn, data, sorting

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its int8 net, and samples."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "models").mkdir()
    (folder / "nets").mkdir()
    onnx.save(cnn(), folder / "models" / "a.onnx")
    np.savez(folder / "data.npz", **data())
    quantize(folder / "models" / "a.onnx", data(), every=True).save(folder / "nets" / "a")
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "project")


def checked(project: Path, thresholds: str, more: str = 'data = "data.npz"') -> ModelResult:
    text = f'net = "nets/{{stem}}.ncnn.param"\n{more}\n[thresholds]\n{thresholds}\n'
    return check(write_project(project, text)).models[0]


@pytest.mark.parametrize("more", ['data = "data.npz"', "seeds = [1, 2, 3]"])
def test_an_int8_net_keeps_its_budgets(project: Path, more: str) -> None:
    found = checked(project, "sqnr = 30\ntop1 = 0.5", more)
    assert (found.exit_code, failed(found)) == (0, [])
    assert 30 < (measured(found, "sqnr fp32").measured or 0) < 80
    assert measured(found, "accuracy").status == "not measured"


def test_rows_in_another_order_are_no_noise(project: Path) -> None:
    onnx.save(sorting(), project / "models" / "a.onnx")
    quantize(project / "models" / "a.onnx", data(), every=True).save(project / "nets" / "a")
    assert failed(checked(project, "sqnr = 30")) == []
    assert failed(checked(project, "sqnr = 90")) == ["sqnr fp32"]


def test_a_budget_out_of_reach_fails(project: Path) -> None:
    found = checked(project, "sqnr = 90")
    assert (found.exit_code, failed(found)) == (3, ["sqnr fp32"])
    assert measured(found, "sqnr fp32").limit == 90


def test_a_net_of_other_weights_fails(project: Path) -> None:
    path = project / "nets" / "a.ncnn.param"
    graph = read_net(path, path.with_suffix(".bin")).graph
    last = next(layer for layer in graph if layer.type == "InnerProduct")
    last.weights["weight_data_int8_scales"] = last.weights["weight_data_int8_scales"] * -1
    save_graph(graph, project / "nets", "a.ncnn")
    assert failed(checked(project, "sqnr = 30\ntop1 = 0.9")) == ["sqnr fp32", "top1 fp32"]


def test_a_net_without_a_manifest(project: Path) -> None:
    (project / "nets" / "a.ncnn.json").unlink()
    assert (measured(checked(project, "sqnr = 30"), "sqnr fp32").measured or 0) > 30


def test_an_accuracy_that_is_set_counts_as_well(project: Path) -> None:
    assert failed(checked(project, "sqnr = 30\naccuracy = 1e-6")) == ["accuracy fp32"]


@pytest.mark.parametrize("limit", ["top1 = 2", 'sqnr = "40dB"'])
def test_limits_of_another_form(tmp_path: Path, limit: str) -> None:
    file = write_project(tmp_path, f"[thresholds]\n{limit}\n")
    with pytest.raises(UsageError, match="has to be a"):
        read_config(file)
