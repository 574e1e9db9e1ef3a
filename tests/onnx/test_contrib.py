"""com.microsoft's operators, also as ONNX Runtime's own optimiser writes them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import pytest
from onnx import helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from testing.compared import compare, compare_nodes, model_of

REL = 3e-5


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def node(operator: str, inputs: list[str], outputs: Any = ("y",), **attributes: Any) -> Any:
    return helper.make_node(operator, inputs, list(outputs), domain="com.microsoft", **attributes)


@pytest.mark.parametrize(
    ("made", "bias"),
    [
        (node("Gelu", ["x"]), False),
        (node("FastGelu", ["x"]), False),
        (node("FastGelu", ["x", "b"]), True),
        (node("BiasGelu", ["x", "b"]), True),
        (node("QuickGelu", ["x"]), False),
        (node("QuickGelu", ["x"], alpha=0.7), False),
    ],
)
@pytest.mark.parametrize("shape", [(1, 5, 8), (2, 5, 8), (3, 8)])
def test_gelu(made: Any, bias: bool, shape: tuple[int, ...]) -> None:
    compare_nodes(made, {"x": normal(0, *shape)}, {"b": normal(1, 8)} if bias else {})


@pytest.mark.parametrize("kind", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("constant", [False, True])
def test_skip_norms(kind: str, biased: bool, batch: int, constant: bool) -> None:
    inputs = {"x": normal(0, batch, 5, 8), "s": normal(1, batch, 5, 8)}
    constants = {"g": normal(2, 8)}
    names = ["x", "s", "g"]
    if kind == "SkipLayerNormalization":
        constants["beta"] = normal(3, 8)
        names.append("beta")
    if biased:
        constants["b"] = normal(4, 8)
        names.append("b")
    if constant:
        constants["s"] = inputs.pop("s")
    made = node(kind, names, ("y", "", "", "sum"), epsilon=1e-5)
    compare_nodes(made, inputs, constants, outputs=("y", "sum"), rel=REL)


@pytest.mark.parametrize(
    ("kind", "opset"),
    [("SimplifiedLayerNormalization", 11), ("SimplifiedLayerNormalization", 23), ("LayerNormalization", 11)],
)
@pytest.mark.parametrize(("attributes", "shape"), [({}, (8,)), ({"axis": 1, "epsilon": 1e-3}, (5, 8))])
def test_norms_in_the_domain_of_onnx(kind: str, opset: int, attributes: Any, shape: tuple[int, ...]) -> None:
    made = helper.make_node(kind, ["x", "g"], ["y"], **attributes)
    compare_nodes(made, {"x": normal(0, 2, 5, 8)}, {"g": normal(1, *shape)}, rel=REL, opset=opset)


def quantised_lstm(directions: int, columns: int, steps: int, kind: Any = np.int8) -> tuple[Any, Any, Any]:
    """A node, its input and its constants."""
    rng, size = np.random.default_rng(3), (directions, columns)
    zero = 100 if kind == np.uint8 else 0
    constants = {
        "w": (rng.integers(-60, 61, (directions, 5, 16)) + zero).astype(kind),
        "r": (rng.integers(-60, 61, (directions, 4, 16)) + zero).astype(kind),
        "b": rng.standard_normal((directions, 32)).astype(np.float32),
        **{name: rng.uniform(0.005, 0.01, size).astype(np.float32) for name in ("ws", "rs")},
        **{name: np.full(size, zero, kind) for name in ("wz", "rz")},
    }
    if columns == 1:
        constants |= {name: constants[name].reshape(-1) for name in ("ws", "rs", "wz", "rz")}
    x = rng.standard_normal((steps, 2, 5)).astype(np.float32)
    names = ["x", "w", "r", "b", "", "", "", "", "ws", "wz", "rs", "rz"]
    direction = "forward" if directions == 1 else "bidirectional"
    return node("DynamicQuantizeLSTM", names, hidden_size=4, direction=direction), x, constants


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("columns", [1, 16])
@pytest.mark.parametrize("directions", [1, 2])
def test_quantised_lstm(directions: int, columns: int, kind: Any) -> None:
    made, x, constants = quantised_lstm(directions, columns, 1, kind)
    compare_nodes(made, {"x": x}, constants)


def test_quantised_lstm_of_steps() -> None:
    made, x, constants = quantised_lstm(2, 16, 5)
    outputs = lower(model_of([made], {"x": x}, constants)).verify().outputs
    assert [output.status for output in outputs] == ["ok"]


ACTIVATIONS: list[tuple[str, list[float]]] = [
    ("Relu", []),
    ("Sigmoid", []),
    ("Tanh", []),
    ("LeakyRelu", [0.2]),
    ("Clip", [-0.3, 0.8]),
    ("HardSigmoid", [0.3, 0.4]),
]


@pytest.mark.parametrize(("activation", "params"), ACTIVATIONS)
@pytest.mark.parametrize("added", [False, True])
def test_fused_conv(activation: str, params: list[float], added: bool) -> None:
    inputs = {"x": normal(0, 2, 3, 7, 6)}
    if added:
        inputs["z"] = normal(1, 2, 4, 7, 6)
    names = ["x", "w", "b"] + (["z"] if added else [])
    attributes = {"activation_params": params} if params else {}
    made = node("FusedConv", names, activation=activation, pads=[1, 1, 1, 1], kernel_shape=[3, 3], **attributes)
    compare_nodes(made, inputs, {"w": normal(2, 4, 3, 3, 3), "b": normal(3, 4)}, rel=REL)


@pytest.mark.parametrize("activation", ["Clip", "HardSigmoid"])
def test_fused_conv_without_its_parameters(activation: str) -> None:
    made = node("FusedConv", ["x", "w"], activation=activation)
    with pytest.raises(UnsupportedError, match=f"activation {activation} with 0 parameters, not 2"):
        lower(model_of([made], {"x": normal(0, 1, 3, 7, 6)}, {"w": normal(1, 4, 3, 3, 3)}))


@pytest.mark.parametrize(("turn_a", "turn_b", "alpha"), list(itertools.product((0, 1), (0, 1), (1.0, 0.25))))
@pytest.mark.parametrize("constant", [False, True])
def test_fused_matmul(turn_a: int, turn_b: int, alpha: float, constant: bool) -> None:
    a = normal(0, 2, 3, *((5, 4) if turn_a else (4, 5)))
    b = normal(1, *((6, 5) if turn_b else (5, 6)))
    made = node("FusedMatMul", ["a", "b"], transA=turn_a, transB=turn_b, alpha=alpha)
    inputs, constants = ({"a": a}, {"b": b}) if constant else ({"a": a, "b": b}, {})
    compare_nodes(made, inputs, constants, rel=REL)


@pytest.mark.parametrize("activation", ["Relu", "Sigmoid", "LeakyRelu"])
def test_fused_gemm(activation: str) -> None:
    attributes = {"activation_alpha": 0.1} if activation == "LeakyRelu" else {}
    made = node("FusedGemm", ["a", "b", "c"], activation=activation, alpha=0.5, beta=2.0, transB=1, **attributes)
    compare_nodes(made, {"a": normal(0, 3, 5)}, {"b": normal(1, 4, 5), "c": normal(2, 4)}, rel=REL)


ATTENTION = list(itertools.product((1, 2), (False, True), (False, True), (0, 1), (0.0, 0.2)))


@pytest.mark.parametrize(("batch", "biased", "masked", "causal", "scale"), ATTENTION)
def test_multi_head_attention(batch: int, biased: bool, masked: bool, causal: int, scale: float) -> None:
    inputs = {"q": normal(0, batch, 6, 12), "k": normal(1, batch, 6, 12), "v": normal(2, batch, 6, 12)}
    constants = {}
    if biased:
        constants["b"] = normal(3, 36)
    if masked:
        inputs["m"] = normal(4, 1, 1, 6, 6)
    names = ["q", "k", "v", "b" if biased else "", "", "m" if masked else ""]
    made = node("MultiHeadAttention", names, num_heads=3, unidirectional=causal, scale=scale)
    compare_nodes(made, inputs, constants, rel=REL)


@pytest.mark.parametrize(("batch", "count", "masked"), list(itertools.product((1, 2), (2, 3), (False, True))))
def test_packed_operands(batch: int, count: int, masked: bool) -> None:
    """ONNX Runtime takes them on GPUs only: the reference has them apart."""
    inputs = {"p": normal(0, batch, 6, 3, count, 4)}
    if count == 2:
        inputs["q"] = normal(1, batch, 5, 12)
    if masked:
        inputs["m"] = normal(2, 1, 1, 6 if count == 3 else 5, 6)
    parts, extra = ["q", "k", "v"], ["", "", "m"] if masked else []
    made = node("MultiHeadAttention", [*(["p", "", ""] if count == 3 else ["q", "p", ""]), *extra], num_heads=3)
    apart = [helper.make_node("Split", ["p"], [f"{part}5" for part in parts[3 - count :]], axis=3)]
    apart += [helper.make_node("Reshape", [f"{part}5", "rows"], [part]) for part in parts[3 - count :]]
    plain = node("MultiHeadAttention", [*parts, *extra], num_heads=3)
    reference = model_of([*apart, plain], inputs, {"rows": np.array([0, 0, 12])})
    compare(model_of([made], inputs), inputs, rel=REL, reference=reference)


@pytest.mark.parametrize(("batch", "causal", "sizes"), list(itertools.product((1, 2), (0, 1), ((), (12, 12, 6)))))
def test_attention(batch: int, causal: int, sizes: tuple[int, ...]) -> None:
    attributes = {"qkv_hidden_sizes": sizes} if sizes else {}
    total = sum(sizes) or 36
    made = node("Attention", ["x", "w", "b"], num_heads=3, unidirectional=causal, **attributes)
    compare_nodes(made, {"x": normal(0, batch, 5, 10)}, {"w": normal(1, 10, total), "b": normal(2, total)}, rel=REL)


# Each item's length, keys for each item, and keys for each query; no query is left without any.
MASKS: dict[str, Any] = {
    "lengths": np.array([3, 6], np.int32),
    "keys": np.array([[1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0]], np.int32),
    "pairs": np.tril(np.ones((2, 6, 6), np.int32)),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("constant", "causal", "past"), list(itertools.product((False, True), (0, 1), (0, 2))))
def test_masked_keys(kind: str, constant: bool, causal: int, past: int) -> None:
    mask = (
        MASKS[kind] + past
        if kind == "lengths"
        else np.pad(MASKS[kind], [(0, 0)] * (MASKS[kind].ndim - 1) + [(past, 0)], constant_values=1)
    )
    inputs = {"q": normal(0, 2, 6, 12), "k": normal(1, 2, 6, 12), "v": normal(2, 2, 6, 12)}
    names, outputs = ["q", "k", "v", "", "m"], ["y"]
    if past:
        inputs |= {"pk": normal(3, 2, 3, past, 4), "pv": normal(4, 2, 3, past, 4)}
        names, outputs = [*names, "", "pk", "pv"], ["y", "nk", "nv"]
    made = node("MultiHeadAttention", names, outputs, num_heads=3, unidirectional=causal)
    constants = {"m": mask} if constant else {}
    inputs = inputs if constant else {**inputs, "m": mask}
    compare_nodes(made, inputs, constants, rel=REL, outputs=outputs)


@pytest.mark.parametrize(("causal", "kind"), [(0, "keys"), (1, "keys"), (0, ""), (1, "")])
def test_attention_with_a_past(causal: int, kind: str) -> None:
    inputs = {"x": normal(0, 1, 6, 10), "p": normal(3, 2, 1, 3, 2, 4)}
    constants = {"w": normal(1, 10, 36), "b": normal(2, 36)}
    if kind:
        constants["m"] = np.pad(MASKS[kind][:1], [(0, 0), (2, 0)], constant_values=1)
    made = node("Attention", ["x", "w", "b", "m" if kind else "", "p"], ["y", "n"], num_heads=3, unidirectional=causal)
    compare_nodes(made, inputs, constants, rel=REL, outputs=["y", "n"])


GROUPS = list(itertools.product((1, 2), (0, 3), (False, True), ({}, {"local_window_size": 2}, {"softcap": 2.0})))


def group_query(
    shared: int, past: int, packed: bool, lengths: int, **attributes: Any
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    batch, heads, size, length = 2, 4, 16, 1 if past else 5
    kept = heads // shared
    if packed:
        inputs = {"q": normal(0, batch, length, (heads + 2 * kept) * size)}
    else:
        counts = zip("qkv", (heads, kept, kept), strict=True)
        inputs = {name: normal(i, batch, length, count * size) for i, (name, count) in enumerate(counts)}
    names = ["q", "", ""] if packed else ["q", "k", "v"]
    if past:
        inputs |= {name: normal(i, batch, kept, past, size) for i, name in enumerate(("pk", "pv"), 3)}
    names += [*(("pk", "pv") if past else ("", "")), "s", "t", "cos", "sin"]
    total = past + length
    constants = {
        "s": np.full(batch, lengths or total - 1, np.int32),
        "t": np.array([total], np.int32),
        "cos": normal(5, 20, size // 2),
        "sin": normal(6, 20, size // 2),
    }
    sizes = {"num_heads": heads, "kv_num_heads": kept, "do_rotary": 1, **attributes}
    return node("GroupQueryAttention", names, ("y", "nk", "nv"), **sizes), inputs, constants


@pytest.mark.parametrize(("shared", "past", "packed", "attributes"), GROUPS)
def test_group_query_attention(shared: int, past: int, packed: bool, attributes: dict[str, Any]) -> None:
    made, inputs, constants = group_query(shared, past, packed, 0, **attributes)
    compare_nodes(made, inputs, constants, rel=REL, outputs=made.output)


def counted(mask: list[str]) -> list[Any]:
    """Lengths as exporters count them in a mask."""
    return [
        helper.make_node("ReduceSum", [*mask, "one"], ["sum"], keepdims=0),
        helper.make_node("Sub", ["sum", "one"], ["last"]),
        helper.make_node("Cast", ["last"], ["s"], to=onnx.TensorProto.INT32),
        helper.make_node("Shape", mask, ["sizes"]),
        helper.make_node("Gather", ["sizes", "one"], ["size"]),
        helper.make_node("Cast", ["size"], ["t"], to=onnx.TensorProto.INT32),
    ]


def test_lengths_counted_in_a_mask() -> None:
    """ONNX Runtime does not take sizes that it knows, casted: the reference has numbers."""
    made, inputs, constants = group_query(2, 3, False, 0)
    reference = model_of([made], inputs, constants, outputs=made.output)
    constants |= {"mask": np.ones((2, 4), np.int64), "one": np.array([1])}
    del constants["s"], constants["t"]
    model = model_of([*counted(["mask"]), made], inputs, constants, outputs=made.output)
    compare(model, inputs, rel=REL, reference=reference)


def test_lengths_counted_in_a_mask_of_a_dynamic_batch() -> None:
    made, inputs, constants = group_query(2, 0, False, 0)
    constants |= {"one": np.array([1]), "zero": np.array([0]), "length": np.array([5])}
    del constants["s"], constants["t"]
    ones = [
        helper.make_node("Shape", ["q"], ["all"]),
        helper.make_node("Gather", ["all", "zero"], ["batch"]),
        helper.make_node("Concat", ["batch", "length"], ["wanted"], axis=0),
        helper.make_node("ConstantOfShape", ["wanted"], ["mask"], value=helper.make_tensor("v", 7, [1], [1])),
    ]
    model = model_of([*ones, *counted(["mask"]), made], inputs, constants, outputs=made.output)
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    compare(model, inputs, rel=REL)


def test_lengths_counted_when_the_model_runs() -> None:
    made, inputs, constants = group_query(2, 3, False, 0)
    constants["one"] = np.array([1])
    del constants["s"], constants["t"]
    inputs["mask"] = np.ones((2, 4), np.int64)
    with pytest.raises(UnsupportedError) as error:
        lower(model_of([*counted(["mask"]), made], inputs, constants))
    assert "the number of keys of each item is known only at run time" in str(error.value)
    assert "ones for all 4 keys" in str(error.value)


@pytest.mark.parametrize(
    ("lengths", "attributes", "reason"),
    [
        (3, {}, "items of other lengths than 5"),
        (0, {"local_window_size": 0}, "a window of no keys"),
        (0, {"smooth_softmax": 1}, "attribute smooth_softmax is not known"),
    ],
)
def test_group_query_attention_refused(lengths: int, attributes: dict[str, Any], reason: str) -> None:
    made, inputs, constants = group_query(2, 0, False, lengths, **attributes)
    with pytest.raises(UnsupportedError, match=reason):
        lower(model_of([made], inputs, constants))


def test_keys_of_others_are_not_looked_back_at() -> None:
    """ONNX Runtime hides keys from all queries but the last, which sees all of them."""
    inputs = {"q": normal(0, 1, 4, 12), "k": normal(1, 1, 6, 12), "v": normal(2, 1, 6, 12)}
    made = node("MultiHeadAttention", ["q", "k", "v"], num_heads=3, unidirectional=1)
    with pytest.raises(UnsupportedError, match="not those of its queries"):
        lower(model_of([made], inputs))


@pytest.mark.parametrize(
    ("interleaved", "flat", "first"), list(itertools.product((0, 1), (False, True), (False, True)))
)
def test_rotary_embedding(interleaved: int, flat: bool, first: bool) -> None:
    x = normal(0, 2, 5, 24) if flat else normal(0, 2, 3, 5, 8)
    ids = np.array([2]) if first else np.random.default_rng(1).integers(0, 10, (2, 5))
    made = node("RotaryEmbedding", ["x", "ids", "cos", "sin"], interleaved=interleaved)
    compare_nodes(made, {"x": x}, {"ids": ids, "cos": normal(2, 10, 4), "sin": normal(3, 10, 4)})


def test_what_onnx_runtime_writes(tmp_path: Path) -> None:
    """A block of a transformer, and a convolution, with every fusion of ONNX Runtime for the CPU."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Add", ["h", "b1"], ["hb"]),
        helper.make_node("Div", ["hb", "root"], ["d"]),
        helper.make_node("Erf", ["d"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["e1"]),
        helper.make_node("Mul", ["hb", "e1"], ["m"]),
        helper.make_node("Mul", ["m", "half"], ["g"]),
        helper.make_node("MatMul", ["g", "w2"], ["o"]),
        helper.make_node("Add", ["o", "x"], ["s"]),
        helper.make_node("LayerNormalization", ["s", "gamma", "beta"], ["n"]),
        helper.make_node("Transpose", ["n"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["n", "t"], ["y"]),
        helper.make_node("Conv", ["i", "k", "kb"], ["c"]),
        helper.make_node("Relu", ["c"], ["z"]),
    ]
    inputs = {"x": normal(0, 1, 5, 8), "i": normal(1, 1, 3, 6, 6)}
    constants = {
        "root": np.float32(np.sqrt(2)),
        "one": np.float32(1),
        "half": np.float32(0.5),
        "w1": normal(2, 8, 16),
        "b1": normal(3, 16),
        "w2": normal(4, 16, 8),
        "gamma": normal(5, 8),
        "beta": normal(6, 8),
        "k": normal(7, 4, 3, 3, 3),
        "kb": normal(8, 4),
    }
    model = model_of(nodes, inputs, constants, opset=17, outputs=("y", "z"))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(tmp_path / "optimised.onnx")
    written = {node.op_type for node in optimised.graph.node if node.domain == "com.microsoft"}
    assert {"Gelu", "FusedConv", "FusedMatMul", "SkipLayerNormalization"} == written
    compare(optimised, inputs, rel=REL, reference=model)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (node("SkipSimplifiedLayerNormalization", ["x", "x", "g"], ("y", "mean")), "mean or deviation is used"),
        (node("MultiHeadAttention", ["x"], num_heads=2), "3 operands packed in one of shape [1, 4, 8]"),
        (node("MultiHeadAttention", ["x", "x"], num_heads=2), "2 operands packed in one of shape [1, 4, 8]"),
        (node("MultiHeadAttention", ["x", "", "x"], num_heads=2), "3 operands packed in one of shape [1, 4, 8]"),
        (node("MultiHeadAttention", ["packed", "", "", "g"], num_heads=2), "a bias on keys that are split into heads"),
        (node("MultiHeadAttention", ["x", "x", "x", "", "g"], num_heads=2), "a mask of shape [8]"),
        (node("FusedMatMul", ["x", "x"], transBatchA=1), "transBatchA"),
        (node("Attention", ["x", "w", "", "g"], num_heads=2), "a mask of shape [8]"),
        (node("Attention", ["x", "w"], num_heads=2, do_rotary=1), "rotary embeddings"),
        (node("NoSuchOperator", ["x"]), "ncnn has no equivalent of this operator"),
    ],
)
def test_refused(made: Any, reason: str) -> None:
    constants = {"g": normal(0, 8), "w": normal(0, 8, 24), "packed": normal(0, 1, 4, 2, 3, 4)}
    used = {name: array for name, array in constants.items() if name in made.input}
    with pytest.raises(UnsupportedError) as error:
        lower(model_of([made], {"x": normal(0, 1, 4, 8)}, used, outputs=[name for name in made.output if name]))
    assert reason in str(error.value)
