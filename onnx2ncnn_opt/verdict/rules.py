"""The rules by which an output agrees with its reference, in order: the first that accepts decides.

`docs/verdict.md` is generated from `RULES`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from onnx2ncnn_opt.ir.half import LARGEST
from onnx2ncnn_opt.outputs import OutputReport, Status
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.verdict.errors import ALL_SMALL, DEFAULT, LAST_BIT, Difference, Tolerance, compare

LEAST_ROUNDING, UNKNOWN_ROUNDING, MOST_ROUNDING = 2.0**-15, 1e-4, 5e-2
WEIGHTS_MARGIN = 4.0
ADVICE = "give inputs that suit the model with --inputs or --value"
_ANY = Tolerance(np.inf, slices=False)


@dataclass(frozen=True)
class Verdict:
    """The decision of a rule: the difference, and the error that it allows, relative to the reference's largest."""

    rule: str
    difference: Difference
    allowed: float
    accepted: bool
    unproven: str = ""  # the reason why the inputs prove nothing

    def report(self, name: str, blob: str | None) -> OutputReport:
        """Return the report of an output and its blob."""
        difference = self.difference
        refused: Status = "nan" if difference.special else "mismatch"
        status: Status = "unproven" if self.unproven else "ok" if self.accepted else refused
        message = self.unproven or ("" if self.accepted else difference.problem)
        numbers = difference.max_abs, difference.max_rel, difference.cosine
        return OutputReport(name, blob, status, message, *numbers, rule=self.rule, allowed=self.allowed)


def within(tolerance: Tolerance, actual: Array, reference: Array) -> Verdict:
    """Return the verdict of a tolerance alone, for references that have rounding errors like the net's."""
    difference = compare(actual, reference, tolerance)
    is_integer = reference.dtype.kind in "iub"
    rule, allowed = ("equal", 0.0) if is_integer else ("limit", tolerance.relative)
    return Verdict(rule, difference, allowed, difference.ok)


@dataclass(frozen=True)
class Case:
    """An output of a net, its reference, and facts; functions run the model, when a rule first asks for their results.

    `limit` is the tolerance of a mode of 16 bits, or the user's; None for float32. `is_plain` says that ncnn's plain
    kernels, which make rounding errors only, computed the output.
    """

    actual: Array
    reference: Array
    # The effect of rounding errors on each element, after each of several runs; infinite if they decide the element.
    spreads: Callable[[], Iterator[Array]]
    # The error of the model with its weights rounded as the net's, then the largest of several ways to round.
    weights: Callable[[], Iterator[float]] = lambda: iter(())
    # The output of the model without quantisation, and how many times the model's noise a net may have.
    floats: Callable[[], tuple[Array, float] | None] = lambda: None
    least: float = LEAST_ROUNDING  # the error that passes without further runs of the model
    step: float = 0.0  # of the model's coarsest quantisation; 0 for a model without one
    limit: Tolerance | None = None
    is_plain: bool = False

    @property
    def is_integer(self) -> bool:
        """True for integers and bools."""
        return self.reference.dtype.kind in "iub"

    @property
    def is_fp32(self) -> bool:
        """True for floats that have to be as exact as float32 is."""
        return self.limit is None and not self.is_integer

    def verdict(self, rule: str, tolerance: Tolerance, free: Array | None = None) -> Verdict:
        """Compare with a tolerance; `free` is the effect of rounding on each element. NaN of the model is left out."""
        is_nan = np.isnan(self.reference)
        if is_nan.any():
            free = np.where(is_nan, np.inf, 0.0 if free is None else free)
        difference = compare(self.actual, self.reference, tolerance, free)
        unproven = ""
        if difference.ok and self.reference.size:
            left_out = 0 if free is None else int((np.isinf(free) & (self.actual != self.reference)).sum())
            if 2 * left_out > self.reference.size:
                what = "the model gives NaN in" if 2 * is_nan.sum() > left_out else "rounding errors decide"
                unproven = f"{what} {left_out} of {self.reference.size} elements; {ADVICE}"
            elif difference.max_abs is None:
                unproven = f"it has no finite number in the model, which proves nothing; {ADVICE}"
        moved = 0.0 if free is None or not difference.ok else float(free.max(initial=0.0, where=np.isfinite(free)))
        allowed = max(tolerance.relative, max(tolerance.absolute, moved) / (difference.size or np.inf))
        return Verdict("unproven" if unproven else rule, difference, allowed, difference.ok, unproven)

    @property
    def rounding(self) -> Tolerance:
        """The error of float32 that is allowed for any model."""
        return Tolerance(self.least, ALL_SMALL, slices=False)

    def with_moves(self, verdict: Verdict, tolerance: Tolerance) -> Verdict:
        """Return the verdict; if it refuses, add to the tolerance how far rounding moves each element."""
        if verdict.accepted:
            return verdict
        for spread in self.spreads():
            verdict = self.verdict(verdict.rule, tolerance, np.where(np.isfinite(spread), spread, 0.0))
            if verdict.accepted:
                break
        return verdict


