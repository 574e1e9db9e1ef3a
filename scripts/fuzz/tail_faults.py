"""Plant faults in the tails of detectors, and count those that verification does not find.

    python -m scripts.fuzz.tail_faults [COUNT] [FOLDER]

The models are those of fixtures/heads, or of a folder. A fault is another number: a threshold, an index, an axis, a
number of boxes; or another operand, as swapped columns are; or ties in another order. A changed tail that gives the
same in ONNX Runtime as before, on the model's own numbers and on random ones, has no fault.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.errors import Error, RunError
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.tail.registry import TAIL_OPS

_HEADS = Path(__file__).parents[2] / "fixtures" / "heads"
_DRAWS = 6


def main() -> None:
    """Plant faults and print what became of them."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else _HEADS
    chosen, found, missed = random.Random(0), 0, list[str]()
    conversions = [lower(path) for path in sorted(folder.glob("*.onnx")) if "-" not in path.stem]
    conversions = [conversion for conversion in conversions if conversion.tail is not None]
    while found + len(missed) < count:
        conversion = chosen.choice(conversions)
        if chosen.random() < 0.1:
            fault, statuses = "TopK: ties in another order", _with_other_ties(conversion)
        else:
            changed = onnx.ModelProto()
            assert conversion.tail is not None
            changed.CopyFrom(conversion.tail.model)
            fault = _plant(changed, chosen)
            if not _differs(conversion.tail.model, changed):
                continue
            statuses = _statuses(replace(conversion, tail=replace(conversion.tail, model=changed)))
        if statuses <= {"ok", "unproven"}:
            missed.append(f"{conversion.model.name}: {fault}: {', '.join(statuses)}")
        else:
            found += 1
    print(f"{found} of {found + len(missed)} faults found")
    print("\n".join(missed))


def _statuses(conversion: Conversion) -> set[str]:
    try:
        return {row.status for row in conversion.verify().outputs}
    except Error:  # the tail is refused
        return {"refused"}


def _with_other_ties(conversion: Conversion) -> set[str]:
    """Verify with a TopK that prefers the higher of two indices."""
    op = TAIL_OPS["TopK"]

    @wraps(op.function)
    def top_k(x: NDArray[Any], *arguments: Any, **attributes: Any) -> Any:
        axis = attributes.get("axis", -1)
        values, indices = op.function(np.flip(x, axis), *arguments, **attributes)
        return values, x.shape[axis] - 1 - indices

    assert conversion.tail is not None
    if "TopK" not in conversion.tail.operators:
        return {"refused"}
    TAIL_OPS["TopK"] = replace(op, function=top_k)
    try:
        return _statuses(conversion)
    finally:
        TAIL_OPS["TopK"] = op


def _plant(model: onnx.ModelProto, chosen: random.Random) -> str:
    """Change one number or operand of a tail; return what."""
    nodes = list(model.graph.node)
    node = chosen.choice(nodes)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    constants = [name for name in node.input if name in tensors and np.prod(tensors[name].dims, dtype=int) > 0]
    if len(node.input) > 1 and chosen.random() < 0.2:
        node.input[0], node.input[1] = node.input[1], node.input[0]
        return f"{node.op_type}: swapped operands"
    if constants:
        old = tensors[chosen.choice(constants)]
        array = numpy_helper.to_array(old).copy()
        at = chosen.randrange(array.size)
        number = array.reshape(-1)[at]
        array.reshape(-1)[at] = (
            not number
            if array.dtype == bool
            else number + chosen.choice([1, -1] if array.dtype.kind in "iu" else [0.1, -0.1])
        )
        new = numpy_helper.from_array(array, f"{old.name}.changed")
        model.graph.initializer.append(new)
        node.input[list(node.input).index(old.name)] = new.name
        return f"{node.op_type}: {number} is {array.reshape(-1)[at]} at {at} of {old.name}"
    integers = [attribute for attribute in node.attribute if attribute.type == onnx.AttributeProto.INT]
    if integers:
        attribute = chosen.choice(integers)
        attribute.i = 1 - attribute.i if attribute.i in (0, 1) else attribute.i + 1
        return f"{node.op_type}: {attribute.name} is {attribute.i}"
    return f"{node.op_type}: nothing"


def _differs(right: onnx.ModelProto, changed: onnx.ModelProto) -> bool:
    """Return True if two tails give other outputs on random numbers; False too if the changed one does not run."""
    try:
        runners = [OrtRunner(model.SerializeToString(), once=True) for model in (right, changed)]
    except RunError:
        return False
    for feeds in _feeds(right):
        try:
            ours, theirs = (runner.run(feeds) for runner in runners)
        except RunError:
            continue
        if any(not np.array_equal(array, theirs[name], equal_nan=True) for name, array in ours.items()):
            return True
    return False


def _feeds(model: onnx.ModelProto) -> Iterator[Mapping[str, NDArray[Any]]]:
    for seed in range(_DRAWS):
        draw = np.random.default_rng(seed)
        feeds = {}
        for value in model.graph.input:
            kind = value.type.tensor_type
            shape = [dim.dim_value or 1 for dim in kind.shape.dim]
            numbers = draw.uniform(0, 1 if seed % 2 else 64, shape)
            feeds[value.name] = numbers.astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        yield feeds


if __name__ == "__main__":
    main()
