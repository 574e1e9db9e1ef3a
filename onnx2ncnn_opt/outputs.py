"""Results of verification for a net and its outputs; reports and commands show them."""

from dataclasses import dataclass
from typing import Literal

# "unproven": the model itself gives no finite number. "mismatch", "nan", "shape": ncnn's numbers differ, are not
# finite, or have another shape. "missing", "refused", "crashed": the net has no such blob, ncnn refused it, or crashed.
Status = Literal["ok", "unproven", "mismatch", "nan", "shape", "missing", "refused", "crashed"]


@dataclass(frozen=True)
class OutputReport:
    """One output of the model, and its counterpart in the net.

    `max_abs`, `max_rel` and `cosine` are those of a `Difference`, None if nothing could be compared. `message`
    describes the fault, empty if there is none. `blob` is None if the net has no blob for it. `mode` is ncnn's number
    format: "fp32", "fp16" or "bf16".

    `rule` is the rule of agreement that decided (docs/verdict.md), and `inputs` describes the inputs with the largest
    error. `allowed` is the error that the rule allows, in units of the output's largest value.
    """

    name: str
    blob: str | None
    status: Status
    message: str = ""
    max_abs: float | None = None
    max_rel: float | None = None
    cosine: float | None = None
    mode: str = "fp32"
    allowed: float | None = None
    rule: str = ""
    inputs: str = ""

    def __str__(self) -> str:
        error = "" if self.max_rel is None else f" ({self.max_rel:.1e})"
        return f"{self.name}{'' if self.mode == 'fp32' else f' in {self.mode}'} {self.status}{error}"


@dataclass(frozen=True)
class Latency:
    """Milliseconds of the fastest run of a net and of its reference; `ratio` is the median of net / other.

    Both ran `turns` times. On a CPU this is CPU time, because other work disturbs it little; on a GPU, elapsed time.
    """

    net: float
    other: float
    ratio: float
    turns: int
