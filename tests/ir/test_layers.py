"""The layer table against the facts about ncnn's layers in fixtures/ncnn/layers.json."""

import ast
import json
import math
import random
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from onnx2ncnn_opt.errors import GraphError
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.layers import BY_INDEX, LAYERS
from onnx2ncnn_opt.ir.spec import COMMON_PARAMS, LayerSpec, choose, parse_params

FILE = Path(__file__).parents[2] / "fixtures" / "ncnn" / "layers.json"
FACTS: list[dict[str, Any]] = [
    {"params": [], "weights": [], "derived": {}, "enums": {}, **fact} for fact in json.loads(FILE.read_text("utf-8"))
]
BY_TYPE = pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["type"])


def last_blob(*texts: str) -> int:
    return max(int(word[0]) for text in texts for word in re.split(r"[(), ]+", text) if word[1:] in tuple("whdcn"))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": max,
    "cdiv": lambda a, b: math.ceil(a / b),
    "sqrtf": lambda a: 1.0 * math.sqrt(a),
    "last_blob": lambda *texts: last_blob("0w", *texts),
    "c_division": lambda a, b: a // b if isinstance(a, int) and isinstance(b, int) else a / b,
}


class CDivision(ast.NodeTransformer):
    """Every `/` divides as in C."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        return ast.Call(ast.Name("c_division", ast.Load()), [node.left, node.right], [])


@cache
def compiled(text: str) -> CodeType:
    """An expression of the facts: Python's syntax, C's integer division, and the functions above."""
    tree = CDivision().visit(ast.parse(text, mode="eval"))
    return compile(ast.fix_missing_locations(tree), text, "eval")


# What parameters with a code may be; any other is a small size or a flag.
CODES: Mapping[str, tuple[int, ...]] = {
    "quantize_term": (0, 0, 1, 2, 101, 400, 401, 402, 410, 412, 600, 611, 800, 812),
    "int8_scale_term": (0, 0, 1, 2, 101, 102),
    "constant_broadcast_type_C": (-1, 0, 1, 2, 3, 4),
    "scale_data_size": (-233, 1, 5, 16),
    "load_type": (0, 1),
}
# Without these the formulas of MultiHeadAttention divide by zero.
ALWAYS: Mapping[str, tuple[int, ...]] = {"embed_dim": (4, 6, 64), "num_heads": (1, 2, 3)}
EXPRESSIONS = ("", "0w", "*(0h,2),-1", "1w,0h", "+(2c,1),1d")


def random_params(fact: dict[str, Any], rng: random.Random) -> dict[str | int, Any]:
    """Values for about half of the parameters."""
    values: dict[str | int, Any] = {}
    for param in fact["params"]:
        name, kind = param["name"], param["kind"]
        if name in ALWAYS:
            values[name] = rng.choice(ALWAYS[name])
            continue
        if rng.random() < 0.5:
            continue
        if kind == "int":
            values[name] = rng.choice(CODES.get(name, (0, 1, 1, 2, 3, 7, 48)))
        elif kind == "float":
            values[name] = rng.choice((0.0, 0.5, -3.0))
        elif kind == "string":
            values[name] = rng.choice(EXPRESSIONS)
        else:
            values[name] = tuple(rng.choices(range(4), k=rng.randrange(3)))
    return values


class Facts(dict[str | int, Any]):
    """The values of all parameters and derived names of a layer, as the facts define them."""

    def __init__(self, fact: dict[str, Any], given: Mapping[str | int, Any]) -> None:
        super().__init__(given)
        self.rules = {param["name"]: param["default"] for param in fact["params"]}
        self.rules |= {name: f"={text}" for name, text in fact["derived"].items()}

    def __missing__(self, name: str) -> Any:
        value = self.rules[name]
        is_formula = isinstance(value, str) and value.startswith("=")
        return self.evaluate(value[1:].strip()) if is_formula else value

    def evaluate(self, text: str) -> Any:
        return eval(compiled(text), FUNCTIONS, self)  # type: ignore[arg-type]


def samples(fact: dict[str, Any]) -> list[tuple[Layer, Facts]]:
    """Layers with many parameter sets, each beside what the facts say of it."""
    rng = random.Random(fact["index"])
    sets = [random_params(fact, rng) for _ in range(300 if fact["params"] else 1)]
    return [(Layer(fact["type"], "sample", params=params), Facts(fact, params)) for params in sets]


def spec_of(fact: dict[str, Any]) -> LayerSpec:
    return LAYERS[fact["type"]]


def test_every_type_is_in_the_table_under_its_index() -> None:
    assert {spec.type: spec.index for spec in LAYERS.values()} == {fact["type"]: fact["index"] for fact in FACTS}
    assert {index: spec.type for index, spec in BY_INDEX.items()} == dict(
        enumerate(fact["type"] for fact in sorted(FACTS, key=lambda fact: fact["index"]))
    )
    assert len(LAYERS) == 110


@BY_TYPE
def test_params(fact: dict[str, Any]) -> None:
    spec = spec_of(fact)
    found = [(param.id, param.name, param.kind) for param in sorted(spec.params, key=lambda param: param.id)]
    assert found == [(param["id"], param["name"], param["kind"]) for param in fact["params"]]
    assert {param.name for param in COMMON_PARAMS} <= set(spec.by_name)
    assert len(spec.by_id) == len(spec.by_name) == len(found) + len(COMMON_PARAMS)


@BY_TYPE
def test_defaults(fact: dict[str, Any]) -> None:
    for layer, facts in samples(fact):
        for param in fact["params"]:
            expected = facts[param["name"]]
            found = layer[param["name"]]
            assert found == (tuple(expected) if isinstance(expected, list) else expected), param["name"]
            assert (type(found) is float) == (param["kind"] == "float"), param["name"]


@BY_TYPE
def test_weights(fact: dict[str, Any]) -> None:
    spec = spec_of(fact)
    weights = fact["weights"]
    assert [weight.name for weight in spec.weights] == [weight["name"] for weight in weights]
    present = set()
    for layer, facts in samples(fact):
        for weight, known in zip(spec.weights, weights, strict=True):
            is_there = bool(facts.evaluate(known["when"]))
            assert weight.present(layer) == is_there, (weight.name, layer.params)
            if not is_there:
                continue
            present.add(weight.name)
            assert weight.count(layer) == facts.evaluate(known["count"]), (weight.name, layer.params)
            load_type = known["load_type"]
            assert weight.packed == (load_type == "bytes")
            raw = load_type == "bytes" or (facts["load_type"] if load_type == "=load_type" else load_type) == 1
            assert weight.is_tagged(layer) == (not raw), (weight.name, layer.params)
        names = [weight.name for weight in spec.weights if weight.present(layer)]
        assert len(names) == len(set(names))
    assert present == {weight["name"] for weight in weights}


@BY_TYPE
def test_blob_counts(fact: dict[str, Any]) -> None:
    spec = spec_of(fact)
    assert (spec.inputs, spec.outputs) == (tuple(fact["inputs"]), tuple(fact["outputs"]))
    for layer, facts in samples(fact):
        expected = fact["one_blob_only"]
        expected = bool(facts.evaluate(expected)) if isinstance(expected, str) else expected
        assert bool(spec.is_one_blob_only(layer)) == expected, layer.params


@BY_TYPE
def test_flags_and_enums(fact: dict[str, Any]) -> None:
    spec = spec_of(fact)
    # The table's flag is for a layer that always works in place; BinaryOp does only with a scalar.
    assert spec.inplace == (fact["inplace"] is True)
    known: dict[str, dict[str, str]] = fact["enums"]
    for name, codes in spec.enums.items():
        expected = known.get(name) or known["type"]
        # The facts add the activation's parameters in brackets, and a second word after a slash.
        names = {int(code): re.split("[ /]", meaning)[0].upper() for code, meaning in expected.items()}
        assert {code.value: code.name for code in codes} == names
    assert bool(known) == bool(spec.enums)


def test_a_code_that_stands_for_no_size() -> None:
    for code in (-1, 2):
        with pytest.raises(GraphError, match=f"block has the code {code}"):
            choose((32, 64), code, "block")
    layer = Layer("Gemm", "gemm", params={"constantB": 1, "constantK": 64, "constantN": 1, "quantize_term": 407})
    scales = next(weight for weight in LAYERS["Gemm"].weights if weight.name == "B_data_quantize_scales")
    with pytest.raises(GraphError, match="quantize_term has the code 7"):
        scales.count(layer)


def test_notation() -> None:
    params = parse_params("0 a, 1 b=2, 2 c=0.5, 3 d=a, 4 e:int[], 5 f:float[], 6 g:string, 7 h=1e-3, 8 i=-233")
    assert [(p.id, p.name, p.kind, p.default, p.follows) for p in params] == [
        (0, "a", "int", 0, None),
        (1, "b", "int", 2, None),
        (2, "c", "float", 0.5, None),
        (3, "d", "int", None, "a"),
        (4, "e", "int[]", (), None),
        (5, "f", "float[]", (), None),
        (6, "g", "string", "", None),
        (7, "h", "float", 1e-3, None),
        (8, "i", "int", -233, None),
    ]
