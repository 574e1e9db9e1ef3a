"""A search for options with which a refused or wrong model converts, for the error's message."""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnx2ncnn_opt.api.equal_sizes import runs_at
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.options import ConvertOptions
from onnx2ncnn_opt.errors import THEN, WORKS, CrashError, Error, RunError, UnprovenError, UnsupportedError, UsageError
from onnx2ncnn_opt.ir.dim import Dim, Sym, named, names_in, symbol
from onnx2ncnn_opt.onnx.edit.append import NOISE_INPUTS, RANDOM
from onnx2ncnn_opt.onnx.read.binding import InputInfo
from onnx2ncnn_opt.onnx.read.caches import past_lengths
from onnx2ncnn_opt.onnx.read.exported import reference
from onnx2ncnn_opt.onnx.read.given import GivenSize
from onnx2ncnn_opt.onnx.read.load import LoadedModel, load_model
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.system import command_line, temporary_folder

_SECONDS = 15.0
# Usual sizes of exported models: sides of images, and lengths of sequences and sounds.
_SIDES = (640, 224, 320, 416, 512, 256, 384, 128, 112, 96, 64, 299, 300, 192, 160, 480, 800, 1024, 32, 28, 48, 448)
_OBLONG = ((480, 640), (640, 480), (384, 640), (192, 640), (720, 1280), (512, 1024), (256, 128), (32, 100), (32, 320))
_MAPS, _VOLUMES, _COLOURS = (64, 32, 28, 48, 16), (64, 32, 96, 128, 16), 4  # inner maps have more channels than images
_LENGTHS = (512, 128, 256, 64, 16, 32, 160, 320, 480, 1024, 77, 384, 80, 100, 1000)
_SOUNDS = (16000, 8000, *_LENGTHS)
_FACTORS, _LEAST = (2, 4, 32), 7  # of dynamic dimensions; smaller frozen sizes are of kernels
_MOST = 2**22  # elements of the dynamic dimensions, and of the batch
_MAX_RUNS = 4  # of the model at fixed sizes: if none of these helps, others hardly do
_MAX_DIMS, _MAX_SIZES, _MAX_BATCHES = 8, 8, 3  # of constant shapes; of sizes and batches to try
_ROWS = 32  # of a first axis that is no batch, such as the frames of a sound
_STRIDE = 32  # the sides of images are mostly multiples of it
_RATES = (16000, 8000)  # usual sample rates


@contextmanager
def advised(model: Any, options: ConvertOptions, arguments: Sequence[str]) -> Iterator[None]:
    """Add to an error of the block the command that works, if there is one; `arguments` are those of this command."""
    try:
        yield
    except (RunError, UnprovenError, UnsupportedError, UsageError) as error:
        if not isinstance(error, CrashError) and (options.shapes or not isinstance(error, UsageError)):
            error.args = (_with_command(model, error, options, arguments),)
        raise


def _with_command(model: Any, error: Error, options: ConvertOptions, arguments: Sequence[str]) -> str:
    """Return the text of an error, with a command that works instead of advice if there is one."""
    more, text = working_options(model, error, options), str(error)
    if more is None:
        return text
    second: Sequence[str] = ()
    if isinstance(error, UnsupportedError) and error.second and more == {"outputs": [*error.cuts[0]]}:
        second = second_net(model, *error.second)
    if "shapes" in more and not isinstance(error, UsageError):
        more = {**more, "shapes": {**(options.shapes or {}), **more["shapes"]}}
    shapes = ["--shape"] if "shapes" in more or isinstance(error, UsageError) else []
    kept = without(arguments, *shapes, "--split", *(f"--{name}" for name in ("outputs", "custom") if name in more))
    kept = [word for word in kept if word != "--no-verify" or "custom" not in more]
    if error.advice and more.keys() <= {"shapes", "values"}:
        text = text.partition(error.advice)[0].rstrip()
    works = command_line(*kept, *ConvertOptions(**more).arguments)
    return "\n".join([text, WORKS + works, *(THEN + line for line in second)])


