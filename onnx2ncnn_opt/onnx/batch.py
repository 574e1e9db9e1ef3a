"""The batch axis of each graph input, propagated backwards once from the operators that have a batch axis.

An importer registered with ``batch=k`` states that axis k of its first input is a batch. If one matrix multiplies
several operands, in a loop or in unrolled steps, their rows are a batch too. The result only decides how inputs enter
the net (as dims or as batch count of the Mat). Inside, every tensor's view knows where its axes are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import Sym, symbol
from onnx2ncnn_opt.onnx.items import Batch
from onnx2ncnn_opt.onnx.lower.layout import first_batch
from onnx2ncnn_opt.onnx.ops import find, traits_of
from onnx2ncnn_opt.onnx.read.binding import InputInfo
from onnx2ncnn_opt.onnx.read.load import LoadedModel

Size = int | onnx_ir.SymbolicDim

_MIN_STEPS = 4  # products by one matrix that count as a recurrence


def batch_axes(model: LoadedModel) -> dict[str, int]:
    """Return the batch axis of each graph input for which the operators determine one."""
    axes: dict[str, int] = {}
    ranks = {info.name: len(info.shape) for info in model.inputs}
    body_inputs = dict(_body_inputs(model))
    visited: set[tuple[onnx_ir.Value, int]] = set()
    pending = list(_known_axes(model))[::-1]
    while pending:
        value, axis = pending.pop()
        if value is None or (value, axis) in visited:
            continue
        visited.add((value, axis))
        node = value.producer()
        if node is not None:
            pending.extend(_sources(node, value, axis, model))
        elif value in body_inputs:
            outer, is_scanned = body_inputs[value]
            pending.append((outer, axis + is_scanned))
        elif value.name in ranks and axis < ranks[value.name] > 1:
            axes.setdefault(value.name, axis)
    return axes


def batch_axis(info: InputInfo, requested: Mapping[str, int | None], inferred: Mapping[str, int]) -> int | None:
    """Return the axis of an input that is the Mat's batch: requested, inferred, or a first axis of size 1."""
    rank = len(info.shape)
    if info.name not in requested:
        return inferred.get(info.name, first_batch(info.shape))
    axis = requested[info.name]
    if axis is not None and not -rank <= axis < rank:
        raise UsageError(f"input '{info.name}' has no axis {axis}: its rank is {rank}")
    return None if axis is None else axis % rank


def dynamic_batches(model: LoadedModel, fixed: Mapping[str, int | None], solved: Mapping[str, int]) -> Iterator[Batch]:
    """Yield dynamic dimensions that may be a batch: of axes `fixed` by the caller, `solved` by `batch_axes`, or 0."""
    tried, ranks = set(), {info.name: len(info.shape) for info in model.inputs}
    for info in model.inputs:
        axis = fixed.get(info.name, solved.get(info.name, 0))
        size = info.shape[axis] if axis is not None and -len(info.shape) <= axis < len(info.shape) else 1
        name = str(size)
        if size != symbol(name) or name in tried:
            continue
        tried.add(name)
        axes = _axes_of(name, model)
        chosen = [other for other in axes if other in fixed]
        if axes and all(fixed[other] in (axes[other], axes[other] - ranks[other]) for other in chosen):
            is_known = bool(chosen) or any(solved.get(other) == at for other, at in axes.items())
            yield Batch(symbol(name), axes, is_known=is_known)


def _axes_of(name: str, model: LoadedModel) -> dict[str, int]:
    """Return the axis of each input that has this dimension; empty if it cannot be the batch of all of them."""
    axes: dict[str, int] = {}
    for info in model.inputs:
        at = [axis for axis, size in enumerate(info.shape) if isinstance(size, Sym) and name in size.names()]
        if len(at) > 1 or (at and (info.shape[at[0]] != symbol(name))):
            return {}
        axes.update((info.name, axis) for axis in at)
    # An axis that is alone everywhere is rather a row.
    return axes if any(len(info.shape) > 1 for info in model.inputs if info.name in axes) else {}


def _known_axes(model: LoadedModel) -> Iterator[tuple[onnx_ir.Value | None, int]]:
    """Yield values whose batch axis an operator or a repeated product determines."""
    for node in model.graph:
        op = find(node.domain, node.op_type, model.opsets.get(node.domain, 1))
        if op is not None and op.batch is not None and node.inputs:
            yield node.inputs[0], op.batch
    for value in model.graph.initializers.values():
        products = [node for node, index in value.uses() if index == 1 and node.op_type in ("MatMul", "Gemm")]
        if len(products) >= _MIN_STEPS or any(node.graph is not model.graph for node in products):
            yield from ((node.inputs[0], 0) for node in products)


