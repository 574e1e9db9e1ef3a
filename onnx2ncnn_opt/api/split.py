"""`--split llm`: a language model as the three nets that ncnn_llm runs: embeddings, decoder and head.

ncnn_llm's runner provides one mask, one pair of rotary tables and the caches, so they are inputs of the decoder. Masks
with a window are made of the runner's mask, and several pairs of tables are parts of the runner's.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from onnx2ncnn_opt.api.llm_runner import hides, rope_settings, rope_tables, runner_mask, window_of
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
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker

_NETS = {"embed_token": "embed", "decoder": "decoder", "proj_out": "lm_head"}  # names in model.json, and of files
_TOKENIZER = {"type": "bbpe", "vocab_file": "vocab.txt", "merges_file": "merges.txt", "bos": "", "eos": ""}
_LAST = "in1_last{}"  # the mask that sees so many keys
_TO_END = -233  # Crop: to the end
_FILL = -6e4  # hides a score; fp16 has it
_TOLERANCE = 1e-3  # of masks and tables; of logits relative to the largest
_DRIFT = 1e-6  # of tables for each position, because angles are float32

T = TypeVar("T")


class _Parts(NamedTuple):
    """The blobs between the three nets."""

    ids: Blob
    embedded: Blob
    masks: tuple[Blob, ...]
    cosines: tuple[Blob, ...]
    sines: tuple[Blob, ...]
    attention: tuple[Layer, ...]
    hidden: Blob
    logits: Blob

    def ends(self, net: str) -> tuple[dict[str, Blob], dict[str, Blob]]:
        """Return the inputs and outputs of one of the nets, by ncnn_llm's names, without in1 to in3."""
        if net == "embed":
            return {"in0": self.ids}, {"out0": self.embedded}
        if net == "lm_head":
            return {"in0": self.hidden}, {"out0": self.logits}
        starts, outputs = {"in0": self.embedded}, {"out0": self.hidden}
        for number, layer in enumerate(self.attention):
            for role, past, present in zip("kv", layer.inputs[-2:], layer.outputs[1:], strict=True):
                starts[f"cache_{role}{number}"], outputs[f"out_cache_{role}{number}"] = past, present
        return starts, outputs


class _Inputs(NamedTuple):
    """The runner's settings of rotary tables, and what the net makes of its inputs: 0 is no window."""

    rope: dict[str, Any]
    scale: float  # of tables
    widths: tuple[int, ...]  # of tables
    windows: tuple[int, ...]  # of masks

    def tables(self, past: int, count: int) -> list[Array]:
        """Return the net's cosines and sines."""
        return [table * self.scale for table in rope_tables(self.rope, past, count)]


def split_llm(files: NetFiles, folder: Path, steps: Callable[[], Sequence[Step]]) -> list[Path]:
    """Write the three nets of a language model, and model.json, into a folder; return their paths.

    `steps` returns feeds of the net: a prompt, tokens after it, and at the end the last tokens that have positions,
    without caches. Masks and tables of all have to be the runner's. With these, the three nets have to give the net's
    logits, except those of the last tokens. The user has to fill in the tokenizer in model.json. Raises UsageError if
    something differs, or unless the net has one table of embeddings, and caches in all attention layers.
    """
    parts = _parts(read_net(files.param, files.bin).graph)
    params = {f"{word}_{kind}": f"{net}.ncnn.{kind}" for word, net in _NETS.items() for kind in ("param", "bin")}
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in (*params.values(), "model.json")]
    try:
        with all_or_nothing(*paths) as (*staged, config), NcnnWorker() as worker:
            *near, last = steps()
            inputs, logits = _measure(files, parts, near, last, worker)
            nets = [NetFiles(*pair) for pair in zip(staged[::2], staged[1::2], strict=True)]
            for name, net in zip(_NETS.values(), nets, strict=True):
                _write(files, name, net, inputs)
            for found, expected in zip(_run(nets, parts, inputs, near, last, worker), logits, strict=True):
                _check(f"the logits '{parts.logits.name}'", found, expected, float(np.abs(expected).max()) * _TOLERANCE)
            setting = {"attn_cnt": len(parts.attention), "hidden_size": parts.embedded.known_producer["num_output"]}
            tokenizer = {**_TOKENIZER, "additional_special_tokens": []}
            content = {"params": params, "tokenizer": tokenizer, "setting": {**setting, "rope": inputs.rope}}
            config.write_text(json.dumps(content, indent=2) + "\n")
    finally:
        with suppress(OSError):  # the folder is not empty
            folder.rmdir()
    return paths


