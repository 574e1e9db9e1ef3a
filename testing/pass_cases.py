"""Pass fixtures: Markdown files whose headings are cases, with nets as .param lines (see fixtures/passes/README.md)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from onnx2ncnn_opt.ir.graph import Graph, Layer
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.ir.weight import Array, Encoding, Weight
from onnx2ncnn_opt.param.binary import weight_blocks
from onnx2ncnn_opt.param.text import format_param, parse_param

FOLDER = Path(__file__).parents[1] / "fixtures" / "passes"

_SECTION = re.compile(r"^## ", re.MULTILINE)
_BLOCK = re.compile(r"^```(before|after|weights|feeds|outputs)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LARGE = "```large\n"
_UNCHANGED = re.compile(r"^(refused|no match): (.*)$", re.MULTILINE)
_TABLE_SIZE = 256
_EQUAL = "equal:"


@dataclass(frozen=True)
class Case:
    """One heading of a fixture file: the net before, and the net after or the reason why it stays."""

    pass_name: str
    title: str
    text: str

    @property
    def blocks(self) -> Mapping[str, str]:
        """The fenced blocks by their names."""
        return dict(_BLOCK.findall(self.text))

    @property
    def is_unchanged(self) -> bool:
        """True if the net stays as it is."""
        return _UNCHANGED.search(self.text) is not None

    @property
    def refusal(self) -> str | None:
        """The reason that the pass gives; None if it changes the net, or finds nothing to refuse."""
        found = _UNCHANGED.search(self.text)
        return found.group(2) if found and found.group(1) == "refused" else None

    @property
    def remark(self) -> str:
        """Why the pattern does not match, in the words of the case."""
        found = _UNCHANGED.search(self.text)
        return found.group(2) if found else "the pattern does not match"

    @property
    def may_be_nan(self) -> bool:
        """True if the net before gives NaN on some CPU, where the net after gives numbers."""
        return "\nNaN before: " in self.text

    def __str__(self) -> str:
        return f"{self.pass_name}: {self.title}"

    @property
    def param_text(self) -> str:
        """The net before as a .param."""
        lines = self.blocks["before"].strip().splitlines()
        tops = sum(int(line.split()[3]) for line in lines)
        return "\n".join(["7767517", f"{len(lines)} {tops}", *lines, ""])

    def net(self) -> Graph:
        """Return the net before, with shapes and weights."""
        net = parse_param(self.param_text)
        if "outputs" in self.blocks:
            blobs = {blob.name: blob for layer in net.graph for blob in layer.outputs}
            net.graph.outputs = [blobs[name] for name in self.blocks["outputs"].split()]
        infer_graph(net.graph)
        fill_weights(net.graph, self.blocks.get("weights", ""))
        return net.graph

    def feeds(self, graph: Graph) -> dict[str, Array]:
        """Return an array for every Input of its net before: of the case's sizes, or of the Input's own."""
        given = dict(line.split() for line in self.blocks.get("feeds", "").splitlines())
        rng = np.random.default_rng(1)
        feeds = {}
        for blob in graph.inputs:
            shape = tuple(map(int, given[blob.name].split(","))) if blob.name in given else blob.shape
            feeds[blob.name] = rng.standard_normal(cast(tuple[int, ...], shape)).astype(np.float32)
        return feeds


def load(path: Path) -> list[Case]:
    """Return the cases of a file."""
    _, *sections = _SECTION.split(path.read_text(encoding="utf-8"))
    return [Case(path.stem, *section.split("\n", 1)) for section in sections]


def load_large(path: Path) -> Case | None:
    """Return the net of realistic size before the first heading; None if the file has none."""
    text, *_ = _SECTION.split(path.read_text(encoding="utf-8"))
    return Case(path.stem, "large", text.replace(_LARGE, "```before\n")) if _LARGE in text else None


def net_text(graph: Graph) -> str:
    """Return a net as a fixture shows it: without the header."""
    return "".join(line + "\n" for line in format_param(graph).splitlines()[2:])


def updated(case: Case, after: str | None, refusal: str | None) -> str:
    """Return the case's section with its result replaced."""
    kept = _UNCHANGED.sub("", _BLOCK.sub(lambda m: "" if m.group(1) == "after" else m.group(0), case.text)).rstrip()
    if after is not None:
        result = f"```after\n{after}```"
    else:
        result = f"refused: {refusal}" if refusal is not None else f"no match: {case.remark}"
    return f"{kept}\n\n{result}\n"


def fill_weights(graph: Graph, given: str = "") -> None:
    """Set random weights of the sizes in the layer table.

    `given` has lines ``layer.weight what``; `what` is a number for all elements, an encoding, or the axes of a
    MemoryData along which its elements are equal.
    """
    wanted = dict(line.split() for line in given.splitlines())
    rng = np.random.default_rng(0)
    for layer in graph:
        for block in weight_blocks(layer):
            values = _values(rng, layer, block.name, block.count)
            what = wanted.pop(f"{layer.name}.{block.name}", "bytes" if block.packed else "fp32")
            if what.startswith(_EQUAL):
                _, axes, what = f"{what}:fp32".split(":")[:3]
                values = _repeated(values, layer, axes)
            layer.weights[block.name] = _stored(values, what)
    assert not wanted, f"no such weights: {wanted}"


def _values(rng: np.random.Generator, layer: Layer, name: str, count: int) -> Array:
    if "int8_scale" in name or "quantize_scale" in name:
        return rng.uniform(10, 30, count)
    if name == "var_data":
        return rng.uniform(0.5, 2, count)
    if layer.type == "PReLU":
        return rng.uniform(0.1, 0.5, count)
    return rng.standard_normal(count)


def _repeated(values: Array, layer: Layer, axes: str) -> Array:
    shape = cast(tuple[int, ...], layer.output.shape)
    small = values.reshape(shape)
    for axis in map(int, axes.split(",")):
        small = small.take([0], axis)
    return np.broadcast_to(small, shape).reshape(-1)


def _stored(values: Array, what: str) -> Array | Weight:
    values = values.astype(np.float32)
    if what == "fp32":
        return values
    if what == "fp16":
        return Weight(values.astype(np.float16), Encoding.FP16)
    if what == "bf16":
        return Weight((values.view(np.uint32) >> np.uint32(16)).astype(np.uint16), Encoding.BF16)
    if what in ("int8", "bytes"):
        integers = np.clip(np.rint(values * 40), -127, 127).astype(np.int8)
        return Weight(integers, Encoding.INT8) if what == "int8" else Weight(integers.view(np.uint8), Encoding.BYTES)
    if what == "table":
        table = np.linspace(values.min(), values.max(), _TABLE_SIZE, dtype=np.float32)
        return Weight(np.abs(values[:, None] - table).argmin(axis=1).astype(np.uint8), Encoding.TABLE, table)
    return np.full_like(values, float(what))
