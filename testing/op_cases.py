"""Operator fixtures: Markdown files whose headings are cases, with models as text (see fixtures/ops/README.md)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.runtime.ort import OrtRunner

FOLDER = Path(__file__).parents[1] / "fixtures" / "ops"

_SECTION = re.compile(r"^## ", re.MULTILINE)
_MODEL = re.compile(r"^```(onnx|runtime)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RESULT = re.compile(r"^```param\n(.*?)^```$|^refused: ([^\n]*)$", re.MULTILINE | re.DOTALL)
_OPTION = re.compile(r"^(sizes|values|integers|layers): (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """One heading of a fixture file: a model, and the net or the refusal that comes of it."""

    file: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.title}"

    @property
    def result(self) -> str:
        """The expected result in the file; empty if there is none yet."""
        found = _RESULT.search(self.text)
        return found.group(0) if found else ""

    @property
    def options(self) -> dict[str, str]:
        """The lines `sizes: ...`, `values: ...`, `integers: ...` and `layers: ...`."""
        return dict(_OPTION.findall(self.text))

    @property
    def sizes(self) -> list[dict[str, int]]:
        """Values for the symbolic sizes, one run each; one empty dictionary where there are none."""
        runs = self.options.get("sizes", "").split(";")
        return [{name: int(size) for name, size in (pair.split("=") for pair in run.split())} for run in runs]

    def model(self) -> onnx.ModelProto:
        """Return the model; declared tensors without a producer are random weights."""
        return self._parsed("onnx", {})

    def runtime(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return what ONNX Runtime takes for the model: the block `runtime` with the model's weights, or the model."""
        if "```runtime\n" not in self.text:
            return model
        return self._parsed("runtime", {tensor.name: tensor for tensor in model.graph.initializer})

    def reference(self, model: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return ONNX Runtime's outputs by name; those of ONNX's own evaluator where that has no implementation."""
        runtime = self.runtime(model)
        try:
            return OrtRunner(runtime.SerializeToString(), threads=1).run(feeds)
        except RunError:
            evaluator = ReferenceEvaluator(runtime)
            results: Sequence[Any] = list(evaluator.run(None, dict(feeds)))
            return dict(zip(evaluator.output_names, results, strict=True))

    def _parsed(self, kind: str, weights: Mapping[str, onnx.TensorProto]) -> onnx.ModelProto:
        opset, body = dict(_MODEL.findall(self.text))[kind].split("\n", 1)
        assert opset.startswith("opset "), f"{self}: the model begins with 'opset', not '{opset}'"
        domains = f'"": {opset.split()[1]}' + (', "com.microsoft": 1' if "com.microsoft." in body else "")
        model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{domains}]> net {body}")
        fill_weights(model, 7, weights)
        return model

    def feeds(self, model: onnx.ModelProto, sizes: dict[str, int]) -> dict[str, Any]:
        """Return inputs: normal random numbers, integers and bools 0 and 1; or the numbers of the case, repeated."""
        rng = np.random.default_rng(3)
        return {value.name: self._feed(rng, value, sizes) for value in model.graph.input}

    def _feed(self, rng: np.random.Generator, value: onnx.ValueInfoProto, sizes: dict[str, int]) -> Any:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if dtype.kind in "iub":
            if "integers" in self.options:
                return np.resize([int(number) for number in self.options["integers"].split()], shape).astype(dtype)
            return rng.integers(0, 2, shape).astype(dtype)
        array = rng.standard_normal(shape)
        if "values" in self.options:
            array = np.resize([float(number) for number in self.options["values"].split()], shape)
        return array.astype(dtype)

    def updated(self, result: str) -> str:
        """Return the case's text with another result."""
        return f"{_RESULT.sub('', self.text).rstrip()}\n\n{result}\n\n"


def fill_weights(model: onnx.ModelProto, seed: int, known: Mapping[str, onnx.TensorProto] | None = None) -> None:
    """Give a parsed model's declared tensors that nothing makes the known weights of their names, or random numbers."""
    made = {tensor.name for tensor in model.graph.initializer}
    made.update(name for node in model.graph.node for name in node.output)
    rng = np.random.default_rng(seed)
    for value in [value for value in model.graph.value_info if value.name not in made]:
        weight = (known or {}).get(value.name) or numpy_helper.from_array(_weight(rng, value), value.name)
        model.graph.initializer.append(weight)
        model.graph.value_info.remove(value)


def _weight(rng: np.random.Generator, value: onnx.ValueInfoProto) -> Any:
    tensor = value.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if value.name in ("var", "positive"):
        return rng.uniform(0.5, 2, shape).astype(dtype)
    if dtype.itemsize == 1 and dtype.kind in "iu":
        return rng.integers(-60, 61, shape).astype(dtype) if dtype.kind == "i" else rng.integers(0, 256, shape, dtype)
    return rng.standard_normal(shape).astype(dtype)


def load_cases() -> Iterator[Case]:
    """Yield all cases of all files."""
    for path in sorted(FOLDER.glob("*.md")):
        if path.stem != "README":
            _, *sections = _SECTION.split(path.read_text(encoding="utf-8"))
            for section in sections:
                yield Case(path.stem, *section.split("\n", 1))
