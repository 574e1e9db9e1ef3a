"""If, Loop and Scan: the chosen branch of a known condition, and unrolled loops of a known trip count.

If the condition is computed, layers compute both branches of an If and choose. An If whose branches give other shapes
is refused: it can move to the tail.

Their subgraphs are imported in place of the node, once for each iteration. A loop's condition has to be known at each
iteration: constant, or computed from constants, sizes and the iteration's number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir

from onnx2ncnn_opt.onnx.lower.context import ImportContext
from onnx2ncnn_opt.onnx.lower.functional.concat import stacked, unstacked
from onnx2ncnn_opt.onnx.lower.functional.where import where
from onnx2ncnn_opt.onnx.registry import onnx_op
from onnx2ncnn_opt.onnx.value import Constant, Ints, Item, NodeItems, Operand, SymbolicTensor, Tensor, Value


@onnx_op("If", integers=True)
def if_(im: ImportContext, cond: Item, *, then_branch: onnx_ir.Graph, else_branch: onnx_ir.Graph) -> tuple[Item, ...]:
    """Take the branch of a known condition; compute both and choose if the condition is computed."""
    if isinstance(cond, Tensor) and not im.value_hint(0):
        pairs = zip(im.inlined(then_branch), im.inlined(else_branch), strict=True)
        return tuple(_chosen(im, im.reshape(cond, ()), *pair) for pair in pairs)
    return im.inlined(then_branch if _holds(im, cond, 0) else else_branch)


def _chosen(im: ImportContext, condition: Value, *results: Item) -> Value:
    a, b = (im.tensor(x) if isinstance(x, SymbolicTensor) else x for x in results)
    if not (isinstance(a, Operand) and isinstance(b, Operand)):
        raise im.refuse("its branches give sequences, and its condition is known only at run time", "cut it out")
    if a.shape != b.shape:
        shapes = " and ".join(f"[{', '.join(map(str, x.shape))}]" for x in (a, b))
        raise im.refuse(f"its condition is known only at run time, and its branches give {shapes}", "cut it out")
    return where(im, condition, a, b)


@onnx_op("Loop", integers=True)
def loop(
    im: ImportContext, m: Item | None = None, cond: Item | None = None, *initial: Item, body: onnx_ir.Graph
) -> tuple[Item | None, ...]:
    """One copy of the body for each iteration."""
    if len(body.inputs) != 2 + len(initial) or len(body.outputs) <= len(initial):
        raise im.invalid(f"its body takes {len(body.inputs)} and gives {len(body.outputs)} values")
    iterations = None if m is None else _trip_count(im, m)
    condition = Constant(np.array(True)) if cond is None else cond
    state: Sequence[Item] = initial
    rows: list[Sequence[Item]] = []
    while len(rows) != iterations and _holds(im, condition, 1):
        iteration = Constant(np.array(len(rows), np.int64))
        condition, *results = im.inlined(body, iteration, condition, *state, iterations=iterations)
        state = results[: len(initial)]
        rows.append(results[len(initial) :])
    return *state, *_stacks(im, body.outputs[1 + len(initial) :], rows)


def _trip_count(im: ImportContext, m: Item) -> int:
    if isinstance(m, Constant):
        return max(0, int(m.array.reshape(-1)[0]))
    if isinstance(m, Tensor):
        raise im.refuse("its number of iterations is computed at run time, and ncnn has no loops", im.value_hint(0))
    reason = "its number of iterations depends on a dynamic dimension, and ncnn has no loops"
    raise im.refuse(reason, "bind it with --shape")


def _holds(im: ImportContext, condition: Item, operand: int) -> bool:
    """Return True if a condition is true; its first value is this operand of the node."""
    if isinstance(condition, SymbolicTensor):
        raise im.refuse("its condition depends on a dynamic dimension", "bind it with --shape")
    if not isinstance(condition, Constant):
        raise im.refuse("its condition is known only at run time", im.value_hint(operand, "cut it out"))
    return bool(condition.array.all())


@onnx_op("Scan", since=9, integers=True)
def scan9(
    im: ImportContext,
    *xs: Value,
    body: onnx_ir.Graph,
    num_scan_inputs: int,
    scan_input_axes: Ints = (),
    scan_input_directions: Ints = (),
    scan_output_axes: Ints = (),
    scan_output_directions: Ints = (),
) -> tuple[Item | None, ...]:
    """One copy of the body for each element of the sequence."""
    initial, scanned = xs[: len(xs) - num_scan_inputs], xs[len(xs) - num_scan_inputs :]
    axes, backwards = scan_input_axes or (0,) * len(scanned), scan_input_directions or (0,) * len(scanned)
    if not len(body.inputs) == len(xs) == len(initial) + len(axes) == len(initial) + len(backwards):
        raise im.invalid(f"its body takes {len(body.inputs)} values, not {len(xs)}")
    axes_in = [im.axis(axis, x.rank) for axis, x in zip(axes, scanned, strict=True)]
    lengths = {x.shape[axis] for axis, x in zip(axes_in, scanned, strict=True)}
    if len(lengths) != 1 or not all(isinstance(length, int) for length in lengths):
        text = " or ".join(sorted(map(str, lengths)))
        raise im.refuse(f"its sequence has the dynamic length {text}", "bind it with --shape")
    slices = [unstacked(im, x, axis) for x, axis in zip(scanned, axes_in, strict=True)]
    steps = [parts[::-1] if back else parts for parts, back in zip(slices, backwards, strict=True)]
    state: Sequence[Item] = initial
    rows: list[Sequence[Item]] = []
    for step in zip(*steps, strict=True):
        results = im.inlined(body, *state, *step, iterations=len(steps[0]))
        state = results[: len(initial)]
        rows.append(results[len(initial) :])
    return *state, *_stacks(im, body.outputs[len(initial) :], rows, scan_output_axes, scan_output_directions)


@onnx_op("Scan", since=8, integers=True)
def scan8(
    im: ImportContext,
    sequence_lens: Constant | None = None,
    *xs: Value,
    body: onnx_ir.Graph,
    num_scan_inputs: int,
    directions: Ints = (),
) -> tuple[Item | None, ...]:
    """One copy of the body for each element of the sequence of each item of a batch."""
    items = [unstacked(im, x, 0) for x in xs if isinstance(x.shape[0], int)]
    if len(items) < len(xs) or len(set(map(len, items))) != 1:
        raise im.refuse("its batch is dynamic", "bind it with --shape")
    scanned = xs[len(xs) - num_scan_inputs :]
    if sequence_lens is not None and any(length != x.shape[1] for x in scanned for length in sequence_lens.array):
        raise im.refuse("its sequences are padded (input sequence_lens)", "export it without sequence_lens")
    options: dict[str, Any] = {"num_scan_inputs": num_scan_inputs, "scan_input_directions": directions}
    rows = [scan9(im, *item, body=body, **options) for item in zip(*items, strict=True)]
    return tuple(_stack(im, column, 0) if im.is_used(i) else None for i, column in enumerate(zip(*rows, strict=True)))


def _stacks(
    im: ImportContext,
    declared: Sequence[onnx_ir.Value],
    rows: Sequence[Sequence[Item]],
    axes: Ints = (),
    backwards: Ints = (),
) -> list[Item | None]:
    """Stack the outputs of the iterations, except the state, each along its axis."""
    first = len(im.node.outputs) - len(declared)
    results: list[Item | None] = []
    for i, value in enumerate(declared):
        column = [row[i] for row in rows]
        if not im.is_used(first + i):
            results.append(None)
        elif not rows:
            results.append(_empty(im, value))
        else:
            back = i < len(backwards) and backwards[i]
            results.append(_stack(im, column[::-1] if back else column, axes[i] if axes else 0))
    return results


def _stack(im: ImportContext, column: NodeItems, axis: int) -> Value:
    values = [im.tensor(x) if isinstance(x, SymbolicTensor) else x for x in column if isinstance(x, Operand)]
    if len(values) < len(column):
        raise im.refuse("it stacks sequences", "stack tensors instead")
    return stacked(im, values, axis)


def _empty(im: ImportContext, declared: onnx_ir.Value) -> Constant:
    """Return the stacked output of no iterations: an empty tensor with the declared shape of the body's output."""
    if declared.shape is None or declared.dtype is None or not declared.shape.is_static():
        reason = "it has no iterations, so its stacked outputs are empty, and ncnn has no empty tensors"
        raise im.refuse(reason, "remove the loop")
    return Constant(np.zeros((0, *declared.shape.numpy()), declared.dtype.numpy()))
