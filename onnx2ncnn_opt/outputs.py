"""What became of a net and its outputs: what verification finds out, and what reports and commands show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# From right to worst: what ncnn computed is off, is not finite, has another shape; or there is nothing to compare,
# because the net has no such blob, the model itself gives no number, ncnn refused the net, or died on it.
Status = Literal["ok", "unproven", "mismatch", "nan", "shape", "missing", "refused", "crashed"]


@dataclass(frozen=True)
class OutputReport:
    """One output of the model: what became of it in the net.

    `max_abs`, `max_rel` and `cosine` are those of `verification.compare`, None where nothing could be compared.
    `message` says what is wrong, and is empty where nothing is. `blob` is None where the net has none for it. `mode` is
    how ncnn was told to compute: "fp32", "fp16" or "bf16".

    `rounding` is how far ONNX Runtime's float32 is from float64, `bits` how much 16 or 8 bits explain, `allowed` what
    the output may be off by, all in units of its largest value, and `cause` where the error comes from. They are None
    and empty where that was not asked for, or could not be found out.
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
    """Milliseconds of the fastest run of a net and of what it is held against; `ratio` is the median of net / other.

    It is CPU time, so that whatever else the machine does counts little; on a GPU it is time. `turns` had each.
    """

    net: float
    other: float
    ratio: float
    turns: int
