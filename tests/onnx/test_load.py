"""Loading: sources, constants, functions, opsets and structure."""

import hashlib
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir
import pytest
from onnx import TensorProto, helper

from onnx2ncnn_opt.errors import ModelError, UsageError
from onnx2ncnn_opt.ir.dim import symbol
from onnx2ncnn_opt.onnx.read.load import load_model
from testing.models import parsed, serialized

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3, 1, 1)

SMALL = """<ir_version: 10, opset_import: ["": 18], producer_name: "pytorch", producer_version: "2.13">
net (float[N,3,8,8] x) => (float[N,4,8,8] y) { c = Conv(x, w)  y = Relu(c)  unused = Sigmoid(c) }"""

CALLS = """<ir_version: 10, opset_import: ["": 18, "local": 1]>
net (float[N,3,8,8] x, float[N,3,8,8] other) => (float[N,4,8,8] y, float z) {
  c = Conv(x, w)
  y = local.twice(c)
  ones = Constant<value = float[2] {1.0, 1.0}>()
  true = Constant<value = bool {1}>()
  z = If(true) <then_branch = a () => (float za) { za = ReduceSum<keepdims = 0>(ones) },
                else_branch = b () => (float zb) { zb = ReduceMax<keepdims = 0>(y) }>
}
<domain: "local", opset_import: ["": 18]>
leaky<slope>(a) => (r) { r = LeakyRelu<alpha: float = @slope>(a) }
<domain: "local", opset_import: ["": 18, "local": 1]>
twice(a) => (r) { b = local.leaky<slope = 0.5>(a)  r = local.leaky<slope = 0.25>(b) }
"""


def parse(text: str) -> onnx.ModelProto:
    """A model from ONNX's text form, with the initializer w."""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "w"))
    return model


def write(folder: Path, model: onnx.ModelProto) -> Path:
    fresh = folder / "model.new"  # a model that is loaded has its file mapped: reading one that got shorter is SIGBUS
    fresh.write_bytes(model.SerializeToString())
    return fresh.replace(folder / "model.onnx")


def arrays(*graphs: onnx_ir.Graph) -> list[np.ndarray]:
    """All initializers."""
    tensors = [value.const_value for graph in graphs for value in graph.initializers.values()]
    return [tensor.numpy() for tensor in tensors if tensor is not None]


class TestSources:
    @pytest.mark.parametrize("kind", ["path", "str", "bytes", "bytearray", "proto", "ir", "program", "old program"])
    def test_every_source_gives_the_same_graph(self, kind: str, tmp_path: Path) -> None:
        model = parse(CALLS)
        path = write(tmp_path, model)
        data = path.read_bytes()
        sources: dict[str, object] = {
            "path": path,
            "str": str(path),
            "bytes": data,
            "bytearray": bytearray(data),
            "proto": model,
            "ir": onnx_ir.load(path),
            "program": SimpleNamespace(model=onnx_ir.load(path)),
            "old program": SimpleNamespace(model_proto=model),
        }
        loaded = load_model(sources[kind])
        assert [node.op_type for node in loaded.graph] == ["Conv", "LeakyRelu", "LeakyRelu", "If"]
        slopes = [node.attributes["alpha"].as_float() for node in loaded.graph if node.op_type == "LeakyRelu"]
        assert slopes == [0.5, 0.25]
        np.testing.assert_array_equal(loaded.initializer("w"), WEIGHT)
        assert [info.name for info in loaded.inputs] == ["x", "other"]
        assert loaded.inputs[0].shape == (symbol("N"), 3, 8, 8)
        assert loaded.inputs[0].dtype is onnx_ir.DataType.FLOAT
        assert [(info.name, info.shape) for info in loaded.outputs] == [("y", (symbol("N"), 4, 8, 8)), ("z", ())]
        assert loaded.opsets[""] == 18
        assert loaded.folder == (tmp_path if kind in ("path", "str") else None)
        assert loaded.name == ("model" if kind in ("path", "str") else "net")
        if kind not in ("ir", "program"):
            assert loaded.digest() == hashlib.sha256(data).hexdigest()

    def test_a_model_is_not_changed(self) -> None:
        proto = parse(CALLS)
        model = onnx_ir.from_proto(proto)
        load_model(proto, shapes={"x": (1, 3, 8, 8)})
        load_model(model, shapes={"x": (1, 3, 8, 8)})
        before = parse(CALLS)
        assert proto == before
        assert onnx_ir.to_proto(model) == onnx_ir.to_proto(onnx_ir.from_proto(before))

    def test_producer_and_relative_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path, parse(SMALL))
        monkeypatch.chdir(tmp_path)
        loaded = load_model("model.onnx")
        assert loaded.producer == "pytorch 2.13"
        assert loaded.folder == tmp_path

    @pytest.mark.parametrize("source", [None, 3, object(), SimpleNamespace(model=3)])
    def test_no_model(self, source: object) -> None:
        with pytest.raises(UsageError, match="is not a model"):
            load_model(source)


