"""`--append`, `--last-row`, `--noise-inputs`, `--raw-head`: other ends or inputs of the ONNX model.

All later steps get the extended model. So ONNX Runtime is the reference for these nodes, too.
"""

import ast
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir
from onnx import TensorProto, helper, parser, shape_inference

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.edit.model import read_model
from onnx2ncnn_opt.onnx.edit.raw_head import RAW_HEAD, raw_head
from onnx2ncnn_opt.onnx.read.binding import TensorInfo
from onnx2ncnn_opt.onnx.read.exported import exported, reference
from onnx2ncnn_opt.onnx.read.given import GivenShapes
from onnx2ncnn_opt.onnx.read.load import load_model
from onnx2ncnn_opt.onnx.read.structure import OWN, SELECTION

FORM = (
    "nms:OUTPUT or nms:BOXES,SCORES, and perhaps :conf=0.25:iou=0.45:max=300:boxes=cxcywh|xyxy:classes=N"
    ":objectness=yes|no:background=yes|no:layout=rows|columns"
)
LAST_ROW = "last-row:"
NOISE_INPUTS = "noise-inputs"
RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike")
_SHARE = r"1(\.0*)?|0?\.\d+|0"
_VALUES = {
    "conf": _SHARE,
    "iou": _SHARE,
    "max": r"[1-9]\d{0,5}",
    "boxes": "cxcywh|xyxy",
    "classes": r"[1-9]\d{0,5}",
    "objectness": "yes|no",
    "background": "yes|no",
    "layout": "rows|columns",
}
_FIRST_WITH_FUNCTIONS = 8  # of ONNX's formats
_OLDEST = 11  # the first opset with GatherND, ScatterND and TopK of this form
_COCO = {84: 80, 85: 80}  # columns of the most common models, and their classes


class Appended(NamedTuple):
    """The extended model, the request, and a note how the columns were interpreted."""

    model: bytes
    text: str
    note: str


class _Head(NamedTuple):
    """The columns of a raw output: four of the box, perhaps an objectness or the background, classes, extras."""

    has_rows: bool  # [N, boxes, columns], not [N, columns, boxes]
    columns: int
    classes: int
    objectness: bool
    background: bool
    box: int  # 4, or 0 if boxes are an output of their own

    @property
    def first(self) -> int:
        return self.box + self.objectness + self.background

    @property
    def extras(self) -> int:
        return self.columns - self.first - self.classes


