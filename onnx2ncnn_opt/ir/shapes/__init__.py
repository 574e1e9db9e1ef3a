"""Output shapes of every ncnn layer type, as the ncnn runtime computes them.

Sizes that are known only at run time are computed as symbols (`ir.dim`). Where ncnn decides by comparing sizes and a
symbol leaves that open, these assumptions hold throughout:

- two sizes that must be equal are, unless their difference is a constant other than 0; a number is preferred to a
  symbol as the result, else the first operand's size is taken;
- a symbolic size is not 1, so it does not broadcast;
- a part that is cut out of a blob (Crop) is inside it.

ShapeError is raised if the layer cannot take its inputs. That matters: ncnn often computes garbage there, silently.
A shape is None if it is unknown, depends on the data (detections), or cannot be written as a `Dim`.
"""

# Importing a family's module registers its rules.
from onnx2ncnn_opt.ir.shapes import convolution, elementwise, matrix, sampling, sequence, tensor  # noqa: F401
from onnx2ncnn_opt.ir.shapes.registry import assign_shapes, infer_graph, infer_shapes

__all__ = ["assign_shapes", "infer_graph", "infer_shapes"]