class TestConstants:
    @pytest.mark.parametrize(
        "array",
        [
            np.array([1.5, -2], np.float16),
            np.array([1.5, -2], np.float64),
            np.array([[1, 2]], np.int64),
            np.array([True, False]),
            np.array(3, np.int32),
            np.zeros((0, 4), np.float32),
            np.array([1.5, 3.140625], onnx_ir.DataType.BFLOAT16.numpy()),
            np.array([[-8, 7, 3]], onnx_ir.DataType.INT4.numpy()),
        ],
        ids=lambda array: str(array.dtype),
    )
    @pytest.mark.parametrize("where", ["raw", "typed", "external"])
    def test_element_types_are_kept(self, array: np.ndarray, where: str, tmp_path: Path) -> None:
        model = parse(SMALL)
        tensor = onnx_ir.to_proto(onnx_ir.Tensor(array, name="k"))
        if where == "typed":
            tensor = helper.make_tensor("k", tensor.data_type, array.shape, array.reshape(-1).astype(float).tolist())
        elif where == "external":
            (tmp_path / "k.bin").write_bytes(b"head" + tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="k.bin")
            tensor.external_data.add(key="offset", value="4")
        model.graph.initializer.append(tensor)
        model.graph.node.append(helper.make_node("Identity", ["k"], ["same"]))
        model.graph.output.append(helper.make_empty_tensor_value_info("same"))
        found = load_model(write(tmp_path, model)).initializer("k")
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        np.testing.assert_array_equal(found, array)

    def test_large_weights_of_the_file_are_mapped(self, tmp_path: Path) -> None:
        """An initializer, a Constant node, one in a branch, one of 4 bits, and one whose kind of data is said."""
        model = parse(CALLS)
        arrays = {name: np.random.default_rng(i).random((40, 60), np.float32) for i, name in enumerate("abc")}
        arrays["d"] = np.resize(np.arange(-8, 8), (100, 100)).astype(onnx_ir.DataType.INT4.numpy())
        tensors = {name: onnx_ir.to_proto(onnx_ir.Tensor(array, name=name)) for name, array in arrays.items()}
        tensors["a"].data_location = TensorProto.DEFAULT
        branch = model.graph.node[-1].attribute[0].g
        for name, nodes in (("b", model.graph.node), ("c", branch.node)):
            nodes.insert(0, helper.make_node("Constant", [], [name], value=tensors[name]))
        branch.node[-1].input[0] = "c"
        model.graph.initializer.extend([tensors["a"], tensors["d"]])
        for name in "abd":
            model.graph.node.append(helper.make_node("Identity", [name], [f"{name} again"]))
            model.graph.output.append(helper.make_empty_tensor_value_info(f"{name} again"))
        path = write(tmp_path, model)
        loaded = load_model(path)
        found = {**loaded.graph.initializers, **next(iter(loaded.graph.subgraphs())).initializers}
        for name, array in arrays.items():
            tensor = found[name].const_value
            assert tensor is not None
            np.testing.assert_array_equal(tensor.numpy(), array)
        base: Any = loaded.initializer("a")
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base, memoryview)
        assert isinstance(base.obj, mmap.mmap)
        broken = model.graph.initializer[-1].raw_data
        model.graph.initializer[-1].raw_data = broken[:-1]
        with pytest.raises(ModelError, match="'d' holds 4999 bytes, but its dims"):
            load_model(write(tmp_path, model))

    def test_constant_nodes_become_initializers(self) -> None:
        loaded = load_model(
            parse("""<ir_version: 10, opset_import: ["": 18]> net (float[2] x) => (float[2] y, float[2] kept) {
            a = Constant<value_floats = [1.0, 2.0]>()  b = Constant<value_int = 3>()
            kept = Constant<value_ints = [4]>()
            s = Slice(a, kept, kept, b)  y = Add(x, s) }""")
        )
        assert [node.op_type for node in loaded.graph] == ["Constant", "Slice", "Add"]
        np.testing.assert_array_equal(loaded.initializer("a"), np.array([1, 2], np.float32))
        assert loaded.initializer("b").dtype == np.int64
        assert loaded.initializer("b").shape == ()

    def test_an_input_with_an_initializer_is_a_constant(self) -> None:
        model = parse(SMALL)
        model.ir_version = 3
        model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, WEIGHT.shape))
        loaded = load_model(model)
        assert [info.name for info in loaded.inputs] == ["x"]
        np.testing.assert_array_equal(loaded.initializer("w"), WEIGHT)

    def test_unused_nodes_and_initializers_go(self) -> None:
        model = parse(SMALL)
        model.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "nobody's"))
        loaded = load_model(model)
        assert [node.op_type for node in loaded.graph] == ["Conv", "Relu"]
        assert list(loaded.graph.initializers) == ["w"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"raw_data": WEIGHT.tobytes()[:-4]}, r"'w' holds 44 bytes, but its dims \[4, 3, 1, 1\] need 48"),
            ({"raw_data": b""}, "'w' holds 0 bytes"),
            ({"dims": [2**40, 2**40]}, "impossible dims"),
            ({"dims": [-4, -3, 1, 1]}, "impossible dims"),
            ({"dims": [0, 2**62, 2**62]}, "need 0"),
            ({"dims": [2**20, 2**10]}, "need 4294967296"),
            ({"data_type": 0}, "UNDEFINED"),
            ({"data_type": 99}, "99"),
            ({"data_type": TensorProto.INT4, "dims": [2**20]}, "need 524288"),
            ({"raw_data": None}, "holds no data, but has dims"),
            ({"raw_data": None, "float_data": [1.0] * 11}, "holds other data than its dims"),
            ({"raw_data": None, "int64_data": [1] * 12}, "holds other data than its dims"),
            ({"raw_data": None, "int32_data": [1] * 5, "data_type": TensorProto.INT4}, "holds 5 bytes"),
        ],
    )
    def test_data_that_does_not_fit_its_dims(self, change: dict[str, Any], message: str) -> None:
        model = parse(SMALL)
        fields: dict[str, Any] = {
            "name": "w",
            "dims": WEIGHT.shape,
            "data_type": 1,
            "raw_data": WEIGHT.tobytes(),
            **change,
        }
        model.graph.initializer[0].CopyFrom(TensorProto(**fields))
        with pytest.raises(ModelError, match=message):
            load_model(model)


