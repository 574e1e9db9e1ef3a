"""Products of int8 numbers as products of uint8 numbers, because ONNX Runtime's sums of the former may saturate."""

import numpy as np
import onnx_ir

from onnx2ncnn_opt.onnx.edit.editor import Editor
from onnx2ncnn_opt.onnx.edit.model import read_model, to_bytes

_WEIGHTS = {  # the indexes of the inputs for weights and for their zero points
    "MatMulInteger": (1, 3),
    "MatMulIntegerToFloat": (1, 5),
    "DynamicQuantizeMatMul": (1, 3),
    "QGemm": (3, 5),
    "QLinearConv": (3, 5),
    "QLinearMatMul": (3, 5),
}


def without_int8(data: bytes, *, weights: bool) -> bytes | None:
    """Return the model with uint8 operands of products, 128 larger than the int8 ones; None if it has none.

    Without `weights`, only computed operands change: the option against saturation changes the weights. Products of two
    int8 operands do not saturate.
    """
    model = read_model(data, typed=True)
    editor, changed = Editor(model.graph), False
    for node in list(model.graph):
        index, zero = _WEIGHTS.get(node.op_type, (0, 0))
        operand = node.inputs[index] if zero else None
        others = (node.inputs[0], *node.inputs[2:3]) if zero else ()  # the other operand, or its zero point
        if operand is None or not _is_int8(operand) or any(map(_is_int8, others)):
            continue
        if operand.const_value is not None and not weights:
            continue
        node.resize_inputs(max(len(node.inputs), zero + 1))
        editor.place, changed = node, True
        for place in (index, zero):
            number = node.inputs[place]
            whole = editor.node("Cast", number, to=onnx_ir.DataType.INT32) if number else np.array(0, np.int32)
            larger = editor.node("Add", whole, np.array(128, np.int32))
            node.replace_input_with(place, editor.node("Cast", larger, to=onnx_ir.DataType.UINT8))
    return to_bytes(model) if changed else None


def _is_int8(value: onnx_ir.Value | None) -> bool:
    return value is not None and value.dtype is onnx_ir.DataType.INT8
