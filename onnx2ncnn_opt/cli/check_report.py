"""The result of `check`: for a terminal, as Markdown, and as JUnit's XML."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from onnx2ncnn_opt.regression.result import CheckResult, Measurement, ModelResult
from onnx2ncnn_opt.report.console import Block, Table, printable
from onnx2ncnn_opt.report.record import NetRecord

_NOTHING, _SAME = "-", "="


def check_blocks(result: CheckResult) -> list[Block]:
    """Return the result as a table, and lines about failures and changes."""
    columns, rows = _rows(result.models, _short)
    blocks: list[Block] = [Table(columns, rows, "model", tuple(range(2, len(columns))))] if rows else []
    for model in result.models:
        blocks += [f"{kind}: {model.name}: {text}" for kind, text in details(model)]
    blocks += [f"note: {name} is in the baseline, but no model is called so" for name in result.missing]
    return [*blocks, *_summary(result)]


def model_line(model: ModelResult) -> str:
    """Return the log line of a finished model."""
    return f"{model.name}: {_verdict(model)}, {model.seconds:.0f} s"


Form = Callable[[str, float, float | None], str]


def _rows(models: Sequence[ModelResult], form: Form) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return a header, and a row of measurements for each model."""
    modes = dict.fromkeys(m.mode for model in models for m in model.measurements if m.what == "accuracy")
    least = dict.fromkeys((m.what, m.mode) for model in models for m in model.measurements if m.what in _LEAST)
    keys = [*(("accuracy", mode) for mode in modes), *least, *((what, "") for what in _COSTS)]
    error_columns = (f"error {mode}".rstrip() for mode in modes)
    columns = ("model", "result", *error_columns, *(f"{what} {mode}" for what, mode in least), *_COSTS)
    rows = []
    for model in models:
        measured = {(m.what, m.mode): m for m in model.measurements}
        is_same = model.changes is not None and not model.changes.files
        cells = (_cell(measured.get(key), is_same and key[0] in _COSTS, form) for key in keys)
        rows.append((model.name, _verdict(model), *cells))
    return columns, tuple(rows)


def _cell(measurement: Measurement | None, is_same: bool, form: Form) -> str:
    if measurement is None or measurement.measured is None:
        return _SAME if is_same else _NOTHING
    mark = "" if measurement.status == "ok" else " !"
    return form(measurement.what, measurement.measured, measurement.baseline) + mark


def _full(what: str, measured: float, baseline: float | None) -> str:
    """Return a number, and its change from the baseline."""
    text = _FORMS.get(what, _exponent)(measured)
    return text if what not in _COSTS or not baseline else f"{text} ({_change(measured, baseline)})"


def _short(what: str, measured: float, baseline: float | None) -> str:
    """Return only the change of a cost, else the number, so that all columns fit into a terminal."""
    if what not in _COSTS or not baseline:
        return _full(what, measured, baseline)
    if what == "layers":
        return f"{measured:g}" if measured == baseline else f"{measured:g} ({measured - baseline:+g})"
    return _change(measured, baseline)


def _change(measured: float, baseline: float) -> str:
    return _SAME if measured == baseline else f"{measured / baseline - 1:+.1%}"


def details(model: ModelResult) -> Iterator[tuple[str, str]]:
    """Yield failures, changes and notes of a model: a word ("failed", "changed", "note") and a text."""
    for measurement in model.failures:
        yield "failed", failure_text(measurement)
    changes = model.changes
    if changes and changes.files:
        counted = ((what, getattr(changes, what)) for what in ("gone", "added", "changed"))
        parts = [
            f"{what} {', '.join(f'{n} {name}' for name, n in counts.items())}" for what, counts in counted if counts
        ]
        yield "changed", "; ".join(parts) or "names or the order of layers only"
    for note in model.notes:
        yield "note", note


def failure_text(measurement: Measurement) -> str:
    """Return the reason of a failure: the measured value, the limit, and the baseline's value."""
    limit = "at least {}" if measurement.what in _LEAST else "at most {}"
    numbers = _numbers(measurement, measured="{}", limit=limit, baseline="the baseline {}")
    return ": ".join(filter(None, (measurement.name, numbers, measurement.message)))


