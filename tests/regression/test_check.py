import hashlib
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.regression.run import check
from testing import present
from testing.models import write_model
from testing.projects import MODEL, by_name, failed, insert_layers, measured, save_graph, write_project, write_right_net

pytestmark = pytest.mark.usefixtures("quick")
FILE = "ncnn-check.toml"
PREBUILT = 'net = "nets/{stem}.param"\n'


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_baseline_and_a_comparison_with_it(tmp_path: Path) -> None:
    """Our own converter."""
    file = write_project(tmp_path, "", a=MODEL)
    first = by_name(check(file))["a"]
    assert (first.exit_code, first.changes, first.recorded) == (0, None, False)
    assert measured(first, "layers").limit is None
    assert not (tmp_path / "ncnn-baseline").exists()
    recorded = by_name(check(file, record=True))["a"]
    assert recorded.recorded
    assert measured(recorded, "latency").measured is not None
    stems = (".check.json", ".ncnn.param", ".ncnn.bin", ".ncnn.json", ".npz")
    assert names(tmp_path / "ncnn-baseline") == {f"models/a{suffix}" for suffix in stems}
    record = json.loads((tmp_path / "ncnn-baseline" / "models" / "a.check.json").read_text())
    assert record["types"] == {"Input": 1, "Convolution": 1, "TanH": 1} | record["types"]
    assert record["versions"]["converter"].startswith("onnx2ncnn-opt ")
    assert record["examples"] == [{"in": ["x"], "out": ["y", "z"]}]
    with np.load(tmp_path / "ncnn-baseline" / "models" / "a.npz") as arrays:
        shapes = {name: arrays[name].shape for name in arrays.files}
    assert shapes == {"0_in_0": (1, 3, 9, 8), "0_out_0": (1, 4, 9, 8), "0_out_1": (1, 4, 9, 8)}

    again = by_name(check(file))["a"]
    assert (again.exit_code, again.notes) == (0, ())
    assert not present(again.changes).files
    assert measured(again, "stored outputs").measured == 0
    assert measured(again, "latency").message == "the files are those of the baseline"
    assert {m.name for m in again.measurements if m.limit is not None} == {"stored outputs", "layers", "size"}


