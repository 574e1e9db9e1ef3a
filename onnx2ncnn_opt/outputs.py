"""The results for a net and its outputs: verification makes them, reports and commands show them."""

from dataclasses import dataclass
from typing import Literal

# From right to worst: what ncnn computed is off, is not finite, has another shape; or there is nothing to compare,
# because the net has no such blob, the model itself gives no number, ncnn refused the net, or died on it.
Status = Literal["ok", "unproven", "mismatch", "nan", "shape", "missing", "refused", "crashed"]


@dataclass(frozen=True)
class OutputReport:
    """One output of the model, and its counterpart in the net.

    `max_abs`, `max_rel` and `cosine` are those of a `Difference`, None if nothing could be compared. `message` says
    what is wrong, and is empty if nothing is. `blob` is None if the net has none for it. `mode` is ncnn's number
    format: "fp32", "fp16" or "bf16".

    `rounding` is the distance of ONNX Runtime's float32 from float64, `bits` the error that 16 or 8 bits explain,
    `allowed` the error that the output may have, all in units of its largest value, and `cause` the cause of the error.
    They are None and empty if not requested, or unknown.
    """

    name: str
    blob: str | None
    status: Status
    message: str = ""
    max_abs: float | None = None
    max_rel: float | None = None
    cosine: float | None = None
    mode: str = "fp32"
    rounding: float | None = None
    bits: float | None = None
    allowed: float | None = None
    cause: str = ""

    def __str__(self) -> str:
        error = "" if self.max_rel is None else f" ({self.max_rel:.1e})"
        return f"{self.name}{'' if self.mode == 'fp32' else f' in {self.mode}'} {self.status}{error}"


@dataclass(frozen=True)
class Latency:
    """Milliseconds of the fastest run of a net and of the other one; `ratio` is the median of net / other.

    It is CPU time, in which other work on the machine counts little; on a GPU it is elapsed time. `turns` had each.
    """

    net: float
    other: float
    ratio: float
    turns: int