class TestFunctions:
    def test_recursion_is_refused(self) -> None:
        with pytest.raises(ModelError, match=r"call each other in a circle.*local::ping"):
            load_model(
                parse("""<ir_version: 10, opset_import: ["": 18, "local": 1]>
                net (float[2] x) => (float[2] y) { y = local.ping(x) }
                <domain: "local", opset_import: ["": 18, "local": 1]> ping(a) => (r) { r = local.pong(a) }
                <domain: "local", opset_import: ["": 18, "local": 1]> pong(a) => (r) { r = local.ping(a) }""")
            )

    def test_exponential_growth_is_refused_quickly(self) -> None:
        functions = "".join(
            f'<domain: "local", opset_import: ["": 18, "local": 1]> f{i}(a) => (r) '
            f"{{ b = local.f{i - 1}(a)  r = local.f{i - 1}(b) }}"
            for i in range(1, 41)
        )
        start = time.process_time()
        with pytest.raises(ModelError, match=f"expand to {2**40} nodes"):
            load_model(
                parse(f"""<ir_version: 10, opset_import: ["": 18, "local": 1]>
                net (float[2] x) => (float[2] y) {{ y = local.f40(x) }}
                <domain: "local", opset_import: ["": 18]> f0(a) => (r) {{ r = Relu(a) }} {functions}""")
            )
        assert time.process_time() - start < 5

    def test_shared_constants_of_a_function_are_read_once(self) -> None:
        model = parse(CALLS)
        model.functions[0].node.insert(0, helper.make_node("Constant", [], ["k"], value=model.graph.initializer[0]))
        model.functions[0].node.append(helper.make_node("Mul", ["q", "k"], ["r"]))
        model.functions[0].node[1].output[0] = "q"
        loaded = load_model(model)
        _, first, second = (array for array in arrays(loaded.graph) if array.shape == WEIGHT.shape)
        assert np.shares_memory(first, second)


