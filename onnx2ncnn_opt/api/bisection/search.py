"""The search for the first wrong layer: the first layer from which a path of wrong blobs leads to a wrong output."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from onnx2ncnn_opt.api.bisection.wrong_net import Fresh, Results, WrongNet, as_integers
from onnx2ncnn_opt.ir.correspondence import corresponding
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.rewrite.events import LayerRef, refs
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.slots import Slot
from onnx2ncnn_opt.verdict.blobs import UNKNOWN, Match, aligned, as_verdict
from onnx2ncnn_opt.verdict.errors import Tolerance, compare
from onnx2ncnn_opt.verification.inner_values import BlobRun
from onnx2ncnn_opt.verification.model_accuracy import tolerance_within

# Equal layers give equal bits in ncnn's plain kernels, but another version may have folded weights in another order.
_SAME_KERNELS = Tolerance(relative=1e-5, absolute=1e-7)

# Operators that converters may fuse into the layer before, and the layers that they become without fusion.
_ACTIVATIONS = frozenset(
    ("Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Relu", "Sigmoid", "Tanh")
)
_FUNCTIONS = frozenset(("Clip", "ELU", "GELU", "HardSigmoid", "HardSwish", "Mish", "ReLU", "Sigmoid", "Swish", "TanH"))
_RIGHT = Match("right")


@dataclass(frozen=True)
class LayerInput:
    """An input of a layer: the blob, the layer that produces it, its shape in ncnn, and whether it is right.

    `status` is "right", "wrong", or "unknown" if the model has no such value; `value` is the model's name for it.
    """

    blob: str
    layer: LayerRef
    shape: tuple[int, ...]
    status: str
    value: str | None


@dataclass(frozen=True)
class Located:
    """The first layer whose output exceeds the tolerance, on the inputs and in the mode in which verification failed.

    `blob` is this output, `message` describes its error, and `value` is the model's name for it. `origin` names the
    ONNX nodes of the layer, if known. `suspects` are the layers that may have the fault, in the order of the net:
    several if the model has no value for the blobs between them. `arrays` are the layer's inputs by blob.
    """

    layer: LayerRef
    blob: str
    message: str
    mode: str
    value: str | None
    origin: tuple[str, ...]
    inputs: tuple[LayerInput, ...]
    suspects: tuple[LayerRef, ...]
    arrays: Mapping[str, Array] = field(repr=False, compare=False)


def locate(
    blob: Blob,
    mode: str,
    message: str,
    value: str | None = None,
    origin: tuple[str, ...] = (),
    *,
    suspects: Sequence[Layer] = (),
    verdicts: Mapping[Blob, Match] | None = None,
    arrays: Mapping[str, Array] | None = None,
) -> Located:
    """Return the record for the producer of a blob; the default suspect is this layer.

    `verdicts` and `arrays` are those of the layer's inputs, if they were computed.
    """
    assert blob.producer is not None
    arrays, inputs = arrays or {}, []
    for read in blob.producer.inputs:
        verdict = (verdicts or {}).get(read, Match("right") if read.is_input else UNKNOWN)
        shape = arrays[read.name].shape if read.name in arrays else ()
        if read.producer is not None:
            inputs.append(LayerInput(read.name, refs((read.producer,))[0], shape, verdict.status, verdict.value))
    [layer] = refs((blob.producer,))
    blamed = refs(tuple(suspects)) or (layer,)
    return Located(layer, blob.name, message, mode, value, origin, tuple(inputs), blamed, arrays)


@dataclass(frozen=True)
class BlobVerdicts:
    """The verdicts of all blobs in one run.

    `way` says how the net was fed. From a new conversion, `expected` has the right arrays, and `origins` the ONNX nodes
    of layers.
    """

    verdicts: Mapping[Blob, Match]
    way: Sequence[Slot]
    results: Results
    expected: Mapping[Blob, Array]
    origins: Mapping[Layer, tuple[str, ...]]


@dataclass(frozen=True)
class FirstWrong:
    """The first wrong layer (`located`), and the verdicts of the blobs.

    `end` is the first blob that is certainly wrong; `path` are the layers from the first wrong one to an output.
    """

    located: Located
    end: Blob
    path: Sequence[Layer]
    run: BlobVerdicts


def find_first_wrong(net: WrongNet, fresh: Fresh | None) -> FirstWrong | None:
    """Find the first wrong layer against a new conversion, then against the model's values."""
    kernels = (True, False) if net.mode == "fp32" else (False,)
    for exact in kernels if fresh else ():
        assert fresh is not None
        if (run := _against_fresh(net, fresh, exact=exact)) and (first := _first_wrong(net, run)):
            return first
    for exact in kernels:
        if (run := _against_values(net, exact=exact)) and (first := _first_wrong(net, run)):
            return first
    return None


