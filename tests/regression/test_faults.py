"""Faults planted in a folder of models: exactly the right models fail."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.regression.judge import MEMORY_MARGIN
from onnx2ncnn_opt.regression.meter import Meter, Timed
from onnx2ncnn_opt.regression.run import check
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.targets import LOCAL
from testing import present
from testing.command import run
from testing.handmade import tagged, write_net
from testing.models import write_model
from testing.projects import MODEL, by_name, failed, insert_layers, measured, save_graph, write_project, write_right_net

pytestmark = pytest.mark.usefixtures("quick")
PREBUILT = 'net = "nets/{stem}.param"\n'


def change(graph: Graph, **changes: Any) -> None:
    """Give the convolution other parameters or weights."""
    layer = next(layer for layer in graph if layer.type == "Convolution")
    assert (layer["pad_top"], layer["pad_bottom"], layer["activation_type"]) == (1, 0, 1)
    graph.replace(layer, layer.having(**changes))


def wrong_weight(graph: Graph) -> None:
    layer = next(layer for layer in graph if layer.type == "Convolution")
    array = np.array(dict(layer.weights.stored_items())["weight_data"].array)
    array[-1] += 0.5
    change(graph, weights={"weight_data": array})


def deleted_output(graph: Graph) -> None:
    (tanh,) = (layer for layer in graph if layer.type == "TanH")
    graph.outputs = [blob for blob in graph.outputs if blob is not tanh.output]
    graph.remove(tanh)


WRONG: dict[str, Callable[[Graph], None]] = {
    "wrong_weight": wrong_weight,
    "swapped_pads": lambda graph: change(graph, pad_top=0, pad_bottom=1),
    "missing_activation": lambda graph: change(graph, activation_type=0),
    "deleted_output": deleted_output,
}


def test_wrong_nets(tmp_path: Path) -> None:
    names = ("right", *WRONG)
    file = write_project(tmp_path, PREBUILT, **dict.fromkeys(names, MODEL))
    for name in names:
        graph = write_right_net(tmp_path / "nets", name, tmp_path / "models" / f"{name}.onnx")
        if name in WRONG:
            WRONG[name](graph)
            save_graph(graph, tmp_path / "nets", name)
    with pytest.raises(UsageError, match="cannot keep nets in "):
        check(file, jobs=2, keep=file / "kept")
    result = check(file, jobs=2, keep=tmp_path / "kept")
    assert result.exit_code == 3
    found = by_name(result)
    expected: dict[str, list[str]] = {"right": []} | {name: ["accuracy fp32"] for name in WRONG}
    assert {name: failed(model) for name, model in found.items()} == expected
    assert "'z': missing" in found["deleted_output"].failures[0].message
    assert "is allowed" in found["wrong_weight"].failures[0].message
    kept = tmp_path / "kept" / "models"
    assert {path.name for path in kept.iterdir()} == {
        f"{name}.ncnn.{suffix}" for name in WRONG for suffix in ("param", "bin", "json")
    }
    assert (kept / "wrong_weight.ncnn.bin").read_bytes() == (tmp_path / "nets" / "wrong_weight.bin").read_bytes()


def test_the_command_for_a_wrong_net(tmp_path: Path) -> None:
    file = write_project(tmp_path, f'convert = "{sys.executable} copy.py {{out}}"\n', a=MODEL)
    graph = write_right_net(tmp_path / "nets", "a", tmp_path / "models" / "a.onnx")
    wrong_weight(graph)
    save_graph(graph, tmp_path / "nets", "a")
    each = 'for end in (".param", ".bin"): shutil.copyfile("nets/a" + end, sys.argv[1] + end)'
    (tmp_path / "copy.py").write_text(f"import shutil, sys\n{each}\n")

    def command(keep: Path | None) -> list[str]:
        notes = by_name(check(file, keep=keep))["a"].notes
        (text,) = [note.partition("; next: onnx2ncnn-opt ")[2] for note in notes if "first wrong layer" in note]
        return shlex.split(text)

    words = command(None)
    assert words == ["check", str(file), "-k", "models/a", "--keep", "failed-nets"]
    assert run(tmp_path, *words).code == 3
    words, net = command(tmp_path / "failed-nets"), tmp_path / "failed-nets" / "models" / "a.ncnn"
    assert words == ["bisect", str(tmp_path / "models" / "a.onnx"), f"{net}.param", f"{net}.bin"]
    assert "first wrong layer: Convolution" in run(tmp_path, *words).out


# A converter that does with the right net, which lies in nets/right, what its first argument says.
CONVERTER = """
import os, shutil, sys, time
kind, model, out = sys.argv[1:]
NETS = {
    "crashing_net": "2 2\\nInput in 0 1 x\\nConvolution c 1 1 x y 0=4 1=3 6=108\\n",
    "hanging_net": "3 3\\nInput in 0 1 x\\nInterp i 1 1 x a 0=1 3=2000 4=2000\\nPooling p 1 1 a y 0=1 1=1001\\n",
}
def write(name, copy=shutil.copyfile, suffixes=(".param", ".bin")):
    for suffix in suffixes:
        copy(os.path.join("nets", name + suffix), out + ".ncnn" + suffix)