class TestOpsets:
    @pytest.mark.parametrize("domain", ["", "ai.onnx"])
    @pytest.mark.parametrize("opset", [7, 17, onnx.defs.onnx_opset_version()])
    def test_known(self, opset: int, domain: str) -> None:
        model = parse(SMALL)
        model.opset_import[0].domain, model.opset_import[0].version = domain, opset
        assert load_model(model).opsets[""] == opset

    @pytest.mark.parametrize(
        ("opset", "hint"),
        [
            (1, "version_converter"),
            (6, "version_converter"),
            (onnx.defs.onnx_opset_version() + 1, "upgrade onnx"),
            (-5, ""),
        ],
    )
    def test_unknown(self, opset: int, hint: str) -> None:
        model = parse(SMALL)
        model.opset_import[0].version = opset
        with pytest.raises(ModelError, match=rf"uses opset {opset}\b.*{hint}"):
            load_model(model)

    @pytest.mark.parametrize(
        ("nodes", "hint"),
        [
            ("y = Relu(x)", r"or convert it: onnx\.version_converter\.convert_version\(model, 17\)"),
            ("y = LSTM<hidden_size = 2>(x, w, r)", "does not convert it: No Adapter From Version .6 for LSTM"),
            ("y = com.example.Div(x, x)", "does not convert it: .*No opset import for domain com.example"),
        ],
    )
    def test_a_hint_is_one_that_works(self, nodes: str, hint: str) -> None:
        model = parsed(f"(float[5, 1, 3] x, float[1, 8, 3] w, float[1, 8, 2] r) => (float y) {{ {nodes} }}", opset=6)
        with pytest.raises(ModelError, match=f"export it again with opset_version=17 or newer.*{hint}"):
            load_model(model.SerializeToString())

    def test_missing(self) -> None:
        model = parse(SMALL)
        model.ClearField("opset_import")
        with pytest.raises(ModelError, match="does not say which opset"):
            load_model(model)


IF = "c = Constant<value = bool {1}>() y = If(c)<then_branch = t () => (float[2] z) {"
ELSE = "}, else_branch = e () => (float[2] z) { z = Relu(x) }>"


