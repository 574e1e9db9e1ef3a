"""Skeletons: models whose large weights are replaced by a recipe that a seed refills.

A recipe is JSON in the tensor's doc_string, with empty raw data. Kernels and matrices are {"fill": "normal", "seed",
"rows"}: standard normal numbers, each row times its factor. Vectors are {"fill": "half", "values"}: float16 numbers.
"""

import base64
import json
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

KEPT = 64  # tensors of at most so many elements stay whole: they may be shapes, axes or scales
SEEDS = 1000  # seeds that are looked for in a model whose weights were drawn by draw()


def draw(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the standard normal float32 numbers of a seed; a smaller shape gives the first of them."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield all initializers and Constant nodes' tensors."""
    yield from graph.initializer
    for node in graph.node:
        yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))


def refill(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give every tensor that has a recipe its weights, in place; other models stay as they are."""
    for tensor in tensors(model.graph):
        if not tensor.doc_string.startswith('{"fill"'):
            continue
        recipe, shape = json.loads(tensor.doc_string), tuple(tensor.dims)
        if recipe["fill"] == "normal":
            values = draw(recipe["seed"], shape) * unpack(recipe["rows"]).reshape(-1, *[1] * (len(shape) - 1))
        else:
            values = unpack(recipe["values"])
        tensor.raw_data = values.astype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).tobytes()
        tensor.ClearField("doc_string")
    return model


def strip(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace large floating-point tensors by recipes, in place.

    Weights that were drawn by `draw` and scaled by rows, as folding batch normalisation does, come back nearly the
    same; others come back as noise of the same size.
    """
    heads = np.stack([draw(seed, (32,)) for seed in range(SEEDS)])
    for index, tensor in enumerate(tensors(model.graph)):
        values = numpy_helper.to_array(tensor)
        if values.size <= KEPT or not np.issubdtype(values.dtype, np.floating):
            continue
        if values.ndim == 1:
            recipe: dict[str, object] = {"fill": "half", "values": pack(values)}
        else:
            rows = values.reshape(len(values), -1).astype(np.float32)
            seed = find(heads, rows[0])
            if seed is None:
                seed, factors = SEEDS + index, rows.std(axis=1)
            else:
                drawn = draw(seed, rows.shape)
                factors = (rows * drawn).sum(axis=1) / (drawn * drawn).sum(axis=1)
            recipe = {"fill": "normal", "seed": seed, "rows": pack(factors)}
        for field in ("raw_data", "float_data", "double_data"):
            tensor.ClearField(field)
        tensor.raw_data = b""
        tensor.doc_string = json.dumps(recipe)
    return model


def find(heads: np.ndarray, row: np.ndarray) -> int | None:
    """Return the seed whose first numbers point in the same direction as the first ones of a row."""
    row = row[: heads.shape[1]]
    heads = heads[:, : len(row)]
    cosine = heads @ row / np.maximum(np.linalg.norm(heads, axis=1) * np.linalg.norm(row), 1e-30)
    return int(cosine.argmax()) if cosine.max() > 0.99999 and len(row) > 2 else None


def pack(values: np.ndarray) -> str:
    """Return numbers as float16 in base 64."""
    return base64.b64encode(values.astype("<f2").tobytes()).decode()


def unpack(text: str) -> np.ndarray:
    """Return the float32 numbers that `pack` was given, rounded to float16."""
    return np.frombuffer(base64.b64decode(text), "<f2").astype(np.float32)
