import xml.etree.ElementTree as ElementTree

from onnx2ncnn_opt.cli.check_report import check_blocks, check_junit, check_markdown
from onnx2ncnn_opt.regression.result import Changes, CheckResult, Measurement, ModelResult
from onnx2ncnn_opt.report.console import Table
from testing import present

EVIL = "a|b<script>`x`*\x1b[31m\x00\ufffe"
RESULT = CheckResult(
    "ncnn-check.toml",
    "ncnn-baseline",
    (
        ModelResult(
            "models/right",
            0,
            (
                Measurement("accuracy", "ok", 1e-6, None, 2e-6, "fp32"),
                Measurement("layers", "ok", 10, 10, 10),
                Measurement("size", "ok", 1.01e6, 1.01e6, 1e6),
            ),
            Changes(files=True, added={"ReLU": 2}),
            "x86-64 fp32",
        ),
        ModelResult(
            EVIL,
            3,
            (
                Measurement("accuracy", "failed", None, None, 1e-6, "fp32", f"output '{EVIL}': crashed"),
                Measurement("latency", "failed", 3.5, 2.4, 2.0, message="too slow"),
            ),
            notes=("ncnn: 2; the baseline: 1",),
        ),
        ModelResult.failed("models/none", "conversion", "the converter ended with exit code 1", 1),
    ),
    ("models/gone",),
)


def test_on_a_terminal() -> None:
    table, *lines = check_blocks(RESULT)
    assert isinstance(table, Table)
    assert table.columns == ("model", "result", "error fp32", "layers", "size", "latency", "memory")
    assert table.rows == (
        ("models/right", "ok", "1.0e-06", "10", "+1.0%", "-", "-"),
        (EVIL, "FAILED", "-", "-", "-", "+75.0% !", "-"),
        ("models/none", "FAILED", "-", "-", "-", "-", "-"),
    )
    assert lines == [
        "changed: models/right: added 2 ReLU",
        f"failed: {EVIL}: accuracy fp32: the baseline 1.0e-06: output '{EVIL}': crashed",
        f"failed: {EVIL}: latency: 3.5 ms, at most 2.4 ms, the baseline 2 ms: too slow",
        f"note: {EVIL}: ncnn: 2; the baseline: 1",
        "failed: models/none: conversion: the converter ended with exit code 1",
        "note: models/gone is in the baseline, but no model is called so",
        "checked: x86-64 fp32",
        "passed: 1 of 3 models",
    ]


def test_as_markdown() -> None:
    text = check_markdown(RESULT)
    assert "| models/right | ok | 1.0e-06 | 10 (=) | 1.01 MB (+1.0%) | - | - |" in text
    escaped = "a\\|b\\<script\\>\\`x\\`\\*\\\\x1b\\[31m\\\\x00\\\\ufffe"
    assert f"| {escaped} | FAILED |" in text
    assert "<script" not in text.replace("\\<script", "")
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {8}


def test_as_junit() -> None:
    (suite,) = ElementTree.fromstring(check_junit(RESULT))
    assert [suite.get(key) for key in ("tests", "failures", "errors")] == ["3", "1", "1"]
    right, wrong, none = suite
    assert [(p.get("name"), p.get("value")) for p in right.iter("property")] == [
        ("accuracy fp32", "1e-06"),
        ("layers", "10"),
        ("size", "1010000.0"),
    ]
    assert right.findtext("system-out") == "changed: added 2 ReLU"
    assert len((wrong.findtext("failure") or "").splitlines()) == 2
    assert present(none.find("error")).get("message") == "conversion: the converter ended with exit code 1"