def _body_inputs(model: LoadedModel) -> Iterator[tuple[onnx_ir.Value, tuple[onnx_ir.Value | None, bool]]]:
    """Yield each input of a Loop's or Scan's body, its initial value, and whether a Scan slices it along axis 0."""
    for node in model.graph:
        attribute = node.attributes.get("body") if node.op_type in ("Loop", "Scan") else None
        if attribute is not None and attribute.type is onnx_ir.AttributeType.GRAPH:
            body, operands = attribute.as_graph(), list(node.inputs)
            states = len(operands) - node.attributes.get_int("num_scan_inputs", 0)
            for at, (inner, outer) in enumerate(zip(body.inputs, operands, strict=False)):
                yield inner, (outer, at >= states)


def _sources(
    node: onnx_ir.Node, value: onnx_ir.Value, axis: int, model: LoadedModel
) -> Iterator[tuple[onnx_ir.Value, int]]:
    """Yield the inputs of a node that have an axis of its output, each with the axis's index in that input."""
    first = node.inputs[0] if node.inputs else None
    if traits_of(node.domain, node.op_type, model.opsets.get(node.domain, 1)).axes is not None:
        shapes = [port.shape for port in (*node.inputs, *node.outputs) if port is not None]
        rank = max(len(shape or ()) for shape in shapes)
        for operand in node.inputs:
            missing = 0 if operand is None or operand.shape is None else rank - len(operand.shape)
            if operand is not None and axis >= missing:  # broadcasting prepends axes
                yield operand, axis - missing
    elif first is not None and not node.domain and (source := _input_axis(node, first, value, axis)) is not None:
        yield first, source


def _input_axis(node: onnx_ir.Node, x: onnx_ir.Value, y: onnx_ir.Value, axis: int) -> int | None:
    """Return the axis of the first input x that becomes, unchanged, this axis of the output y; None if unknown."""
    match node.op_type:
        case "Transpose":
            return node.attributes["perm"].as_ints()[axis] if "perm" in node.attributes else None
        case "Gather":
            index, at = node.inputs[1], node.attributes.get_int("axis", 0)
            is_scalar = index is not None and index.shape is not None and not len(index.shape)
            return axis + (axis >= at) if is_scalar and at >= 0 else None
        case "Flatten":
            is_first = node.attributes.get_int("axis", 1) == 1 and axis == 0
            return 0 if is_first else _axis_of_same_size(x.shape, y.shape, axis)
        case "Reshape":
            return _before_reshape(node, x, y, axis)
        case "Squeeze" | "Unsqueeze":
            return _before_squeeze(node, x, y, axis)
    return None


def _before_reshape(node: onnx_ir.Node, x: onnx_ir.Value, y: onnx_ir.Value, axis: int) -> int | None:
    target = _ints(node, 1)
    after: Iterable[Size] | None = y.shape
    copies = not node.attributes.get_int("allowzero", 0)
    if target and copies and not any(target[: axis + 1]):
        return axis
    if target and x.shape is not None:
        after = [x.shape[at] if size == 0 and copies else size for at, size in enumerate(target)]
    return _axis_of_same_size(x.shape, after, axis)


def _before_squeeze(node: onnx_ir.Node, x: onnx_ir.Value, y: onnx_ir.Value, axis: int) -> int | None:
    axes = _ints(node, 1)
    if "axes" in node.attributes:  # before opset 13
        axes = node.attributes["axes"].as_ints()
    is_unsqueeze = node.op_type == "Unsqueeze"
    if axes and min(axes) < 0 and x.shape is not None:
        rank = len(x.shape) + (len(axes) if is_unsqueeze else 0)
        axes = [at % rank for at in axes]
    if not axes or min(axes) < 0:
        return _axis_of_same_size(x.shape, y.shape, axis)
    if is_unsqueeze:
        return None if axis in axes else axis - sum(at < axis for at in axes)
    return [at for at in range(len(axes) + axis + 1) if at not in axes][axis]


def _axis_of_same_size(before: Iterable[Size] | None, after: Iterable[Size] | None, axis: int) -> int | None:
    """Return the axis in `before` of the same size as `axis` in `after`, if the outer sizes other than 1 are equal."""
    if before is None or after is None:
        return None
    before, after = list(before), list(after)
    outer = [size for size in after[:axis] if size != 1]
    for at, size in enumerate(before):
        if size == after[axis] and [other for other in before[:at] if other != 1] == outer:
            return at
    return None


def _ints(node: onnx_ir.Node, index: int) -> Sequence[int]:
    """Return the integers of a constant operand; empty if it is absent or not constant."""
    value = node.inputs[index] if index < len(node.inputs) else None
    tensor = None if value is None else value.const_value
    return () if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]
