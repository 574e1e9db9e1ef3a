"""`--raw-head`: what a YOLO computes before it decodes its boxes. ncnn's own examples read it, and decode it."""

from collections.abc import Iterator

import onnx
import onnx_ir

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.onnx.edit.editor import Editor
from onnx2ncnn_opt.onnx.edit.model import read_model
from onnx2ncnn_opt.onnx.read.structure import attributes_of, cut, names_of, read_values

RAW_HEAD = "raw-head"
_BINS = 16  # of the distance to each of the four sides; the examples have this number
_DECODING = ("Add", "Concat", "Mul", "Reshape", "Sigmoid", "Slice", "Sub")  # of keypoints and angles


def raw_head(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Return the model with its raw head as outputs, and a note that describes them.

    From YOLOv8 on, `raw` is [N, boxes, 64 + classes]: distributions of distances, and logits of classes. `extras` has a
    row for each box: mask coefficients, keypoints or an angle. In YOLOv5 and v7, each level is an output, [N, anchors *
    columns, height, width]. Other outputs follow. Raises UsageError for other heads.
    """
    model = read_model(onnx.shape_inference.infer_shapes(proto, data_prop=True).SerializeToString())
    graph, editor = model.graph, Editor(model.graph)
    editor.place = None
    if outputs := list(_levels(graph)):
        note = f"the outputs are {len(outputs)} levels before their decoding; the program has to know the anchors"
    else:
        decoded, distributions, logits, *extras = _parts(graph)
        raw = editor.node("Concat", distributions, logits, axis=1)
        for name, value in zip(("raw", "extras"), (raw, *extras), strict=False):
            outputs.append(editor.node("Transpose", value, perm=[0, 2, 1]))
            outputs[-1].name, outputs[-1].type = editor.names.take(name), distributions.type
        outputs += [value for value in graph.outputs if value is not decoded]
        note = f"{outputs[0].name} has a row for each box: {4 * _BINS} numbers of its sides, and logits of its classes"
    cut(graph, names_of(outputs))
    return onnx_ir.to_proto(model), note


def _levels(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    """Yield the convolutions [N, anchors * columns, height, width] of a head with anchors."""
    for node in graph:
        chain = _chain(node.inputs[0], "Transpose", "Reshape") if node.op_type == "Sigmoid" else []
        if chain and attributes_of(chain[0]).get("perm") == (0, 1, 3, 4, 2):
            yield next(read_values(chain[-1]))


def _parts(graph: onnx_ir.Graph) -> list[onnx_ir.Value]:
    """Return the decoded output, and what it is computed from: distributions, logits, and perhaps extras."""
    distributions = [value for node in graph if (value := _distributions(node)) is not None]
    if len(distributions) != 1:
        how = "ncnn's examples read the heads of YOLOv8, YOLO11, YOLOv5 and the like; others may need --blob-names pnnx"
        raise UsageError(f"raw head: {len(distributions)} nodes compute boxes from {_BINS} bins, not one; {how}")
    for output in graph.outputs:
        _, *columns = _joined(output)
        if len(columns) in (1, 2) and (sigmoid := _chain(columns[0], "Sigmoid")):
            return [output, *distributions, *read_values(sigmoid[0]), *map(_before_decoding, columns[1:])]
    raise UsageError("raw head: no output joins boxes with the sigmoid of classes; export without nms and end2end")


def _distributions(node: onnx_ir.Node) -> onnx_ir.Value | None:
    """Return the value [N, 4 * bins, boxes] whose distributions a node integrates, or None for other nodes."""
    weight = node.inputs[1].const_value if node.op_type == "Conv" and node.inputs[1] else None
    if weight is None or tuple(weight.shape) != (1, _BINS, 1, 1) or weight.numpy().ravel().tolist() != [*range(_BINS)]:
        return None
    if not (chain := _chain(node.inputs[0], "Softmax", "Transpose", "Reshape")):
        return None
    axis, perm = (attributes_of(chain[i]).get(name) for i, name in enumerate(("axis", "perm")))
    shape = chain[2].outputs[0].shape
    return chain[2].inputs[0] if axis == 1 and perm == (0, 2, 1, 3) and shape and shape[1:3] == (4, _BINS) else None


def _joined(value: onnx_ir.Value) -> Iterator[onnx_ir.Value]:
    """Yield the values that are joined along axis 1, also in several steps."""
    concat = _chain(value, "Concat")
    if concat and attributes_of(concat[0])["axis"] == 1:
        for part in read_values(concat[0]):
            yield from _joined(part)
    else:
        yield value


def _before_decoding(extras: onnx_ir.Value) -> onnx_ir.Value:
    """Return the levels' Concat that extras are, or that a decoding with a sigmoid computes them from."""
    found, kinds, stack = dict[onnx_ir.Value, None](), set[str](), [extras]
    while stack:
        node = (value := stack.pop()).producer()
        if node is not None and node.op_type == "Concat" and all(_chain(x, "Reshape", "Conv") for x in node.inputs):
            found[value] = None
        elif node is not None and node.op_type in _DECODING:
            kinds.add(node.op_type)
            stack += read_values(node)
    if len(found) != 1 or (kinds and "Sigmoid" not in kinds):
        raise UsageError(f"raw head: '{extras.name}' is no mask coefficients, keypoints of three numbers, or angle")
    return next(iter(found))


def _chain(value: onnx_ir.Value | None, *kinds: str) -> list[onnx_ir.Node]:
    """Return the nodes of these kinds that end in a value, the last one first, along first inputs; else no nodes."""
    nodes: list[onnx_ir.Node] = []
    for kind in kinds:
        node = value.producer() if value else None
        if node is None or node.op_type != kind:
            return []
        nodes.append(node)
        value = node.inputs[0]
    return nodes