def working_options(model: Any, error: Error, options: ConvertOptions) -> dict[str, Any] | None:
    """Return further options (shapes and values, outputs, append, or custom) with which the model converts.

    With a verification, the net also agrees with ONNX Runtime. Return None if no attempt succeeds within 15 seconds.
    After a UsageError, the options replace the given shapes, and may be empty.
    """
    given, verification = options.shapes or {}, options.verification
    if isinstance(error, UsageError):
        options = replace(options, shapes=None)
    try:
        loaded = load_model(model, shapes=options.shapes, values=options.values)
    except Error:
        return None
    end = time.monotonic() + _SECONDS
    runner = None if verification is None else _runner(model, loaded)
    is_size = isinstance(error, UnsupportedError) and any("--shape" in node.hint for node in error.nodes)
    attempts = _attempts(loaded, runner, end - _SECONDS / 3, _FACTORS if is_size else ())  # a third is for others
    steps = past_lengths(loaded.net_inputs) if isinstance(error, RunError) else None
    if steps is not None and isinstance(steps.new, Sym):  # a decoder, perhaps of single tokens
        attempts = chain([_named(loaded.inputs, {str(steps.new): 1})], attempts)
    if isinstance(error, UsageError):
        sides = {name: (*shape[:2], *map(_rounded_up, shape[2:])) for name, shape in given.items() if len(shape) == 4}
        attempts = chain([{"shapes": {**given, **sides}}, {}], attempts)
    if isinstance(error, UnsupportedError):
        attempts = _around(attempts, loaded, error, options)
    while (more := next(attempts, None)) is not None:
        if time.monotonic() > end:
            break
        announce(f"trying {' '.join(ConvertOptions(**more).arguments)}")
        tried = {
            key: {**(getattr(options, key) or {}), **new} if isinstance(new, dict) else new for key, new in more.items()
        }
        try:
            conversion = lower(model, replace(options, **tried))  # type: ignore[arg-type]
            if verification is None or conversion.custom or conversion.verify(verification).ok:
                return more
        except Error as again:
            if not more and str(again) == str(error):  # the shapes are not the cause
                break
            attempts = chain(_without_refused(loaded, again, more, options), attempts)
    return None


