"""Decoders that run step by step, with caches that stay next to ncnn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt import Net
from onnx2ncnn_opt.errors import RunError, UsageError
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing.decoders import POSITIONS, VOCABULARY, decoder
from testing.handmade import RELU, write_net


def _expected(model: Path, ids: list[int]) -> Any:
    empty, array = np.zeros((1, 1, 0, 8), np.float32), np.array([ids])
    feeds = {"input_ids": array, "attention_mask": np.ones_like(array), "position_ids": np.arange(len(ids))[None]}
    return OrtRunner(model).run({**feeds, "past_key": empty, "past_value": empty})["logits"]


@pytest.mark.parametrize(
    ("how", "most"),
    [
        ({}, 1e-5),
        ({"isolated": False}, 1e-5),
        pytest.param({"on": "vulkan"}, 1e-5, marks=pytest.mark.needs("Vulkan")),
        ({"mode": "bf16"}, 5e-2),
    ],
    ids=str,
)
def test_steps_agree_with_the_whole_sequence(how: dict[str, Any], most: float, tmp_path: Path) -> None:
    model, param, _ = decoder(tmp_path)
    random, ids = np.random.default_rng(0), list[int]()
    with Net(param, **how) as net:
        for _ in range(12):
            if ids and random.random() < 0.4:
                count = int(random.integers(0, len(ids) + 1))
                net.rewind(count)
                ids = ids[: len(ids) - count]
            new = random.integers(0, VOCABULARY, int(random.integers(1, 6))).tolist()
            ids += new
            logits, expected = net.step(new)["logits"], _expected(model, ids)[:, -len(new) :]
            assert np.abs(logits - expected).max() <= most * np.abs(expected).max()
            assert net.past == len(ids)
        net.reset()
        assert np.abs(net.step(ids[:3])["logits"] - _expected(model, ids[:3])).max() < most * 100


def test_a_run_starts_anew(tmp_path: Path) -> None:
    _, param, _ = decoder(tmp_path)
    feeds = {"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "position_ids": [[0, 1]]}
    with Net(param) as net:
        net.step([3, 4, 5])
        assert [entry.name for entry in net.inputs] == list(feeds)
        assert list(net.run(feeds)) == ["logits"]
        assert net.past == 0


def test_a_prompt_longer_than_the_table(tmp_path: Path) -> None:
    _, param, _ = decoder(tmp_path)
    with Net(param) as net:
        net.step([1] * POSITIONS)
        with pytest.raises(UsageError, match="position_ids has 64 to 64, but is an index into a table of 64 entries"):
            net.step(1)
        with pytest.raises(UsageError, match="input_ids has 50 to 50"):
            net.step(VOCABULARY)
        assert net.past == POSITIONS


def test_a_size_that_follows_from_the_past(tmp_path: Path) -> None:
    """The net's own arithmetic may have a limit, such as a table of positions that it makes from the mask."""
    _, param, _ = decoder(tmp_path)
    path = param.with_suffix(".json")
    path.write_text(replace(read_manifest(path), minimum={"10 + -1*P": 1}).to_json())
    with Net(param) as net:
        net.step([1] * 9)
        net.step([1])
        with pytest.raises(UsageError, match="the net is for P of 9 or less, not 10: the model's table ends"):
            net.step([1])


def test_wrong_use(tmp_path: Path) -> None:
    _, param, _ = decoder(tmp_path)
    with Net(param) as net:
        net.step([1, 2])
        with pytest.raises(UsageError, match="can forget 0 to 2 tokens, not 3"):
            net.rewind(3)
        with pytest.raises(UsageError, match="not an array of shape"):
            net.step(np.zeros((1, 1, 2), np.int64))
        net.close()
        with pytest.raises(RunError, match=r"the caches have 0 rows, not 2.*start with reset\(\)"):
            net.step(1)
        net.reset()
        assert net.step([1, 2])["logits"].shape == (1, 2, VOCABULARY)
    other, _ = write_net(tmp_path / "other", *RELU)
    with Net(other) as net, pytest.raises(UsageError, match="has no caches of attention"):
        net.step(1)