if kind == "crashes":
    os.kill(os.getpid(), 11)
elif kind == "fails":
    write("right")
    sys.exit("a message of the converter")
elif kind == "hangs":
    os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
elif kind == "half":
    write("right", suffixes=(".param",))
elif kind == "older":
    write("right", shutil.copy2)
elif kind == "outdated":
    write("wrong_weight")
elif kind in NETS:
    with open(out + ".param", "w") as file:
        file.write("7767517\\n" + NETS[kind])
    open(out + ".bin", "wb").close()
elif kind != "nothing":
    write("right")
"""
SAID = {
    "crashes": "the converter crashed with SIGSEGV",
    "fails": "the converter ended with exit code 1; it says: a message of the converter",
    "hangs": "the converter did not finish within 0.5 s",
    "half": "there is no file net.ncnn.bin beside net.ncnn.param",
    "older": "net.ncnn.param and net.ncnn.bin is older than the conversion",
    "nothing": "there is no net: no file net.ncnn.param or net.param was written",
}


def test_converters_that_fail(tmp_path: Path) -> None:
    (tmp_path / "converter.py").write_text(CONVERTER)
    names = (*SAID, "outdated", "crashing_net", "hanging_net", "right")
    text = "\n".join(
        f"[model.'models/{name}']\nconvert = \"'{sys.executable}' converter.py {name} {{onnx}} {{out}}\"\n"
        + ({"hangs": "timeout = 0.5\n", "hanging_net": "timeout = 2\n"}.get(name, ""))
        for name in names
    )
    file = write_project(tmp_path, f"version = \"'{sys.executable}' -V\"\n{text}", **dict.fromkeys(names, MODEL))
    for name in ("right", "wrong_weight"):
        graph = write_right_net(tmp_path / "nets", name, tmp_path / "models" / "right.onnx")
    wrong_weight(graph)
    save_graph(graph, tmp_path / "nets", "wrong_weight")
    for suffix in (".param", ".bin"):
        os.utime(tmp_path / "nets" / f"right{suffix}", (1e9, 1e9))
    result = check(file, jobs=2)
    found = by_name(result)
    expected = {**dict.fromkeys(SAID, 1), "outdated": 3, "crashing_net": 3, "hanging_net": 3, "right": 0}
    assert {name: model.exit_code for name, model in found.items()} == expected
    for name, message in SAID.items():
        assert failed(found[name]) == ["conversion"]
        assert found[name].failures[0].message.startswith(message)
    assert failed(found["outdated"]) == failed(found["hanging_net"]) == ["accuracy fp32"]
    assert "did not finish within 2 s" in found["hanging_net"].failures[0].message
    assert found["right"].versions["converter"].startswith("Python 3")


def test_a_slower_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred passes over an image more, which take longer than all the rest."""
    monkeypatch.delenv("MALLOC_PERTURB_", raising=False)  # memory that is filled counts, whoever uses it
    image = MODEL.replace("9, 8]", "65, 64]")
    file = write_project(tmp_path, f"{PREBUILT}thresholds = {{ layers = inf, size = inf }}\n", slower=image)
    graph = write_right_net(tmp_path / "nets", "slower", tmp_path / "models" / "slower.onnx")
    assert check(file, record=True).ok
    insert_layers(graph, 100)
    save_graph(graph, tmp_path / "nets", "slower")
    result = by_name(check(file))["slower"]
    assert (result.exit_code, failed(result)) == (3, ["latency"])
    latency = measured(result, "latency")
    assert latency.limit == pytest.approx(1.2 * present(latency.baseline))


