from onnx2ncnn_opt.precision.knapsack import cheapest

COSTS = {"dear": 100.0, **{f"cheap{n}": 11.0 for n in range(5)}}
POWERS = {"dear": 10.0, **{f"cheap{n}": 1.0 for n in range(5)}}
STEPS = [(POWERS[name] / COSTS[name], name, "float", 0.0) for name in POWERS]


def cost(name: str, way: str) -> float:
    return COSTS[name] * (0.1 if way == "half" else 1)


def test_an_item_that_removes_more_than_is_needed_is_not_taken() -> None:
    """It removes the most for its cost; two others are enough."""
    assert set(cheapest(POWERS, STEPS, cost, 13.0)) == {"cheap0", "cheap1"}
    assert set(cheapest(POWERS, STEPS, cost, 6.0)) == {"dear"}


def test_all_items_if_no_choice_is_enough() -> None:
    assert set(cheapest(POWERS, STEPS, cost, -1.0)) == set(POWERS)
    assert cheapest(POWERS, STEPS, cost, 15.0) == {}


def test_a_way_has_its_own_cost() -> None:
    """Half of the dear item is enough, and costs less than cheap ones."""
    steps = [*STEPS, (8.0 / 10.0, "dear", "half", 2.0)]
    assert cheapest(POWERS, steps, cost, 10.0) == {"dear": "half"}
