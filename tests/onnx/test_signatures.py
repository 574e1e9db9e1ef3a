"""Every importer's signature against ONNX's own schemas, at every opset that is read."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.defs import OpSchema

from onnx2ncnn_opt.onnx import ops
from onnx2ncnn_opt.onnx.ops import all_ops, find
from onnx2ncnn_opt.onnx.read.structure import OLDEST_OPSET
from onnx2ncnn_opt.onnx.registry import OnnxOp

OPSETS = range(OLDEST_OPSET, onnx.defs.onnx_opset_version() + 1)
NAMES = sorted({op.name for op in all_ops() if op.domain == ""})


def test_a_family_has_all_versions_of_its_operators() -> None:
    """For no other one is imported where it is found. In a process that has none of them yet."""
    code = """
from importlib import import_module
from onnx2ncnn_opt.onnx import ops, registry
for family in ops._FAMILIES:
    before = {key: len(versions) for key, versions in registry.OPS.items()}
    import_module(f"onnx2ncnn_opt.onnx.ops.{family}")
    assert all(len(registry.OPS[key]) == count for key, count in before.items()), family
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    folder = Path(ops.__file__).parent
    files = {path.stem for path in (*folder.glob("*.py"), *folder.glob("*/"))} - {"__init__", "__pycache__"}
    assert files == set(ops._FAMILIES)


def schemas(name: str) -> list[tuple[int, OpSchema]]:
    """The schema in force at each opset that has the operator."""
    found = []
    for opset in OPSETS:
        try:
            schema = onnx.defs.get_schema(name, opset)
        except onnx.defs.SchemaError:
            continue
        if not schema.deprecated:
            found.append((opset, schema))
    return found


def importer(name: str, opset: int) -> OnnxOp:
    op = find("", name, opset)
    assert op is not None, f"{name} is not read at opset {opset}"
    return op


@pytest.mark.parametrize("name", NAMES)
def test_attributes_and_their_defaults(name: str) -> None:
    """Every attribute that a schema knows is taken, with its default, and required where it is."""
    assert schemas(name), f"no opset has {name}"
    for opset, schema in schemas(name):
        taken = importer(name, opset).attributes
        assert set(schema.attributes) <= set(taken), f"opset {opset}"
        for attribute, known in schema.attributes.items():
            where = f"{attribute} at opset {opset}"
            default = taken[attribute]
            assert (default is inspect.Parameter.empty) == known.required, where
            if not known.required:
                written = np.float32(default) if isinstance(default, float) else default
                assert default_of(known) == (None if default == () else written), where


def default_of(attribute: OpSchema.Attribute) -> Any:
    """The schema's default; None where it has none."""
    proto = attribute.default_value
    if proto.type == onnx.AttributeProto.UNDEFINED:
        return None
    value = helper.get_attribute_value(proto)
    if isinstance(value, list):
        return tuple(item.decode() if isinstance(item, bytes) else item for item in value)
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.parametrize("name", NAMES)
def test_no_attribute_is_invented(name: str) -> None:
    """What a signature takes is known to some schema between its opset and that of the next importer."""
    for op in (op for op in all_ops() if op.domain == "" and op.name == name):
        served = [schema for opset, schema in schemas(name) if importer(name, opset) is op]
        assert served, f"no opset reaches the importer since {op.since}"
        assert set(op.attributes) <= {attribute for schema in served for attribute in schema.attributes}


@pytest.mark.parametrize("name", NAMES)
def test_inputs(name: str) -> None:
    """As many inputs as the schema has, and optional where one of the schemas served says so."""
    optional = OpSchema.FormalParameterOption.Optional
    variadic = OpSchema.FormalParameterOption.Variadic
    for opset, schema in schemas(name):
        op = importer(name, opset)
        fixed = [declared for declared in schema.inputs if declared.option != variadic]
        assert (len(fixed) < len(schema.inputs)) == (op.variadic is not None), f"opset {opset}"
        assert len(fixed) <= len(op.inputs), f"opset {opset}"
        for i, taken in enumerate(op.inputs):
            if i >= len(fixed) or fixed[i].option == optional:
                assert taken.optional, f"{taken.name} at opset {opset}"
    for op in (op for op in all_ops() if op.domain == "" and op.name == name):
        served = [schema for opset, schema in schemas(name) if importer(name, opset) is op]
        assert len(op.inputs) <= max(len(schema.inputs) for schema in served)
