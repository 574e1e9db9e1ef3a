"""What layers read and write that are no convolution, product, attention or recurrence, per model, in Markdown.

    python -m scripts.measure.moved FOLDER [--only TEXT...] [--top N]

FOLDER has the ONNX models; where sizes are dynamic, an .npz beside a model says which to use (see pnnx.py). A line is a
model, MB of these layers, their share of what all layers read and write, and the types with the largest shares.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.net_shapes import infer_net
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.ir.memory import blob_bytes
from onnx2ncnn_opt.ir.spec import Trait
from scripts.measure.pnnx import input_shapes

_COMPUTING = ("Convolution", "Deconvolution", "InnerProduct", "Gemm", "MatMul", "MultiHeadAttention", "SDPA", "Einsum")
_RECURRENT = ("GRU", "LSTM", "RNN")


def moved(graph: Graph) -> tuple[int, Counter[str], Counter[str]]:
    """Bytes that all layers read and write; those of the others by type, and how many layers these are."""
    total, sizes, counts = 0, Counter[str](), Counter[str]()
    for layer in graph:
        if not layer.inputs or layer.has(Trait.SHARES):
            continue
        bytes = sum(
            (blob_bytes(blob.shape) or 0) * (blob.batch if isinstance(blob.batch, int) else 1)
            for blob in (*layer.inputs, *layer.outputs)
        )
        total += bytes
        if not layer.type.startswith(_COMPUTING) and layer.type not in _RECURRENT:
            sizes[layer.type] += bytes
            counts[layer.type] += 1
    return total, sizes, counts


def row(model: Path, top: int) -> str:
    """One line of the table."""
    try:
        graph = lower(model).graph
        shapes = [shape[1:] if len(shape) > 1 and shape[0] == 1 else shape for shape, _ in input_shapes(model)]
        infer_net(graph, {blob.name: shape for blob, shape in zip(graph.inputs, shapes, strict=True)})
    except (Error, ValueError) as error:
        return f"| {model.stem} | - | - | {str(error).splitlines()[0]} |"
    total, sizes, counts = moved(graph)
    largest = ", ".join(f"{counts[type]} {type} {size / 1e6:.3g}" for type, size in sizes.most_common(top))
    rest = sizes.total()
    return f"| {model.stem} | {rest / 1e6:.3g} | {rest / max(total, 1):.2f} | {largest} |"


def main() -> None:
    """Print a line for every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], help="models with one of these in their name")
    parser.add_argument("--top", type=int, default=6, help="how many types of layers to name")
    options = parser.parse_args()
    print("| model | MB | share | layers, MB |\n|---|---|---|---|")
    for model in sorted(options.folder.glob("*.onnx")):
        if any(text in model.stem for text in options.only):
            print(row(model, options.top), flush=True)


if __name__ == "__main__":
    main()
