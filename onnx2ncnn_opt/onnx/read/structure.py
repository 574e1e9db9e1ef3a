"""Checks and normalisation of a graph: functions inlined, dead nodes removed, in topological order.

onnx.checker is not used: it serialises the whole model once more, and the importer checks every node's signature.
"""

import difflib
import graphlib
import logging
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import onnx
import onnx_ir
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx.shape_inference import InferenceError
from onnx_ir.passes import PreconditionError

from onnx2ncnn_opt.errors import ModelError, UsageError
from onnx2ncnn_opt.onnx.read.schema import schema_error
from onnx2ncnn_opt.progress import counted

OLDEST_OPSET = 7  # older operators broadcast by attribute
# Operators of ONNX Runtime in ONNX's own domain, and the first opset in which ONNX has them itself.
_RUNTIME_OPERATORS = {"SimplifiedLayerNormalization": 2**31, "LayerNormalization": 17}
OWN, SELECTION, ROWS = "onnx2ncnn_opt", "SelectBoxes", "SelectRows"  # NonMaxSuppression, which ncnn has as a layer
MOST_NODES = 1_000_000  # functions that call functions twice each grow exponentially

_GRAPHS = (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS)
_Key = TypeVar("_Key")
_CLASSICAL = "ai.onnx.ml"  # a domain of ONNX
_LEARNED = frozenset({"Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN"})
# Names that exporters write for "any size", in lower case.
_NO_NAMES = frozenset({"", "?", "*", "-1", "any", "nan", "none", "null", "unk", "unknown"})


def check_proto(proto: onnx.ModelProto) -> None:
    """Raise ModelError for parts that onnx_ir cannot read, or would drop or overwrite silently."""
    _check_text(proto)
    _check_learning(proto.graph.node)
    imports = {(opset.domain or "ai.onnx", opset.version) for opset in proto.opset_import}  # onnx.utils repeats them
    for domain, count in _repeated(domain for domain, _ in imports):
        raise ModelError(f"the model imports the opset of domain '{domain}' {count} times")
    for (domain, name, _), count in _repeated((f.domain, f.name, f.overload) for f in proto.functions):
        raise ModelError(f"function '{domain}::{name}' is defined {count} times")
    _check_graph_proto(proto.graph)
    for function in proto.functions:
        _check_nodes_proto(function.node)


def _check_learning(nodes: Iterable[onnx.NodeProto]) -> None:
    """Refuse models of trees, linear classifiers and the like without a neural network; onnx_ir cannot read maps."""
    classical = dict.fromkeys(node.op_type for node in nodes if node.domain == _CLASSICAL)
    others = {node.op_type for node in nodes if node.domain != _CLASSICAL}
    if classical and ("ZipMap" in classical or others.isdisjoint(_LEARNED)):
        raise ModelError(
            f"the model is classical machine learning ({', '.join(classical)}), which ncnn does not compute: run it in "
            "ONNX Runtime, or export the neural network alone"
        )


def _repeated(keys: Iterable[_Key]) -> Iterator[tuple[_Key, int]]:
    """Yield the keys that occur more than once, and their counts."""
    yield from ((key, count) for key, count in Counter(keys).items() if count > 1)


