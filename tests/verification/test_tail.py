"""Faults in the tails of detectors are found, and last bits of functions are no faults."""

import os
import select
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.report.tail_call import cpp_call
from onnx2ncnn_opt.runtime.compiled_tail import compiled
from onnx2ncnn_opt.tail.reader import read_tail
from onnx2ncnn_opt.tail.registry import TAIL_OPS
from testing import present
from testing.models import parsed

HEADS = Path(__file__).parents[2] / "fixtures" / "heads"


@cache
def head(name: str) -> Conversion:
    return lower(HEADS / f"{name}.onnx")


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling a header takes longer than everything else."""
    monkeypatch.setenv("PATH", "")


def statuses(conversion: Conversion) -> set[str]:
    return {row.status for row in conversion.verify().outputs}


def with_constant(name: str, operator: str, old: float, new: float) -> Conversion:
    """Return a head in which the first node of this operator with a constant of one number has another one."""
    conversion = head(name)
    assert conversion.tail is not None
    model = onnx.ModelProto.FromString(conversion.tail.model.SerializeToString())
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        for i, key in enumerate(node.input):
            if node.op_type == operator and key in tensors:
                array = numpy_helper.to_array(tensors[key])
                if array.size == 1 and np.isclose(array.reshape(()), old):
                    changed = numpy_helper.from_array(np.full_like(array, new), "changed")
                    model.graph.initializer.append(changed)
                    node.input[i] = "changed"
                    return replace(conversion, tail=replace(conversion.tail, model=model))
    raise AssertionError(f"{name} has no {operator} of {old}")


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(
    ("name", "operator", "old", "new"),
    [
        ("yolo26-nhw.dyn", "Mod", 5, 6),  # the class of a box
        ("pose_nms-hw.dyn", "NonMaxSuppression", 0.45, 0.55),  # the threshold of overlaps
        ("obb_nms.dyn", "Mul", 0.25, 0.35),
        ("centernet.ts", "Div", 2, 2.1),
    ],
)
def test_another_number_is_found(name: str, operator: str, old: float, new: float) -> None:
    assert statuses(with_constant(name, operator, old, new)) - {"ok", "unproven"}


@pytest.mark.usefixtures("without_compiler")
def test_a_wrong_operator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    conversion, op = head("yolo26-nhw.dyn"), TAIL_OPS["Mod"]

    @wraps(op.function)
    def mod(a: Any, b: Any, **attributes: Any) -> Any:
        return op.function(a, b, **attributes) + 1

    monkeypatch.setitem(TAIL_OPS, "Mod", replace(op, function=mod))
    [message, *_] = [row.message for row in conversion.verify().outputs if row.status == "mismatch"]
    assert "the first wrong node is Mod 'node_" in message


@pytest.mark.usefixtures("without_compiler")
def test_casts_that_onnx_does_not_define_are_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ARM they give the nearest integer, on x86 the lowest."""
    graph = "(float[8] x) => (float[8] z, int32[1, n] y) <float one = {1}> { z = Relu(x) i = NonZero(x)"
    conversion = lower(parsed(f"{graph} f = Cast<to = 1>(i) q = Div(one, f) y = Cast<to = 6>(q) }}"))
    assert statuses(conversion) == {"ok"}
    op = TAIL_OPS["Cast"]

    @wraps(op.function)
    def saturated(x: Any, **attributes: Any) -> Any:
        y = op.function(x, **attributes)
        return np.where(np.isposinf(x), np.iinfo(np.int32).max, y).astype(y.dtype)

    monkeypatch.setitem(TAIL_OPS, "Cast", replace(op, function=saturated))
    assert statuses(conversion) == {"ok"}

    @wraps(op.function)
    def shifted(x: Any, **attributes: Any) -> Any:
        return op.function(x, **attributes) + np.int32(1)

    monkeypatch.setitem(TAIL_OPS, "Cast", replace(op, function=shifted))
    assert "mismatch" in statuses(conversion)


