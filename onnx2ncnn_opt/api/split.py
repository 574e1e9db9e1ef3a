"""`--split llm`: a language model as the three nets that ncnn_llm runs: embeddings, decoder and head.

ncnn_llm's runner provides the mask, the rotary tables and the caches, so they are inputs of the decoder.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.attention import ATTENTION, caches, operand_count
from onnx2ncnn_opt.ir.codes import BinaryOp, Reduction
from onnx2ncnn_opt.ir.cut import cut
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.param.files import NetFiles, all_or_nothing, read_net, write_staged
from onnx2ncnn_opt.rewrite.prove_masks import unmoved
from onnx2ncnn_opt.runtime.base import Feed, Step

_NETS = {"embed_token": "embed", "decoder": "decoder", "proj_out": "lm_head"}  # names in model.json, and of files
_TOKENIZER = {"type": "bbpe", "vocab_file": "vocab.txt", "merges_file": "merges.txt", "bos": "", "eos": ""}
_FILL = 1e6  # numbers of this size and larger hide scores
_HIDDEN, _TOLERANCE = np.float32(-1e38), 1e-3  # in the runner's mask; relative to the largest logit
_RUNNER = "which scales neither positions nor tables, and adds nothing to scores; use the whole net"
# The blobs of `_Parts` that the three nets are compared by.
_COMPARED = {"mask": "the masks", "cos": "the cosines", "sin": "the sines", "logits": "the logits"}

T = TypeVar("T")


class _Parts(NamedTuple):
    """The blobs between the three nets."""

    ids: Blob
    embedded: Blob
    mask: Blob
    cos: Blob
    sin: Blob
    attention: tuple[Layer, ...]
    hidden: Blob
    logits: Blob

    def ends(self, net: str) -> tuple[dict[str, Blob], dict[str, Blob]]:
        """Return the inputs and outputs of one of the nets, by ncnn_llm's names."""
        if net == "embed":
            return {"in0": self.ids}, {"out0": self.embedded}
        if net == "lm_head":
            return {"in0": self.hidden}, {"out0": self.logits}
        starts = {"in0": self.embedded, "in1": self.mask, "in2": self.cos, "in3": self.sin}
        outputs = {"out0": self.hidden}
        for number, layer in enumerate(self.attention):
            for role, past, present in zip("kv", layer.inputs[-2:], layer.outputs[1:], strict=True):
                starts[f"cache_{role}{number}"], outputs[f"out_cache_{role}{number}"] = past, present
        return starts, outputs


def split_llm(files: NetFiles, folder: Path, steps: Callable[[], Sequence[Step]]) -> list[Path]:
    """Write the three nets of a language model, and model.json, into a folder; return their paths.

    `steps` returns feeds of the net: the three nets, with the runner's mask and tables, have to give its logits. The
    user has to fill in the tokenizer in model.json. Raises UsageError unless the net has one table of embeddings, one
    mask, one pair of rotary tables that the runner can make, and caches in all attention layers.
    """
    graphs: dict[str, Graph] = {}
    for name in _NETS.values():
        graph = read_net(files.param, files.bin).graph
        parts = _parts(graph)
        assert parts.embedded.producer is not None
        blobs = {field: getattr(parts, field).name for field in ("ids", *_COMPARED)}
        setting = {"attn_cnt": len(parts.attention), "hidden_size": parts.embedded.producer["num_output"]}
        _cut(graph, *parts.ends(name))
        graphs[name] = graph
    params = {f"{word}_{kind}": f"{net}.ncnn.{kind}" for word, net in _NETS.items() for kind in ("param", "bin")}
    tokenizer = {**_TOKENIZER, "additional_special_tokens": []}
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in (*params.values(), "model.json")]
    try:
        with all_or_nothing(*paths) as (*staged, config):
            nets = [NetFiles(*pair) for pair in zip(staged[::2], staged[1::2], strict=True)]
            for graph, net in zip(graphs.values(), nets, strict=True):
                write_staged(graph, net.param, net.bin)
            rope = {"type": "RoPE", **_compare(files, nets, blobs, setting["attn_cnt"], steps())}
            content = {"params": params, "tokenizer": tokenizer, "setting": {**setting, "rope": rope}}
            config.write_text(json.dumps(content, indent=2) + "\n")
    finally:
        with suppress(OSError):  # the folder is not empty
            folder.rmdir()
    return paths


