"""Integers that fp16 changes: the bits of integer inputs, indices, and integers above 2048.

ncnn reads the bits of an integer as a float, and casts this float if a layer computes in fp16. Floats may also hold
integers. fp16 holds integers exactly up to 2048, and computes positions in an image up to a width of 768.
"""

from collections.abc import Collection, Iterator

from onnx2ncnn_opt.ir.codes import BinaryOp, Sample
from onnx2ncnn_opt.ir.detections import BY_RANK, counting, is_sort
from onnx2ncnn_opt.ir.dim import is_fixed
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import COMPUTED_SIDE, COUNTED
from onnx2ncnn_opt.ir.ranges import Ranges
from onnx2ncnn_opt.ir.reached import reached
from onnx2ncnn_opt.ir.spec import Trait

# Layers that compute integers from floats or sizes; others do so only from integers.
_CALCULATES = frozenset({"BinaryOp", "Clip", "CumulativeSum", "Eltwise", "Interp", "Reduction", "Scale", "UnaryOp"})
_POSITIONS = _CALCULATES | {"GridSample", "Pooling1D"}  # layers that compute positions in an image
_COUNTED = frozenset({"CumulativeSum", "Dequantize", "MemoryData", "Reduction"})
_RANKS = _POSITIONS | {"DetectionOutput", "MemoryData", "Padding", "Threshold"}  # and boxes that classes move apart
_RANKS |= {"Concat", "Crop", "DeepCopy", "Permute", "Reshape", "Slice", "Tile"}
_COMPUTES = _CALCULATES | {"MatMul", "Threshold"}


def moved(layer: Layer) -> tuple[Blob, ...]:
    """Return the inputs whose bits a layer copies; it reads only the sizes of the others."""
    if not layer.has(Trait.MOVES) and not (layer.type == "Dropout" and layer["scale"] == 1.0):
        return ()
    return layer.inputs if layer.type in ("Concat", "CopyTo") else layer.inputs[:1]


def index_blobs(graph: Graph) -> set[Blob]:
    """Return the blobs whose bits are integers: Embed reads them as indices, or Dequantize converts them."""
    sinks = [layer.inputs[0] for layer in graph if layer.type == "Embed" or _reads_integers(layer)]
    return set(reached(sinks, lambda blob: moved(blob.producer) if blob.producer is not None else ()))


def _reads_integers(layer: Layer) -> bool:
    """Return True if a layer converts integers to floats with factor 1: they were not quantised."""
    return layer.type == "Dequantize" and layer["scale_data_size"] == 1 and layer.weights["scale_data"][0] == 1


def inexact_layers(graph: Graph, ports: Collection[Blob]) -> Iterator[tuple[Layer, str]]:
    """Yield each layer whose integers fp16 changes, with the reason; `ports` are the integer inputs and outputs."""
    bits = {*(blob for blob in ports if blob.is_input), *index_blobs(graph)}
    for layer in graph:
        if layer.type == "MemoryData" and layer.weights["data"].dtype.kind == "i":
            bits.update(layer.outputs)
            if layer.output in ports:
                yield layer, "its integers are an output"
        if any(blob in bits for blob in moved(layer)):
            bits.update(layer.outputs)
            yield layer, "it moves the bits of integers"
    ranges = Ranges()
    cones: dict[Layer, str] = {}
    for blob in graph.outputs:
        if blob in ports and blob not in bits and not ranges.of(blob).within(-COUNTED, COUNTED):
            _collect(blob, "it computes integers, perhaps above 2048, which fp16 does not tell apart", ranges, cones)
    for layer in graph:
        if layer.type == "GridSample" and layer["sample_type"] == Sample.NEAREST:
            side = _longest(layer.inputs[0])
            if side is None or side > COMPUTED_SIDE:
                size = f"more than {COMPUTED_SIDE} pixels a side" if side else "any size"
                cone = {layer: f"it samples an image of {size}"}
                _collect(layer.inputs[1], cone[layer], ranges, cone)
                cones |= cone
        elif is_sort(layer):
            _collect_around(layer, "it sorts numbers and their indices, or computes with these", ranges, cones)
        elif layer.type == "DetectionOutput" and layer["confidence_threshold"] == BY_RANK:
            after = reached([layer], lambda x: (user for blob in x.outputs for user in blob.users))
            made = reached(after, lambda x: (y for b in x.inputs if (y := b.producer) and y.type in _RANKS))
            cones |= dict.fromkeys(made, "it selects boxes by their ranks, or computes with these")
    cones |= _counting(graph, ranges)
    yield from cones.items()