def test_the_size_of_an_input_that_the_net_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    graph = "(float[n, 4] x, float[1, m] y) => (int64[2, k] r) { z = Relu(x) i = NonZero(z) c = Size(y) r = Add(i, c) }"
    conversion = lower(parsed(graph))
    assert statuses(conversion) == {"ok"}
    assert conversion.tail is not None
    lines = cpp_call(conversion.manifest(), read_tail(conversion.tail.data), "net", {"z": "out0"}, {"n": "in0.h"})
    assert "    std::vector<int64_t> tail_data2(1, (int64_t)(tail_in[0].shape[1]));" in lines


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.usefixtures("without_compiler")
def test_the_size_of_an_input_whose_name_is_a_product() -> None:
    """Exports of dynamo call a size 32*H if it has to be a multiple of 32; this tail reads (1 + 32*H) // 2."""
    text = (
        "(float[1, 4, H] x) => (int64[2, n] y) { p = AveragePool<kernel_shape = [3], strides = [2], pads = [1, 1]>(x)"
    )
    text += " s = Shape(p) z = ConstantOfShape(s) q = Add(p, z) f = NonZero(q) m = Shape<start = 2>(p) y = Mul(f, m) }"
    model = parsed(text, 18)
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "32*H"
    assert statuses(lower(model)) == {"ok"}


def test_another_order_of_ties_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    conversion, op = head("yolo26-nhw.dyn"), TAIL_OPS["TopK"]
    assert statuses(conversion) == {"ok"}

    @wraps(op.function)
    def top_k(x: Any, *arguments: Any, **attributes: Any) -> Any:
        axis = attributes.get("axis", -1)
        values, indices = op.function(np.flip(x, axis), *arguments, **attributes)
        return values, x.shape[axis] - 1 - indices

    monkeypatch.setitem(TAIL_OPS, "TopK", replace(op, function=top_k))
    assert "mismatch" in statuses(conversion)


@pytest.mark.needs("C++")
def test_a_wrong_template_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification compiles the header, and compares it with NumPy."""
    conversion, op = head("yolo26-nhw.dyn"), TAIL_OPS["TopK"]
    assert any("gives the same numbers" in note for note in conversion.verify().notes)
    for old, new, problem in (
        ("^ turned, q}", "^ ~turned, q}", "the tail's C++ header is wrong: output0: off by up to"),
        ("if (!axis_of", "if (axis_of", "the tail's C++ header is wrong: error 10"),
        ("View scratch;", "View scratch", "did not run"),
    ):
        assert old in op.cpp
        monkeypatch.setitem(TAIL_OPS, "TopK", replace(op, cpp=op.cpp.replace(old, new, 1)))
        report = conversion.verify()
        text = [row.message for row in report.outputs if row.status == "mismatch"] + list(report.notes)
        assert problem in " ".join(text)


def test_a_compiler_ends_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """c++ only drives other programs, which would go on after an interrupt, and write their files."""
    os.mkfifo(tmp_path / "alive")  # readers see its end when no process has it open to write
    script = tmp_path / "c++"
    script.write_text(f"#!/bin/sh\nexec 3> '{tmp_path / 'alive'}'\n(echo started >&3; exec sleep 100) & wait\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with compiled(read_tail(present(head("yolo26-nhw.dyn").tail).data)), (tmp_path / "alive").open("rb") as alive:
        assert alive.readline() == b"started\n"
        ended = os.dup(alive.fileno())
    with os.fdopen(ended, "rb") as alive:
        assert select.select([alive], [], [], 10)[0]
        assert alive.read() == b""


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler() -> None:
    report = head("yolo26-nhw.dyn").verify()
    assert report.ok
    assert any("there is no C++ compiler" in note for note in report.notes)


@pytest.mark.usefixtures("without_compiler")
def test_last_bits_may_decide_about_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's functions may have other last bits than ONNX Runtime's."""
    graph = "(float[8] x) => (float[8] z, float[1, n] y) <float three = {3}> { z = Relu(x) i = NonZero(x)"
    conversion = lower(parsed(f"{graph} f = Cast<to = 1>(i) q = Div(f, three) r = Mul(q, three) y = Floor(r) }}"))
    for name, factor, expected in (("Div", 1 - 2.0**-23, {"ok"}), ("Floor", 2, {"ok", "mismatch"})):
        op = TAIL_OPS[name]

        @wraps(op.function)
        def scaled(*operands: Any, op: Any = op, factor: float = factor) -> Any:
            return op.function(*operands) * np.float32(factor)

        monkeypatch.setitem(TAIL_OPS, name, replace(op, function=scaled))
        assert statuses(conversion) == expected
