"""Random nets of views, elementwise layers, matrix products and normalisations stay what they are."""

from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.ir.dim import AXES, known
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from testing.pass_cases import fill_weights
from tests.passes.test_random_nets import SETTINGS, check_outputs_stay

# All with 48 elements, so that any blob can take any of these forms.
_SHAPES = ((48,), (6, 8), (8, 6), (4, 12), (2, 24), (4, 2, 6), (2, 4, 6), (6, 1, 8), (1, 6, 8), (4, 3, 2, 2))
_UNARY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Sigmoid", {}),
    ("GELU", {}),
    ("BinaryOp", {"op_type": 2, "with_scalar": 1, "b": 0.5}),
    ("UnaryOp", {}),
)

Step = tuple[int, int, int]


def _named(sizes: tuple[int, ...]) -> dict[str, Any]:
    return dict(zip(AXES[len(sizes)], sizes, strict=True))


class Builder:
    """A net of random steps, each of which reads one or two of the blobs made so far."""

    def __init__(self) -> None:
        self.graph = Graph()
        source = Blob("x", _SHAPES[5])
        self.blobs = [source]
        self.graph.add(Layer("Input", "x", (), [source], {"w": 6, "h": 2, "c": 4}))

    def add(self, type: str, inputs: list[Blob], outputs: int = 1, **params: Any) -> None:
        number = len(self.graph)
        tops = [Blob(f"b{number}_{i}") for i in range(outputs)]
        layer = self.graph.add(Layer(type, f"l{number}", inputs, tops, params))
        assign_shapes(layer)
        self.blobs += tops

    def step(self, kind: int, pick: int, detail: int) -> None:
        x = self.blobs[-1 - pick % min(len(self.blobs), 4)]
        assert x.shape is not None
        shape = known(x.shape)
        rank = len(shape)
        if kind in (0, 1):
            self.add("Permute", [x], order_type=detail % factorial(rank))
        elif kind in (2, 3):
            fitting = [s for s in _SHAPES if np.prod(s) == np.prod(shape)] or [(int(np.prod(shape)),)]
            target = fitting[detail % len(fitting)]
            self.add("Reshape", [x], **_named(target))
        elif kind in (4, 5):
            type, params = _UNARY[detail % len(_UNARY)]
            self.add(type, [x], **params)
        elif kind in (6, 7):
            same = [b for b in self.blobs if b.shape == shape]
            self.add("BinaryOp", [x, same[detail % len(same)]], op_type=detail % 2 * 2)
        elif kind == 8 and 1 < rank < 4:
            self.add("LayerNorm", [x], affine_size=shape[-1], eps=1e-3, affine=detail % 2)
        elif kind == 9:
            self.add("Softmax", [x], axis=detail % rank, fixbug0=1)
        elif kind == 10 and rank == 2:
            out = (6, 8, 12)[detail % 3]
            sizes = {"constantN": out, "constantK": shape[1], "transB": 1, "constantB": 1}
            self.add("Gemm", [x], **sizes, constantC=1, constant_broadcast_type_C=4)
        elif kind == 11 and shape[detail % rank] % 2 == 0:
            self.add("Slice", [x], 2, slices=(-233, -233), axis=detail % rank)
        elif kind == 12:
            same = [b for b in self.blobs if b.shape == shape]
            self.add("Concat", [x, same[detail % len(same)]], axis=detail % rank)
        elif kind == 13 and rank in (2, 3):
            self.constant(x, detail)
        elif kind == 14 and rank == 3:
            others = [b for b in self.blobs if b.shape == shape]
            k, v = others[detail % len(others)], others[detail // 3 % len(others)]
            self.add("MatMul", [x, k], transB=1)
            self.add("Softmax", [self.blobs[-1]], axis=2, fixbug0=1)
            self.add("MatMul", [self.blobs[-1], v])

    def constant(self, x: Blob, detail: int) -> None:
        """A sum or product with a constant, which broadcasts along some axes."""
        assert x.shape is not None
        sizes = tuple(size if detail >> i & 1 else 1 for i, size in enumerate(known(x.shape)))
        self.add("MemoryData", [], **_named(sizes))
        self.add("BinaryOp", [x, self.blobs.pop()], op_type=detail % 2 * 2)

    def build(self, steps: list[Step], outputs: list[int]) -> Graph:
        for step in steps:
            self.step(*step)
        made = self.blobs[1:]
        unused = [blob for blob in made if not blob.uses]
        self.graph.outputs = dict.fromkeys([*(made[i % len(made)] for i in outputs if made), *unused])
        fill_weights(self.graph)
        for layer in self.graph:
            for name in layer.weights:
                layer.weights[name] = layer.weights[name] * np.float32(0.3)
        return self.graph


_numbers = st.integers(0, 23)


@settings(SETTINGS, max_examples=150)
@given(
    steps=st.lists(st.tuples(st.integers(0, 14), _numbers, _numbers), min_size=2, max_size=16),
    outputs=st.lists(_numbers, max_size=2),
)
def test_outputs_stay(steps: list[Step], outputs: list[int], tmp_path: Path, worker: NcnnWorker) -> None:
    check_outputs_stay(lambda: Builder().build(steps, outputs), tmp_path, worker)
