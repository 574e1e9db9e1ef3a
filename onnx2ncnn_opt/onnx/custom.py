"""Operators that become custom layers on request; the user's program implements these layers."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import Dim, product, symbol
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.spec import SHAPE_HINTS_ID
from onnx2ncnn_opt.ir.view import MAX_DIMS, View
from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.layout import Layout, first_batch
from onnx2ncnn_opt.onnx.registry import qualified
from onnx2ncnn_opt.onnx.value import Constant, Item, NodeItems, SymbolicTensor, Tensor, TensorSequence, held_as_float
from onnx2ncnn_opt.param.values import format_value

_KINDS = ("INT", "FLOAT", "INTS", "FLOATS", "STRING")
_WRITE_IMPORTER = "write an importer for the operator (docs/plugins.md)"
_REQUEST = r"(?:([^\s:=,]*)::)?([^\s:=,]+)(?:=([^\s:=,]+))?(?::(|[^\s:=,]+(?:,[^\s:=,]+)*))?"


class CustomOp(NamedTuple):
    """An operator that becomes a layer of type `layer`; `attributes` are the layer's parameters 0, 1, ... in order."""

    domain: str
    name: str
    layer: str
    attributes: tuple[str, ...] | None = None

    @property
    def request(self) -> str:
        """The text of this request, see `parse_custom`."""
        attributes = "" if self.attributes is None else f":{','.join(self.attributes)}"
        return f"{qualified(self.domain, self.name)}={self.layer}{attributes}"

    def __str__(self) -> str:
        params = ", ".join(f"{id}={name}" for id, name in enumerate(self.attributes or ()))
        return f"{qualified(self.domain, self.name)} is {self.layer}{f' ({params})' if params else ''}"


def parse_custom(requests: Iterable[str]) -> tuple[CustomOp, ...]:
    """Parse ``DOMAIN::OP[=TYPE][:ATTRIBUTE,...]``; TYPE is OP by default. Raise UsageError for all other requests."""
    ops: dict[tuple[str, str], CustomOp] = {}
    for request in requests:
        match = re.fullmatch(_REQUEST, request)
        if not match:
            raise UsageError(f"'{request}' names no operator; an example is my.domain::MyOp=MyLayer:alpha,beta")
        domain, name, layer, listed = match.groups()
        attributes = None if listed is None else tuple(listed.split(",")) if listed else ()
        op = CustomOp("" if domain in (None, "ai.onnx") else domain, name, layer or name, attributes)
        spec = LAYERS.get(op.layer)
        if spec is not None and not spec.is_custom:
            raise UsageError(f"ncnn has a layer {op.layer} itself; give it another type: {request}=My{op.layer}")
        if attributes and (len(set(attributes)) < len(attributes) or len(attributes) > SHAPE_HINTS_ID):
            raise UsageError(f"'{request}' names an attribute twice, or more than {SHAPE_HINTS_ID}")
        if (op.domain, op.name) in ops:
            raise UsageError(f"there are two requests for {qualified(op.domain, op.name)}")
        ops[op.domain, op.name] = op
    return tuple(ops.values())


def numbered(ops: Sequence[CustomOp], graph: onnx_ir.Graph) -> tuple[CustomOp, ...]:
    """Return the requests with all attributes, as listed or sorted by name; raise UsageError for unknown operators."""
    nodes: dict[tuple[str, str], set[str]] = {}
    for node in graph.all_nodes():
        nodes.setdefault((node.domain, node.op_type), set()).update(node.attributes)
    result = []
    for op in ops:
        name = qualified(op.domain, op.name)
        if (op.domain, op.name) not in nodes:
            names = sorted(qualified(*key) for key in nodes)
            similar = difflib.get_close_matches(name, names, 3)
            listed = similar or [other for other in names if "::" in other] or names[:10]
            raise UsageError(f"the model has no {name}; it has {', '.join(listed)}")
        attributes = tuple(sorted(nodes[op.domain, op.name])) if op.attributes is None else op.attributes
        if (count := len(attributes)) > SHAPE_HINTS_ID:
            problem = f"has {count} attributes, a layer {SHAPE_HINTS_ID} parameters"
            raise UsageError(f"{name} {problem}; list those that matter")
        result.append(op._replace(attributes=attributes))
    return tuple(result)