def _check_text(message: Message) -> None:
    """Refuse text that is not UTF-8: protobuf returns it as bytes."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            for text in value if field.is_repeated else (value,):
                if isinstance(text, bytes):
                    raise ModelError(f"a name or text of the model ({field.full_name}) is not UTF-8: {text[:80]!r}")
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                if not isinstance(inner, onnx.TensorProto):
                    _check_text(inner)
                elif isinstance(inner.name, bytes):  # ListFields would copy its data
                    raise ModelError(f"the name of a tensor is not UTF-8: {inner.name[:80]!r}")


def _check_graph_proto(graph: onnx.GraphProto) -> None:
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise ModelError(f"initializer '{name}' is sparse, which is not supported; store it as a dense tensor")
    for kind, items in (("input", graph.input), ("initializer", graph.initializer), ("output", graph.output)):
        if not all(item.name for item in items):
            raise ModelError(f"graph '{graph.name}' has an {kind} without a name")
        for name, count in _repeated(item.name for item in items) if kind != "output" else ():
            raise ModelError(f"graph '{graph.name}' has {count} {kind}s called '{name}'")
    for tensor in graph.initializer:
        _check_external(tensor, f"tensor '{tensor.name}'")
    _check_nodes_proto(graph.node)


def _check_external(tensor: onnx.TensorProto, where: str) -> None:
    for entry in tensor.external_data:
        if entry.key in ("offset", "length") and not (entry.value.isascii() and entry.value.isdigit()):
            location = next((other.value for other in tensor.external_data if other.key == "location"), "")
            problem = f"the {entry.key} of external data '{location}' is '{entry.value}', not a number of bytes"
            raise ModelError(f"{where}: {problem}; save the model again")


def _check_nodes_proto(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for name, count in _repeated(attribute.name for attribute in node.attribute):
            raise ModelError(f"{node.op_type} '{node.name}' has {count} attributes called '{name}'")
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _check_graph_proto(attribute.g)
            for graph in attribute.graphs:
                _check_graph_proto(graph)
            for tensor in (attribute.t, *attribute.tensors):
                _check_external(tensor, f"attribute '{attribute.name}' of {node.op_type} '{node.name}'")
            texts = () if node.domain else (attribute.s, *attribute.strings)
            if any(text.decode(errors="ignore").encode() != text for text in texts):
                raise ModelError(f"attribute '{attribute.name}' of {node.op_type} '{node.name}' is no text in UTF-8")


def unname_dims(graph: onnx_ir.Graph, opset: int) -> None:
    """Clear dim_params that name no size, such as "?", and names that contradict the graph.

    An axis of an input gets the size that the weights of a consumer demand, if there is one, and so do all others of
    its name.
    """
    shapes = {value: tuple(value.shape or ()) for value in graph.inputs}
    demanded = {value: _demanded(value, len(shape), opset) for value, shape in shapes.items()}
    false: set[int | onnx_ir.SymbolicDim] = set()
    sizes: dict[int | onnx_ir.SymbolicDim, set[int]] = {}
    for value, shape in shapes.items():
        # In an input [N, 3, N, N] the batch would be the image size, in [N, N, 3, 3] the number of channels. In
        # [1, N, N, N] the number of channels would be the image size. No model means that.
        false |= {dim for dim in shape[:1] if dim in shape[1 if len(shape) > 3 else 2 :]}
        false |= {dim for dim in shape[1:2] if len(shape) == 4 and shape[2:] == (dim, dim)}
        for dim in shape:  # weights demand a size of one axis; other axes of the same name would be free
            demands = {demanded[value].get(axis, 0) for axis, other in enumerate(shape) if other == dim}
            false |= {dim} if len(demands) > 1 else set()
            sizes.setdefault(dim, set()).update(demands - {0})
    false |= {dim for dim, demands in sizes.items() if len(demands) > 1}

    def named(dim: int | onnx_ir.SymbolicDim, size: int | None = None) -> int | onnx_ir.SymbolicDim | None:
        if isinstance(dim, int) and dim >= 0:
            return dim
        name = "" if isinstance(dim, int) else dim.value or ""
        is_name = name.strip().lower() not in _NO_NAMES and name[0] != "#"  # the names of axis indices begin with #
        return next(iter(sizes.get(dim) or [dim])) if is_name and dim not in false else size

    for value in (*graph.outputs, *(value for node in graph for value in node.outputs)):
        if value.shape is not None:
            value.shape = onnx_ir.Shape(map(named, value.shape))
    for value, shape in shapes.items():
        if value.shape is not None:
            value.shape = onnx_ir.Shape(named(dim, demanded[value].get(axis)) for axis, dim in enumerate(shape))


def _demanded(value: onnx_ir.Value, rank: int, opset: int) -> dict[int, int]:
    """Return the sizes of an input's axes that the weights of its consumers demand."""
    sizes = {}
    for node, index in value.uses():
        weight = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
        shape = [] if weight is None or index else [size for size in weight.shape if isinstance(size, int)]
        if len(shape) < 2 or schema_error(node, opset):
            continue
        if node.op_type == "Conv":
            sizes[1] = shape[1] * node.attributes.get_int("group", 1)
        elif node.op_type == "ConvTranspose":
            sizes[1] = shape[0]
        elif node.op_type == "MatMul":
            sizes[rank - 1] = shape[-2]
        elif node.op_type in ("LSTM", "GRU", "RNN"):
            sizes[rank - 1] = shape[-1]
        elif node.op_type == "Gemm" and not node.attributes.get_int("transA", 0):
            sizes[1] = shape[node.attributes.get_int("transB", 0)]
    return sizes


