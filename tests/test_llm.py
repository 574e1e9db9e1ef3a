"""Decoders with caches: fixtures/llm, of three exporters, each a net that computes what ONNX Runtime does."""

from pathlib import Path

import onnx
import pytest

from onnx2ncnn_opt import convert
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from testing.skeletons import refill

MODELS = sorted((Path(__file__).parents[1] / "fixtures" / "llm").glob("*.onnx"))
KINDS = ("optimum", "optimum-sdpa", "dynamo", "genai", "genai-int4")
# What a model cannot be, in which words.
REFUSED = {"merged": "If 'optimum::if': its condition is known only at run time"}


def refusal(path: Path) -> str | None:
    """Return the words in which a model is refused."""
    return next((said for part, said in REFUSED.items() if part in path.stem), None)


def model_of(path: Path) -> bytes:
    """Return a model with its weights."""
    return bytes(refill(onnx.load(path)).SerializeToString())


def sample(paths: list[Path]) -> list[Path]:
    """Return one exporter of each model, another one from model to model."""
    names = sorted({path.name.split(".")[0] for path in paths})
    found = []
    for number, name in enumerate(names):
        own = [path for path in paths if path.name.startswith(f"{name}.")]
        found.append(own[number % len(own)])
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "path" in metafunc.fixturenames:
        able = [path for path in MODELS if not refusal(path)]
        paths = able if metafunc.config.getoption("--thorough") else sample(able)
        metafunc.parametrize("path", paths, ids=lambda path: path.stem)


def test_ten_models_of_all_exporters() -> None:
    stems = {path.stem for path in MODELS}
    names = {stem.split(".")[0] for stem in stems}
    assert len(names) >= 10
    assert {stem.partition(".")[2] for stem in stems} == set(KINDS)
    assert sum(path.stat().st_size for path in MODELS) < 3_000_000


def test_a_decoder_is_right(path: Path) -> None:
    conversion = convert(model_of(path))
    assert conversion.report is not None
    assert conversion.report.ok, conversion.report


def test_what_is_refused_is_named() -> None:
    for path in MODELS:
        said = refusal(path)
        if said:
            with pytest.raises(UnsupportedError, match=said):
                lower(model_of(path))


@pytest.mark.parametrize("name", ["qwen2.dynamo", "llama.dynamo", "gemma3.dynamo", "phi.dynamo", "qwen3.genai"])
def test_rotations_of_any_length_are_layers(name: str) -> None:
    """Two blocks, in each the queries and the keys; heads that share keys are not repeated.

    The only head of keys is a matrix in 3-D: of 2-D blobs, Vulkan rotates each fourth row by the angles of the first.
    """
    [path] = [path for path in MODELS if path.stem == name]
    graph = lower(model_of(path)).graph
    types = [layer.type for layer in graph]
    assert {len(layer.inputs[0].known_shape) for layer in graph if layer.type == "RotaryEmbed"} == {3}
    assert types.count("RotaryEmbed") == 4
    assert types.count("SDPA") == 2
    assert "Tile" not in types


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2.optimum", "phi.optimum-sdpa", "gemma3.optimum", "mistral.dynamo", "phi3.dynamo", "llama.genai"),
        *("gpt2.optimum", "gpt2.dynamo"),
    ],
)
def test_every_past_is_a_cache(name: str) -> None:
    """All inputs of the past are read by attention alone, and no size comes from them; the batch is 1."""
    paths = [path for path in MODELS if path.stem == name]
    assert paths
    conversion = lower(model_of(paths[0]))
    manifest = conversion.manifest()
    caches = [entry for entry in manifest.inputs if entry.name.startswith("past_key_values")]
    assert len(caches) == 4
    for entry in caches:
        assert entry.cache is not None
        assert (entry.cache.in_, entry.cache.out) == (entry.name, entry.name.replace("past_key_values", "present"))
        assert entry.shape[0] == 1
    pasts = [layer for layer in conversion.graph if any(blob.is_input for blob in layer.inputs[1:])]
    assert {layer.type for layer in pasts} <= {"SDPA", "Interp", "Reshape", "Crop"}
    [last] = [layer for layer in conversion.graph if layer.type == "Input" and len(layer.outputs) > 1]
    assert [blob.name for blob in last.outputs] == [entry.blob for entry in caches]


def test_a_past_whose_length_nothing_tells_stays() -> None:
    """Whisper's decoder has no mask: its positions follow from the length of the past."""
    [path] = [path for path in MODELS if path.stem == "whisper.optimum"]
    conversion = lower(model_of(path))
    assert all(entry.cache is None for entry in conversion.manifest().inputs)
    reasons = {miss.reason for miss in conversion.near_misses if miss.pass_name == "fuse_kv_cache"}
    assert any("a cache has no shape when it is unset" in reason for reason in reasons)
