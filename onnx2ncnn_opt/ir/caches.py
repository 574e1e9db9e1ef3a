"""The keys and values that attention keeps from run to run."""

from onnx2ncnn_opt.ir.graph import Blob, Graph


def caches(graph: Graph) -> set[Blob]:
    """Return the blobs that hold attention's keys and values: inputs that may be unset, and outputs.

    ncnn chooses their layout in memory: numbers that are fed into them, or read out of them, mean nothing.
    """
    layers = (layer for layer in graph if not layer.is_custom and layer.resolved.get("kv_cache"))
    return {blob for layer in layers for blob in (*layer.inputs[-2:], *layer.outputs[1:])}
