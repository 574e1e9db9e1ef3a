"""Inferred shapes and types of a refused node's results, so the importer can continue with the nodes after it.

One error then lists all nodes that cannot be converted. If ONNX's own inference does not know every size, there is no
stand-in, and the importer skips the readers of the node.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx
import onnx_ir
from onnx import helper

from onnx2ncnn_opt.ir.dim import Dim, Shape
from onnx2ncnn_opt.onnx.fold.inferred import inferred_types
from onnx2ncnn_opt.onnx.value import Item, Tensor, TensorSequence

Inferred: TypeAlias = "tuple[Shape, np.dtype[np.generic]] | None"


def inferred_outputs(
    node: onnx_ir.Node, operands: Sequence[Item | None], opsets: Mapping[str, int]
) -> Sequence[Inferred]:
    """Return the shape and type of each output; None if they are unknown, or the output may be a constant."""
    unknown: list[Inferred] = [None] * len(node.outputs)
    subgraphs = (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS)
    if node.domain or any(attribute.type in subgraphs for attribute in node.attributes.values()):
        return unknown
    given = [operand for operand in operands if operand is not None]
    is_numeric = (not isinstance(operand, TensorSequence) and operand.dtype.kind in "biuf" for operand in given)
    if not any(isinstance(operand, Tensor) for operand in given) or not all(is_numeric):
        return unknown
    sizes = {str(size): size for operand in given if not isinstance(operand, TensorSequence) for size in operand.shape}
    try:
        types = inferred_types(onnx_ir.serde.serialize_node(node), opsets.get("", 1), operands)
    except onnx_ir.serde.SerdeError:  # an attribute without a type
        return unknown
    return [None if type is None else _read(type, sizes) for type in types]


def _read(tensor: onnx.TypeProto.Tensor, sizes: Mapping[str, Dim]) -> Inferred:
    if not tensor.HasField("shape") or not tensor.elem_type:
        return None
    shape = [sizes.get(dim.dim_param) if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if dtype.kind not in "biuf" or any(size is None or (isinstance(size, int) and size < 1) for size in shape):
        return None
    return tuple(size for size in shape if size is not None), dtype
