"""ncnn_llm's runner in Python: what its ncnn_llm_gpt.cpp and rope_embed.cpp compute."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.runtime.base import Array, Feed, Step
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner

_HIDDEN = np.float32(-1e38)


def tables(rope: Mapping[str, Any], past: int, count: int) -> tuple[Array, Array]:
    """Return the cosines and sines of so many tokens, in float32 as in the runner."""
    size = rope["rope_head_dim"]
    power = (np.arange(size // 2) * 2 / size).astype(np.float32)
    angles = np.arange(past, past + count, dtype=np.float32)[:, None] * (1 / np.float32(rope["rope_theta"]) ** power)
    scale = np.float32(1)
    if rope["type"] == "LongRoPE":
        original = rope["original_max_position_embeddings"]
        angles /= np.array(rope["long_factor" if count > original else "short_factor"], np.float32)
        scale = np.sqrt(1 + np.log(np.float32(original / 32768)) / np.log(np.float32(32768)))
    return np.cos(angles) * scale, np.sin(angles) * scale


def greedy(folder: Path, prompt: Sequence[int], count: int) -> Array:
    """Return the scores of greedy tokens after a prompt, whose last token is a step of its own."""
    config = json.loads((folder / "model.json").read_text())
    paths = {key: folder / name for key, name in config["params"].items()}
    setting, before, past = config["setting"], None, 0
    caches = [(f"cache_{role}{i}", f"out_cache_{role}{i}") for i in range(setting["attn_cnt"]) for role in "kv"]
    tokens, ids, scores = [*prompt], [*prompt[:-1]], list[Array]()
    with NcnnWorker() as first, NcnnWorker() as second, NcnnWorker() as third:
        embed, decoder, head = (
            NcnnRunner(paths[f"{net}_param"], paths[f"{net}_bin"], worker=worker)
            for net, worker in zip(("embed_token", "decoder", "proj_out"), (first, second, third), strict=True)
        )
        while len(scores) < count:
            x = embed.run({"in0": np.array([ids], np.int32)}, ["out0"])["out0"]
            mask = np.triu(np.full((len(ids), past + len(ids)), _HIDDEN), past + 1)
            feeds = {f"in{i}": Feed(a) for i, a in enumerate((x, mask, *tables(setting["rope"], past, len(ids))))}
            before = Step(feeds, caches, past, before)
            y = decoder.run(before, ["out0"])["out0"]
            past += len(ids)
            if past >= len(prompt):
                scores.append(head.run({"in0": y}, ["out0"])["out0"].reshape(-1))
                tokens.append(int(scores[-1].argmax()))
            ids = tokens[past : past + 1]
    return np.array(scores)


def onnxruntime_scores(model: bytes, manifest: Manifest, prompt: Sequence[int], count: int) -> Array:
    """Return the scores of greedy tokens after a prompt; each is computed from all earlier ones, without a past."""
    entries = manifest.inputs
    pasts = [entry for entry in entries if entry.name.startswith("past_key_values")]
    past = {e.name: np.zeros([n if isinstance(n, int) else 0 for n in e.shape], np.float32) for e in pasts}
    tokens, scores, runner = [*prompt], list[Array](), OrtRunner(model)
    for _ in range(count):
        own = {"input_ids": tokens, "attention_mask": [1] * len(tokens), "position_ids": range(len(tokens))}
        feeds = {entry.name: np.array([own[entry.name]]) for entry in entries if entry.name in own}
        scores.append(runner.run_any({**feeds, **past})["logits"][0, -1])
        tokens.append(int(scores[-1].argmax()))
    runner.close()
    return np.array(scores)
