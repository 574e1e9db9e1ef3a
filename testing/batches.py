"""Models with a dynamic batch: the importer's proofs about their items, compared with ONNX Runtime item by item."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

import numpy as np
import onnx

from onnx2ncnn_opt.errors import Error, RunError
from onnx2ncnn_opt.ir.dim import Sym
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.importer import import_model
from onnx2ncnn_opt.onnx.read.load import load_model
from onnx2ncnn_opt.onnx.walk import Port
from onnx2ncnn_opt.runtime.ort import OrtRunner

ITEMS = 3


def with_batch(model: onnx.ModelProto, axes: Mapping[str, int]) -> onnx.ModelProto:
    """Return the model with a dynamic dimension on these axes of its inputs, and without the shapes of outputs."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for value in changed.graph.input:
        if value.name in axes:
            value.type.tensor_type.shape.dim[axes[value.name]].dim_param = "batch"
    for value in changed.graph.output:
        value.type.tensor_type.ClearField("shape")
    changed.graph.ClearField("value_info")
    return changed


def choices(model: onnx.ModelProto) -> Iterator[Mapping[str, int]]:
    """Yield axes that may be a batch: each of all inputs that have as many, and the first of one input."""
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in model.graph.input}
    for axis in range(max(ranks.values(), default=0)):
        yield {name: axis for name, rank in ranks.items() if axis < rank}
    if len(ranks) > 1:
        yield from ({name: 0} for name, rank in ranks.items() if rank)


def free_outputs(model: onnx.ModelProto, axes: Mapping[str, int]) -> tuple[Port, ...] | None:
    """Return the outputs of a model whose batch is no part of the net; None if it is, or if the model is refused."""
    try:
        imported = import_model(load_model(model.SerializeToString()), batch_axes=axes)
    except Error:
        return None
    batched = [port for port in imported.inputs if batch_axis(port) is not None]  # none if operators demand its size
    return imported.outputs if batched and all(port.blob.batch == 1 for port in batched) else None


def batch_axis(port: Port) -> int | None:
    """Return the axis that depends on the batch; None if there is none."""
    return next((i for i, size in enumerate(port.shape) if isinstance(size, Sym) and "batch" in size.names()), None)


def mixed_outputs(
    model: onnx.ModelProto,
    axes: Mapping[str, int],
    feeds: Callable[[onnx.ModelProto], Mapping[str, Array]],
    *,
    rel: float = 1e-5,
) -> list[str] | None:
    """Return the outputs with an item that differs from ONNX Runtime's result for it alone, against the proof.

    `feeds` are inputs with `ITEMS` items. Sums in another order may differ by `rel`. Return None if nothing was proved,
    or if ONNX Runtime does not take the model.
    """
    changed = with_batch(model, axes)
    outputs = free_outputs(changed, axes)
    if outputs is None:
        return None
    arrays = feeds(changed)
    items = [{n: x.take([i], axes[n]) if n in axes else x for n, x in arrays.items()} for i in range(ITEMS)]
    try:
        with closing(OrtRunner(changed.SerializeToString())) as runner:
            whole, *alone = (runner.run(given).values() for given in (arrays, *items))
    except RunError:
        return None
    return [
        port.name
        for port, together, *each in zip(outputs, whole, *alone, strict=True)
        if not all(_same(_item(together, batch_axis(port), i), item, rel) for i, item in enumerate(each))
    ]


def _item(whole: Array, axis: int | None, index: int) -> Array:
    return whole if axis is None else whole.take([index], axis)


def _same(a: Array, b: Array, rel: float) -> bool:
    return a.shape == b.shape and np.allclose(a, b, rtol=rel, atol=rel / 10, equal_nan=True)