@dataclass(frozen=True)
class Rule:
    """A rule: `when` it applies, what it `allows`, and `why`, for people; `judge` returns None if it does not apply."""

    name: str
    when: str
    allows: str
    why: str
    judge: Callable[[Case], Verdict | None] = lambda case: None  # "unproven" only qualifies other verdicts


def _equal(case: Case) -> Verdict | None:
    return case.verdict("equal", Tolerance(0.0, 0.0)) if case.is_integer else None


def _limit(case: Case) -> Verdict | None:
    if case.is_integer or (case.limit is None and case.reference.dtype.name not in LAST_BIT):
        return None
    return case.verdict("limit", case.limit or Tolerance())


def _rounding(case: Case) -> Verdict | None:
    if not case.is_fp32:
        return None
    verdict = case.verdict("rounding", case.rounding)
    return case.with_moves(verdict, case.rounding) if case.is_plain else verdict


def _weights(case: Case) -> Verdict | None:
    verdict: Verdict | None = None
    for error in filter(None, case.weights() if case.is_fp32 else ()):
        verdict = case.verdict("weights", Tolerance(WEIGHTS_MARGIN * error, ALL_SMALL, slices=False))
        if verdict.accepted:
            break
    return verdict


def _kernels(case: Case) -> Verdict | None:
    if not case.is_fp32 or case.is_plain:
        return None
    return case.with_moves(case.verdict("kernels", DEFAULT), DEFAULT)


def _quantised(case: Case) -> Verdict | None:
    if case.limit is not None or not case.step:
        return None
    if case.is_integer:  # steps of 8 bits, which are one apart
        case = replace(case, reference=case.reference.astype(np.float64))
    verdict = case.verdict("quantised", Tolerance(case.step, ALL_SMALL, slices=False))
    floats, factor = (None, 0.0) if verdict.accepted else case.floats() or (None, 0.0)
    if floats is None or floats.shape != case.reference.shape:
        return verdict
    reference, actual = (array.astype(np.float64) for array in (case.reference, case.actual))
    sizes = np.abs(floats)
    overflows = np.isinf(reference) & (sizes > LARGEST) & (np.abs(actual - floats) <= case.step * sizes)
    own, of_net = (compare(np.where(overflows, floats, array), floats, _ANY) for array in (reference, actual))
    is_near = of_net.noise <= factor * own.noise or (of_net.max_rel or 0.0) <= case.step
    return verdict if of_net.special or not is_near else Verdict("quantised", of_net, own.max_rel or 0.0, accepted=True)


def _decided(case: Case) -> Verdict | None:
    if case.limit is not None and case.limit.relative < DEFAULT.relative:  # it leaves no room for rounding
        return None
    *_, spread = case.spreads()
    if not np.isinf(spread).any():
        return None
    tolerance = case.limit
    if tolerance is None:
        least = case.rounding if case.is_plain else DEFAULT
        weights = WEIGHTS_MARGIN * max(case.weights(), default=0.0)
        relative = max(case.rounding.relative, least.relative, weights, case.step)
        tolerance = replace(least, relative=relative)
    return case.verdict("decided", Tolerance(0.0, 0.0) if case.is_integer else tolerance, spread)


