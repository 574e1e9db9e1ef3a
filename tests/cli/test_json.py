"""The output of --json is as docs/json.md says, for every command."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click import Context

from onnx2ncnn_opt.cli.main import cli
from testing.command import SMALL, names, net_files, refused, run, run_well, shown_nets, write_sine
from testing.models import write_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"
KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "boolean": bool,
    "list": list,
    "object": dict,
    "null": type(None),
}


@cache
def tables() -> dict[str, dict[str, str]]:
    """The types of fields by the headings of the page."""
    found = {}
    for section in re.split(r"^#+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        found[heading] = dict(re.findall(r"^\| `(\w+)` \| ([a-z ]+) \|", text, re.MULTILINE))
    return found


def check(data: Mapping[str, Any], *headings: str) -> None:
    """Hold an object against the tables of these headings."""
    fields = {name: kind for heading in headings for name, kind in tables()[heading].items()}
    assert set(data) == set(fields)
    for name, kind in fields.items():
        assert isinstance(data[name], tuple(KINDS[word] for word in kind.split(" or "))), (name, data[name])
        assert not isinstance(data[name], bool) or kind == "boolean", name


def printed(folder: Path, *args: str, code: int = 0) -> dict[str, Any]:
    """Return the output of a command with --json."""
    ended = run(folder, *args, "--json")
    assert ended.code == code, ended.err

    def no_constant(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    data: dict[str, Any] = json.loads(ended.out, parse_constant=no_constant)
    assert (data["format_version"], data["command"], data["exit_code"]) == (1, args[0], code)
    assert (data["error"] is None) == (code == 0 or args[0] in ("diff", "check") or len(data.get("results", ())) > 1)
    if data["error"] is not None:
        check(data["error"], "An error")
        assert data["error"]["message"] in ended.err
    return data


NET = ("model.ncnn.param", "model.ncnn.bin")


def test_of_lists_and_of_a_model_and_its_net(folder: Path) -> None:
    assert set(cli.list_commands(Context(cli))) <= set(tables())  # every command is on the page
    for args, headings in (
        (("passes",), ["passes"]),
        (("ops",), ["ops"]),
        (("inspect", "model.onnx"), ["inspect"]),
        (("inspect", NET[0]), ["inspect"]),
        (("example", "model"), ["example"]),
        (("verify", "model.onnx", *NET), ["A verification"]),
        (("report", "model.onnx", *NET, "-o", "p.html"), ["A verification", "report"]),
        (("bisect", "model.onnx", *NET), ["A verification", "bisect"]),
        (("bisect", "model.onnx", "--passes"), ["A verification", "bisect --passes"]),
        (("mixed", "model.onnx", *NET, "-o", "mixed"), ["mixed"]),
        (("diff", NET[0], NET[0]), ["diff"]),
    ):
        check(printed(folder, *args), "Every command", *headings)


def test_check_and_its_report(folder: Path) -> None:
    write_model(folder, "(float[1, 8] x) => (float[1, 8] y) { y = Det(x) }", "refused.onnx")
    nets = "[model.model]\nnet = 'model.ncnn.param'\n"
    (folder / "ncnn-check.toml").write_text(f'models = ["model.onnx", "none.onnx", "refused.onnx"]\n{nets}')
    data = printed(folder, "check", "--report", "page.html", code=2)
    check(data, "Every command", "check")
    for model in data["models"]:
        check(model, "Each of check's models")
        for measurement in model["measurements"]:
            check(measurement, "A measurement")
    assert [model["exit_code"] for model in data["models"]] == [0, 2, 1]
    right, _, refused = shown_nets(folder / "page.html")
    assert (right["title"], right["verdict"], right["headline"]) == ("model", "ok", "ok: it keeps all limits.")
    assert right["after"][1]["errors"]["fp32"]["status"] == "right"
    assert ["layers", "5"] in right["facts"]
    assert (refused["title"], refused["verdict"], refused["after"]) == ("refused", "wrong", [])
    assert refused["headline"].startswith("FAILED: conversion: the converter ended with exit code 1")


def test_convert(small: Path) -> None:
    data = printed(small, "convert", "model.onnx", "--benchmark")
    check(data, "Every command", "convert")
    (result,) = data["results"]
    check(result, "Each of convert's results")
    check(result["verification"], "A verification")
    assert result["layers"] == {"before": 8, "after": 7}
    assert set(result["latency"]) == {"net", "other", "ratio", "turns"}
    assert all(number > 0 for number in result["latency"].values())
    assert [file["path"] for file in result["files"]] == ["model.ncnn.param", "model.ncnn.bin", "model.ncnn.json"]


def test_optimize(folder: Path) -> None:
    data = printed(folder, "optimize", *NET, "-o", "after", "--benchmark")
    check(data, "Every command", "optimize")
    (result,) = data["results"]
    check(result, "Each of optimize's results")
    check(result["verification"], "A verification")
    assert result["latency"]["turns"] > 2


def test_errors(tmp_path: Path) -> None:
    write_model(tmp_path, "(float[1, 8] x) => (float[1, 8] y) { [det] y = Det(x) }")
    data = printed(tmp_path, "convert", "model.onnx", code=1)
    check(data, "Every command", "convert")
    assert data["error"]["type"] == "UnsupportedError"
    assert [(node["node"], node["operator"]) for node in data["error"]["nodes"]] == [("det", "Det")]
    assert set(data["results"][0]) == {"source", "exit_code", "error"}
    printed(tmp_path, "convert", "model.onnx", "--skip", "nonsense", code=2)
    for wrong in ("missing.onnx", "--nonsense"):
        assert printed(tmp_path, "convert", wrong, code=2)["error"]["type"] == "UsageError"


def test_a_wrong_net(tmp_path: Path) -> None:
    write_sine(tmp_path)
    data = printed(tmp_path, "convert", "model.onnx", "--inputs", "in.npz", code=3)
    verification = data["results"][0]["verification"]
    assert not verification["ok"]
    assert [output["status"] == "ok" for output in verification["outputs"]] == [False, True]
    assert data["results"][0]["files"] == []


def test_several_models(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    write_model(tmp_path, SMALL, "a.onnx")
    write_model(tmp_path, "(float[1, 8] x) => (float[1, 8] y) { y = Det(x) }", "b.onnx")
    write_model(tmp_path, SMALL, "c.onnx")
    models = ("a.onnx", "b.onnx", "c.onnx")
    ended = run(tmp_path, "convert", *models, "-o", "nets", "--no-verify", "--report", "page.html")
    assert ended.code == 1
    assert [net["title"] for net in shown_nets(tmp_path / "page.html")] == ["a", "c"]
    assert ended.err.startswith("Error: b.onnx: cannot express 1 node in ncnn:")
    results = ended.lines("result")
    assert [words[:2] for words in results] == [["a.onnx", "ok,"], ["b.onnx", "not"], ["c.onnx", "ok,"]]
    assert names(tmp_path / "nets") == net_files("a") | net_files("c")
    data = printed(tmp_path, "convert", *models, "-o", "nets", "--no-verify", code=1)
    assert [result["exit_code"] for result in data["results"]] == [0, 1, 0]
    quiet = run(tmp_path, "convert", *models, "-o", "nets", "--no-verify", "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (1, "", ended.err)


def test_several_nets(folder: Path) -> None:
    (folder / "nets").mkdir()
    for suffix in ("param", "bin"):
        (folder / f"other.{suffix}").write_bytes((folder / f"model.ncnn.{suffix}").read_bytes())
    ended = run_well(folder, "optimize", NET[0], "other.param", "other.bin", "-o", "nets", "--no-verify")
    assert [words[0] for words in ended.lines("result")] == [NET[0], "other.param"]
    assert names(folder / "nets") == {*NET, "other.param", "other.bin"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("convert", "model.onnx", "model.onnx"), "model.onnx is given twice"),
        (("convert", "model.onnx", "other.onnx", "-o", "net"), "one prefix for several nets"),
        (("convert", "model.onnx", "sub/model.onnx", "-o", "sub"), "would both be written to sub/model"),
        (("optimize", "lonely.param", "-o", "out"), "has no lonely.bin beside it"),
    ],
)
def test_invalid_targets_of_several_files(folder: Path, args: tuple[str, ...], message: str) -> None:
    (folder / "sub").mkdir()
    for name in ("other.onnx", "sub/model.onnx", "lonely.param"):
        (folder / name).write_bytes(b"")
    assert message in refused(folder, *args)