def append_decoding(source: Any, text: str, shapes: GivenShapes | None = None) -> Appended:
    """Append the decoding, or a Slice, to a model; `shapes` are the sizes that its inputs will have.

    `text` is in `FORM`. The output becomes `detections`: [n, 6 + extras] with x1, y1, x2, y2, score, class and the
    columns behind the classes. With more than one image, the first column is the image's number. Rows are sorted by
    image and score; a box has its best class, and NMS compares boxes of one class. An inner value takes the place of
    all outputs. Raises UsageError if the output or the text does not fit, or if the columns are ambiguous; ModelError
    if the model is broken.

    If `text` is `LAST_ROW` and an output's name, the output keeps only the last element of its second last axis.
    If it is `NOISE_INPUTS`, nodes that draw random numbers become inputs; for `RAW_HEAD` see `raw_head`.
    """
    is_row, is_noise, is_raw = str(text).startswith(LAST_ROW), text == NOISE_INPUTS, text == RAW_HEAD
    name, options = (text.removeprefix(LAST_ROW), {}) if is_row or is_noise or is_raw else _parsed(text)
    # This checks that the file is a model, and safe to open. It has no inputs for noise yet, but `shapes` may.
    loaded = load_model(source, shapes=None if is_noise else shapes)
    is_path = isinstance(source, (str, os.PathLike))
    proto = onnx.load(source) if is_path else onnx.ModelProto.FromString(bytes(reference(source)))
    if is_noise:
        return _noise_inputs(proto)
    if is_raw:
        proto, note = raw_head(proto)
        return Appended(bytes(proto.SerializeToString()), text, note)
    outputs = {info.name: info for info in loaded.outputs}
    names = [name] if is_row or name in outputs else name.split(",", 1)
    if not outputs.keys() >= {*names}:
        proto = onnx_ir.to_proto(read_model(proto.SerializeToString(), names, typed=True))
        outputs = {info.name: info for info in load_model(proto, shapes=shapes).outputs}
    if (opset := loaded.opsets.get("", 1)) < _OLDEST:
        raise UsageError(f"append '{text}': the model has opset {opset}; export it with opset {_OLDEST} or newer")
    shape, *others = (_shape(outputs[each], loaded.inputs, proto) for each in names[::-1])
    if others:  # rows may have no batch
        shape, *others = ([1, *sizes] if len(sizes) == 2 else sizes for sizes in (shape, *others))
    if is_row:
        if len(shape) < 2:
            raise UsageError(f"last row: '{name}' has {len(shape)} axes, and rows need two")
        return Appended(_last_row(proto, name, len(shape)), text, f"{name} has its last row only")
    try:
        head = _head((shape, *others), options, {prop.key: prop.value for prop in proto.metadata_props})
    except ValueError as error:
        sizes = ", ".join("?" if size is None else str(size) for size in shape)
        raise UsageError(f"append '{text}': '{names[-1]}' is [{sizes}]: {error}") from None
    nodes, width = _text(head, options, opset, is_single=shape[0] == 1), 6 + head.extras + (shape[0] != 1)
    result = _put(proto, names, nodes, width)
    kinds = {f"4 of a box ({options.get('boxes', 'cxcywh')})": True, "1 objectness": head.objectness}
    kinds |= {"1 background": head.background, f"{head.classes} classes": True}
    kinds |= {f"{head.extras} more that stay with their box": head.extras > 0}
    columns = f"{'' if shape[0] == 1 else 'image, '}x1, y1, x2, y2, score, class{', ...' if head.extras else ''}"
    read = f"{head.columns + 4 - head.box} columns: {', '.join(kind for kind, is_there in kinds.items() if is_there)}"
    note = f"{name} is read as {read}; {result} has {columns}"
    return Appended(bytes(proto.SerializeToString()), text, note)


def _noise_inputs(proto: onnx.ModelProto) -> Appended:
    """Return the model with an input in the place of each node that draws random numbers."""
    graph = proto.graph
    inferred = shape_inference.infer_shapes(proto, data_prop=True).graph
    known = {value.name: value for value in (*inferred.value_info, *inferred.output)}
    nodes = [node for node in graph.node if node.op_type in RANDOM and node.output[0] in known]
    if not nodes:
        raise UsageError("noise inputs: no node of the model draws random numbers")
    for node in nodes:
        graph.input.append(known[node.output[0]])
        graph.node.remove(node)
    drawn = ", ".join(f"'{node.output[0]}' ({_kind(node)})" for node in nodes)
    return Appended(bytes(proto.SerializeToString()), NOISE_INPUTS, f"random numbers are inputs: {drawn}")


def _kind(node: onnx.NodeProto) -> str:
    """Return the distribution that a node draws from."""
    given = {each.name: each.f for each in node.attribute}
    if "Normal" in node.op_type:
        return f"normal, mean {given.get('mean', 0):g}, deviation {given.get('scale', 1):g}"
    return f"uniform, {given.get('low', 0):g} to {given.get('high', 1):g}"


def _last_row(proto: onnx.ModelProto, name: str, rank: int) -> bytes:
    """Return the model with an output replaced by its last row."""
    graph, rows = proto.graph, f"{name}/rows"
    for side in (side for node in graph.node for side in (node.input, node.output)):
        side[:] = [rows if value == name else value for value in side]
    limits = {f"{name}/start": -1, f"{name}/end": 2**31 - 1, f"{name}/axis": rank - 2}
    graph.initializer.extend(helper.make_tensor(key, TensorProto.INT64, [1], [n]) for key, n in limits.items())
    graph.node.append(helper.make_node("Slice", [rows, *limits], [name], f"{name}/last"))
    [output] = [value for value in graph.output if value.name == name]
    if output.type.tensor_type.HasField("shape"):
        output.type.tensor_type.shape.dim[rank - 2].dim_value = 1
    return bytes(proto.SerializeToString())