def _against_fresh(net: WrongNet, fresh: Fresh, *, exact: bool) -> BlobVerdicts | None:
    """Compare the blobs with the new conversion, which runs in fp32 on this machine's CPU."""
    announce("ncnn computes all blobs of the net, and of a new conversion")
    computed = net.fresh_blobs(fresh, exact=exact)
    if computed is None:
        return None
    tolerance = net.in_mode(_SAME_KERNELS if exact else tolerance_within(net.loaded))
    pairs = corresponding(net.graph, fresh.graph)
    twins = {
        blob.name: other.name
        for layer, twin in pairs.items()
        for blob, other in zip(layer.outputs, twin.outputs, strict=False)
    }

    def verdict(blob: str, result: Array | Failure) -> Match:
        twin = twins.get(blob)
        expected = None if twin is None else computed.get(twin)
        if isinstance(result, Failure):
            return Match("wrong", result.reason, twin)
        if not isinstance(expected, np.ndarray):
            return UNKNOWN
        if result.shape != expected.shape:
            return Match("wrong", f"its shape is {list(result.shape[1:])}, not {list(expected.shape[1:])}", twin)
        if result.tobytes() == expected.tobytes():
            return Match("right", "", twin)
        return as_verdict(compare(result, as_integers(expected), tolerance), twin)

    run = net.run(verdict, exact=exact)
    if run is None:
        return None
    blobs = (blob for layer in net.graph for blob in layer.outputs if blob.name in twins)
    arrays = {blob: computed.get(twins[blob.name]) for blob in blobs}
    expected = {blob: array for blob, array in arrays.items() if isinstance(array, np.ndarray)}
    origins = {layer: fresh.origins.get(twin.name, ()) for layer, twin in pairs.items()}
    return BlobVerdicts(_by_blob(net, run), run.way, run.results, expected, origins)


def _by_blob(net: WrongNet, run: BlobRun[Sequence[Slot]]) -> dict[Blob, Match]:
    """Return the verdicts by blob; inputs are right."""
    return {blob: run.verdicts.get(blob.name, _RIGHT) for layer in net.graph for blob in layer.outputs}


def _against_values(net: WrongNet, *, exact: bool) -> BlobVerdicts | None:
    """Compare the blobs with the model's values; feed the net in the way that gives the most right blobs."""
    announce("ncnn and ONNX Runtime compute all blobs and values")
    tolerance = net.tolerance(exact=exact)

    def verdict(blob: str, result: Array | Failure) -> Match:
        judged = net.reference.judge(blob, result, tolerance)
        if judged.status == "right" and judged.value == net.names.get(blob, blob) and blob in net.wrong:
            return Match("wrong", net.wrong[blob], judged.value)  # an output must have the model's order of axes
        return judged

    run = net.run(verdict, exact=exact)
    return BlobVerdicts(_by_blob(net, run), run.way, run.results, {}, {}) if run else None


def _first_wrong(net: WrongNet, run: BlobVerdicts) -> FirstWrong | None:
    """Return the first layer from which a path of blobs that are not right leads to a wrong output."""
    verdicts = dict(run.verdicts)
    if net.is_special:
        verdicts = {blob: _only_special(verdict) for blob, verdict in verdicts.items()}
    path = _paths_to_outputs(net, verdicts)
    if not path:
        return None
    if not run.expected and (before := _without_function(net.loaded, path[0], verdicts)):
        producer, message = before
        path.insert(0, producer)
        verdicts[producer.outputs[0]] = replace(verdicts[producer.outputs[0]], status="unknown", message=message)
    run = replace(run, verdicts=verdicts)
    first = path[0]
    # Compared with values, a blob counts as right in any order of axes: so a Permute before the layer is suspect too.
    suspects = [] if run.expected else [b.producer for b in first.inputs if b.producer and b.producer.type == "Permute"]
    for layer in path:
        if layer is first or any(blob.producer in suspects for blob in layer.inputs):
            suspects.append(layer)
        if layer in suspects and any(verdicts[blob].status == "wrong" for blob in layer.outputs):
            break
    blob, end = (
        next(blob for blob in layer.outputs if verdicts[blob].status != "right") for layer in (first, suspects[-1])
    )
    message = verdicts[blob].message
    if end is not blob and verdicts[end].status == "wrong":
        message += f"; '{end.name}' after it is {verdicts[end].message}"
    return FirstWrong(_located(net, run, blob, message, suspects), end, path, run)


def _paths_to_outputs(net: WrongNet, verdicts: Mapping[Blob, Match]) -> list[Layer]:
    """Return, in the net's order, the layers from which paths of blobs that are not right lead to wrong outputs."""
    leading: set[Layer] = set()
    for layer in reversed(net.graph):
        for blob in layer.outputs:
            ends = blob.is_output and blob.name in net.wrong
            if verdicts[blob].status != "right" and (ends or any(user in leading for user in blob.users)):
                leading.add(layer)
    return [layer for layer in net.graph if layer in leading and layer.type != "Input"]


def _located(net: WrongNet, run: BlobVerdicts, blob: Blob, message: str, suspects: Sequence[Layer]) -> Located:
    layer = blob.producer
    assert layer is not None
    fed = {slot.blob: net.feeds[slot.name] for slot in run.way if slot.name in net.feeds}
    numbers = {b.name: fed.get(b.name) if b.is_input else run.results.get(b.name) for b in layer.inputs}
    arrays = {name: array for name, array in numbers.items() if isinstance(array, np.ndarray)}
    verdicts = {b: Match("right", "", b.name) if b.is_input else run.verdicts[b] for b in layer.inputs}
    value, origin = run.verdicts[blob].value, run.origins.get(layer, ())
    return locate(blob, net.mode, message, value, origin, suspects=suspects, verdicts=verdicts, arrays=arrays)


