"""Decoders with caches: fixtures/llm, of three exporters, each a net that computes what ONNX Runtime does."""

from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt import Net, convert
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError, UsageError
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing import present
from testing.exports import one_of_each, refilled, sampled
from testing.ncnn_llm import onnxruntime_scores

MODELS = sorted((Path(__file__).parents[1] / "fixtures" / "llm").glob("*.onnx"))
KINDS = ("optimum", "optimum-sdpa", "dynamo", "genai", "genai-int4")
# What a model cannot be, in which words.
REFUSED = {"merged": "If 'optimum::if': its condition is known only at run time"}


def refusal(path: Path) -> str | None:
    """Return the words in which a model is refused."""
    return next((said for part, said in REFUSED.items() if part in path.stem), None)


def named(stem: str) -> bytes:
    """Return the model of this name with its weights."""
    [path] = [path for path in MODELS if path.stem == stem]
    return model_of(path)


def model_of(path: Path) -> bytes:
    """Return a model with its weights."""
    return bytes(refilled(path).SerializeToString())


ABLE = [path for path in MODELS if not refusal(path)]


def test_ten_models_of_all_exporters() -> None:
    stems = {path.stem for path in MODELS}
    names = {stem.split(".")[0] for stem in stems}
    assert len(names) >= 10
    assert {stem.partition(".")[2] for stem in stems} == set(KINDS)
    assert sum(path.stat().st_size for path in MODELS) < 3_000_000


@pytest.mark.parametrize("path", sampled(ABLE, one_of_each(ABLE)))
def test_a_decoder_is_right(path: Path) -> None:
    conversion = convert(model_of(path))
    assert present(conversion.report).ok, conversion.report


def test_refusals_name_the_reason() -> None:
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
    graph = lower(named(name)).graph
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
    conversion = lower(named(name))
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


@pytest.mark.parametrize("count", [1, 4])
def test_steps_of_a_fixed_number_of_tokens(count: int) -> None:
    conversion = convert(named("qwen2.optimum"), shapes={"input_ids": (1, count)})
    assert conversion.manifest().caches
    assert present(conversion.report).ok, conversion.report


def test_a_past_of_a_fixed_length_is_no_cache() -> None:
    """A cache grows, and the mask and positions of such a net do not."""
    pasts = {f"past_key_values.{i}.{part}": (1, None, 9, None) for i in range(2) for part in ("key", "value")}
    own = {"input_ids": (1, 4), "attention_mask": (1, 13), "position_ids": (1, 4)}
    conversion = convert(named("qwen2.optimum"), shapes={**own, **pasts})
    assert not conversion.manifest().caches
    assert present(conversion.report).ok, conversion.report


@pytest.mark.parametrize("name", ["whisper.optimum", "t5.optimum", "t5.dynamo"])
def test_a_past_whose_length_no_input_tells(name: str, tmp_path: Path) -> None:
    """The net has an input for it. Keys and values of the encoder stay plain inputs, which hold for all steps."""
    conversion = convert(named(name), tmp_path / "net")
    assert present(conversion.report).ok
    with Net(tmp_path / "net") as net:
        assert net.manifest is not None
        caches = {entry.name: entry.cache for entry in net.manifest.inputs if "past" in entry.name}
        assert {"decoder" in name for name, cache in caches.items() if cache} == {True}
        assert {"encoder" in name for name, cache in caches.items() if not cache} == {True}
        [length] = [entry for entry in net.manifest.inputs if entry.length]
        assert length.length == ("input_ids", "past_key_values.0.decoder.key")
        assert length.name not in [entry.name for entry in net.inputs]
        random = np.random.default_rng(0)
        sizes = {entry.name: [n if isinstance(n, int) else 12 for n in entry.shape] for entry in net.inputs}
        given = {n: random.random(size).astype(np.float32) for n, size in sizes.items() if "mask" not in n}
        given |= {n: np.ones(size, np.int64) for n, size in sizes.items() if "mask" in n}
        del given["input_ids"]
        whole = net.step([5, 6, 7], given)["logits"]
        net.reset()
        net.step([5], given)
        parts = net.step([6, 7])["logits"]
    np.testing.assert_allclose(parts[0, -1], whole[0, -1], atol=1e-4)


def test_a_table_of_positions_ends(tmp_path: Path) -> None:
    """Whisper's positions follow from the past: ncnn would take other rows, and say nothing."""
    convert(named("whisper.optimum"), tmp_path / "net", verification=None)
    with Net(tmp_path / "net") as net:
        shapes = {e.name: [n if isinstance(n, int) else 12 for n in e.shape] for e in net.inputs}
        given = {name: np.ones(shape, np.float32) for name, shape in shapes.items() if name != "input_ids"}
        net.step([1] * 64, given)
        with pytest.raises(UsageError, match="of 64 or less, not 65: the model's table ends there"):
            net.step([1])


@pytest.mark.parametrize("name", ["gemma2.optimum", "gemma2.dynamo"])
def test_a_past_that_is_no_cache_starts_with_a_hidden_row(name: str, tmp_path: Path) -> None:
    """A cap of scores keeps SDPA from having caches."""
    model, prompt, ends = named(name), [*range(3, 15)], 0
    expected = onnxruntime_scores(model, convert(model, tmp_path / "net", verification=None).manifest(), prompt, 24)
    with Net(tmp_path / "net") as net:
        shapes = {entry.name: [n if isinstance(n, int) else 1 for n in entry.shape] for entry in net.inputs}
        pasts = {name: np.zeros(shape, np.float32) for name, shape in shapes.items() if "past" in name}
        for ids, scores in zip((prompt, *expected.argmax(1)[:-1, None]), expected, strict=True):
            starts, ends = ends, ends + len(ids)
            own = {"input_ids": ids, "attention_mask": [0, *[1] * ends], "position_ids": range(starts, ends)}
            results = net.run({**{name: np.array([own[name]]) for name in shapes if name in own}, **pasts})
            pasts = {name: results[name.replace("past_key_values", "present")] for name in pasts}
            np.testing.assert_allclose(results["logits"][0, -1], scores, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2.optimum", "qwen2.dynamo", "mistral.optimum"])
def test_left_padding(name: str, tmp_path: Path) -> None:
    """Rows of padding see nothing but themselves, and no other row sees them."""
    model = named(name)
    conversion = convert(model, tmp_path / "net", verification=None)
    pasts = [entry for entry in conversion.manifest().inputs if entry.cache]
    unset = {e.name: np.zeros([n if isinstance(n, int) else 0 for n in e.shape], np.float32) for e in pasts}
    mask = np.array([[0, 0, *[1] * 11]])
    given = {"attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    ids = np.arange(3, 16)[None]
    runner = OrtRunner(model)
    with Net(tmp_path / "net") as net:
        ours = net.step(ids, given)["logits"]
    theirs = runner.run_any({"input_ids": ids, **given, **unset})["logits"]
    runner.close()
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
