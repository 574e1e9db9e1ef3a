"""The results of a check, as plain records that convert to JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "failed", "not measured"]


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    `what` is "conversion", "model", "accuracy" or "stored outputs" (relative errors, in `mode`), "sqnr" (decibels) or
    "top1" (a share of rows; both in `mode`, and `limit` is the minimum), "layers", "size" (bytes of .param and .bin),
    "latency" (milliseconds) or "memory" (bytes). `measured` is compared with `limit`; `baseline` is the number of the
    baseline's net. A missing number is None. `message` describes the failure, or why there is no measurement.
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
        """The name of the measurement, with its mode."""
        return f"{self.what} {self.mode}".rstrip()


@dataclass(frozen=True)
class Changes:
    """The differences from the baseline's net: counts of layers by type, without Splits, whatever their names.

    `files` is True if any file differs.
    """

    files: bool = False
    gone: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelResult:
    """The result for one model.

    `exit_code` is 0 if the model passes, 1 if the conversion failed, 2 if something is missing (the model, the
    baseline, the device), 3 if the net is wrong or costs too much. `changes` is None without a baseline. `checked`
    names the device and the modes. `versions` has the versions of the converter and the runtimes.
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
    def failed(cls, name: str, what: str, message: str, exit_code: int) -> "ModelResult":
        """Return the result of a model with one failed measurement and no others."""
        return cls(name, exit_code, (Measurement(what, "failed", message=message),))


@dataclass(frozen=True)
class CheckResult:
    """The results for all models of a file; `missing` are models that only the folder `baseline` has."""

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
        """The worst (highest) exit code of the models."""
        return max((model.exit_code for model in self.models), default=0)
