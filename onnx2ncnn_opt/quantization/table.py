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
from onnx2ncnn_opt.quantization.centre import is_centred
from onnx2ncnn_opt.quantization.emit import STORED_SCALES, Scales, has_static_scale, obstacle, part_sizes, rows_of

_ROWS = "_param_0"


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
    scales_by_name = {}
    for layer in graph:
        if obstacle(layer):
            continue
        sizes = part_sizes(layer)
        parts = [rows.get(f"{layer.name}_param_{part}", []) for part in range(len(sizes))]
        if any(parts):
            if [len(part) for part in parts] != list(sizes):
                counts = ", ".join(str(len(part)) for part in parts)
                raise UsageError(f"{path}: '{layer.name}' needs {', '.join(map(str, sizes))} scales, not {counts}")
            scales_by_name[layer.name] = Scales(1.0, parts=tuple(np.asarray(part, np.float64) for part in parts))
        if layer.name not in rows or not has_static_scale(layer):
            continue
        scales, needed = rows.get(layer.name + _ROWS, []), len(rows_of(layer))
        if len(rows[layer.name]) != 1 or len(scales) not in (1, needed):
            counts = f"{len(rows[layer.name])} for the input and {len(scales)} for the weights"
            raise UsageError(f"{path}: '{layer.name}' needs 1 and {needed} scales, not {counts}")
        scales_by_name[layer.name] = Scales(rows[layer.name][0], rows=np.resize(np.asarray(scales, np.float64), needed))
    if not scales_by_name:
        raise UsageError(f"{path} has no scales for a layer of the net")
    return scales_by_name


def format_table(graph: Graph) -> str:
    """Return the table of an int8 net: lines of weights first, then lines of inputs."""
    layers = [layer for layer in graph if "bottom_blob_int8_scales" in layer.weights]
    rows = [(layer.name + _ROWS, layer.weights["weight_data_int8_scales"]) for layer in layers]
    rows += [(layer.name, layer.weights["bottom_blob_int8_scales"] / (1 + is_centred(layer))) for layer in layers]
    rows += [
        (f"{layer.name}_param_{part}", layer.weights[name])
        for layer in graph
        for part, name in enumerate(STORED_SCALES.get(layer.type, ()))
        if name in layer.weights
    ]
    return "".join(f"{name} {' '.join(f'{scale:.9g}' for scale in scales)}\n" for name, scales in rows)
