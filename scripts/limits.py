"""Refusals of importers, for docs/ops.md: from their signatures, the fixtures' cases and the conformance suite."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import onnx

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import RunError, UnsupportedError
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.registry import OnnxOp
from onnx2ncnn_opt.onnx.value import Constant, Ints, Sizes
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing.op_cases import Case, load_cases

TABLE = Path(__file__).resolve().parents[1] / "fixtures" / "conformance.tsv"

# What holds for every operator, or stands in another column of the page.
_GENERAL = ("must be constant", "floats only here", "no form of this operator", "empty", "more than four axes")
_SPECIFIC = re.compile(r"[\d,()\[\] -]*\d[\d,()\[\] -]*|\b(u?int|b?float)\w*|\bbool\b|\boutput \w+ |reduction \w+")
_LONGEST = 90


def constant_inputs(op: OnnxOp) -> list[str]:
    """Return the inputs that the importer takes only if they are constant."""
    return [f"`{declared.name}`" for declared in op.inputs if declared.type in (Array, Ints, Sizes, Constant)]


def refusals() -> Mapping[str, Sequence[str]]:
    """Return by operator the reasons for refusing models that ONNX Runtime runs; only the first of similar ones."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for operator, reason in (*_of_fixtures(), *_of_conformance()):
        if not any(general in reason for general in _GENERAL):
            short = reason if len(reason) <= _LONGEST else reason.split(": ")[0]
            found[operator].setdefault(_SPECIFIC.sub("", reason), short)
    return {operator: list(reasons.values()) for operator, reasons in found.items()}


def _of_fixtures() -> Iterable[tuple[str, str]]:
    for case in load_cases():
        if case.result.startswith("refused") and _runs(case):
            try:
                lower(case.model())
            except UnsupportedError as error:
                yield from ((node.operator, node.reason) for node in error.nodes)


def _runs(case: Case) -> bool:
    """Return True if ONNX Runtime runs the model. A model that it refuses too shows no limit of this package."""
    if " is too large: " in case.result or " its iterations of " in case.result:
        return False  # feeds that do not fit into memory, or a loop without an end
    model = case.model()
    if not all(dim.dim_value or dim.dim_param for x in model.graph.input for dim in x.type.tensor_type.shape.dim):
        return False  # empty tensors, which ncnn does not have
    try:
        OrtRunner(model.SerializeToString()).run(case.feeds(model, defaultdict(lambda: 4, case.sizes[0])))
    except RunError:
        return False
    return True


def _of_conformance() -> Iterable[tuple[str, str]]:
    operators = {schema.name for schema in onnx.defs.get_all_schemas()}
    for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        _, outcome, reason = line.split("\t")
        if outcome == "refused" and not reason.endswith("..."):
            for part in re.split(r"; (?=[A-Z]\w+: )", reason):
                operator, _, text = part.partition(": ")
                if operator in operators:
                    yield operator, text
