"""Files that are no models, and models that are broken or hostile: one clear error, and quickly."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import onnx_ir
import pytest
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]

from onnx2ncnn_opt.errors import ConversionError, ModelError, UsageError
from onnx2ncnn_opt.onnx.read.load import load_model
from testing.models import parsed
from tests.onnx.test_load import CALLS, parse


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"hello, world\n" * 20, "not an ONNX model"),
        (b"7767517\n2 2\n", "ncnn .param file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"PK\x03\x04" + bytes(60), "torch.onnx.export"),
        (b"\x80\x02}q\x00.", "torch.onnx.export"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (bytes(1000), "not an ONNX model"),
        (b"\x08\x0a", "not an ONNX model"),
    ],
)
def test_no_model_at_all(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(data)
    for source in (path, data):
        with pytest.raises(ModelError, match=message):
            load_model(source)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.onnx does not exist"):
        load_model(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match="is a folder"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="not a plain file"):
        load_model("/dev/zero")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model("a\0b")
    with open(tmp_path / "huge.onnx", "wb") as file:
        file.truncate(2**31)
    with pytest.raises(ModelError, match=r"more than protobuf can read.*external data"):
        load_model(tmp_path / "huge.onnx")


def test_attributes_that_are_no_text() -> None:
    model = parsed('(float[1, 1, 8, 8] x) => (float y) { y = MaxPool<auto_pad = "VALID", kernel_shape = [2, 2]>(x) }')
    model.graph.node[0].attribute[0].s = b"\xafALID"
    with pytest.raises(ModelError, match="attribute 'auto_pad' of MaxPool '' is no text in UTF-8"):
        load_model(model.SerializeToString())


def test_truncated_anywhere() -> None:
    data = parse(CALLS).SerializeToString()
    for end in range(len(data)):
        try:
            loaded = load_model(data[:end])
        except ModelError:
            continue
        # Cut between two functions, it is a whole model that calls what it does not define.
        assert "local" in {node.domain for node in loaded.graph}


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes(seed: int) -> None:
    rng = random.Random(seed)
    data = parse(CALLS).SerializeToString()
    loads = 0
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        loads += survives(bytes(changed))
    assert 0 < loads < 300


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("as_ir", [False, True])
def test_changed_fields(seed: int, as_ir: bool) -> None:
    rng = random.Random(seed)
    loads = 0
    for _ in range(150):
        model = parse(CALLS)
        for _ in range(rng.choice((1, 2, 3, 8))):
            mutate(model, rng)
        if as_ir:
            try:
                source: object = onnx_ir.from_proto(model)
            except onnx_ir.serde.SerdeError:
                continue
        else:
            source = model
        loads += survives(source)
    assert 0 < loads < 150


def survives(source: object) -> bool:
    """Return True if the model loads; a refusal must be one of ours, and either must be quick."""
    start = time.process_time()
    message = "loaded, no error"
    try:
        load_model(source)
    except (ConversionError, UsageError) as error:
        message = str(error)
    assert time.process_time() - start < 5
    assert 10 < len(message) < 1000
    return message == "loaded, no error"


STRINGS = ("", "x", "y", "w", "N", "ai.onnx", "..", "/etc/passwd", "Constant", "local", "twice", "a" * 300)
INTEGERS = (0, 1, -1, 2, 7, 16, 2**31 - 1, 2**62, -(2**63), 8, 22, 23)
ODD: dict[int, Sequence[Any]] = {
    FieldDescriptor.TYPE_STRING: STRINGS,
    FieldDescriptor.TYPE_BYTES: [text.encode() for text in STRINGS],
    FieldDescriptor.TYPE_FLOAT: (0.0, 1.0, float("nan"), 1e30),
    FieldDescriptor.TYPE_DOUBLE: (0.0, 1.0, float("nan"), 1e30),
    FieldDescriptor.TYPE_INT64: INTEGERS,
    FieldDescriptor.TYPE_INT32: [i for i in INTEGERS if abs(i) < 2**31],
    FieldDescriptor.TYPE_UINT64: [abs(i) for i in INTEGERS],
}


def mutate(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change one field anywhere: to an odd value, away, twice, or to a copy of another message of its type."""
    messages: list[Any] = [model]
    for message in messages:
        for field, inner in message.ListFields():
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                messages.extend(inner if field.is_repeated else [inner])
    message = rng.choice(messages)
    field = rng.choice(list(message.DESCRIPTOR.fields))
    values = ODD.get(field.type, [])
    if field.type == FieldDescriptor.TYPE_ENUM:
        values = [value.number for value in field.enum_type.values]
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        values = [type(m).FromString(m.SerializeToString()) for m in messages if m.DESCRIPTOR is field.message_type]
    if not values or rng.random() < 0.2:
        message.ClearField(field.name)
    elif field.is_repeated:
        items = getattr(message, field.name)
        if len(items) and rng.random() < 0.5:
            del items[rng.randrange(len(items))]
        else:
            items.append(rng.choice(values))
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, field.name).CopyFrom(rng.choice(values))
    else:
        setattr(message, field.name, rng.choice(values))