def second_net(model: Path, inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """Return the commands that convert the part of a model between these values; none if they would fail."""
    with temporary_folder() as folder:
        rest = Path(folder) / "rest.onnx"
        try:
            onnx.utils.extract_model(model, rest, list(inputs), list(outputs))
            lower(rest)
        except (Error, ValueError, onnx.checker.ValidationError):  # onnx does not know the types of all values
            return []
    arguments = json.dumps([os.fspath(model), rest.name, inputs, outputs], ensure_ascii=False)[1:-1]
    python = f"import onnx.utils; onnx.utils.extract_model({arguments})"
    return [command_line("-c", python, program="python"), command_line("convert", rest.name)]


def _around(
    attempts: Iterator[dict[str, Any]], model: LoadedModel, error: UnsupportedError, options: ConvertOptions
) -> Iterator[dict[str, Any]]:
    """Yield options for refused nodes before and after other attempts."""
    if any(node.operator in RANDOM for node in error.nodes) and options.append is None:
        yield {"append": NOISE_INPUTS}
    yield from _without_refused(model, error, {}, options)
    # Operators of a user's domain, not of one of ONNX's.
    operators = dict.fromkeys(node.operator for node in error.nodes)
    unknown = [name for name in operators if "::" in name and not name.startswith("ai.onnx.ml::")]
    if len(unknown) == len(operators):
        yield {"custom": [*options.custom, *unknown]}
    yield from attempts
    yield from ({"outputs": list(names)} for names in error.cuts)


def _without_refused(
    model: LoadedModel, error: Error, tried: Mapping[str, Any], options: ConvertOptions
) -> Iterator[dict[str, Any]]:
    """Yield the tried options without the refused outputs, if only outputs are refused."""
    nodes = error.nodes if isinstance(error, UnsupportedError) else ()
    refused = {node.node for node in nodes if node.operator == "graph output"}
    outputs = [value.name for value in model.graph.outputs if value.name not in refused]
    if refused and len(refused) == len(nodes) and outputs and not options.outputs and "outputs" not in tried:
        yield {**tried, "outputs": outputs}


def _rounded_up(size: GivenSize) -> GivenSize:
    return -(-size // _STRIDE) * _STRIDE if isinstance(size, int) else size


def without(arguments: Sequence[str], *options: str) -> list[str]:
    """Return the arguments of a command without some options and their values."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [word for before, word in pairs if before not in options and word.split("=")[0] not in options]


def _runner(model: Any, loaded: LoadedModel) -> OrtRunner | None:
    """Return the model in ONNX Runtime, whose runs are faster than conversions; None if it refuses the model."""
    try:
        return OrtRunner(reference(model), values=loaded.values, threads=None, timeout=_SECONDS)
    except RunError:
        return None


def _attempts(
    model: LoadedModel, runner: OrtRunner | None, end: float, factors: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield values of flags, with dimensions times `factors`, then with fixed ones with which the model runs.

    Integers for each item of a batch may be the lengths of sequences: then they are bound to the full length.
    """
    flags = {info.name: _values_of(info) for info in model.inputs if _is_flag(info)}
    inputs = [info for info in model.inputs if info.name not in flags and names_in(info.shape)]
    lengths = [info.name for info in inputs if len(info.shape) == 1 and not info.dtype.is_floating_point()]
    axes = [(info, axis, {*names_in([dim])}) for info in inputs for axis, dim in enumerate(info.shape)]
    batches = {name for info, axis, names in axes if _is_batch(info, axis) for name in names}
    sides = [name for info, axis, names in axes if len(info.shape) > 3 and axis > 1 for name in sorted(names)]
    others = {name for *_, names in axes for name in names} - batches
    sized = list(dict.fromkeys(sides or sorted(others)))
    for numbers in product(*flags.values()):
        values = dict(zip(flags, numbers, strict=True))
        bound = {"values": values} if flags else {}
        if bound:
            yield bound
        new = {name: symbol(name.swapcase()) for name in sized if name.isidentifier()}
        for factor in factors if new else ():
            yield {**bound, **_named(inputs, {name: size * factor for name, size in new.items()})}
        runs = 0
        for height, width, count in _ladder(model, inputs, len(sized), has_batch=bool(batches)) if axes else ():
            if time.monotonic() > end or runs == _MAX_RUNS or (runs and height != width):
                break
            sizes = dict.fromkeys(others, height) | dict.fromkeys(sized[1:], width) | dict.fromkeys(batches, count)
            if runner is not None and not runs_at(runner, model, sizes, values):
                continue
            runs += 1
            shapes = _named(inputs, sizes)["shapes"]
            yield {**bound, "shapes": shapes}
            if lengths:
                known = values | dict.fromkeys(lengths, height)
                yield {"values": known, "shapes": {name: shape for name, shape in shapes.items() if name not in known}}


def _ladder(
    model: LoadedModel, inputs: Sequence[InputInfo], dims: int, *, has_batch: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield sizes to try for the first of `dims` dimensions, for the others, and for batches.

    All dimensions get the same size, a usual one or one that torch froze in a constant; then two get different ones. A
    batch is 1, a frozen size, or `_ROWS`.
    """
    usual = _usual_sizes(inputs)
    frozen = [size for size in _frozen_sizes(model) if size <= max(usual)]
    candidates = dict.fromkeys((usual[0], *(size for size in frozen if size >= _LEAST), *usual)) if dims else (1,)
    counts = (1, *frozen[:_MAX_BATCHES], _ROWS) if has_batch else (1,)
    different = (*(_OBLONG if usual is _SIDES else ()), *permutations(frozen, 2)) if dims == 2 else ()
    for pairs in ([(size, size) for size in candidates], different):
        for count, (first, other) in product(counts, pairs):
            if count * first * other ** (dims - 1) <= _MOST:
                yield first, other, count


def _named(inputs: Iterable[InputInfo], sizes: Mapping[str, Dim]) -> dict[str, Any]:
    """Return the shapes of inputs with other sizes for names, as options."""
    return {"shapes": {info.name: named(info.shape, sizes) for info in inputs if names_in(info.shape)}}


def _usual_sizes(inputs: Sequence[InputInfo]) -> tuple[int, ...]:
    """Return the usual sizes of the longest inputs."""
    rank = max((len(info.shape) for info in inputs), default=0)
    fixed = [[size for size in info.shape[1:] if isinstance(size, int)] for info in inputs if len(info.shape) == rank]
    if rank > 3:
        return _VOLUMES if rank > 4 else _MAPS if all(min(sizes, default=0) > _COLOURS for sizes in fixed) else _SIDES
    is_sound = all(info.dtype.is_floating_point() for info in inputs) and any(math.prod(sizes) == 1 for sizes in fixed)
    return _SOUNDS if is_sound else _LENGTHS


def _frozen_sizes(model: LoadedModel) -> list[int]:
    """Return the sizes in constant shapes, then the sizes of tables; in both, frequent ones come first."""
    constants = (value.const_value for value in model.graph.initializers.values())
    tensors = [tensor for tensor in constants if tensor is not None]
    vectors = [tensor.numpy() for tensor in tensors if len(tensor.shape) == 1 and tensor.size <= _MAX_DIMS]
    shapes = [array for array in vectors if array.dtype == np.int64]
    tables = [tensor.shape.numpy() for tensor in tensors if len(tensor.shape) > 1]
    counts = [Counter(int(size) for shape in kind for size in shape if size > 1) for kind in (shapes, tables)]
    return [size for count in counts for size, _ in count.most_common(_MAX_SIZES)]


def _is_batch(info: InputInfo, axis: int) -> bool:
    """Return True for the outermost axis, the second axis of an RNN's state, and an axis that is called batch."""
    rank = len(info.shape)
    is_state = axis == 1 and rank == 3 and isinstance(info.shape[0], int)
    return rank > 1 and (axis == 0 or is_state or any("batch" in name.lower() for name in names_in([info.shape[axis]])))


def _is_flag(info: InputInfo) -> bool:
    return all(dim == 1 for dim in info.shape) and not info.dtype.is_floating_point()


def _values_of(info: InputInfo) -> tuple[object, ...]:
    if info.dtype.name == "BOOL":
        return (True, False)
    return _RATES if info.name.lower() in ("sr", "rate", "sample_rate", "sampling_rate") else (1, 0)