def _numbers(measurement: Measurement, **words: str) -> str:
    """Return the numbers of a measurement as text; `words` are the fields to show, with a template for each."""
    form = _FORMS.get(measurement.what, _exponent)
    numbers = ((text, getattr(measurement, key)) for key, text in words.items())
    return ", ".join(text.format(form(number)) for text, number in numbers if number is not None)


def check_markdown(result: CheckResult) -> str:
    """Return the table and the lines in the Markdown of GitHub's step summaries."""
    columns, rows = _rows(result.models, _full)
    lines = ["## ncnn nets", ""]
    lines += [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"] if rows else []
    lines += [f"| {' | '.join(map(_markdown, row))} |" for row in rows]
    lines.append("")
    for model in result.models:
        for kind, text in details(model):
            lines.append(f"- **{_markdown(model.name)}** {kind}: {_markdown(text)}")
    lines += [f"- {_markdown(line)}" for line in _summary(result)]
    return "\n".join(lines) + "\n"


def check_junit(result: CheckResult) -> str:
    """Return a test suite with a case for each model: a wrong net is a failure, an unconverted model an error.

    `printable` removes the characters that XML forbids.
    """
    models = result.models
    codes = [model.exit_code for model in models]
    suite = ElementTree.Element(
        "testsuite",
        name=printable(result.file),
        tests=str(len(models)),
        failures=str(sum(code == 3 for code in codes)),
        errors=str(sum(code in (1, 2) for code in codes)),
        time=f"{sum(model.seconds for model in models):.3f}",
    )
    for model in models:
        name, seconds = printable(model.name), f"{model.seconds:.3f}"
        case = ElementTree.SubElement(suite, "testcase", classname=printable(result.file), name=name, time=seconds)
        properties = ElementTree.SubElement(case, "properties")
        for measurement in model.measurements:
            if measurement.measured is not None:
                value = repr(measurement.measured)
                ElementTree.SubElement(properties, "property", name=measurement.name, value=value)
        texts = [printable(failure_text(m)) for m in model.failures]
        if texts:
            kind = "failure" if model.exit_code == 3 else "error"
            failure = ElementTree.SubElement(case, kind, message=texts[0])
            failure.text = "\n".join(texts)
        others = [printable(f"{kind}: {text}") for kind, text in details(model) if kind != "failed"]
        if others:
            ElementTree.SubElement(case, "system-out").text = "\n".join(others)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def check_record(model: ModelResult, record: NetRecord | None) -> NetRecord:
    """Return a model's record for a page: its result, and the facts about its net."""
    reason = failure_text(model.failures[0]) if model.failures else "it keeps all limits."
    measured = [
        (m.name, _numbers(m, measured="{}", baseline="baseline {}", limit="limit {}"))
        for m in model.measurements
        if m.measured is not None
    ]
    base = record or NetRecord(model.name, "unverified", "")
    return replace(
        base,
        title=model.name,
        verdict="wrong" if model.exit_code else "ok",
        headline=f"{_verdict(model)}: {reason}",
        facts=(*measured, *base.facts),
        notes=(*(f"{kind}: {text}" for kind, text in details(model)), *base.notes),
    )


def _summary(result: CheckResult) -> Iterator[str]:
    models = result.models
    for checked in dict.fromkeys(model.checked for model in models if model.checked):
        yield f"checked: {checked}"
    if recorded := sum(model.recorded for model in models):
        yield f"recorded: {recorded} of {len(models)} models in {result.baseline}"
    passed = sum(model.exit_code == 0 for model in models)
    yield f"passed: {passed} of {len(models)} models"


def _verdict(model: ModelResult) -> str:
    if model.exit_code:
        return "FAILED"
    return "recorded" if model.recorded else "ok"


def _exponent(number: float) -> str:
    return f"{number:.1e}"


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"


_FORMS: Mapping[str, Callable[[float], str]] = {
    "layers": lambda number: f"{number:g}",
    "size": _bytes,
    "latency": lambda number: f"{number:.3g} ms",
    "memory": _bytes,
    "sqnr": lambda number: f"{number:.1f} dB",
    "top1": lambda number: f"{number:.1%}",
}
_LEAST = ("sqnr", "top1")
_COSTS = tuple(what for what in _FORMS if what not in _LEAST)


def _markdown(text: str) -> str:
    """Escape markup in a text, because names from models may contain it."""
    escaped = "".join(f"\\{char}" if char in "\\`*_[]<>|#~&" else char for char in printable(text))
    return escaped.replace("\n", "<br>")
