import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.manifest import Cache, Entry, LayerCount, Manifest, Source, read_manifest

MANIFEST = Manifest(
    inputs=(
        Entry("input ids", "input_ids", (1, "seq", None), "int64", 0, "int32"),
        Entry("t", "t", (), "float32", None),
    ),
    outputs=(Entry("y", "y", (2, 3), "float32", 1),),
    source=Source("0" * 64, 20),
    tool="onnx2ncnn-opt 0.1.0",
    ncnn="1.0.20261020",
    layers=LayerCount(9, 5),
    passes=("fuse_activation", "eliminate_noop"),
)


def test_the_format_that_other_programs_read() -> None:
    data = json.loads(MANIFEST.to_json())
    assert data["format"] == 1
    assert data["inputs"][0] == {
        "name": "input ids",
        "blob": "input_ids",
        "shape": [1, "seq", None],
        "dtype": "int64",
        "batch_axis": 0,
        "element": "int32",
    }
    assert data["inputs"][1]["batch_axis"] is None
    assert data["source"] == {"sha256": "0" * 64, "opset": 20}
    assert data["layers"] == {"before": 9, "after": 5}
    assert data["passes"] == ["fuse_activation", "eliminate_noop"]


def test_the_pair_of_a_cache(tmp_path: Path) -> None:
    cache = Cache("attention0", "key", "past", "present")
    entry = Entry("past", "past", (1, 2, "P", 8), "float32", 0, cache=cache)
    path = tmp_path / "m.ncnn.json"
    present = replace(entry, name="present", blob="present")
    path.write_text(replace(MANIFEST, inputs=(entry,), outputs=(present,)).to_json())
    assert read_manifest(path).inputs == (entry,)
    data = json.loads(path.read_text())
    assert data["inputs"][0]["cache"] == {"of": "attention0", "role": "key", "in": "past", "out": "present"}
    data["inputs"][0]["cache"]["role"] = "query"
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="role is 'query'"):
        read_manifest(path)


def test_a_manifest_is_read_as_it_was_written_by_this_version_or_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "m.ncnn.json"
    path.write_text(MANIFEST.to_json())
    assert read_manifest(path) == MANIFEST
    data = json.loads(MANIFEST.to_json())
    for entry in (*data["inputs"], *data["outputs"]):
        del entry["element"]
    path.write_text(json.dumps(data))
    assert read_manifest(path) == MANIFEST


def changed(*keys: str | int, value: Any) -> str:
    data = json.loads(MANIFEST.to_json())
    place = data
    for key in keys[:-1]:
        place = place[key]
    if value is ...:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a manifest"),
        ("{", "not a manifest"),
        ("[" * 100_000, "not a manifest"),
        ('"\ud800"', "not a manifest"),
        ("[1]", "no format of type int"),
        (changed("format", value=2), "manifest format 2"),
        (changed("format", value=True), "no format of type int"),
        (changed("inputs", value={}), r"Expected `array`, got `object` - at `\$\.inputs`"),
        (changed("inputs", 1, value="x"), r"Expected `object`, got `str` - at `\$\.inputs\[1\]`"),
        (changed("inputs", 0, "blob", value=...), r"missing required field `blob` - at `\$\.inputs\[0\]`"),
        (
            changed("outputs", 0, "element", value="int8"),
            r"element is 'int8', but has to be one of .* - at `\$\.outputs\[0\]`",
        ),
        (
            changed("outputs", 0, "batch_axis", value=2),
            r"batch_axis is 2, but the shape has 2 axes - at `\$\.outputs\[0\]`",
        ),
        (
            changed("outputs", 0, "batch_axis", value="0"),
            r"Expected `int \| null`, got `str` - at `\$\.outputs\[0\]\.batch_axis`",
        ),
        (
            changed("outputs", 0, "shape", 1, value=1.5),
            r"Expected `int \| str \| null`, got `float` - at `\$\.outputs\[0\]\.shape\[1\]`",
        ),
        (
            changed("inputs", 0, "shape", 0, value=-3),
            r"a size is -3, but has to be 0 to 2147483647 - at `\$\.inputs\[0\]`",
        ),
        (changed("inputs", 1, "shape", value=[2**62]), "a size is 4611686018427387904"),
        (
            changed("inputs", 1, "cache", value={"of": "a", "role": "key", "in": "t", "out": "y"}),
            "the cache 't' has no output - at `\\$`",
        ),
        (changed("source", "opset", value=None), r"Expected `int`, got `null` - at `\$\.source\.opset`"),
        (
            changed("values", value=[{"name": "a", "dtype": "int64", "value": ["x"]}]),
            r"to be numbers, .* `\$\.values\[0\]`",
        ),
        (changed("inputs", 0, "image", value={"std": [0]}), r"std is divided by, .* `\$\.inputs\[0\]\.image`"),
        (changed("layers", value=...), "missing required field `layers`"),
        (changed("passes", 0, value=3), r"Expected `str`, got `int` - at `\$\.passes\[0\]`"),
    ],
)
def test_a_broken_manifest_says_where(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "m.ncnn.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UsageError, match=said) as error:
        read_manifest(path)
    assert str(path) in str(error.value)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_manifest(tmp_path / "none.json")
