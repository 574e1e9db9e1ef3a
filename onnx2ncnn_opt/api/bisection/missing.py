"""The search for the layer at fault if the net lacks an output."""

from collections.abc import Iterator, Sequence
from functools import partial

from onnx2ncnn_opt.api.bisection.located import Located, locate
from onnx2ncnn_opt.api.bisection.wrong_net import Fresh, WrongNet
from onnx2ncnn_opt.ir.correspondence import corresponding
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.runtime.base import Failure
from onnx2ncnn_opt.verdict.blobs import aligned


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
