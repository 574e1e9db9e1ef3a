"""A model that takes the order of rows from a net: two right sorts differ where scores are equal within rounding."""

from collections.abc import Collection
from pathlib import Path

import onnx_ir

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.permute import inverted
from onnx2ncnn_opt.onnx.edit.editor import Editor
from onnx2ncnn_opt.onnx.edit.model import read_model, to_bytes

# Prefixes of the output of a TopK: the input for the net's indices, row by row; and the outputs with the scores at
# these, with the scores that TopK finds, and with their indices, row by row. All scores follow, to say how large they
# are.
GIVEN, FOUND, BEST, OWN = (f"onnx2ncnn_opt.{name}." for name in ("given", "found", "best", "own"))


def with_order(model: Path | bytes, outputs: Collection[str], orders: Collection[str]) -> bytes:
    """Return the model with inputs in place of the indices of these TopK nodes, and three more outputs for each.

    Raises EncodeError for a model that does not fit into a message, and UsageError if it has no such nodes.
    """
    changed = read_model(model, outputs, typed=True, upgraded=True)
    graph, editor = changed.graph, Editor(changed.graph)
    nodes = {value.name: node for node in graph for value in node.outputs if node.op_type == "TopK"}
    for order in orders:
        if order not in nodes:
            raise UsageError(f"the manifest belongs to another model: no TopK computes '{order}'")
        editor.place = node = nodes[order]
        best, own = editor.copy(node)
        given = onnx_ir.val(GIVEN + order, onnx_ir.DataType.INT64, ["numbers"])
        axis, x = node.attributes.get_int("axis", -1), node.inputs[0]
        assert x is not None
        if x.shape is None and axis != -1:
            raise UsageError(f"TopK '{node.name}': its input has no known rank; export it with axis -1")
        rank = 0 if x.shape is None else x.shape.rank()
        perm = [a for a in range(rank) if a != axis % rank] + [axis % rank] if rank else []  # rows are the last axis
        own = editor.node("Transpose", own, perm=perm) if perm else own
        indices = editor.node("Reshape", given, editor.node("Shape", own))
        indices = editor.node("Transpose", indices, perm=inverted(perm)) if perm else indices
        found = editor.node("GatherElements", x, indices, axis=axis)
        scores, own_indices = node.outputs
        editor.replace(scores, found)
        editor.replace(own_indices, indices)
        with_all = [editor.node("Concat", value, x, axis=axis) for value in (found, best)]
        for prefix, value, old in ((FOUND, with_all[0], scores), (BEST, with_all[1], scores), (OWN, own, own_indices)):
            value.name, value.type = prefix + order, old.type
            graph.outputs.append(value)
        graph.inputs.append(given)
        graph.remove(node, safe=True)
    return to_bytes(onnx_ir.external_data.load_to_model(changed))
