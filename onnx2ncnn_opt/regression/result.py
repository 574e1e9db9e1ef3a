"""The result of a check, as plain records that convert to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "failed", "not measured"]


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    `what` is "conversion", "model", "accuracy" or "stored outputs" (in `mode`; relative errors), "sqnr" (decibels) or
    "top1" (a share of rows; both in `mode`, and `limit` is the least), "layers", "size"
    (bytes of .param and .bin), "latency" (milliseconds) or "memory" (bytes). `measured` is compared with `limit`;
    `baseline` is the number of the baseline's net. They are None if there is no number. `message` says what is wrong,
    or why nothing was measured.
    """

    what: str
    status: Status
    measured: float | None = None
    limit: float | None = None
    baseline: float | None = None
    mode: str = ""
    message: str = ""

    @property
    def name(self) -> str:
        """The name of the measurement for people."""
        return f"{self.what} {self.mode}".rstrip()


@dataclass(frozen=True)
class Changes:
    """The differences of a net from the baseline's: counts of layers by type, without Splits; names do not count.

    `files` says whether the files differ at all.
    """

    files: bool = False
    gone: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelResult:
    """The result for one model.

    `exit_code` is 0 for a model that passes, 1 for one that was not converted, 2 where something is missing (the model,
    the baseline, the device), 3 for a net that is wrong or costs too much. `changes` is None without a baseline.
    `checked` says where the net ran and in which modes. `versions` are those of the converter and the runtimes.
    """

    name: str
    exit_code: int
    measurements: tuple[Measurement, ...] = ()
    changes: Changes | None = None
    checked: str = ""
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    recorded: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if the model passes."""
        return self.exit_code == 0

    @property
    def failures(self) -> tuple[Measurement, ...]:
        """The measurements that failed."""
        return tuple(measurement for measurement in self.measurements if measurement.status == "failed")

    @classmethod
    def failed(cls, name: str, what: str, message: str, exit_code: int) -> ModelResult:
        """Return the result of a model that failed at this point."""
        return cls(name, exit_code, (Measurement(what, "failed", message=message),))


@dataclass(frozen=True)
class CheckResult:
    """The results for all models of a file; `baseline` is the folder, and `missing` are models that only it has."""

    file: str
    baseline: str
    models: tuple[ModelResult, ...]
    missing: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if all models pass."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """The worst, which is the highest, of the models' codes."""
        return max((model.exit_code for model in self.models), default=0)