def _compare(
    whole: NetFiles, nets: Sequence[NetFiles], blobs: Mapping[str, str], count: int, steps: Sequence[Step]
) -> dict[str, Any]:
    """Return the parameters of the rotary tables: frequency i is rope_theta ** (-2 * i / rope_head_dim).

    `blobs` are names in the whole net, `count` is the number of attention layers. Raises UsageError unless the nets,
    with the runner's mask and tables, give the logits of the whole net.
    """
    from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker

    caches = [(f"cache_{role}{i}", f"out_cache_{role}{i}") for i in range(count) for role in "kv"]
    before: Step | None = None
    with NcnnWorker() as worker:
        runners = [NcnnRunner(net.param, net.bin, worker=worker) for net in (whole, *nets)]
        expected = [runners[0].run(step, [blobs[name] for name in _COMPARED]) for step in steps]
        cos, sin = (np.concatenate([results[blobs[name]] for results in expected])[1] for name in ("cos", "sin"))
        half, least = cos.size, abs(float(np.arctan2(sin[-1], cos[-1])))  # of the frequencies the most exact one
        theta = float(f"{least ** (half / (1 - half)):.6g}") if half > 1 and least > 0 else 1.0
        frequencies = theta ** (-np.arange(half) / half)
        own: list[list[Array]] = []
        for step in steps:
            x = runners[1].run({"in0": step[blobs["ids"]]}, ["out0"])["out0"]
            angles = (step.past + np.arange(len(x)))[:, None] * frequencies
            mask = np.triu(np.full((len(x), step.past + len(x)), _HIDDEN), step.past + 1)
            own.append([np.asarray(array, np.float32) for array in (mask, np.cos(angles), np.sin(angles), x)])
        for arrays, step in zip(own, steps, strict=True):
            feeds = {f"in{i}": Feed(array) for i, array in enumerate((arrays.pop(), *arrays))}
            before = Step(feeds, caches, step.past, before)
            arrays.append(runners[2].run(before, ["out0"])["out0"])
        for arrays in own:
            arrays.append(runners[3].run({"in0": arrays.pop()}, ["out0"])["out0"])
    for arrays, results in zip(own, expected, strict=True):
        for (name, what), array in zip(_COMPARED.items(), arrays, strict=True):
            found = results[blobs[name]]
            found = np.where(found < -1e3, _HIDDEN, found) if name == "mask" else found
            scale = float(np.abs(array).max()) if name == "logits" else 1.0
            if found.size != array.size or np.abs(found.reshape(array.shape) - array).max() > _TOLERANCE * scale:
                raise UsageError(f"--split llm: {what} '{blobs[name]}' are not those of ncnn_llm's runner, {_RUNNER}")
    return {"rope_head_dim": 2 * half, "rope_theta": theta}


def _parts(graph: Graph) -> _Parts:
    for layer in graph.layers:
        if layer.computes(BinaryOp.MUL, scalar=False):
            for rows, other in (layer.inputs, layer.inputs[::-1]):
                if _sees_keys(rows):
                    graph.redirect(layer.output, other)
    attention = tuple(layer for layer in graph if layer.type in ATTENTION)
    for layer in attention:
        if layer.type != "SDPA" or not layer["kv_cache"]:
            raise UsageError(f"--split llm: {layer.type} '{layer.name}' keeps no caches")
    if not all(layer["attn_mask"] for layer in attention):
        raise UsageError("--split llm: there is attention without a mask, and ncnn_llm's has one")
    mask = _only(dict.fromkeys(layer.inputs[operand_count(layer)] for layer in attention), "masks")
    for layer in _before(mask):
        if any(1 < abs(number) < _FILL for number in _added(layer)):
            raise UsageError(
                f"--split llm: '{layer.name}' makes a window of the mask, and ncnn_llm's runner makes none"
            )
    rotated = [layer for layer in graph if layer.type == "RotaryEmbed"]
    cos, sin = _only(dict.fromkeys(layer.inputs[1:] for layer in rotated), "pairs of rotary tables")
    before = _before(mask, cos, sin)
    embed = _only((layer for layer in graph if layer.type == "Embed" and layer not in before), "tables of embeddings")
    ids = _only((layer.output for layer in _before(embed.output) if layer.type == "Input"), "inputs of token ids")
    logits = last = _only((blob for blob in graph.outputs if blob not in caches(graph)), "outputs besides the caches")
    is_product = False
    while not is_product:
        if last.producer is None or last.is_input:
            raise UsageError("--split llm: no product makes the logits")
        is_product = last.producer.type in ("Gemm", "InnerProduct")
        last = _only(last.producer.inputs, f"operands of {last.producer.type} '{last.producer.name}'")
    return _Parts(ids, embed.output, mask, cos, sin, attention, last, logits)


def _sees_keys(blob: Blob) -> bool:
    """Return True if a blob is 1 in rows of the mask that see a key; with the runner's mask, each row sees one."""
    layer = unmoved(blob).producer
    reduction = layer.input.producer if layer is not None and layer.type == "Threshold" else None
    is_max = reduction is not None and reduction.type == "Reduction" and reduction["operation"] == Reduction.MAX
    return is_max and all(ancestor.type != "Embed" for ancestor in _before(blob))


def _added(layer: Layer) -> Iterable[float]:
    """Return the constants that a layer adds, or that a MemoryData holds."""
    if layer.type == "MemoryData":
        return layer.weights["data"].reshape(-1).tolist()
    is_sum = any(layer.computes(op, scalar=True) for op in (BinaryOp.ADD, BinaryOp.SUB, BinaryOp.RSUB))
    return [layer["b"]] if is_sum else []


def _only(items: Iterable[T], what: str) -> T:
    listed = list(items)
    if len(listed) != 1:
        raise UsageError(f"--split llm: the net has {len(listed)} {what}, and ncnn_llm has one")
    return listed[0]


def _before(*blobs: Blob) -> set[Layer]:
    """Return the layers that blobs depend on."""
    before = reached(blobs, lambda blob: blob.producer.inputs if blob.producer is not None else ())
    return {blob.producer for blob in before if blob.producer is not None}


def _cut(graph: Graph, starts: Mapping[str, Blob], ends: Mapping[str, Blob]) -> None:
    """Cut a graph to the layers between blobs, and give these blobs their new names."""
    renamed = {**starts, **ends}
    blobs = [blob for layer in graph for blob in layer.outputs]
    names = NamePool((*renamed, *(blob.name for blob in blobs)))
    for blob in blobs:
        if blob.name in renamed:
            blob.name = names.take(blob.name)
    for name, blob in renamed.items():
        if name in ends or blob.is_input:
            blob.name = name
        if blob.is_input and blob.producer is not None:
            blob.producer.name = name
    cut(graph, starts, ends)
    more = {blob.name for blob in graph.inputs} - set(starts)
    if more:
        raise UsageError(f"--split llm: the part with {', '.join(ends)} also needs {', '.join(sorted(more))}")