def converted_model(model: Any, manifest: Manifest | None) -> Path | bytes:
    """Return the model of the manifest's net in a form that ONNX Runtime accepts."""
    source = reference(exported(model))
    if manifest is None or manifest.source.append is None:
        return source
    return append_decoding(source, manifest.source.append, {i.name: i.shape for i in manifest.inputs}).model


def _parsed(text: str) -> tuple[str, dict[str, str]]:
    match = re.fullmatch(rf"nms:(.+?)((?::(?:{'|'.join(_VALUES)})=[^:]*)*)", text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"append takes {FORM}, not {text!r:.200}")
    pairs = [part.partition("=")[::2] for part in match[2].split(":")[1:]]
    for key, value in pairs:
        if not re.fullmatch(_VALUES[key], value) or [other for other, _ in pairs].count(key) > 1:
            raise UsageError(f"append takes {FORM}, with each option once; '{key}={value}' in '{text}' does not fit")
    return match[1], dict(pairs)


def _shape(output: TensorInfo, inputs: Sequence[TensorInfo], proto: onnx.ModelProto) -> list[int | None]:
    """Return the sizes of an output, None for unknown ones; ONNX infers sizes that the model does not declare."""
    shape = [size if isinstance(size, int) else None for size in output.shape or ()]
    if shape and None not in shape:
        return shape
    bound = onnx.ModelProto()
    bound.CopyFrom(proto)
    for value in bound.graph.input:
        sizes = next((info.shape for info in inputs if info.name == value.name), None)
        for dim, size in zip(value.type.tensor_type.shape.dim, sizes or (), strict=False):
            if isinstance(size, int):
                dim.dim_value = size
    graph = shape_inference.infer_shapes(bound, data_prop=True).graph
    [value] = [value for value in graph.output if value.name == output.name]
    inferred = [dim.dim_value or None for dim in value.type.tensor_type.shape.dim]
    return [a or b for a, b in zip(shape or inferred, inferred, strict=True)]


def _head(shapes: Sequence[list[int | None]], options: Mapping[str, str], metadata: Mapping[str, str]) -> _Head:
    """Return the meaning of the columns; raise ValueError with the options to set if they are ambiguous.

    The first of `shapes` is that of the columns, a second one that of boxes, which then have no columns.
    """
    shape, boxes = shapes[0], shapes[1] if len(shapes) > 1 else None
    if metadata.get("task") == "obb":
        raise ValueError("it has rotated boxes, which NonMaxSuppression does not know; export the model with nms=True")
    layout, box = options.get("layout"), 4 if boxes is None else 0
    if boxes and (len(boxes) != 3 or boxes[2] not in (4, None)):
        raise ValueError(f"its boxes are {boxes}, and have to be [N, boxes, 4]")
    if boxes and len(shape) == 3 and layout is None and boxes[1] in shape[1:]:
        layout = "rows" if boxes[1] == shape[1] else "columns"
    has_rows, columns = _columns(shape, layout)
    names = literal(metadata.get("names", ""))  # of ultralytics' exporter
    named = len(names) if isinstance(names, (dict, list)) else 0
    background, objectness = (options.get(name) == "yes" for name in ("background", "objectness"))
    known = (named or _COCO.get(columns, 0)) if box else columns - background - objectness
    classes = int(options.get("classes", known))
    if classes < 1:
        raise ValueError(f"{columns} columns may be a box, classes and others; say how many with classes=N")
    extras = columns - box - background - classes
    # YOLOv5 and YOLOX have one; those with the metadata and the layout of YOLOv8 and newer have none.
    if "objectness" not in options and "task" not in metadata and extras > 0 and (has_rows or extras == 1):
        if not has_rows or extras > 1:
            reason = f"{extras} columns are neither box nor class"
            raise ValueError(f"{reason}; say whether one is with objectness=yes or =no")
        objectness = True
    if extras < objectness:
        raise ValueError(f"4 of a box{', an objectness' if objectness else ''} and {classes} classes are more columns")
    return _Head(has_rows, columns, classes, objectness, background, box)