def check_structure(model: onnx_ir.Model) -> None:
    """Check graph and functions, and sort them topologically. Raises ModelError."""
    for function in model.functions.values():
        _check_graph(function.graph, f"function '{function.domain}::{function.name}'", [])
    _check_graph(model.graph, "the graph", [])
    if not model.graph.outputs:
        raise ModelError("the graph has no outputs")


def _check_graph(graph: onnx_ir.Graph, where: str, outer: list[onnx_ir.Graph]) -> None:
    scope = [*outer, graph]
    _check_names(graph, where)
    for node in counted(graph, "checking the model", "nodes"):
        for attribute in node.attributes.values():
            if attribute.is_ref() and attribute.type in _GRAPHS:
                problem = "takes a subgraph from a function's attribute"
                raise ModelError(f"{node.op_type} '{node.name}' in {where} {problem}")
        for read in node.inputs:
            if read is not None and not _defined(read, scope):
                raise ModelError(f"{node.op_type} '{node.name}' in {where} reads '{read.name}', which nothing produces")
        for inner in _attribute_graphs(node):
            _check_graph(inner, f"a subgraph of {node.op_type} '{node.name}'", scope)
    for value in graph.outputs:
        if not _defined(value, scope):
            raise ModelError(f"output '{value.name}' of {where} is produced by nothing")
    try:
        graph.sort()
    except ValueError:
        raise ModelError(f"{where} has a cycle: {_cycle(graph)}") from None


def _check_names(graph: onnx_ir.Graph, where: str) -> None:
    made = [value for node in graph for value in node.outputs]
    values = dict.fromkeys([*graph.inputs, *graph.initializers.values(), *made])
    for twice, _ in _repeated(value.name for value in values if value.name):
        raise ModelError(f"{where} defines '{twice}' twice")
    if not all(value.name for value in (*graph.inputs, *graph.outputs)):
        raise ModelError(f"{where} has an input or output without a name")


def _defined(value: onnx_ir.Value, scope: list[onnx_ir.Graph]) -> bool:
    made = value.producer() is not None or value.is_graph_input() or value.const_value is not None
    return made and any(value.graph is graph for graph in scope)


def _attribute_graphs(node: onnx_ir.Node) -> Iterator[onnx_ir.Graph]:
    for attribute in node.attributes.values():
        if not attribute.is_ref() and attribute.type in _GRAPHS:
            yield from [attribute.value] if attribute.type is _GRAPHS[0] else attribute.value


def _cycle(graph: onnx_ir.Graph) -> str:
    nodes = set(graph)
    after = {node: nodes.intersection(value.producer() for value in read_values(node)) for node in graph}
    try:
        graphlib.TopologicalSorter(after).prepare()
    except graphlib.CycleError as error:
        names = [f"{node.op_type} '{node.name}'" for node in error.args[1]]
        return " -> ".join(names if len(names) <= 8 else [*names[:7], "..."])
    return "between a subgraph and its node"


def name_domains(model: onnx_ir.Model) -> None:
    """Rename ONNX's own domain from 'ai.onnx' to '' in all opset imports, as in the nodes."""
    for opsets in (model.opset_imports, *(function.opset_imports for function in model.functions.values())):
        if "ai.onnx" in opsets:
            opsets.setdefault("", opsets.pop("ai.onnx"))