RULES = (
    Rule(
        "equal",
        "integers and bools, as numbers or as the bits of int32; in `optimize` also floats with the same bits",
        "nothing",
        "they are decisions: an index that is off by one is another index",
        _equal,
    ),
    Rule(
        "limit",
        "fp16 and bf16, outputs of 16 bits, tails, `optimize`, and the options `--rtol` and `--atol`",
        "2e-2 in fp16, 1.6e-1 in bf16, eight last places of an output of 16 bits, 2e-6 in a tail, 1e-4 in `optimize` "
        "(more with `--fp16` or `--bf16`), or the option's number",
        "an app decides how much it may lose; fp16 has forty roundings of 2^-11 in 2e-2",
        _limit,
    ),
    Rule(
        "rounding",
        "fp32",
        "always 3.05e-5, on Vulkan 1e-4 (1e-3 with GELU); with ncnn's plain kernels also four times the element's "
        "largest move in up to ten runs of the model with errors in the last bits (1e-4 if branches or loops hide it)",
        "ncnn adds up in another order than ONNX Runtime, so it has other errors in the last bits",
        _rounding,
    ),
    Rule(
        "weights",
        "fp32, and weights of 16 or 8 bits",
        "4 times the error of the model with its own weights rounded in this way",
        "the option for smaller weights asks for this error; passes round the weights after they are folded",
        _weights,
    ),
    Rule(
        "kernels",
        "fp32; all nets run with ncnn's faster kernels, such as winograd",
        "1e-3, also of the largest value of each slice of 64 numbers or more, and the moves of `rounding`; then ncnn's "
        "plain kernels have to agree by another rule on the same inputs, except in quantised models",
        "the transforms of winograd have errors up to 3e-4; wrong nets are off by 1e-2 and more, or wrong with plain "
        "kernels, too",
        _kernels,
    ),
    Rule(
        "quantised",
        "models that round to 8 bits, or less, themselves, or that compute in float16",
        "a step of the coarsest rounding, such as 1/255, or 2^-10 in float16; for int8 layers 3.1e-2 times the square "
        "root of the number of roundings, for weights of 16 bits and roundings at run time half of that; or a step, or "
        "1 dB more noise than the model has (more for coarser steps), against the model without these roundings; then "
        "`allowed` is the model's own error, and what overflows in float16 counts as in float32",
        "a last bit decides whether a number is rounded up or down, so no right net has all the same steps",
        _quantised,
    ),
    Rule(
        "decided",
        "elements that these ten runs move by 5e-2 of the largest value, or integers that they move at all: behind a "
        "comparison, Round, TopK, or a difference of equal numbers",
        "any number there; the other elements are compared as by the other rules",
        "two right implementations decide such elements differently",
        _decided,
    ),
)
UNPROVEN = Rule(
    "unproven",
    "outputs that agree by another rule, but more than half of whose elements are NaN in the model, or differ where "
    "rounding decides; if other inputs prove more, these count alone",
    "neither agreement nor an error: exit code 2",
    "such inputs prove nothing; `--inputs` gives others",
)


ORDER = {rule.name: place for place, rule in enumerate(RULES)}
# What the summary of a command says if an output agrees by these rules only.
RESERVES = {
    "decided": "rounding decides some elements",
    "quantised": "explained by the model's own roundings",
}


def judge(case: Case) -> Verdict:
    """Return the verdict of the first rule that accepts an output, or of the last one that refuses it."""
    refused: Verdict | None = None
    for rule in RULES:
        verdict = rule.judge(case)
        if verdict is not None and verdict.accepted:
            return verdict
        refused = verdict or refused
    assert refused is not None
    return refused