def _columns(shape: list[int | None], layout: str | None) -> tuple[bool, int]:
    """Return whether a box is a row, and the number of columns: the smaller size if it is at most half of the other."""
    if len(shape) != 3:
        raise ValueError("the raw output of a detector has three axes, [N, boxes, columns] or [N, columns, boxes]")
    high, wide = shape[1:]
    if layout is None and (high is None or wide is None):
        layout = "columns" if wide is None else "rows"
    elif layout is None and high is not None and wide is not None and 2 * min(high, wide) <= max(high, wide):
        layout = "columns" if high < wide else "rows"
    if layout is None:
        raise ValueError("say which axis has the columns with layout=rows ([N, boxes, columns]) or layout=columns")
    columns = wide if layout == "rows" else high
    if columns is None:
        raise ValueError("the number of columns is not known; fix the sizes of the model's inputs (--shape)")
    return layout == "rows", columns


def literal(text: str) -> Any:
    """Return the value of a Python literal, None for other text."""
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        return ast.literal_eval(text)
    return None


def _put(proto: onnx.ModelProto, outputs: Sequence[str], text: str, width: int) -> str:
    """Append the nodes of `text`, and replace the outputs; return the name of the new one, of `width` columns."""
    graph = proto.graph
    values = (*graph.input, *graph.output, *graph.initializer)
    taken = (*(value.name for value in values), *(output for node in graph.node for output in node.output))
    result = NamePool(name.partition("/")[0] for name in taken).take("detections")  # new values are "detections/..."
    added = parser.parse_graph(text)
    names = {"boxes": outputs[0], "raw": outputs[-1], "detections": result}
    for node in added.node:
        for side in (node.input, node.output):
            side[:] = [names.setdefault(value, f"{result}/{value}") for value in side]
        node.name = node.output[0]
    for constant in added.initializer:
        constant.name = names.setdefault(constant.name, f"{result}/{constant.name}")
    if width == 6:
        _fold_selection(proto, added, result)
    graph.node.extend(added.node)
    read = {value for node in added.node for value in node.input}
    graph.initializer.extend(constant for constant in added.initializer if constant.name in read)
    [output, *others] = [value for value in graph.output if value.name in outputs]
    output.CopyFrom(helper.make_tensor_value_info(result, TensorProto.FLOAT, [None, width]))
    for other in others:
        graph.output.remove(other)
    return result


def _fold_selection(proto: onnx.ModelProto, added: onnx.GraphProto, result: str) -> None:
    """Make the nodes after corners and scores a function, which the importer knows."""
    names = [f"{result}/{name}" for name in ("corners", "scores", "most", "iou", "conf")]
    first = next(i for i, node in enumerate(added.node) if names[1] in node.output) + 1
    body = list(added.node[first:])
    read = {value for node in body for value in node.input} - {*names}
    constants = [helper.make_node("Constant", [], [x.name], value=x) for x in added.initializer if x.name in read]
    opsets = [opset for opset in proto.opset_import if opset.domain in ("", "ai.onnx")]
    proto.functions.append(helper.make_function(OWN, SELECTION, names, [result], [*constants, *body], opsets))
    proto.opset_import.append(helper.make_opsetid(OWN, 1))
    proto.ir_version = max(proto.ir_version, _FIRST_WITH_FUNCTIONS)
    del added.node[first:]
    added.node.append(helper.make_node(SELECTION, names, [result], result, domain=OWN))