def name_runtime_operators(model: onnx_ir.Model) -> None:
    """Move operators that only ONNX Runtime defines, but in ONNX's own domain, to ONNX Runtime's domain."""
    opset = model.opset_imports.get("", OLDEST_OPSET)
    for node in model.graph.all_nodes():
        if not node.domain and opset < _RUNTIME_OPERATORS.get(node.op_type, 0):
            node.domain = "com.microsoft"


def check_opset(model: onnx_ir.Model) -> None:
    """Check that the model's opset of ONNX is supported. Raises ModelError."""
    newest = onnx.defs.onnx_opset_version()
    opset = model.opset_imports.get("")
    if opset is None:
        raise ModelError("the model does not say which opset of ONNX it uses; is it complete? Export it again")
    if opset < OLDEST_OPSET:
        try:
            onnx.version_converter.convert_version(onnx_ir.to_proto(model), 17)
            hint = ", or convert it: onnx.version_converter.convert_version(model, 17)"
        except (onnx.version_converter.ConvertError, InferenceError, RuntimeError, ValueError) as error:
            hint = f"; onnx.version_converter does not convert it: {str(error).rpartition(': ')[2]}"
        again = "export it again with opset_version=17 or newer"
        raise ModelError(f"the model uses opset {opset}, older than {OLDEST_OPSET}; {again}{hint}")
    if opset > newest:
        known = f"the installed onnx {onnx.__version__} knows opsets up to {newest}"
        hint = f"upgrade onnx, or export the model with opset_version={newest} or older"
        raise ModelError(f"the model uses opset {opset}, but {known}; {hint}")


def inline_functions(model: onnx_ir.Model, opaque: Collection[tuple[str, str]] = ()) -> None:
    """Replace calls of the model's functions by their bodies, except `opaque` ones. Raises ModelError."""
    for key in [key for key in model.functions if key[:2] in opaque]:
        del model.functions[key]
    if not model.functions:
        return
    from onnx_ir.passes.common import InlinePass  # slow to import, and few models need it

    inliner = InlinePass()
    try:
        inliner.requires(model)
        nodes = _inlined_size(model)
        if nodes > MOST_NODES:
            raise ModelError(f"the model's functions expand to {nodes} nodes, more than {MOST_NODES}")
        inliner(model)
    except PreconditionError as error:
        raise ModelError(f"the model's functions call each other in a circle: {error}") from None
    except (ValueError, RuntimeError) as error:
        hint = "try onnx.inliner.inline_local_functions(model), or export without functions"
        raise ModelError(f"the model's functions cannot be inlined: {root_cause(error)}; {hint}") from None


def _inlined_size(model: onnx_ir.Model) -> int:
    """Return the number of nodes after all calls are replaced by bodies; calls must not be recursive."""
    calls = {name: Counter(node.op_identifier() for node in f.all_nodes()) for name, f in model.functions.items()}
    needs = {name: [called for called in counts if called in calls] for name, counts in calls.items()}
    size: dict[onnx_ir.OperatorIdentifier, int] = {}
    for name in graphlib.TopologicalSorter(needs).static_order():
        size[name] = sum(count * size.get(called, 1) for called, count in calls[name].items())
    return sum(size.get(node.op_identifier(), 1) for node in model.graph.all_nodes())


def lift_constants(model: onnx_ir.Model) -> None:
    """Turn Constant nodes into initializers, except those that are outputs of the graph. Raises ModelError."""
    try:
        others = [node for node in list(model.graph.all_nodes()) if node.op_type == "Constant" and not _lift(node)]
        if any(not node.outputs[0].is_graph_output() for node in others):
            from onnx_ir.passes.common import LiftConstantsToInitializersPass

            LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    except (ValueError, TypeError) as error:
        raise ModelError(f"a Constant node is malformed: {root_cause(error)}") from None