@pytest.fixture(scope="module")
def recorded(quick: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a net that somebody made, and its baseline."""
    folder = tmp_path_factory.mktemp("recorded")
    file = write_project(folder, PREBUILT, a=MODEL)
    write_right_net(folder / "nets", "a", folder / "models" / "a.onnx")
    assert check(file, record=True).ok
    return folder


@pytest.fixture
def project(recorded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recorded, tmp_path / "project")


def test_a_larger_net_is_measured_beside_the_old_one(project: Path) -> None:
    graph = read_net(project / "nets" / "a.param", project / "nets" / "a.bin").graph
    insert_layers(graph, 3)
    save_graph(graph, project / "nets", "a")
    result = by_name(check(project / FILE))["a"]
    assert result.exit_code == 3
    assert failed(result)[:1] == ["layers"]
    assert measured(result, "layers").baseline == len(graph) - 3
    changes = present(result.changes)
    assert (changes.gone, changes.added) == ({}, {"UnaryOp": 3})
    for what in ("latency", "memory"):
        found = measured(result, what)
        assert None not in (found.measured, found.baseline)


def test_a_model_that_is_not_the_recorded_one(project: Path) -> None:
    write_model(project / "models", MODEL.replace("0.25", "0.375"), "a.onnx")
    write_right_net(project / "nets", "a", project / "models" / "a.onnx")
    result = by_name(check(project / FILE))["a"]
    assert result.exit_code == 2
    assert failed(result) == ["model"]
    assert "`check --record` writes it again" in result.failures[0].message
    assert by_name(check(project / FILE, record=True))["a"].recorded
    assert check(project / FILE).ok


def test_stored_outputs_that_onnx_runtime_does_not_compute(project: Path) -> None:
    arrays = project / "ncnn-baseline" / "models" / "a.npz"
    record = arrays.with_name("a.check.json")
    with np.load(arrays) as stored:
        changed = {name: stored[name] for name in stored.files}
    changed["0_out_1"] = changed["0_out_1"] + np.float32(0.01)
    np.savez(arrays, **changed)
    damaged = by_name(check(project / FILE))["a"]
    assert (damaged.exit_code, failed(damaged)) == (2, ["baseline"])
    assert "is not the file that was recorded" in damaged.failures[0].message
    data = json.loads(record.read_text())
    data["files"]["a.npz"] = hashlib.sha256(arrays.read_bytes()).hexdigest()
    record.write_text(json.dumps(data))
    result = by_name(check(project / FILE))["a"]
    assert (result.exit_code, failed(result)) == (3, ["stored outputs"])
    assert "output 'z'" in result.failures[0].message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{", "", "not a baseline"),
        ('"format": 1', '"format": 7', "baseline format 7"),
        ('"layers"', '"floors"', "not a baseline"),
        ("a.npz", "b.npz", "the baseline is not complete"),
        ('"x"', '"q"', "it takes"),
    ],
)
def test_a_baseline_that_is_broken(project: Path, old: str, new: str, message: str) -> None:
    record = project / "ncnn-baseline" / "models" / "a.check.json"
    record.write_text(record.read_text().replace(old, new))
    result = by_name(check(project / FILE))["a"]
    assert result.exit_code >= 2
    assert message in result.failures[0].message or result.failures[0].what == "model"


def test_models_that_come_and_go(project: Path) -> None:
    write_model(project / "models", MODEL, "b.onnx")
    write_right_net(project / "nets", "b", project / "models" / "b.onnx")
    (project / "models" / "a.onnx").unlink()
    result = check(project / FILE)
    assert (result.exit_code, result.missing) == (2, ("models/a",))
    assert failed(by_name(result)["b"]) == ["baseline"]


def test_thresholds_of_accuracy(project: Path) -> None:
    file = project / FILE
    graph = read_net(project / "nets" / "a.param", project / "nets" / "a.bin").graph
    conv = next(layer for layer in graph if layer.type == "Convolution")
    weight = dict(conv.weights.stored_items())["weight_data"].array * np.float32(1.004)
    graph.replace(conv, conv.having(weights={"weight_data": weight}))
    save_graph(graph, project / "nets", "a")
    wrong = by_name(check(file))["a"]
    assert failed(wrong) == ["accuracy fp32"]
    assert present(wrong.changes).changed == {"Convolution": 1}
    assert measured(wrong, "latency").message == "the model fails already"
    (located,) = [note for note in wrong.notes if note.startswith("the first wrong layer is")]
    first, next_command = located.split("; next: ")
    assert first == f"the first wrong layer is Convolution '{conv.name}', in fp32"
    nets = project / "nets"
    words = ["onnx2ncnn-opt", "bisect", str(project / "models" / "a.onnx"), str(nets / "a.param"), str(nets / "a.bin")]
    assert next_command == shlex.join(words)
    file.write_text(file.read_text() + "thresholds = { accuracy = 0.01 }\n")
    assert check(file).ok
    file.write_text(file.read_text().replace("0.01", "0.001"))
    result = by_name(check(file))["a"]
    assert failed(result) == ["accuracy fp32"]
    assert measured(result, "accuracy fp32").limit == 0.001
    file.write_text(file.read_text().replace("accuracy = 0.001", "accuracy = { fp32 = 0.01, fp16 = 1e-6 }"))
    assert failed(by_name(check(file, modes=["fp32", "fp16"]))["a"]) == ["accuracy fp16"]


def test_faults_of_the_device_and_of_the_model(tmp_path: Path) -> None:
    file = write_project(tmp_path, 'on = "no-such-python"\n', a=MODEL)
    result = by_name(check(file))["a"]
    assert (result.exit_code, failed(result)) == (2, ["device"])
    onnx.save(onnx.ModelProto(), tmp_path / "models" / "a.onnx")
    assert by_name(check(file))["a"].exit_code == 1
    with pytest.raises(UsageError, match="jobs has to be a whole number"):
        check(file, jobs=-1)