def _text(head: _Head, options: Mapping[str, str], opset: int, *, is_single: bool) -> str:
    """Return the nodes from `raw` to `detections` in ONNX's text form."""
    end, best = head.first + head.classes, "ReduceMax<axes = [1]>(scores)" if opset < 18 else "ReduceMax(scores, one)"
    columns = ["float_image"] * (not is_single) + ["box", "score", "float_label"] + ["more"] * (head.extras > 0)
    low, high = "Sub(first_half, half_size)", "Add(first_half, half_size)"
    if options.get("boxes") == "xyxy":
        low, high = "Identity(first_half)", "Max(first_half, second_half)"
    selection = """found = GatherND(by_class, chosen) sizes = Shape(found) is_short = Less(sizes, most)
        limit = Where(is_short, sizes, most) ranked, order = TopK<axis = 0>(found, limit)
        picks = Gather(chosen, order) cells = Gather<axis = 1>(picks, ends) label = Gather<axis = 1>(picks, one)"""
    if not is_single:
        # `kept` [images, boxes] has the scores of chosen boxes, else 0. So one TopK sorts and limits those of an image.
        selection = """places = Gather<axis = 1>(chosen, ends) best_flat = Reshape(best, by_image)
        sizes = Shape(best_flat) zeros = ConstantOfShape(sizes) chosen_scores = GatherND(best_flat, places)
        kept = ScatterND(zeros, places, chosen_scores) count = Gather(sizes, one) is_short = Less(count, most)
        limit = Where(is_short, count, most) all_ranked, order = TopK<axis = 1>(kept, limit)
        is_kept = Greater(all_ranked, nothing) found = NonZero(is_kept) ranks = Transpose(found)
        image = Gather<axis = 1>(ranks, zero) numbers = GatherND(order, ranks) column = Reshape(numbers, column_of)
        cells = Concat<axis = 1>(image, column) ranked = GatherND(all_ranked, ranks)
        labels = ArgMax<axis = 2>(all_scores) label = GatherND(labels, cells) float_image = Cast<to = 1>(image)"""
    # A box competes only in its best class: `by_class` is 0 in all others, and for boxes without an area, between which
    # ncnn divides 0 by 0.
    return f"""g (float raw, float boxes) => (float detections) <
        int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] four = {{4}},
        int64[3] of_boxes = {{{int(is_single)}, -1, 4}}, int64[3] of_scores = {{{int(is_single)}, -1, {head.columns}}},
        int64[1] box_end = {{{head.box}}}, int64[1] first = {{{head.first}}},
        int64[1] end = {{{end}}}, int64[1] width = {{{head.columns}}},
        int64[1] most = {{{options.get("max", 300)}}}, float[1] iou = {{{float(options.get("iou", 0.45))}}},
        float[1] conf = {{{float(options.get("conf", 0.25))}}}, float half = {{0.5}}, float nothing = {{0.0}},
        int64[2] ends = {{0, 2}}, int64[2] by_image = {{0, -1}}, int64[2] column_of = {{-1, 1}}
    > {{
        floats = Cast<to = 1>(raw)
        rows = {"Reshape(floats, of_scores)" if head.has_rows else "Transpose<perm = [0, 2, 1]>(floats)"}
        box_floats = Cast<to = 1>(boxes) placed = {"Identity(rows)" if head.box else "Reshape(box_floats, of_boxes)"}
        first_half = Slice(placed, zero, two, two) second_half = Slice(placed, two, four, two)
        size = Relu(second_half) half_size = Mul(size, half) low = {low} high = {high}
        corners = Concat<axis = 2>(low, high) extras = Slice(rows, end, width, two)
        classes = Slice(rows, first, end, two) objectness = Slice(rows, box_end, first, two)
        all_scores = {"Mul(classes, objectness)" if head.objectness else "Identity(classes)"}
        scores = Transpose<perm = [0, 2, 1]>(all_scores)
        starts = Slice(corners, zero, two, two) stops = Slice(corners, two, four, two) extent = Sub(stops, starts)
        wide = Slice(extent, zero, one, two) tall = Slice(extent, one, two, two)
        shorter = Min(wide, tall) has_area = Less(nothing, shorter) is_flat = Not(has_area) flat = Cast<to = 1>(is_flat)
        flat_row = Transpose<perm = [0, 2, 1]>(flat) best = {best} bound = Add(best, flat_row)
        is_below = Less(scores, bound) by_class = Where(is_below, nothing, scores)
        chosen = NonMaxSuppression(corners, by_class, most, iou, conf) {selection}
        box = GatherND(corners, cells) score = Reshape(ranked, column_of) float_label = Cast<to = 1>(label)
        {"more = GatherND(extras, cells)" if head.extras else ""}
        detections = Concat<axis = 1>({", ".join(columns)})
    }}"""
