"""Checks of nodes against ONNX's schemas at the model's opset: an importer's signature is the union of all versions."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import onnx
import onnx_ir

# Operators that were withdrawn only because a later opset changed their meaning; ONNX Runtime still runs them.
_WITHDRAWN = ("GroupNormalization",)
_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional


def schema_error(node: onnx_ir.Node, opset: int) -> str | None:
    """Return how a node breaks its operator's schema; None if it is valid, or not of ONNX's own domain."""
    if node.domain:
        return None
    try:
        schema, attributes, inputs = _schema(node.op_type, opset)
    except onnx.defs.SchemaError:
        return f"opset {opset} has no such operator"
    if schema.deprecated and node.op_type not in _WITHDRAWN:
        return f"the operator is gone from ONNX since opset {schema.since_version}; the model says opset {opset}"
    return _attribute_error(node, attributes, opset) or _port_error(node, schema, inputs, opset)


def allows_floats(domain: str, name: str, opset: int, i: int) -> bool:
    """Return True if ONNX's own operator takes floats for an input, as OneHot for its depth."""
    declared = _schema(name, opset)[0].inputs if not domain and onnx.defs.has(name) else []
    return i < len(declared) and "tensor(float)" in declared[i].types


def _attribute_error(node: onnx_ir.Node, attributes: Mapping[str, Any], opset: int) -> str | None:
    for name, attribute in node.attributes.items():
        declared = attributes.get(name)
        if declared is None:
            return f"attribute {name} is not known at opset {opset}"
        if declared.type != getattr(onnx.defs.OpSchema.AttrType, attribute.type.name, None):
            return f"attribute {name} is of type {attribute.type.name}, not {str(declared.type).rpartition('.')[2]}"
    for name, declared in attributes.items():
        if declared.required and name not in node.attributes:
            return f"attribute {name} is missing"
    return None


def _port_error(
    node: onnx_ir.Node, schema: onnx.defs.OpSchema, inputs: Sequence[tuple[str, bool, bool]], opset: int
) -> str | None:
    if len(node.inputs) > schema.max_input:
        return f"it has {len(node.inputs)} inputs, at opset {opset} it takes {schema.max_input}"
    if len(node.outputs) > schema.max_output:
        return f"it has {len(node.outputs)} outputs, at opset {opset} it gives {schema.max_output}"
    for i, (name, is_required, is_bool) in enumerate(inputs):
        value = node.inputs[i] if i < len(node.inputs) else None
        if value is None and is_required:
            return f"input {name} is missing"
        # A model rarely declares the results of other nodes.
        dtype = value.dtype if value is not None and value.producer() is None else None
        if is_bool and dtype not in (None, onnx_ir.DataType.BOOL):
            return f"input {name} is {dtype.name}, not BOOL"
    return None


@cache
def _schema(name: str, opset: int) -> tuple[onnx.defs.OpSchema, Mapping[str, Any], list[tuple[str, bool, bool]]]:
    """Return an operator's schema, its attributes, and for each input its name, is_required and is_bool."""
    schema = onnx.defs.get_schema(name, opset)
    inputs = [
        (declared.name, i < schema.min_input and declared.option != _OPTIONAL, declared.types == {"tensor(bool)"})
        for i, declared in enumerate(schema.inputs)
    ]
    return schema, schema.attributes, inputs
