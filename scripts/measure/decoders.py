"""Measure a decoder: our net, one written by hand, and ONNX Runtime, alternating, with one thread each.

    python -m scripts.measure.decoders MODEL.onnx [--past N...] [--turns N]

MODEL.onnx is a Qwen2, as optimum exports it. The fastest of all turns counts. The net by hand has the same inputs and
outputs: it makes mask and rotary tables from ids, mask and positions.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.manifest import Manifest, read_manifest
from onnx2ncnn_opt.runtime.base import Array, Step
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner, OrtWorker
from onnx2ncnn_opt.runtime.slots import Slot, model_feeds
from onnx2ncnn_opt.runtime.steps import StepInputs
from testing.handmade import raw, tagged, write_net

_SECONDS, _PREFILL = 0.1, 256


@dataclass
class _Weights:
    """The weights of a Qwen2 by the names of its nodes."""

    model: onnx.ModelProto
    arrays: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.model.graph.initializer}
        for node in self.model.graph.node:  # optimum stores equal tensors once
            if node.op_type == "Identity" and node.input[0] in self.arrays:
                self.arrays[node.output[0]] = self.arrays[node.input[0]]
        self.nodes = {node.name: node for node in self.model.graph.node}

    def matrix(self, name: str) -> Array:
        """Return the matrix of a MatMul, transposed as Gemm wants it."""
        return np.ascontiguousarray(self.arrays[self.nodes[f"{name}/MatMul"].input[1]].T)


def by_hand(model: Path, folder: Path, manifest: Manifest) -> tuple[Path, Path]:
    """Write the net of a Qwen2 as its author would."""
    weights = _Weights(onnx.load(model))
    arrays = weights.arrays
    cache = next(entry for entry in manifest.inputs if entry.cache)
    groups, size = (int(str(cache.shape[axis])) for axis in (1, 3))
    blocks = len(manifest.caches) // 2
    vocabulary, hidden = arrays["model.embed_tokens.weight"].shape
    lines = [f"Input {name} 0 1 {name}" for name in ("input_ids", "attention_mask", "position_ids")]
    pasts, presents = zip(*manifest.caches, strict=True)
    lines += [
        f"Input caches 0 {len(pasts)} {' '.join(pasts)}",
        f"Embed words 1 1 input_ids x0 0={hidden} 1={vocabulary} 3={vocabulary * hidden}",
        "Dequantize seen 1 1 attention_mask seen 0=1 31=23",
        "CumulativeSum count 1 1 seen count",
        "Reshape columns 1 1 count columns 0=-1 1=1",
        "Dequantize own 1 1 position_ids own 0=1 31=23",
        "Reshape rows 1 1 own rows 0=1 1=-1",
        "Split rows2 1 2 rows rows_mask rows_angle",
        "BinaryOp gap0 2 1 rows_mask columns gap0 0=1",
        "BinaryOp gap1 1 1 gap0 gap1 0=0 1=1 2=1.0",
        "BinaryOp gap2 1 1 gap1 gap2 0=5 1=1 2=0.0",
        "BinaryOp bias 1 1 gap2 bias 0=2 1=1 2=10000.0",
        f"MemoryData frequencies 0 1 frequencies 0={size // 2} 1=1",
        "BinaryOp angles 2 1 rows_angle frequencies angles 0=2",
        "Split angles2 1 2 angles angles_cos angles_sin",
        "UnaryOp cos 1 1 angles_cos cos 0=10",
        "UnaryOp sin 1 1 angles_sin sin 0=9",
    ]
    for name, count in (("bias", blocks), ("cos", 2 * blocks), ("sin", 2 * blocks)):
        lines.append(f"Split {name}_all 1 {count} {name} " + " ".join(f"{name}{i}" for i in range(count)))
    theta = 1.0 / 10000.0 ** (np.arange(0, size, 2) / size)
    data = [tagged(arrays["model.embed_tokens.weight"]), raw(1.0), raw(1.0), raw(theta)]
    for n in range(blocks):
        at = f"model.layers.{n}"

        def gemm(name: str, bottom: str, top: str, at: str = at) -> str:
            matrix, bias = (
                weights.matrix(f"/model/{at.removeprefix('model.')}/{name}"),
                f"{at}.{name.replace('/', '.')}.bias",
            )
            rows, columns = matrix.shape
            data.append(tagged(matrix) + (tagged(arrays[bias]) if bias in arrays else b""))
            kind = "10=4" if bias in arrays else "10=-1"
            return f"Gemm {top} 1 1 {bottom} {top} 3=1 5=1 6=1 8={rows} 9={columns} {kind}"

        def heads(name: str, count: int, n: int = n) -> Iterator[str]:
            yield f"Reshape {name}r{n} 1 1 {name}{n} {name}r{n} 0={size} 1={count} 2=-1"
            yield f"Permute {name}p{n} 1 1 {name}r{n} {name}p{n} 0=2"

        data.append(raw(arrays[f"{at}.input_layernorm.weight"]))
        lines += [f"Split x{n}s 1 2 x{n} x{n}a x{n}b", f"RMSNorm n{n} 1 1 x{n}a n{n} 0={hidden} 1=1e-6"]
        lines += [f"Split n{n}s 1 3 n{n} n{n}q n{n}k n{n}v"]
        lines += [gemm(f"self_attn/{name}_proj", f"n{n}{name}", f"{name}{n}") for name in "qkv"]
        lines += [*heads("q", weights.matrix(f"/model/layers.{n}/self_attn/q_proj").shape[0] // size)]
        lines += [*heads("k", groups), *heads("v", groups)]
        for number, name in enumerate("qk"):
            lines.append(f"RotaryEmbed {name}e{n} 3 1 {name}p{n} cos{2 * n + number} sin{2 * n + number} {name}e{n}")
        mine = f"{pasts[2 * n]} {pasts[2 * n + 1]} o{n} {presents[2 * n]} {presents[2 * n + 1]}"
        lines += [f"SDPA a{n} 6 3 qe{n} ke{n} vp{n} bias{n} {mine} 5=1 6={size**-0.5} 7=1"]
        lines += [f"Permute op{n} 1 1 o{n} op{n} 0=2", f"Reshape or{n} 1 1 op{n} or{n} 0={hidden} 1=-1"]
        lines += [gemm("self_attn/o_proj", f"or{n}", f"og{n}"), f"BinaryOp y{n} 2 1 x{n}b og{n} y{n}"]
        data.append(raw(arrays[f"{at}.post_attention_layernorm.weight"]))
        lines += [f"Split y{n}s 1 2 y{n} y{n}a y{n}b", f"RMSNorm m{n} 1 1 y{n}a m{n} 0={hidden} 1=1e-6"]
        lines += [f"Split m{n}s 1 2 m{n} m{n}g m{n}u"]
        lines += [gemm("mlp/gate_proj", f"m{n}g", f"g{n}"), gemm("mlp/up_proj", f"m{n}u", f"u{n}")]
        lines += [f"Swish s{n} 1 1 g{n} s{n}", f"BinaryOp h{n} 2 1 s{n} u{n} h{n} 0=2"]
        lines += [gemm("mlp/down_proj", f"h{n}", f"d{n}"), f"BinaryOp x{n + 1} 2 1 y{n}b d{n} x{n + 1}"]
    head = weights.matrix("/lm_head")
    data += [raw(arrays["model.norm.weight"]), tagged(head)]
    lines += [f"RMSNorm norm 1 1 x{blocks} last 0={hidden} 1=1e-6"]
    lines += [f"Gemm head 1 1 last logits 3=1 5=1 6=1 8={head.shape[0]} 9={head.shape[1]} 10=-1"]
    return write_net(folder, *lines, weights=b"".join(data), stem="hand")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--past", type=int, nargs="+", default=[1, 64, 512, 1024, 2048])
    parser.add_argument("--turns", type=int, default=12)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, NcnnWorker() as first, NcnnWorker() as second:
        ours = lower(given.model).save(Path(folder) / "ours")
        manifest = read_manifest(ours.manifest)
        hand = by_hand(given.model, Path(folder), manifest)
        nets = [NcnnRunner(ours.param, ours.bin, worker=first), NcnnRunner(*hand, worker=second)]
        layers = [
            sum(not line.startswith("Split") for line in p.read_text().splitlines()) - 2 for p in (ours.param, hand[0])
        ]
        _check(nets, manifest)
        worker = OrtWorker()
        other = OrtRunner(given.model, fast=True, worker=worker)
        print("| | ours | by hand | ONNX Runtime | ours / by hand |\n|---|---|---|---|---|")
        print(f"| layers without Split | {layers[0]} | {layers[1]} | | |")
        for past, count in ((0, _PREFILL), *((past, 1) for past in given.past)):
            step, arrays = _step(manifest, past, count)
            best = [float("inf")] * 3
            for _ in range(given.turns):
                turn = [min(net.time(step, ["logits"], _SECONDS)) for net in nets]
                best = list(map(min, best, [*turn, min(other.time(arrays, _SECONDS))]))
            times = " | ".join(f"{each * 1e3:.3g}" for each in best)
            name = f"a token at past {past}, ms" if past else f"prefill of {count}, ms"
            print(f"| {name} | {times} | {best[0] / best[1]:.2f} |", flush=True)
        memory = [(net.worker.memory() or 0) / 1e6 for net in nets]
        print(f"| peak memory, MB | {memory[0]:.0f} | {memory[1]:.0f} | | {memory[0] / memory[1]:.2f} |")
        worker.close()


def _step(manifest: Manifest, past: int, count: int) -> tuple[Step, dict[str, Array]]:
    """Return a step of so many tokens after a prompt of `past`, for ncnn and for ONNX Runtime."""
    inputs, random = StepInputs.of(manifest), np.random.default_rng(0)
    slots = [Slot.of(entry) for entry in manifest.fed]
    before, arrays = None, {}
    for done, new in ((0, past), (past, count)) if past else ((0, count),):
        arrays = inputs.arrays(random.integers(0, inputs.ids.table or 2, new), done)
        before = Step(model_feeds(slots, arrays), manifest.caches, done, before)
    assert before is not None
    for entry in manifest.inputs:
        if entry.cache:
            shape = [size if isinstance(size, int) else past for size in entry.shape]
            arrays[entry.name] = random.standard_normal(shape, np.float32)
    return before, arrays


def _check(nets: Sequence[NcnnRunner], manifest: Manifest) -> None:
    """Raise SystemExit if the nets differ."""
    ours, hand = (net.run(_step(manifest, 7, 3)[0], ["logits"])["logits"] for net in nets)
    if not np.allclose(ours.reshape(-1), hand.reshape(-1), atol=1e-4 * np.abs(ours).max()):
        raise SystemExit(f"the net by hand is another one: it is off by {np.abs(ours - hand).max():.2g}")


if __name__ == "__main__":
    main()
