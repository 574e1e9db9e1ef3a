"""Random models converted, run and held against ONNX Runtime."""

import signal
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.api.lower import Conversion, Files, lower
from onnx2ncnn_opt.errors import CrashError, Error, UnsupportedError
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.runtime.base import Failure
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import too_small
from onnx2ncnn_opt.verdict.errors import compare
from testing.compared import way
from testing.conformance import Outcome
from testing.optimized import apply_passes
from testing.random_models import NoFit, RandomModel, evaluate

SECONDS = 20
NOISE = 1e-6
"""The relative error of ncnn's own exp, log and tanh."""
TINY = np.finfo(np.float32).tiny

# Whose results are not rounded: they move, choose or count.
EXACT = frozenset(
    {
        *("Abs", "ArgMax", "ArgMin", "Cast", "Ceil", "Clip", "Concat", "ConstantOfShape", "DepthToSpace", "Expand"),
        *("Flatten", "Floor", "Gather", "GatherElements", "GatherND", "GlobalMaxPool", "Hardmax", "Identity", "Max"),
        *("MaxPool", "Min", "Neg", "OneHot", "Pad", "ReduceMax", "ReduceMin", "Relu", "Reshape", "Round"),
        *("ScatterElements", "ScatterND", "Sign", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "TopK"),
        *("Transpose", "Trilu", "Unsqueeze", "Where"),
    }
)

# Whose terms may cancel: their error is one of the terms, and not of the result.
SUMS = frozenset({"Add", "Conv", "ConvTranspose", "CumSum", "Gemm", "MatMul", "ReduceMean", "ReduceSum", "Sub", "Sum"})

Array = Any


class Fuzzer:
    """Judges models, with one process for ncnn; `is_verified` says that a right net has to pass `verify` as well."""

    def __init__(self, folder: Path, worker: NcnnWorker, *, is_verified: bool = False) -> None:
        self._folder, self._worker, self._is_verified = folder, worker, is_verified

    def judge(self, model: RandomModel) -> Outcome:
        """Convert a model without passes and with them, and return its outcome."""
        proto = model.proto()
        for passes, packing in ((False, True), (True, False), (True, True)):
            try:
                conversion = lower(proto, optimize=passes, tail="never")
                files = conversion.save(self._folder / "net")
            except UnsupportedError as error:
                reasons = dict.fromkeys(f"{node.operator}: {node.reason}" for node in error.nodes)
                return Outcome("refused", " & ".join(reasons))
            if not packing and any(map(_crashes_without_packing, conversion.graph)):
                continue
            how = "without passes" if not passes else "with passes" if packing else "with passes, without packing"
            outcome = self._run(model, conversion, files, how, packing=packing)
            if outcome.kind != "right":
                return outcome
        outcome = self._is_stable(model, conversion, files)
        return self._verified(conversion) if self._is_verified and outcome.kind == "right" else outcome

    def _verified(self, conversion: Conversion) -> Outcome:
        """Return the outcome of `verify` for a right net."""
        bad = [output for output in conversion.verify(worker=self._worker).outputs if output.status != "ok"]
        kind = "right" if not bad else "unproven" if all(o.status == "unproven" for o in bad) else "ALARM"
        return Outcome(kind, " & ".join(f"{output.name} {output.status}: {output.message}" for output in bad))

    def _run(
        self, model: RandomModel, conversion: Conversion, files: Files, how: str, *, packing: bool = True
    ) -> Outcome:
        manifest = conversion.manifest()
        runner = NcnnRunner(files.param, files.bin, exact=not packing, timeout=SECONDS, worker=self._worker)
        for run, (feeds, expected) in enumerate(zip(model.feeds(), model.expected(), strict=True)):
            if too_small(manifest, feeds):
                continue
            at = f"{how}, at sizes {run}: " if len(model.feeds()) > 1 else f"{how}: "
            try:
                results = runner.extract(*way(manifest, feeds))
            except CrashError as error:
                return Outcome("CRASH", f"{at}{error}")
            for entry in manifest.outputs:
                result = results[entry.blob]
                if isinstance(result, Failure):
                    return Outcome("CRASH" if result.crashed else "WRONG", f"{at}{entry.name}: {result.reason}")
                if entry.batch_axis is not None and len(entry.shape) == 1:  # a Mat has a dim besides its batch
                    result = result[:, 0]
                found = difference(result, expected[entry.name])
                if found and not _is_as_runtime(model, run, entry.name, result):
                    kind = "ill-conditioned" if moves(model, run, entry.name, result) else "WRONG"
                    return Outcome(kind, f"{at}{entry.name}: {found}")
        return Outcome("right")

    def _is_stable(self, model: RandomModel, conversion: Conversion, files: Files) -> Outcome:
        again = lower(model.proto(), tail="never").save(self._folder / "again")
        if any(a.read_bytes() != b.read_bytes() for a, b in ((files.param, again.param), (files.bin, again.bin))):
            return Outcome("UNSTABLE", "converted again it is another net")
        is_open = any(not isinstance(size, int) for entry in conversion.inputs for size in entry.shape)
        optimized = apply_passes(files.param, files.bin, fixed_shapes=not is_open)
        if not optimized.applied:
            return Outcome("right")
        saved = optimized.save(self._folder / "optimized")
        outcome = self._run(
            model, conversion, Files(saved.param, saved.bin, files.manifest, files.tail), "after optimize"
        )
        # How many images there are at a time stands in no net, and decides which products are faster.
        if outcome.kind == "right" and not any(port.batch_axis is not None for port in conversion.inputs):
            return Outcome("UNSTABLE", f"optimize finds {optimized.applied[0]}")
        return outcome


