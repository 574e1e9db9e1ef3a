"""Decoders against their models, step by step."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt import Net, bisect, convert, verify
from onnx2ncnn_opt.manifest import read_manifest
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.verification.decode import Decoder
from onnx2ncnn_opt.verification.model_runs import load_converted
from onnx2ncnn_opt.verification.options import Verification
from testing import present
from testing.decoders import MODEL, NET, decoder, model_of

_ATTENTION = "q k v mask past_key past_value o0 present_key present_value 5=1 6=0.35355338 7=1"


def _lines(old: str, new: str) -> list[str]:
    lines = [line.replace(old, new) for line in NET]
    assert lines != list(NET)
    return lines


@pytest.mark.parametrize("modes", [("fp32",), ("fp16", "bf16")], ids=str)
def test_a_right_decoder(modes: tuple[str, ...], tmp_path: Path) -> None:
    report = verify(*decoder(tmp_path), verification=Verification(modes=modes))
    assert [(row.name, row.status) for row in report.outputs] == [
        ("logits", "ok"),
    ] * len(modes)


def test_a_decoder_of_embeddings(tmp_path: Path) -> None:
    """It takes rows, so no token can follow from the scores: all steps get random rows."""
    text = MODEL.replace("int64[1, S] input_ids", "float[1, S, 16] inputs_embeds")
    text = text.replace("word = Gather(words, input_ids)", "").replace("Add(word,", "Add(inputs_embeds,")
    found = convert(model_of(text), tmp_path / "net")
    assert [(row.name, row.status) for row in present(found.report).outputs] == [
        ("logits", "ok"),
    ]
    rows = np.random.default_rng(0).standard_normal((1, 3, 16)).astype(np.float32)
    with Net(tmp_path / "net") as net:
        whole = net.step(rows)["logits"]
        net.reset()
        parts = [net.step(rows[0, :2])["logits"], net.step(rows[:, 2:])["logits"]]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gap0 gap1 0=0 1=1 2=1.0", "gap0 gap1 0=0 1=1 2=0.0"),  # the mask hides the newest key
        ("gap0 gap1 0=0 1=1 2=1.0", "gap0 gap1 0=0 1=1 2=2.0"),  # the mask shows the next key
        (_ATTENTION, _ATTENTION.replace("past_key past_value", "past_value past_key")),
        (_ATTENTION, _ATTENTION.replace("present_key present_value", "present_value present_key")),
        ("6=0.35355338", "6=0.36"),
    ],
    ids=["mask hides one more", "mask hides one less", "pasts swapped", "presents swapped", "scale"],
)
def test_planted_faults_are_found(old: str, new: str, tmp_path: Path) -> None:
    report = verify(*decoder(tmp_path, *_lines(old, new)))
    assert not report.ok


def test_a_mask_that_nothing_reads_is_found(tmp_path: Path) -> None:
    """The columns are counted, and not the ones in the mask: both are equal until a token is hidden."""
    lines = _lines("seen 1 1 attention_mask seen 0=1 31=23", "seen 1 1 attention_mask hidden 0=1 31=23")
    at = next(i for i, line in enumerate(lines) if " hidden " in line)
    lines[at + 1 : at + 1] = [
        "BinaryOp ones0 1 1 hidden zeros 0=2 1=1 2=0.0",
        "BinaryOp ones1 1 1 zeros seen 0=0 1=1 2=1.0",
    ]
    report = verify(*decoder(tmp_path, *lines))
    assert "second token hidden" in report.outputs[0].message


def test_a_net_of_another_model(tmp_path: Path) -> None:
    _, param, bin = decoder(tmp_path)
    other, *_ = decoder(tmp_path / "other", seed=1)
    manifest = read_manifest(param.with_suffix(".json"))
    report = verify(other, param, bin, manifest=replace(manifest, source=manifest.source))
    assert "prompt of 7: off by up to" in report.outputs[0].message


def test_bisect_names_step_and_layer(tmp_path: Path) -> None:
    lines = _lines(_ATTENTION, _ATTENTION.replace("present_key present_value", "present_value present_key"))
    found = bisect(*decoder(tmp_path, *lines))
    assert "token 1 after a prompt of 7" in found.report.outputs[0].message
    assert found.located is not None
    assert found.located.layer.name == "attention"


def test_a_step_runs_again_after_others(tmp_path: Path) -> None:
    """The process plays the steps that its caches lack, and shortens caches that are longer."""
    model, param, bin = decoder(tmp_path)
    manifest = read_manifest(param.with_suffix(".json"))
    prompt, token = Decoder(load_converted(model, manifest), manifest, 0).steps()
    with NcnnWorker() as worker:
        runner, other = (NcnnRunner(param, bin, worker=worker) for _ in range(2))
        first = runner.run(token, ["logits"])["logits"]
        for net in (runner, other, runner):
            assert net.run(prompt, ["logits"])["logits"].shape == (63, 50)
            np.testing.assert_array_equal(net.run(token, ["logits"])["logits"], first)
            np.testing.assert_array_equal(net.run(token, ["logits"])["logits"], first)
            assert net.time(token, ["logits"], 0.0)