def _lift(node: onnx_ir.Node) -> bool:
    """Replace a Constant node by an initializer if it has a tensor: onnx_ir's pass is slow for tensors."""
    (result,), graph, attribute = node.outputs, node.graph, node.attributes.get("value")
    if attribute is None or attribute.type != onnx_ir.AttributeType.TENSOR or attribute.is_ref() or graph is None:
        return False
    if len(node.attributes) > 1 or node.domain or result.is_graph_output():
        return False
    constant = onnx_ir.val(result.name, const_value=attribute.value)
    graph.register_initializer(constant)
    result.replace_all_uses_with(constant)
    graph.remove(node, safe=True)
    return True


def strip(graph: onnx_ir.Graph) -> None:
    """Remove nodes and initializers that no output depends on; an input with an initializer becomes a constant."""
    graph.outputs[:] = outputs = dict.fromkeys(graph.outputs)  # TorchScript repeats one that a model returns twice
    for node in reversed(graph):
        if not any(value in outputs or value.uses() for value in node.outputs):
            for inner in nodes_of(node):  # nodes in its subgraphs would still be users
                for index in range(len(inner.inputs)):
                    inner.replace_input_with(index, None)
            graph.remove(node, safe=True)
    for value in [value for value in graph.inputs if value.is_initializer()]:
        graph.inputs.remove(value)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in outputs:
            del graph.initializers[name]


def cut(graph: onnx_ir.Graph, outputs: Sequence[str]) -> tuple[str, ...]:
    """Make other values the graph's outputs, and remove inputs that they do not need; UsageError for unknown names.

    Return the outputs that are lost: they are not among the values, and do not depend on one.
    """
    made = [value for node in graph for value in node.outputs if value.name]
    values = {value.name: value for value in (*graph.inputs, *made)}
    unknown = [name for name in outputs if name not in values]
    if unknown:
        near = difflib.get_close_matches(unknown[0], [name for name in values if name], 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; a viewer such as Netron shows them"
        raise UsageError(f"the model has no value called {', '.join(unknown)}{hint}")
    chosen = [values[name] for name in dict.fromkeys(outputs)]
    reached = set(chosen)
    for node in graph:
        if not reached.isdisjoint(read_values(node)):
            reached.update(node.outputs)
    lost = tuple(value.name or "" for value in graph.outputs if value not in reached)
    graph.outputs[:] = chosen
    strip(graph)
    for value in [value for value in graph.inputs if not value.uses() and value not in reached]:
        graph.inputs.remove(value)
    return lost


def read_values(node: onnx_ir.Node) -> Iterator[onnx_ir.Value]:
    """Yield the values that a node reads, including those of its subgraphs."""
    for reader in nodes_of(node):
        yield from (value for value in reader.inputs if value is not None)


def nodes_of(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """Yield a node and the nodes of its subgraphs."""
    yield node
    for graph in _attribute_graphs(node):
        yield from graph.all_nodes()


def attributes_of(node: onnx_ir.Node) -> dict[str, Any]:
    """Return a node's attributes as Python values: tensors as arrays, lists as tuples."""
    result: dict[str, Any] = {}
    for name, attribute in node.attributes.items():
        value = attribute.value
        if attribute.type == onnx_ir.AttributeType.TENSOR:
            value = value.numpy()
        elif isinstance(value, (list, tuple)):
            value = tuple(value)
        result[name] = value
    return result


def before(value: onnx_ir.Value, op_types: Collection[str]) -> onnx_ir.Value:
    """Return the value before all nodes of these types that lead to a value, along their first inputs."""
    while (node := value.producer()) is not None and node.op_type in op_types and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def names_of(values: Iterable[onnx_ir.Value | None]) -> list[str]:
    """Return the names of values, empty for absent ones."""
    return ["" if value is None else value.name or "" for value in values]


@contextmanager
def quiet(name: str | None = None) -> Iterator[None]:
    """Suppress warnings and the messages of the logger `name`; without a name, of all loggers, as torch has many."""
    logger, disabled = logging.getLogger(name), logging.root.manager.disable
    was_disabled, logger.disabled = logger.disabled, name is not None
    logging.disable(disabled if name else logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = was_disabled
        logging.disable(disabled)


def root_cause(error: BaseException) -> str:
    """Return the shortened message of the first error in a chain: onnx_ir prints whole graphs in later ones."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."
