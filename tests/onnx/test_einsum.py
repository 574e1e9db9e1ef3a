"""Einsum of one to three operands, each of them fed or constant."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from onnx import helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from testing.compared import compare_nodes, model_of, types

SIZES = {"b": 2, "h": 3, "i": 4, "j": 5, "k": 6, "d": 7, "o": 1}
EQUATIONS = [
    "ij->ji",
    "ij->i",
    "bij->",
    "ij",
    "ij,jk->ik",
    "ij,jk",
    "ij,kj->ik",
    "ij,ij->ij",
    "ij,ij->",
    "i,j->ij",
    "i,i->",
    "bij,bjk->bik",
    "bhid,bhjd->bhij",
    "bhij,bhjd->bihd",
    "bihd,bjhd->bhij",
    "bij,jk->bik",
    "bij,bik->jk",
    "ijk,k->ij",
    "ijd,jkd->ikj",
    "bohi,bohj->bhij",
    "bih,hd,bd->bi",
    "ij,jk,kd->id",
    "...ij,...jk->...ik",
    "...ij,jk->...ik",
    "b...,b...->b...",
    "ijkd,bk->bijd",
]


def shape_of(term: str) -> tuple[int, ...]:
    before, dots, after = term.partition("...")
    return tuple(SIZES[c] for c in before) + ((2, 3) if dots else ()) + tuple(SIZES[c] for c in after)


@pytest.mark.parametrize(("equation", "constant"), list(itertools.product(EQUATIONS, (-1, 0, 1))))
def test_einsum(equation: str, constant: int) -> None:
    """`constant` is the operand that is an initializer."""
    rng = np.random.default_rng(0)
    terms = equation.split("->")[0].split(",")
    arrays = {f"x{i}": rng.standard_normal(shape_of(term)).astype(np.float32) for i, term in enumerate(terms)}
    constants = {name: array for i, (name, array) in enumerate(arrays.items()) if i == constant and len(terms) > 1}
    inputs = {name: array for name, array in arrays.items() if name not in constants}
    compare_nodes(helper.make_node("Einsum", [*arrays], ["y"], equation=equation), inputs, constants, rel=2e-5)


def test_a_product_is_one_layer() -> None:
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((1, 3, 4, 5)).astype(np.float32) for name in "ab"}
    conversion = compare_nodes(helper.make_node("Einsum", ["a", "b"], ["y"], equation="bhid,bhjd->bhij"), inputs)
    assert types(conversion) == ["MatMul"]


@pytest.mark.parametrize(("equation", "reason"), [("ij->ii", "the result 'ii'"), ("ij->k", "the result 'k'")])
def test_refused(equation: str, reason: str) -> None:
    node = helper.make_node("Einsum", ["x"], ["y"], equation=equation)
    with pytest.raises(UnsupportedError) as error:
        lower(model_of([node], {"x": np.ones((3, 3), np.float32)}))
    assert reason in str(error.value)