def _measure(
    files: NetFiles, parts: _Parts, near: Sequence[Step], last: Step, worker: NcnnWorker
) -> tuple[_Inputs, list[Array]]:
    """Return what the runner's inputs have to be for the net's masks and tables, and the net's logits."""
    net = NcnnRunner(files.param, files.bin, worker=worker)
    names = [blob.name for blob in (*parts.masks, *parts.cosines, *parts.sines)]
    results = [*(net.run(step, [*names, parts.logits.name]) for step in near), net.run(last, names)]
    cos, sin = ([_joined(each, tables) for each in results] for tables in (parts.cosines, parts.sines))
    if len({len(rows) for rows in cos[:-1]}) == 1:
        raise UsageError(f"--split llm: each step takes {len(cos[0])} tokens; leave their number dynamic")
    row = np.concatenate(cos)[1], np.concatenate(sin)[1]  # at position 1
    widths = tuple(results[0][blob.name].shape[-1] for blob in parts.cosines)
    windows = tuple(window_of(results[-1][mask.name]) for mask in parts.masks)
    inputs = _Inputs(rope_settings(*row), float(f"{np.hypot(*row).mean():.6g}"), widths, windows)
    for step, each, *tables in zip((*near, last), results, cos, sin, strict=True):
        count = len(tables[0])
        for mask, window in zip(parts.masks, inputs.windows, strict=True):
            _check(f"the mask '{mask.name}'", hides(each[mask.name]), runner_mask(step.past, count, window), _TOLERANCE)
        labels = f"cosines '{parts.cosines[0].name}'", f"sines '{parts.sines[0].name}'"
        for label, found, expected in zip(labels, tables, inputs.tables(step.past, count), strict=True):
            _check(f"the {label}", found, expected, _TOLERANCE + _DRIFT * (step.past + count))
    return inputs, [each[parts.logits.name] for each in results[:-1]]


def _joined(results: Mapping[str, Array], blobs: Sequence[Blob]) -> Array:
    """Return rows of several tables side by side."""
    tables = [results[blob.name] for blob in blobs]
    return np.concatenate([table.reshape(-1, table.shape[-1]) for table in tables], axis=1)


def _run(
    nets: Sequence[NetFiles], parts: _Parts, inputs: _Inputs, near: Sequence[Step], last: Step, worker: NcnnWorker
) -> list[Array]:
    """Return the logits of the three nets; raise UsageError if a mask with a window differs for the last tokens."""
    embed, decoder, head = (NcnnRunner(net.param, net.bin, worker=worker) for net in nets)
    caches = [(f"cache_{role}{i}", f"out_cache_{role}{i}") for i in range(len(parts.attention)) for role in "kv"]
    embedded = [embed.run({"in0": step[parts.ids.name]}, ["out0"])["out0"] for step in near]
    before: Step | None = None
    hidden: list[Array] = []
    for step, x in zip(near, embedded, strict=True):
        arrays = x, runner_mask(step.past, len(x)), *rope_tables(inputs.rope, step.past, len(x))
        before = Step({f"in{i}": Feed(array) for i, array in enumerate(arrays)}, caches, step.past, before)
        hidden.append(decoder.run(before, ["out0"])["out0"])
    for window in {*inputs.windows} - {0}:
        name = _LAST.format(window)
        found = decoder.run({"in1": runner_mask(last.past, 1)}, [name])[name]
        _check(f"the mask '{name}'", hides(found), runner_mask(last.past, 1, window), _TOLERANCE)
    return [head.run({"in0": x}, ["out0"])["out0"] for x in hidden]


def _check(what: str, found: Array, expected: Array, tolerance: float) -> None:
    if found.size != expected.size or not np.abs(found.reshape(expected.shape) - expected).max() <= tolerance:
        raise UsageError(
            f"--split llm: {what} are not those of ncnn_llm's runner: its mask adds nothing to scores, and its "
            "frequencies are the same at all positions; use the whole net"
        )


def _write(files: NetFiles, name: str, net: NetFiles, inputs: _Inputs) -> None:
    """Write one of the three nets."""
    graph = read_net(files.param, files.bin).graph
    parts = _parts(graph)
    layers, replaced = _runner_layers(parts, inputs) if name == "decoder" else ([], {})
    _cut(graph, *parts.ends(name), layers, replaced)
    write_staged(graph, net.param, net.bin)