def _without_function(model: LoadedModel, layer: Layer, verdicts: Mapping[Blob, Match]) -> tuple[Layer, str] | None:
    """Return the layer before `layer` that lost its activation: its output is the function's argument.

    The argument is a value of the model, so the blob looks right, but no blob has the function's result. If `layer` may
    be the function itself, return None.
    """
    functions = _functions(model)
    right = {verdict.value for verdict in verdicts.values() if verdict.status == "right"}
    for blob in layer.inputs:
        verdict, producer = verdicts[blob], blob.producer
        if verdict.status != "right" or producer is None or blob.is_input or len(producer.outputs) > 1:
            continue
        results = functions.get(verdict.value or "", [])
        if results and layer.type not in _FUNCTIONS and right.isdisjoint(results):
            message = f"it is '{verdict.value}' of the model, and no blob is '{results[0]}', which follows from that"
            return producer, message
    return None


def _functions(model: LoadedModel) -> dict[str, list[str]]:
    """Return the results of unary functions by their argument, for arguments without other readers."""
    results: dict[str, list[str]] = {}
    others: set[str] = set()
    for node in model.graph:
        names = [v.name for v in node.inputs if v is not None and v.const_value is None and v.name]
        for name in names:
            if len(names) == 1 and len(node.outputs) == 1 and node.op_type in _ACTIVATIONS:
                results.setdefault(name, []).append(node.outputs[0].name or "")
            else:
                others.add(name)
    return {name: outputs for name, outputs in results.items() if name not in others}


def _only_special(verdict: Match) -> Match:
    """Return the verdict, but "right" for a wrong blob whose errors are finite."""
    is_finite = verdict.difference is not None and not verdict.difference.special
    return replace(verdict, status="right") if verdict.status == "wrong" and is_finite else verdict


def find_unsplit(net: WrongNet, blobs: Sequence[Blob]) -> Located | None:
    """Return the second reader of a blob without Split, if outputs are missing."""
    failed = any(output.status in ("missing", "crashed", "refused") for output in net.report.outputs)
    # ncnn runs a MemoryData again for each reader.
    blob = next((b for b in blobs if b.producer and b.producer.type != "MemoryData"), None)
    if blob is None or not failed:
        return None
    first, last = blob.users[0], blob.users[-1]
    message = f"it reads '{blob.name}', which '{first.name}' reads as well, and there is no Split between"
    return locate(last.outputs[0], net.mode, message)


def find_missing(net: WrongNet, fresh: Fresh | None) -> Located | None:
    """Return the producer of an output that is missing in the net."""
    blobs = {blob.name: blob for layer in net.graph for blob in layer.outputs}
    missing = next((o for o in net.report.outputs if o.status == "missing" and o.blob not in blobs), None)
    if missing is None:
        return None
    if fresh is not None:
        return _producer_in(net, fresh, missing)
    tolerance = net.tolerance(exact=False)
    run, values = net.run(partial(net.reference.judge, tolerance=tolerance), exact=False), net.reference.values
    for name in _ancestors(net.loaded, missing.name):
        if name not in values:
            continue
        value = values[name]
        for blob, result in run.results.items() if run else ():
            if isinstance(result, Failure) or result.size != value.size:
                continue
            if aligned(result, value, tolerance)[0].ok:
                what = "but its numbers here" if name == missing.name else f"which the model makes of '{name}'"
                message = f"the net has no output '{missing.name}', {what}"
                return locate(blobs[blob], net.mode, message, name)
    return None


def _ancestors(model: LoadedModel, name: str) -> Iterator[str]:
    """Yield a value of the model and the values that it is computed from, the nearest first."""
    producers = {value.name: node for node in model.graph for value in node.outputs}
    names = [name]
    for ancestor in names:
        yield ancestor
        inputs = producers[ancestor].inputs if ancestor in producers else ()
        names += [v.name for v in inputs if v is not None and v.name and v.name not in names]


def _producer_in(net: WrongNet, fresh: Fresh, output: OutputReport) -> Located | None:
    """Return the layer that produces the output in a new conversion, or its counterpart in the net."""
    blob = next((blob for blob in fresh.graph.outputs if blob.name == output.blob), None)
    if blob is None or blob.producer is None:
        return None
    twins = {theirs: ours for ours, theirs in corresponding(net.graph, fresh.graph).items()}
    origin = fresh.origins.get(blob.producer.name, ())
    twin = twins.get(blob.producer)
    if twin is not None:
        same = twin.outputs[blob.producer.outputs.index(blob)]
        message = f"the net has no blob '{blob.name}', which this should be"
        return locate(same, net.mode, message, output.name, origin)
    return locate(blob, net.mode, f"the net has no blob '{blob.name}': it lacks this layer", output.name, origin)
