"""Two nets against each other in ncnn, output by output: an optimised one, and what it was made from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from onnx2ncnn_opt.errors import CrashError, RunError, UsageError
from onnx2ncnn_opt.ir.caches import caches
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.runtime.base import Array, Failure
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner
from onnx2ncnn_opt.verify.compare import Tolerance, compare
from onnx2ncnn_opt.verify.inputs import LARGEST_INPUT
from onnx2ncnn_opt.verify.verify import OutputReport, Status

# Both nets run in ncnn's plain kernels, so they differ by nothing but the rounding of folded weights and another order
# of sums: half a unit of the last place for each, 6e-8, which grows with the square root of the number of layers and
# with what cancels. The largest measured on 102 real nets is 4e-7 (docs/measurements.md).
FOLDING = Tolerance(relative=1e-4, absolute=1e-6)

UNPROVEN_NET = (
    "it is NaN before as well as after, which proves nothing; broken weights, or inputs that do not suit the net? "
    "(another --seed or --shape may, --no-verify does without)"
)
# NaN as it is calculated; as bits of integers these are two numbers of -2**31 and below 2**31.
_NAN = np.array([0x7FC00000, 0xFFC00000], np.uint32).view(np.int32)

# Layers whose outputs have the values of their first input, moved about.
_MOVES = frozenset(
    {"Concat", "Crop", "ExpandDims", "Flatten", "Flip", "Noop", "Padding", "Permute", "Reshape", "Slice", "Split"}
    | {"Squeeze", "Tile"}
)


def draw_feeds(graph: Graph, shapes: Mapping[str, Sequence[int]], *, seed: int = 0) -> dict[Blob, Array]:
    """An array for each input that is used, the same for the same seed: N(0,1), or valid indexes for an Embed.

    Caches stay unset, as they are before a first run.

    `shapes` are by the inputs' names. Raises UsageError for an input without one, or with an absurd one.
    """
    feeds: dict[Blob, Array] = {}
    unset = caches(graph)
    for position, blob in enumerate(graph.inputs):
        if not blob.users or blob in unset:
            continue
        shape = shapes.get(blob.name)
        if shape is None:
            raise UsageError(
                f"nothing tells the shape of the input '{blob.name}': give it, like --shape {blob.name}:3,224,224 "
                "(outermost size first), or leave out the verification with --no-verify"
            )
        if not 1 <= len(shape) <= 4 or not 0 < math.prod(shape) <= LARGEST_INPUT:
            raise UsageError(f"the input '{blob.name}' cannot have the shape {','.join(map(str, shape))}")
        rng = np.random.default_rng([seed, position])
        limit = min(_tables(blob), default=0)
        feeds[blob] = rng.integers(0, limit, shape, np.int32) if limit else rng.standard_normal(shape, np.float32)
    return feeds


def _tables(blob: Blob) -> Iterable[int]:
    """The sizes of the tables that the values of a blob are indexes into."""
    seen, left = {blob}, [blob]
    while left:
        for layer in left.pop().users:
            if layer.type == "Embed":
                yield int(layer["input_dim"])
            elif layer.type in _MOVES or _is_move(layer):
                left += [output for output in layer.outputs if output not in seen]
                seen.update(layer.outputs)


def index_blobs(graph: Graph) -> set[Blob]:
    """The blobs whose bits are integers, because they end as indexes into a table."""
    found: set[Blob] = set()
    left = [layer.inputs[0] for layer in graph if layer.type == "Embed"]
    while left:
        blob = left.pop()
        found.add(blob)
        layer = blob.producer
        if layer is not None and (layer.type in _MOVES or _is_move(layer)):
            left += [each for each in layer.inputs if each not in found]
    return found


def _is_move(layer: Layer) -> bool:
    return layer.type == "Dropout" and layer["scale"] == 1.0


def run_reference(
    runner: NcnnRunner, feeds: Mapping[str, Array], outputs: Sequence[str], *, apart: bool
) -> dict[str, Array]:
    """The outputs of the net that is optimised; `apart` runs it anew for each, as blobs inside it need that.

    Raises VerificationError where ncnn cannot run that net as it is.
    """
    try:
        if apart:
            return {name: runner.run(feeds, [name])[name] for name in outputs}
        results = runner.extract(feeds, outputs)
    except CrashError as error:
        raise CrashError(f"the net dies in ncnn before anything is optimised: {error}") from error
    except RunError as error:
        raise RunError(f"ncnn cannot run the net as it is, before anything is optimised: {error}") from error
    failures = {name: result for name, result in results.items() if isinstance(result, Failure)}
    if failures:
        lines = "\n".join(f"  {name}: {reason}" for name, reason in failures.items())
        kind = CrashError if any(failure.crashed for failure in failures.values()) else RunError
        raise kind(f"ncnn cannot compute these outputs of the net as it is, before anything is optimised:\n{lines}")
    return {name: result for name, result in results.items() if not isinstance(result, Failure)}


def compare_outputs(
    runner: NcnnRunner,
    feeds: Mapping[str, Array],
    reference: Mapping[str, Array],
    names: Mapping[str, str],
    tolerance: Tolerance,
) -> tuple[OutputReport, ...]:
    """The reports of all outputs of a net against those of its reference; `names` are the net's own names for them."""
    try:
        results = runner.extract(feeds, [names[name] for name in reference])
    except RunError as error:
        status: Status = "crashed" if isinstance(error, CrashError) else "refused"
        return tuple(OutputReport(name, None, status, str(error)) for name in reference)
    return tuple(
        _judge(name, names[name], results[names[name]], expected, tolerance) for name, expected in reference.items()
    )


def _judge(name: str, blob: str, result: Array | Failure, reference: Array, tolerance: Tolerance) -> OutputReport:
    if isinstance(result, Failure):
        return OutputReport(name, blob, "crashed" if result.crashed else "missing", result.reason)
    if result.shape != reference.shape:
        return OutputReport(name, blob, "shape", f"its shape is {list(result.shape)}, before {list(reference.shape)}")
    if reference.size and np.isin(reference.view(np.int32), _NAN).all() and np.isnan(result).all():
        return OutputReport(name, blob, "unproven", UNPROVEN_NET)
    if result.tobytes() == reference.tobytes():  # integers in the bits of floats as well
        return OutputReport(name, blob, "ok", "", 0.0, 0.0, 1.0)
    difference = compare(result, reference, tolerance)
    status: Status = "nan" if difference.special else "mismatch" if difference.excess else "ok"
    numbers = (difference.max_abs, difference.max_rel, difference.cosine)
    return OutputReport(name, blob, status, difference.special or difference.excess, *numbers)