def _runner_layers(parts: _Parts, inputs: _Inputs) -> tuple[list[Layer], dict[Blob, Blob]]:
    """Return layers that compute masks and tables from the runner's in1, in2 and in3, and the blobs to replace."""
    layers: list[Layer] = []

    def add(type: str, sources: Sequence[Blob], *names: str, **params: Any) -> tuple[Blob, ...]:
        layers.append(Layer(type, names[0], sources, [Blob(name) for name in names], params))
        return layers[-1].outputs

    [mask] = add("Input", (), "in1")
    made = {0: mask}
    for window in sorted({*inputs.windows} - {0}):  # a key that is `window` keys before one that is seen is hidden
        [x] = add("Padding", [mask], f"in1_padded{window}", right=window, value=_FILL)
        [x] = add("Crop", [x], f"in1_ahead{window}", starts=[window], ends=[_TO_END], axes=[1])
        [x] = add("Threshold", [x], f"in1_seen{window}", threshold=_FILL / 2)
        [x] = add("BinaryOp", [x], f"in1_before{window}", op_type=BinaryOp.MUL, with_scalar=1, b=_FILL)
        [made[window]] = add("BinaryOp", [mask, x], _LAST.format(window), op_type=BinaryOp.MIN)
    replaced = {old: made[window] for old, window in zip(parts.masks, inputs.windows, strict=True)}
    for name, tables in (("in2", parts.cosines), ("in3", parts.sines)):
        slices = table = add("Input", (), name)
        if inputs.scale != 1:
            slices = table = add(
                "BinaryOp", table, f"{name}_scaled", op_type=BinaryOp.MUL, with_scalar=1, b=inputs.scale
            )
        if len(tables) > 1:
            names = [f"{name}_{i}" for i in range(len(tables))]
            slices = add("Slice", table, *names, slices=list(inputs.widths), axis=1)
        replaced |= dict(zip(tables, slices, strict=True))
    return layers, replaced


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
    masks = tuple(dict.fromkeys(layer.inputs[operand_count(layer)] for layer in attention))
    tables = dict.fromkeys(layer.inputs[1:] for layer in graph if layer.type == "RotaryEmbed")
    if not masks or not tables:
        what = "no attention layer keeps caches" if not masks else "no rotary table tells ncnn_llm's positions"
        raise UsageError(f"--split llm: {what}; use the whole net")
    cosines, sines = zip(*tables, strict=True)
    before = _before(*masks, *cosines, *sines)
    embed = _only((layer for layer in graph if layer.type == "Embed" and layer not in before), "tables of embeddings")
    ids = _only((layer.output for layer in _before(embed.output) if layer.type == "Input"), "inputs of token ids")
    logits = last = _only((blob for blob in graph.outputs if blob not in caches(graph)), "outputs besides the caches")
    is_product = False
    while not is_product:
        if last.producer is None or last.is_input:
            raise UsageError("--split llm: no product makes the logits")
        is_product = last.producer.type in ("Gemm", "InnerProduct")
        last = _only(last.producer.inputs, f"operands of {last.producer.type} '{last.producer.name}'")
    return _Parts(ids, embed.output, masks, cosines, sines, attention, last, logits)


def _sees_keys(blob: Blob) -> bool:
    """Return True if a blob is 1 in rows of the mask that see a key; with the runner's mask, each row sees one."""
    layer = unmoved(blob).made_by("Threshold")
    reduction = layer.input.made_by("Reduction") if layer is not None else None
    is_max = reduction is not None and reduction["operation"] == Reduction.MAX
    return is_max and all(ancestor.type != "Embed" for ancestor in _before(blob))


def _only(items: Iterable[T], what: str) -> T:
    listed = list(items)
    if len(listed) != 1:
        raise UsageError(f"--split llm: the net has {len(listed)} {what}, and ncnn_llm has one; use the whole net")
    return listed[0]


def _before(*blobs: Blob) -> set[Layer]:
    """Return the layers that blobs depend on."""
    before = reached(blobs, lambda blob: blob.producer.inputs if blob.producer is not None else ())
    return {blob.producer for blob in before if blob.producer is not None}


def _cut(
    graph: Graph,
    starts: Mapping[str, Blob],
    ends: Mapping[str, Blob],
    layers: Sequence[Layer],
    replaced: Mapping[Blob, Blob],
) -> None:
    """Cut a graph to the layers between blobs, and give these blobs their new names; `layers` make blobs for others."""
    renamed, own = {**starts, **ends}, [blob.name for layer in layers for blob in layer.outputs]
    blobs = [blob for layer in graph for blob in layer.outputs]
    names = NamePool((*renamed, *own, *(blob.name for blob in blobs)))
    for blob in blobs:
        if blob.name in (*renamed, *own):
            blob.name = names.take(blob.name)
    start = next(iter(graph))
    for layer in layers:
        graph.add(layer, before=start)
    for old, new in replaced.items():
        graph.redirect(old, new)
    for name, blob in renamed.items():
        if name in ends or blob.is_input:
            blob.name = name
        if blob.is_input and blob.producer is not None:
            blob.producer.name = name
    cut(graph, starts, ends)
    more = {blob.name for blob in graph.inputs} - {*starts, *own}
    if more:
        raise UsageError(f"--split llm: the part with {', '.join(ends)} also needs {', '.join(sorted(more))}")