def _counting(graph: Graph, ranges: Ranges) -> dict[Layer, str]:
    """Return the layers that compute from counts and constants alone, and those that subtract a count from data.

    Counts are integer inputs and sums of integers, such as positions. The difference of two counts, or the sine of one,
    needs the exact number. Adding a count to data, or multiplying them, does not.
    """
    counts, reasons = set[Blob](), dict[Layer, str]()
    reason = f"it computes with whole numbers, perhaps above {COUNTED}"
    for layer in graph:
        inputs = moved(layer) or layer.inputs[: 1 if layer.type == "Interp" else None]
        others = [blob for blob in inputs if blob not in counts]
        large = [blob for blob in layer.outputs if not ranges.of(blob).within(-COUNTED, COUNTED)]
        if len(others) == len(inputs):
            if large and layer.type in _COUNTED and ranges.of(layer.outputs[0]).is_integer:
                counts.update(large)
                _collect(large[0], reason, ranges, reasons)
        elif layer.has(Trait.MOVES) or layer.type in _COMPUTES or layer.get("constantK") == 1:
            makers = [blob.producer.type if blob.producer else "" for blob in others if not _is_held(ranges, blob)]
            if {"MemoryData"}.issuperset(makers):
                counts.update(large)
                reasons[layer] = reason
            elif layer.computes(BinaryOp.SUB, BinaryOp.RSUB) and (_CALCULATES | {"Input"}).issuperset(makers):
                reasons[layer] = reason
                for blob in others:
                    _collect(blob, reason, ranges, reasons)
    return reasons


def _longest(image: Blob) -> int | None:
    """Return the longest side of an image; None if its shape is unknown or dynamic."""
    sides = None if image.shape is None else image.shape[1:]
    return max(sides, default=1) if is_fixed(sides) else None


def _collect(blob: Blob, reason: str, ranges: Ranges, reasons: dict[Layer, str]) -> None:
    """Add the layers that compute a blob; stop at layers whose results fp16 holds exactly."""
    pending = [blob]
    while pending:
        layer = pending.pop().producer
        if layer is None or layer in reasons or not layer.inputs:
            continue
        is_integer = layer.has(Trait.MOVES) or layer.type in _POSITIONS or layer.get("constantK") == 1
        if not is_integer and not all(ranges.of(x).is_integer for x in layer.inputs):
            continue
        # A mask costs nothing at the start of a net, and a cast is a layer.
        is_first = layer.type == "Interp" and layer.inputs[0].made_by("MemoryData")
        if is_first or not all(_is_held(ranges, output) for output in layer.outputs):
            reasons[layer] = reason
            pending += layer.inputs[:1] if layer.type == "GridSample" else layer.inputs


def _collect_around(sort: Layer, reason: str, ranges: Ranges, reasons: dict[Layer, str]) -> None:
    """Add a sort, the layers that limit, count, pad and move its numbers, and those that compute with large indices."""

    steps = counting(sort)

    def before(layer: Layer) -> Iterator[Layer]:
        for each in (blob.producer for blob in layer.inputs if layer.type != "BinaryOp" or layer in steps):
            if each and layer.type == "Clip":
                yield from [each] if each.computes(BinaryOp.MUL) else ()  # a quarter of each number
            elif each and (each.type in ("Clip", "Padding") or (each.has(Trait.MOVES) and each.type != "DeepCopy")):
                yield each  # a DeepCopy is a cast

    def after(layer: Layer) -> Iterator[Layer]:
        for user in (user for blob in layer.outputs if not _is_held(ranges, blob) for user in blob.users):
            if layer is sort or user.has(Trait.MOVES) or user.type in _CALCULATES:
                yield user

    for blob in (sort.inputs[0], *(blob for step in steps[:-1] for blob in step.inputs[1:])):
        _collect(blob, reason, ranges, reasons)
    reasons |= dict.fromkeys((*reached([sort, *steps], before), *reached([sort], after)), reason)


def _is_held(ranges: Ranges, blob: Blob) -> bool:
    numbers = ranges.of(blob)
    return numbers.is_integer and numbers.within(-COUNTED, COUNTED)