def import_custom(im: ImportContext, op: CustomOp, node: onnx_ir.Node, operands: NodeItems) -> NodeItems:
    """Return the results of a custom layer that reads a node's operands; its outputs have the declared shapes."""
    while operands and operands[-1] is None:
        operands = operands[:-1]
    inputs = [_natural(im, operand) for operand in operands]
    params = _params(im, op, node)
    counts = {blob.batch for blob, _ in inputs} - {1}
    if len(counts) > 1:
        reason = f"its inputs have batches of {' and '.join(sorted(map(str, counts)))}"
        raise im.refuse(reason, "give the operator's inputs the same batch, or none")
    count = next(iter(counts), 1)
    axis = next((axis for blob, axis in inputs if axis is not None and blob.batch == count), None)
    views = [_result(im, value, axis, count) if im.is_used(i) else None for i, value in enumerate(node.outputs)]
    results = [(view.mat_shape, product(atom.size for atom in view.batch)) if view else (None, 1) for view in views]
    blobs = im.custom(op.layer, *(blob for blob, _ in inputs), results=results, params=params)
    outputs = zip(blobs, views, node.outputs, strict=True)
    return tuple(Tensor(blob, view, _dtype(value)) if view else None for blob, view, value in outputs)


def _natural(im: ImportContext, operand: Item | None) -> tuple[Blob, int | None]:
    """Return an operand with every axis except its batch axis as a dim, and the batch axis; constants have none."""
    if operand is None:
        reason = "an input is left out before others, and a layer's inputs have no gaps"
        raise im.refuse(reason, "give the operator every input up to the last one that it has")
    if isinstance(operand, TensorSequence):
        raise im.refuse("an input is a sequence, and ncnn has tensors only", "pass its tensors one by one")
    x = im.tensor(operand) if isinstance(operand, SymbolicTensor) else operand
    batch = x.batch_axis if isinstance(x, Tensor) else None
    if isinstance(x, Tensor) and batch is None:
        batch = first_batch(x.shape)
    if x.rank - (batch is not None) > MAX_DIMS:
        raise im.refuse(f"an input has rank {x.rank}: ncnn has four dims and a batch", "reshape it in the model")
    if isinstance(x, Constant):
        return im.memory(x.array.reshape(x.array.shape or (1,))), None
    return im.mat(x, *Layout.plain(x.rank, batch)), batch


def _params(im: ImportContext, op: CustomOp, node: onnx_ir.Node) -> dict[int, Any]:
    """Return the attributes as parameters by id."""
    assert op.attributes is not None
    params: dict[int, Any] = {}
    for name, attribute in node.attributes.items():
        if name not in op.attributes:
            reason = f"attribute {name} is not among those that --custom lists: {', '.join(op.attributes)}"
            raise im.refuse(reason, "add it there")
        if attribute.type.name not in _KINDS:
            reason = f"attribute {name} is {attribute.type.name}; a layer has numbers, lists of them and strings"
            raise im.refuse(reason, _WRITE_IMPORTER)
        number = op.attributes.index(name)
        value = tuple(attribute.value) if isinstance(attribute.value, (list, tuple)) else attribute.value
        try:
            format_value(number, None, value)
        except ValueError as error:
            raise im.refuse(f"attribute {name} is {value!r}: {error}", _WRITE_IMPORTER) from None
        params[number] = value
    return params


def _result(im: ImportContext, value: onnx_ir.Value, axis: int | None, count: Dim) -> View:
    """Return the view of an output: it has the declared shape and the batch of the inputs."""
    declared, name = im.declared_shape(value), value.name
    if declared is None or 0 in declared or None in declared[axis or 0 : (axis or 0) + 1]:
        hint = "declare it in the graph's value_info (torch: setType in the symbolic function)"
        raise im.refuse(f"the model does not say which shape its output {name} has", hint)
    # A declared size that does not follow from the sizes of the inputs is known only at run time.
    shape = tuple(symbol(f"{name}.{i}") if size is None else size for i, size in enumerate(declared))
    batch = axis if axis is not None and axis < len(shape) > 1 and shape[axis] == count else None
    if batch is None and count != 1:
        reason = f"its output {name} has no axis {axis} of {count}, which is the batch of its inputs"
        raise im.refuse(reason, _WRITE_IMPORTER)
    layout = Layout.plain(len(shape), batch)
    if len(layout.dims) > MAX_DIMS:
        raise im.refuse(f"its output {name} has rank {len(shape)}: ncnn has four dims and a batch", _WRITE_IMPORTER)
    return View.of(shape, *layout)


def _dtype(value: onnx_ir.Value) -> np.dtype[np.generic]:
    """Return the declared type, by default float32. Layers output integers as float32."""
    if value.dtype in (None, onnx_ir.DataType.UNDEFINED):
        return np.dtype(np.float32)
    dtype = value.dtype.numpy()
    return held_as_float(dtype) if dtype.kind in "iu" else dtype