def test_memory_is_measured_alike(tmp_path: Path) -> None:
    """Huge pages made it 2 MB more or less."""
    feeds = {"x": Feed(np.zeros((3, 64, 64), np.float32))}
    net = Timed(*write_net(tmp_path, "Input in 0 1 x", "ReLU r 1 1 x y"), feeds, ["y"])
    meter = Meter(LOCAL, "fp32", 60.0)
    memories = [memory for memory in (meter.memory(net) for _ in range(8)) if memory is not None]
    assert not memories or max(memories) - min(memories) < MEMORY_MARGIN


def test_a_larger_net(tmp_path: Path) -> None:
    """Weights of 32 bits, which had 16."""
    text = f"{PREBUILT}thresholds = {{ latency = inf }}\n"
    file = write_project(tmp_path, text, larger=MODEL, right=MODEL)
    for name in ("larger", "right"):
        write_right_net(tmp_path / "nets", name, tmp_path / "models" / f"{name}.onnx", storage="fp16")
    assert check(file, record=True, jobs=2).ok
    write_right_net(tmp_path / "nets", "larger", tmp_path / "models" / "larger.onnx")
    found = by_name(check(file, jobs=2))
    assert {name: failed(result) for name, result in found.items()} == {"larger": ["size"], "right": []}
    assert present(found["larger"].changes).changed == {"Convolution": 1}


def test_an_overflow_in_fp16(tmp_path: Path) -> None:
    weight = (np.random.default_rng(0).standard_normal((16, 16)) * 1e5).astype(np.float32)
    file = write_project(tmp_path, f'{PREBUILT}modes = ["fp32", "fp16"]\n')
    text = "(float[1,16] x) => (float[1,16] y) <float k = {0.00001}> { s = MatMul(x, w) y = Mul(s, k) }"
    write_model(tmp_path / "models", text, "overflow.onnx", w=weight)
    lines = ("Input in 0 1 x", "InnerProduct a 1 1 x s 0=16 1=0 2=256", "BinaryOp m 1 1 s y 0=2 1=1 2=1e-5")
    write_net(tmp_path / "nets", *lines, weights=tagged(weight.T), stem="overflow")
    result = by_name(check(file))["overflow"]
    assert (result.exit_code, failed(result)) == (3, ["accuracy fp16"])
    assert measured(result, "accuracy fp32").status == "ok"


def test_a_nan_of_one_device(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """ncnn's HardSigmoid of NaN is 0 on x86, and NaN on aarch64 (docs/special-values.md): see --on."""
    text = (
        "(float[1, 3, 8, 16] x) => (float[1, 3, 8, 16] y) <float z = {0}> { s = Sqrt(x) c = Greater(x, z) "
        "w = Where(c, s, z) y = HardSigmoid<alpha = 1.0, beta = 0.0>(w) }"
    )
    file = write_project(tmp_path, PREBUILT, guarded=text)
    lines = ("Input in 0 1 x", "UnaryOp a 1 1 x s 0=5", "HardSigmoid h 1 1 s y 0=1.0 1=0.0")
    write_net(tmp_path / "nets", *lines, stem="guarded")
    result = by_name(check(file, on=request.config.getoption("--on")))["guarded"]
    if result.checked.startswith("aarch64"):
        assert failed(result) == ["accuracy fp32", "accuracy fp16"]
        assert "NaN in" in result.failures[0].message
    else:
        assert result.exit_code == 0


def test_a_device_that_is_lost(tmp_path: Path) -> None:
    """A command that ends in the middle fails its own model, and says so."""
    file = write_project(tmp_path, PREBUILT, here=MODEL, there=MODEL)
    for name in ("here", "there"):
        write_right_net(tmp_path / "nets", name, tmp_path / "models" / f"{name}.onnx")
    file.write_text(file.read_text() + "[model.'models/there']\non = \"false\"\n")
    found = by_name(check(file))
    assert found["here"].exit_code == 0
    assert (found["there"].exit_code, failed(found["there"])) == (2, ["device"])
