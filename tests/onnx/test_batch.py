"""The axis of the batch: followed from the operators that have one up to the inputs."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as state  # type: ignore[import-untyped]

from onnx2ncnn_opt.onnx.batch import batch_axes
from onnx2ncnn_opt.onnx.ops import all_ops, find
from onnx2ncnn_opt.onnx.read.load import load_model
from onnx2ncnn_opt.onnx.registry import OnnxOp
from testing.models import parsed

SHAPE = (2, 3, 4, 5)
PLACES = ((0, 0, 0, 0), (1, 2, 3, 4), (0, 2, 1, 3))
TYPES = (TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64, TensorProto.UINT8)
ATTRIBUTES: dict[str, dict[str, Any]] = {"Cast": {"to": TensorProto.FLOAT}, "BitShift": {"direction": "LEFT"}}
# What ONNX Runtime raises where it does not take a model or its inputs.
ERRORS = (state.Fail, state.InvalidArgument, state.InvalidGraph, state.NotImplemented, state.RuntimeException)
VIEWS = ("Reshape", "Squeeze", "Flatten", "Unsqueeze", "Transpose")  # these are followed as they are
NEWEST = 24  # of what ONNX Runtime knows


def numbers(dtype: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == TensorProto.FLOAT:
        return rng.uniform(0.1, 0.9, SHAPE).astype(np.float32)
    return rng.integers(0, 2 if dtype == TensorProto.BOOL else 5, SHAPE).astype(helper.tensor_dtype_to_np_dtype(dtype))


def sessions(op: OnnxOp) -> Iterator[tuple[onnxruntime.InferenceSession, Sequence[int]]]:
    """The operator with inputs of one shape, of every count and type that ONNX Runtime takes."""
    opset = next((n for n in range(max(op.since, 7), NEWEST + 1) if find(op.domain, op.name, n) == op), None)
    if op.domain:
        opset = NEWEST
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for count in (1, 2, 3) if opset else ():
        kinds: Any = [[dtype] * count for dtype in TYPES]
        if count == 3:
            kinds = [*kinds, (TensorProto.BOOL, TensorProto.FLOAT, TensorProto.FLOAT)]
        for types in kinds:
            names = [f"x{n}" for n in range(count)]
            node = helper.make_node(op.name, names, ["y"], domain=op.domain, **ATTRIBUTES.get(op.name, {}))
            graph = helper.make_graph(
                [node],
                "g",
                [helper.make_tensor_value_info(n, t, SHAPE) for n, t in zip(names, types, strict=True)],
                [onnx.ValueInfoProto(name="y")],
            )
            opsets = [helper.make_opsetid("", opset or 1), helper.make_opsetid("com.microsoft", 1)]
            model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
            try:
                yield onnxruntime.InferenceSession(model.SerializeToString(), options), types
            except ERRORS:
                continue


def is_elementwise(op: OnnxOp) -> bool:
    """Return True if each result of the operator depends on the numbers at its place, and on no others."""
    for session, types in sessions(op):
        plain = [numbers(dtype, seed) for seed, dtype in enumerate(types)]
        try:
            (right,) = run(session, plain)
            if right.shape != SHAPE:
                continue
            for place in PLACES:
                others = [numbers(dtype, seed + 10) for seed, dtype in enumerate(types)]
                for array, kept in zip(others, plain, strict=True):
                    array[place] = kept[place]
                (found,) = run(session, others)
                if found.shape != SHAPE or found[place] != right[place]:
                    break
            else:
                return True
        except ERRORS:
            continue
    return False


def run(session: onnxruntime.InferenceSession, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    results = session.run(None, {f"x{n}": array for n, array in enumerate(arrays)})
    return [np.asarray(result) for result in results]


def test_elementwise_operators_keep_the_batch() -> None:
    found = {(op.domain, op.name, op.since): op for op in all_ops() if is_elementwise(op)}
    assert len(found) > 60
    assert {op.name for op in found.values() if op.traits.axes is None and op.batch != 0} <= {*VIEWS}


FIRST = "a = Constant<value_ints = [0]>()"


@pytest.mark.parametrize(
    ("inputs", "nodes", "expected"),
    [
        ("float[2,3,8,8] x", "t = Celu(x)", {"x": 0}),
        ("float[2,3,8,8] x", "t = Sin(x)", {"x": 0}),
        ("float[2,3,8,8] x, float[2,3,8,8] z", "g = Greater(x, z) t = Where(g, x, z)", {"x": 0, "z": 0}),
        ("float[2,3,8,8] x, float[3,8,8] z", "t = Add(x, z)", {"x": 0}),
        ("float[2,3,8,8] x, float[8,8] z", "t = Mul(z, x)", {"x": 0}),
        ("float[2,3,64] x", "s = Constant<value_ints = [2, 3, 8, 8]>() t = Reshape(x, s)", {"x": 0}),
        ("float[N,3,64] x", "s = Constant<value_ints = [0, 3, 8, 8]>() t = Reshape(x, s)", {"x": 0}),
        ("float[2,3,64] x", "s = Constant<value_ints = [2, -1, 8, 8]>() t = Reshape(x, s)", {"x": 0}),
        ("float[6,64] x", "s = Constant<value_ints = [2, 3, 8, 8]>() t = Reshape(x, s)", {}),
        ("float[2,8,8] x", "a = Constant<value_ints = [1]>() t = Unsqueeze(x, a)", {"x": 0}),
        ("float[8,2,8] x", f"{FIRST} u = Unsqueeze(x, a) t = Transpose<perm=[2,0,1,3]>(u)", {"x": 1}),
        ("float[2,8,8] x", f"{FIRST} t = Unsqueeze(x, a)", {}),
        ("float[1,2,3,8,8] x", f"{FIRST} t = Squeeze(x, a)", {"x": 1}),
        ("float[2,1,3,8,8] x", "a = Constant<value_ints = [-4]>() t = Squeeze(x, a)", {"x": 0}),
    ],
)
def test_the_axis_at_the_inputs(inputs: str, nodes: str, expected: dict[str, int]) -> None:
    text = f"({inputs}) => (float[] y) <float[1,1,1,1] w = {{1}}> {{ {nodes} y = Conv(t, w) }}"
    assert batch_axes(load_model(parsed(text, 19).SerializeToString())) == expected


def test_flatten_keeps_the_batch() -> None:
    text = (
        "(float[2,3,8] x) => (float[] y) <int64[3] s = {2, 1, 24}, float[1,1,1] w = {1}> "
        "{ f = Flatten(x) r = Reshape(f, s) y = Conv(r, w) }"
    )
    assert batch_axes(load_model(onnx.shape_inference.infer_shapes(parsed(text, 19)).SerializeToString())) == {"x": 0}
