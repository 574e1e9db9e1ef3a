"""PyTorch's constructs as its exporters write them, and the outcome of each in the real ncnn."""

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.inputs.draws import Draw, draw_inputs
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing.arrays import RELATIVE
from testing.conformance import Harness, Outcome, attempt, short

FIXTURES = Path(__file__).parents[1] / "fixtures" / "snippets"
TABLE = FIXTURES / "outcomes.tsv"
VARIANTS = ("dyn", "ts", "new")  # torch's default exporter, TorchScript, and the default one at a newer opset
SEEDS = (0, 1)
WITHOUT_RUNTIME = "as torch says; ONNX Runtime does not run it"


def judge(harness: Harness, model: onnx.ModelProto, torch: Mapping[str, Any] | None = None) -> Outcome:
    """Convert a snippet once, and run it on inputs of each seed and on torch's, if these and its outputs are given."""
    conversion = attempt(model)
    if isinstance(conversion, Outcome):
        return conversion
    names = [entry.name for entry in conversion.manifest().model_inputs]
    feeds = [draw_inputs(conversion.model, draw=Draw(seed, plain=True)) for seed in SEEDS]
    feeds += [{name: torch[name] for name in names}] if torch else []
    expected = [torch[name] for name in torch if name.startswith("out")] if torch else []
    try:
        runtime = OrtRunner(model.SerializeToString())
        references = [list(runtime.run(given).values()) for given in feeds]
    except RunError as error:
        if not torch:
            return Outcome("WRONG", f"it is converted, but {error}")
        outcome = harness.compare(conversion, feeds[-1], [(expected, RELATIVE + _rounding(model))])
        return replace(outcome, reason=f"{WITHOUT_RUNTIME}: {error}") if outcome.kind == "right" else outcome
    tolerance = RELATIVE + _rounding(model)
    for given, reference in zip(feeds, references, strict=True):
        outcome = harness.compare(conversion, given, [(reference, tolerance)])
        if outcome.kind != "right":
            return outcome
    if torch and harness.compare(conversion, feeds[-1], [(expected, tolerance)]).kind != "right":
        return Outcome("right", "as ONNX Runtime says, not as torch")
    return outcome


def _rounding(model: onnx.ModelProto) -> float:
    """Return the error that 16 bits inside a model may cause, as a share of its results: ncnn computes with 32."""
    types = {value.type.tensor_type.elem_type for value in model.graph.input}
    types |= {a.i for node in model.graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
    bits = [2.0**-10] * (onnx.TensorProto.FLOAT16 in types) + [2.0**-7] * (onnx.TensorProto.BFLOAT16 in types)
    return 4 * max(bits, default=0.0)


def kept(variant: str, part: int = 0, parts: int = 1) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield name and model of each fixture, or of every so many-th of them."""
    with zipfile.ZipFile(FIXTURES / f"{variant}.zip") as archive:
        for name in archive.namelist()[part::parts]:
            yield name, onnx.ModelProto.FromString(archive.read(name))


def table() -> list[str]:
    """Return the lines of the table."""
    return TABLE.read_text(encoding="utf-8").splitlines()


def rows_of(variant: str, part: int = 0, parts: int = 1) -> list[str]:
    """Return the lines of the table for the fixtures of one variant, as they are now; or every so many-th of them."""
    harness = Harness()
    return [row(name, variant, judge(harness, model)) for name, model in kept(variant, part, parts)]


def row(name: str, variant: str, outcome: Outcome) -> str:
    """Return a line of the table."""
    return f"{name}\t{variant}\t{outcome.kind}\t{short(outcome.reason) if outcome.kind != 'right' else ''}"