def _crashes_without_packing(layer: Layer) -> bool:
    """Return True for convolutions that ncnn takes apart by their dilation: it crashes on outputs smaller than that."""
    is_convolution = layer.type in ("Convolution", "ConvolutionDepthWise")
    return is_convolution and (layer["dilation_w"], layer["dilation_h"]) != (1, 1)


def difference(result: Array, expected: Array) -> str:
    """Return the difference of an output from the expected one, in words; empty if there is none."""
    if result.shape != (expected.shape or (1,)):
        return f"shape {list(result.shape)} for {list(expected.shape)}"
    found = compare(result.reshape(expected.shape), expected)
    return found.problem


def _is_as_runtime(model: RandomModel, run: int, name: str, result: Array) -> bool:
    """Return True if ONNX Runtime gives this result for the whole model, although not for its nodes one by one."""
    whole = OrtRunner(model.proto().SerializeToString()).run(model.feeds()[run])
    return not difference(result, whole[name])


def moves(model: RandomModel, run: int, name: str, result: Array) -> bool:
    """Return True if rounding within the model changes an output by a third of its error."""
    expected = model.values[name][run]
    if result.shape != (expected.shape or (1,)):
        return False
    error = _distance(result.reshape(expected.shape), expected)
    for seed in range(3):
        try:
            moved = _distance(noisy(model, run, seed)[name], expected)
        except NoFit:
            continue
        if moved >= error / 3:
            return True
    return False


def _distance(a: Array, b: Array) -> float:
    """Return the largest difference; infinite if one is NaN, as powers of a negative base are near a whole exponent."""
    return float(np.nan_to_num(np.abs(a.astype(np.float64) - b), nan=np.inf, posinf=np.inf).max())


def noisy(model: RandomModel, run: int, seed: int) -> dict[str, Array]:
    """Return the values of a model with every rounded number replaced by one nearby, zeros without a sign.

    Subnormal numbers are 0, as in ncnn.
    """
    rng = np.random.default_rng(seed)
    feeds = model.feeds()[run]
    known: dict[str, Array] = {
        **model.constants,
        **{name: x if x.dtype == bool else x + 0 for name, x in feeds.items()},
    }
    for node in model.nodes:
        for name, array in zip(node.output, evaluate(node, model.opset, known), strict=True):
            is_rounded = array.dtype == np.float32 and node.op_type not in EXACT
            noise = NOISE * rng.standard_normal(array.shape).astype(np.float32)
            known[name] = np.where(np.abs(array) < TINY, 0, array * (1 + noise)) + 0 if is_rounded else array
            if is_rounded and node.op_type in SUMS:
                known[name] += noise * np.abs(array).max() / 8
    return known


def guarded(fuzzer: Fuzzer, model: RandomModel) -> Outcome:
    """Return the outcome of a model, within its time limit."""

    def too_long(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(3 * SECONDS)
    try:
        return fuzzer.judge(model)
    except TimeoutError:
        return Outcome("SLOW", f"more than {3 * SECONDS} seconds")
    except Error as error:
        return Outcome("WRONG", f"{type(error).__name__}: {error}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Outcome("TRACEBACK", traceback.format_exc(limit=-3).replace("\n", " | ")[-600:])
    finally:
        signal.alarm(0)


def shrunk(fuzzer: Fuzzer, model: RandomModel, kind: str) -> RandomModel:
    """Return the smallest part of a model, between values made inputs and one output, that has the same outcome."""

    def fails(part: RandomModel) -> bool:
        return bool(part.nodes) and guarded(fuzzer, part).kind == kind

    made = [name for node in model.nodes for name in node.output]
    for name in made:  # the first that is wrong
        if fails(part := model.cut([name])):
            model = part
            break
    else:
        for name in list(model.outputs):
            rest = [other for other in model.outputs if other != name]
            if rest and fails(part := model.cut(rest)):
                model = part
    for name in made[::-1]:
        if name not in model.outputs and fails(part := model.cut(model.outputs, [name])):
            model = part
    return model
