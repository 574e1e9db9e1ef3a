from onnx2ncnn_opt.verification.knapsack import cheapest

COSTS = {"dear": 100.0, **{f"cheap{n}": 11.0 for n in range(5)}}
POWERS = {"dear": 10.0, **{f"cheap{n}": 1.0 for n in range(5)}}
STEPS = [(POWERS[name] / COSTS[name], name, "float", 0.0) for name in POWERS]


def test_an_item_that_removes_more_than_is_needed_is_not_taken() -> None:
    """It removes the most for its cost; two others are enough."""
    assert set(cheapest(POWERS, STEPS, COSTS.__getitem__, 13.0)) == {"cheap0", "cheap1"}
    assert set(cheapest(POWERS, STEPS, COSTS.__getitem__, 6.0)) == {"dear"}


def test_all_items_where_nothing_is_enough() -> None:
    assert set(cheapest(POWERS, STEPS, COSTS.__getitem__, -1.0)) == set(POWERS)
    assert cheapest(POWERS, STEPS, COSTS.__getitem__, 15.0) == {}
