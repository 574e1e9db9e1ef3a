"""Names that ncnn can read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.param.names import MAX_NAME_BYTES, clean_name
from onnx2ncnn_opt.param.names import safe_names as names_from


def safe_names(wanted: list[str]) -> list[str]:
    return names_from(wanted, NamePool(limit=MAX_NAME_BYTES))


names = st.lists(st.text(st.sampled_from("ab_1 \t\0ö\ud800/"), max_size=3) | st.sampled_from(["a" * 260, "ö" * 130]))


@settings(max_examples=150, derandomize=True, deadline=None)
@given(names)
def test_safe_names(wanted: list[str]) -> None:
    safe = safe_names(wanted)
    assert len(set(safe)) == len(safe) == len(wanted)
    for name in safe:
        assert clean_name(name) == name
        assert len(name.encode()) <= 255
        assert len(name.encode().split()) == 1
    assert safe_names(safe) == safe
    first = {name: i for i, name in reversed(list(enumerate(wanted)))}
    for i, (name, result) in enumerate(zip(wanted, safe, strict=True)):
        if first[name] == i and name and clean_name(name) == name:
            assert result == name


@pytest.mark.parametrize(
    ("wanted", "safe"),
    [
        (["a b", "a_b"], ["a_b_1", "a_b"]),
        (["x", "x", "x", "x_1"], ["x", "x_2", "x_3", "x_1"]),
        (["", ""], ["blob", "blob_1"]),
        (["a" * 256, "a" * 255], ["a" * 253 + "_1", "a" * 255]),
        (["ö" * 128], ["ö" * 127]),
        (["a\u00a0b", "0=1"], ["a\u00a0b", "0=1"]),
    ],
)
def test_examples(wanted: list[str], safe: list[str]) -> None:
    assert safe_names(wanted) == safe


def test_many_equal_names_take_linear_time() -> None:
    assert len(set(safe_names(["conv"] * 20_000))) == 20_000
