"""Choices of forms by noise and price, on nets whose noise is known."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from onnx2ncnn_opt.precision.search import Form, Limit, Plan, Power, choose

Forms = Mapping[str, Sequence[Form]]
LAYERS: Forms = {
    "loud": (Form("int8", 0, 80.0), Form("float", 4, 0.0)),
    "dear": (Form("int8", 0, 15.0), Form("float", 9, 0.0)),
    "cheap": (Form("int8", 0, 4.0), Form("float", 1, 0.0)),
    "quiet": (Form("int8", 0, 1.0), Form("float", 3, 0.0)),
}


def chosen(limits: Sequence[Limit], *, factor: float = 1.0, forms: Forms = LAYERS) -> tuple[set[str], Plan[str], int]:
    """Return the layers that are float, the plan, and the number of measurements, whose noise is `factor` times."""
    choices: list[Mapping[str, Form]] = []

    def measure(choice: Mapping[str, Form]) -> Power:
        choices.append(choice)
        return np.sqrt(factor * sum(form.noise for form in choice.values()))

    plan = choose(forms, measure, limits, 10)
    return {layer for layer, form in plan.choice.items() if form.value == "float"}, plan, len(choices)


@pytest.mark.parametrize(
    ("error", "layers"),
    [(10.0, set()), (5.0, {"loud"}), (4.6, {"loud", "cheap"}), (2.0, {"loud", "dear", "quiet", "cheap"})],
)
def test_the_noisiest_for_their_price_come_first(error: float, layers: set[str]) -> None:
    found, plan, _ = chosen([Limit(error)])
    assert found <= layers
    assert plan.limit == 0
    assert plan.error <= error


def test_a_net_without_need_is_measured_once() -> None:
    assert chosen([Limit(10.0)])[2] == 1


def test_needless_steps_are_undone() -> None:
    """The cheap one comes before the dear one, which is enough alone."""
    forms = {
        "cheap": (Form("int8", 0, 4.0), Form("float", 1, 0.0)),
        "dear": (Form("int8", 0, 16.0), Form("float", 8, 0.0)),
    }
    assert chosen([Limit(2.5)], forms=forms)[0] == {"dear"}


def test_measurements_correct_the_prediction() -> None:
    found, plan, count = chosen([Limit(5.0)], factor=2.0)
    assert plan.limit == 0
    assert plan.error <= 5.0
    assert found == {"loud", "dear"}
    assert count <= 4


def test_each_output_counts() -> None:
    forms = {
        "first": (Form("int8", 0, np.array([1.0, 0.0])), Form("float", 1, np.zeros(2))),
        "second": (Form("int8", 0, np.array([0.0, 1.0])), Form("float", 1, np.zeros(2))),
    }
    assert chosen([Limit(0.5)], forms=forms)[0] == {"first", "second"}


def test_a_form_between_costs_less() -> None:
    forms = {"layer": (Form("winograd", 0, 100.0), Form("sums", 1, 4.0), Form("float", 9, 0.0))}
    assert [chosen([Limit(error)], forms=forms)[1].choice["layer"].value for error in (11.0, 3.0, 1.0)] == [
        "winograd",
        "sums",
        "float",
    ]


def test_the_first_limit_that_its_price_allows() -> None:
    limits = [Limit(1.5, 1.0), Limit(5.0, 5.0), Limit(9.5)]
    found, plan, _ = chosen(limits)
    assert (plan.limit, found) == (1, {"loud"})
    assert chosen([Limit(1.5, 1.0)])[1].limit is None
    assert chosen([Limit(1.5, 1.0)])[1].price <= 1.0


def test_a_choice_that_is_of_no_use_teaches_nothing_about_noise() -> None:
    def measure(choice: Mapping[str, Form]) -> Power:
        noise = sum(form.noise for form in choice.values())
        return math.nan if choice["loud"].value == "int8" else np.sqrt(noise)

    plan = choose(LAYERS, measure, [Limit(5.0)], 10)
    assert {layer for layer, form in plan.choice.items() if form.value == "float"} == {"loud"}
    assert plan.limit == 0


def test_a_choice_without_any_error() -> None:
    found, plan, _ = chosen([Limit(2.0)], factor=0.0)
    assert (found, plan.error, plan.limit) == (set(), 0.0, 0)
