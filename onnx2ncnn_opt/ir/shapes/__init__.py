"""Output shapes of every ncnn layer type, as the ncnn runtime computes them.

Sizes that are known only at run time are computed as symbols (`ir.dim`). Where ncnn decides by comparing sizes and a
symbol leaves that open, these assumptions hold throughout:

- two sizes that must be equal are equal, unless their difference is a constant other than 0; of a number and a symbol
  the result is the number, of two symbols the first one;
- a symbolic size is not 1, so it does not broadcast;
- a part that is cut out of a blob (Crop) is inside it.

The rules raise ShapeError if the layer cannot take its inputs, because ncnn often computes garbage then, silently.
A shape is None if it is unknown, depends on the data (detections), or cannot be written as a `Dim`.
"""

# Importing a family's module registers its rules.
from onnx2ncnn_opt.ir.shapes import convolution, elementwise, matrix, sampling, sequence, tensor  # noqa: F401
from onnx2ncnn_opt.ir.shapes.registry import assign_shapes, infer_graph, infer_shapes

__all__ = ["assign_shapes", "infer_graph", "infer_shapes"]
