"""Unique names."""

from onnx2ncnn_opt.ir.names import NamePool


def test_names_are_numbered_from_the_lowest_that_is_free() -> None:
    names = NamePool(["a"])
    assert [names.take(name) for name in ("a", "a", "b", "a", "a_1")] == ["a_1", "a_2", "b", "a_3", "a_1_1"]
    names.release("a_2")
    names.add("c")
    assert [names.take(name) for name in ("a", "c", "a")] == ["a_2", "c_1", "a_4"]


def test_a_name_with_a_long_number_is_released() -> None:
    names = NamePool(["a"])
    names.take("a")
    names.release("a_" + "9" * 5000)
    assert names.take("a") == "a_2"
