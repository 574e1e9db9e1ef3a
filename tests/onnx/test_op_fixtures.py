"""Every case of fixtures/ops: the net that comes of it, line by line, and its outputs against ONNX Runtime's."""

from collections import Counter

import pytest

from onnx2ncnn_opt.errors import UnsupportedError
from onnx2ncnn_opt.onnx.ops import all_ops
from onnx2ncnn_opt.param.text import format_param
from testing.arrays import first_difference
from testing.compared import conversions, types
from testing.conformance import Harness
from testing.op_cases import FOLDER, Case, load_cases

CASES = list(load_cases())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, harness: Harness, request: pytest.FixtureRequest) -> None:
    model = case.model()
    try:
        converted = conversions(model)
    except UnsupportedError as error:
        result = f"refused: {'; '.join(dict.fromkeys(node.reason for node in error.nodes))}"
    else:
        layers = format_param(converted[0].graph).splitlines()[2:]
        result = "\n".join(["```param", *(line.rstrip() for line in layers), "```"])
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(types(converted[-1])).items()))
        assert case.options.get("layers", counts) == counts
        for sizes in case.sizes:
            feeds = case.feeds(model, sizes)
            reference = list(case.reference(model, feeds).values())
            for conversion in converted:
                assert not first_difference(harness.run(conversion, feeds), reference), f"sizes {sizes}\n{result}"
    if request.config.getoption("--update-fixtures"):
        update(case, result)
    else:
        assert result == case.result


def update(case: Case, result: str) -> None:
    path = FOLDER / f"{case.file}.md"
    text = path.read_text(encoding="utf-8")
    section = f"## {case.title}\n{case.text}"
    assert text.count(section) == 1, f"two cases of {path.name} have the same title"
    path.write_text(text.replace(section, f"## {case.title}\n{case.updated(result)}").rstrip() + "\n", encoding="utf-8")


def test_every_operator_has_a_case() -> None:
    shown = {(node.domain, node.op_type) for case in CASES for node in case.model().graph.node}
    # ONNX Runtime writes these operators of its own in ONNX's domain.
    shown |= {
        ("com.microsoft", name) for _, name in shown if name in ("LayerNormalization", "SimplifiedLayerNormalization")
    }
    shown |= {("com.microsoft", "DynamicQuantizeLSTM")}  # a float LSTM, which is off by its roundings: test_contrib.py
    # Of --append, and of an exported NonMaxSuppression: test_append.py, test_selection.py.
    shown |= {("onnx2ncnn_opt", name) for name in ("SelectBoxes", "SelectRows")}
    assert not {(op.domain, op.name) for op in all_ops()} - shown


def test_titles_are_unique() -> None:
    assert len({str(case) for case in CASES}) == len(CASES)