class TestStructure:
    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("y = Relu(nowhere)", "Relu '.*' in the graph reads 'nowhere', which nothing produces"),
            ("a = Relu(x)", "output 'y' of the graph is produced by nothing"),
            ("y = Relu(x) y = Abs(x)", "'y' is redeclared"),
            ("x = Relu(x) y = Relu(x)", "'x' is redeclared"),
            ("a = Add(x, b) b = Relu(a) y = Relu(b)", "the graph has a cycle: .*Add.*Relu|Relu.*Add"),
            ("a = Relu(a) y = Relu(x)", "cycle"),
            (f"{IF} z = Relu(lost) {ELSE}", "Relu '.*' in a subgraph of If '.*' reads 'lost'"),
            (f"{IF} z = Relu(y) {ELSE}", "cycle"),
        ],
    )
    def test_broken_graphs(self, body: str, message: str) -> None:
        text = f'<ir_version: 10, opset_import: ["": 18]> net (float[2] x) => (float[2] y) {{ {body} }}'
        with pytest.raises(ModelError, match=message):
            load_model(onnx.parser.parse_model(text))

    def test_nodes_out_of_order_are_sorted(self) -> None:
        model = parse(SMALL)
        model.graph.node.reverse()
        assert [node.op_type for node in load_model(model).graph] == ["Conv", "Relu"]
        assert [node.op_type for node in load_model(onnx_ir.from_proto(model)).graph] == ["Conv", "Relu"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda m: setattr(m.graph.sparse_initializer.add().values, "name", "thin"), "'thin' is sparse"),
            (lambda m: m.graph.initializer.append(m.graph.initializer[0]), "2 initializers called 'w'"),
            (lambda m: m.graph.input.append(m.graph.input[0]), "2 inputs called 'x'"),
            (lambda m: setattr(m.graph.initializer[0], "name", ""), "an initializer without a name"),
            (lambda m: m.graph.node[3].attribute.append(m.graph.node[3].attribute[0]), "2 attributes called 'value'"),
            (lambda m: m.graph.ClearField("output"), "no outputs"),
            (lambda m: m.functions.append(m.functions[0]), "'local::leaky' is defined 2 times"),
            (lambda m: setattr(m.functions[0].opset_import[0], "version", 17), "cannot be inlined: Opset mismatch"),
            (lambda m: m.graph.node[1].input.append("x"), "cannot be inlined: Input mismatch"),
            (lambda m: m.opset_import.add(domain="ai.onnx", version=17), r"'ai\.onnx' 2 times"),
        ],
    )
    def test_content_the_reader_would_drop(self, change: Callable[[onnx.ModelProto], object], message: str) -> None:
        model = parse(CALLS)
        change(model)
        with pytest.raises(ModelError, match=message):
            load_model(model)

    def test_an_output_that_is_repeated(self) -> None:
        """As TorchScript writes it for a tensor that a model returns twice."""
        model = parse(SMALL)
        model.graph.output.append(model.graph.output[0])
        own = onnx_ir.from_proto(model)
        assert [[output.name for output in load_model(each).outputs] for each in (model, own)] == [["y"], ["y"]]
        assert len(own.graph.outputs) == 2

    def test_an_import_that_is_repeated(self) -> None:
        """As `onnx.utils.extract_model` has written it."""
        model = parse(SMALL)
        model.opset_import.add(domain="", version=18)
        assert load_model(model).opsets == {"": 18}

    def test_text_that_is_not_utf_8(self) -> None:
        data = parse(SMALL).SerializeToString().replace(b"Sigmoid", b"Sigm\xff\xfed")
        with pytest.raises(ModelError, match="not UTF-8"):
            load_model(data)

    def test_inputs_that_are_not_tensors(self) -> None:
        model = parse(SMALL)
        model.graph.input[0].type.sequence_type.elem_type.tensor_type.elem_type = 1
        with pytest.raises(ModelError, match=r"input 'x' is of type Sequence.*only tensors"):
            load_model(model)
        model.graph.input[0].ClearField("type")
        with pytest.raises(ModelError, match="input 'x' is of type unknown"):
            load_model(model)


@pytest.mark.parametrize(("parts", "batch"), [("x, y", "1"), ("x, x", "N"), ("x, y, y", "N")])
def test_only_a_cache_with_new_tokens_binds_the_batch(parts: str, batch: str) -> None:
    """Images that are one below the other once became a cache."""
    model = f"(float[N, 2, P, 4] x, float[N, 2, 1, 4] y) => (float[N, 2, Q, 4] z) {{ z = Concat<axis = 2>({parts}) }}"
    assert [str(info.shape[0]) for info in load_model(serialized(model, 20)).inputs] == [batch] * 2
