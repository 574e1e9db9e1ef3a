import re
from pathlib import Path

import numpy as np
import pytest

from testing.command import names, net_files, run, run_well, shown_nets, write_sine
from testing.models import write_model


def test_report_of_a_model(small: Path) -> None:
    ended = run_well(small, "report", "model.onnx", "-o", "page.html")
    assert [words[1] for words in ended.lines("output")] == ["ok", "ok"]
    assert names(small) == {"model.onnx", "page.html"}
    assert shown_nets(small / "page.html")[0]["verdict"] == "ok"


def test_report_of_a_net(folder: Path) -> None:
    data = (folder / "model.ncnn.bin").read_bytes()
    (folder / "model.ncnn.bin").write_bytes(data[:4] + np.float32(9).tobytes() + data[8:])
    ended = run(folder, "report", "model.onnx", "model.ncnn.param", "-o", "page.html")
    assert (ended.code, ended.err) == (3, "Error: 2 of 2 outputs differ from ONNX Runtime's\n")
    assert shown_nets(folder / "page.html")[0]["verdict"] == "wrong"


def test_convert_with_a_report(small: Path) -> None:
    ended = run_well(small, "convert", "model.onnx", "--report", "page.html")
    assert re.fullmatch(r"wrote: page.html \(\d+\.\d kB\)", ended.out.splitlines()[-1])
    assert shown_nets(small / "page.html")[0]["verdict"] == "ok"


NET = ("model.ncnn.param", "model.ncnn.bin")


@pytest.mark.parametrize(
    ("args", "verdict"),
    [
        (("verify", "model.onnx", *NET), "ok"),
        (("optimize", *NET, "-o", "new"), "ok"),
        (("optimize", *NET, "-o", "new", "--no-verify"), "unverified"),
    ],
)
def test_other_commands_with_a_report(folder: Path, args: tuple[str, ...], verdict: str) -> None:
    assert run(folder, *args, "--report", "page.html").code == 0
    assert shown_nets(folder / "page.html")[0]["verdict"] == verdict


def test_the_page_is_written_when_verification_fails(tmp_path: Path) -> None:
    write_sine(tmp_path)
    ended = run(tmp_path, "convert", "model.onnx", "--inputs", "in.npz", "--report", "page.html")
    assert ended.code == 3
    assert names(tmp_path) == {"model.onnx", "in.npz", "page.html"}
    (net,) = shown_nets(tmp_path / "page.html")
    assert (net["verdict"], net["after"][1]["errors"]["fp32"]["status"]) == ("wrong", "wrong")


def test_no_net_no_page(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 8] x) => (float[1, 8] y) { y = Det(x) }")
    assert run(tmp_path, "convert", "model.onnx", "--report", "page.html").code == 1
    assert run(tmp_path, "report", "model.onnx", "-o", "page.html").code == 1
    assert names(tmp_path) == {"model.onnx"}


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("no/where/page.html", "cannot write no/where/page.html: there is no folder no"),
        ("folder", "cannot write folder: it is a folder"),
        ("model.onnx", "cannot write model.onnx: it is the model itself"),
    ],
)
def test_targets_are_checked_before_the_work(small: Path, target: str, problem: str) -> None:
    (small / "folder").mkdir()
    for command in (("report", "model.onnx", "-o", target), ("convert", "model.onnx", "--report", target)):
        ended = run(small, *command)
        assert (ended.code, ended.out) == (2, "")
        assert re.sub(r"the model model.onnx", "the model", ended.err) == f"Error: {problem}\n"
        assert names(small) == {"model.onnx", "folder"}


def test_a_manifest_needs_a_net(folder: Path) -> None:
    ended = run(folder, "report", "model.onnx", "--manifest", "model.ncnn.json", "-o", "page.html")
    assert ended.code == 2
    assert names(folder) == {"model.onnx", *net_files("model")}
