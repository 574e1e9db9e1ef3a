"""Tables of scales as ncnn2table writes them: line ``NAME_param_0`` for rows of weights, ``NAME`` for the input.

Recurrent layers, Embed and attention have lines ``NAME_param_0``, ``_1``, ... for their weights, and none for the
input. Gemm and SDPA have no lines in this format.
"""

import math
import os
from pathlib import Path

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.int8 import WITH_SCALE
from onnx2ncnn_opt.quantization.centre import is_centred
from onnx2ncnn_opt.quantization.emit import STORED_SCALES, Scales, obstacle, part_sizes


def read_table(path: str | os.PathLike[str], graph: Graph) -> dict[str, Scales]:
    """Return scales from a table for a float net's layers. Raises UsageError for a table that does not fit the net."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: no table can be read from it: {error}") from error
    rows: dict[str, list[float]] = {}
    for number, line in enumerate(lines, 1):
        name, *words = line.split() or [""]
        try:
            rows[name] = [float(word) for word in words]
        except ValueError:
            raise UsageError(f"{path}, line {number}: a name and numbers are needed, not {line!r:.60}") from None
        if name and not all(math.isfinite(scale) and scale > 0 for scale in rows[name]):
            raise UsageError(f"{path}, line {number}: the scales of '{name}' have to be above 0 and finite")
    found = {}
    for layer in [layer for layer in graph if not obstacle(layer)]:
        sizes = part_sizes(layer)
        parts = [rows.get(f"{layer.name}_param_{part}", []) for part in range(len(sizes))]
        inputs = rows.get(layer.name, []) if layer.type in WITH_SCALE else [1.0]
        if not (layer.name in rows if layer.type in WITH_SCALE else any(parts)):
            continue
        counts = [len(part) for part in parts]
        if len(inputs) != 1 or any(n not in (1, size) for n, size in zip(counts, sizes, strict=True)):
            needed, given = (", ".join(map(str, each)) for each in (sizes, counts))
            raise UsageError(
                f"{path}: '{layer.name}' needs {needed} scales for its weights, not {given}, and one for its input"
            )
        found[layer.name] = Scales(inputs[0], rows=tuple(map(np.resize, parts, sizes)))
    if not found:
        raise UsageError(f"{path} has no scales for a layer of the net")
    return found


def format_table(graph: Graph) -> str:
    """Return the table of an int8 net: lines of weights first, then lines of inputs."""
    rows = [
        (f"{layer.name}_param_{part}", layer.weights[name])
        for layer in graph
        for part, name in enumerate(STORED_SCALES.get(layer.type, ()))
        if name in layer.weights
    ]
    layers = [layer for layer in graph if "bottom_blob_int8_scales" in layer.weights]
    rows += [(layer.name, layer.weights["bottom_blob_int8_scales"] / (1 + is_centred(layer))) for layer in layers]
    return "".join(f"{name} {' '.join(f'{scale:.9g}' for scale in scales)}\n" for name, scales in rows)
