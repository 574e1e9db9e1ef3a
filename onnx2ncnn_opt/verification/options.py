"""The options of a verification: the inputs, the tolerance, and the place where the net runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onnx2ncnn_opt.errors import UsageError, check_options
from onnx2ncnn_opt.precision.search import EFFORTS, Effort

if TYPE_CHECKING:
    from onnx2ncnn_opt.inputs.draws import Wanted
    from onnx2ncnn_opt.inputs.given import Feeds
    from onnx2ncnn_opt.onnx.read.given import GivenShapes
    from onnx2ncnn_opt.verdict.errors import Tolerance


NO_ESTIMATE = "fp16 could not be estimated, so the masks of the net are unknown: {}. Try again, or with --no-masks"


@dataclass(frozen=True)
class Verification:
    """The options of every verification.

    Inputs: `feeds` are arrays by ONNX name, a file of arrays (.npz, .npy), or an image. By default inputs are drawn
    from `seed`: ordinary and large numbers, many more draws for a small net, or the `wanted` draws. `shapes` has sizes
    of inputs to draw, `values` the inputs that are constants in the net; both default to the manifest's. Each dynamic
    dimension runs at two sizes. `outputs` are values to compare instead of the model's outputs.

    Tolerance: `rtol` and `atol` replace the relative and absolute error that the rules allow, in every mode
    (docs/verdict.md). `exact` selects ncnn's plain kernels instead of its faster ones.

    Place: `on` is "vulkan", "qemu-aarch64", "qemu-x86_64:CPU", "ssh:user@host", or a command that starts a Python with
    numpy and ncnn; this machine's CPU by default. `modes` are "fp32", "fp16" or "bf16"; by default fp32, and with `on`
    also fp16, ncnn's default on phones and GPUs. `timeout` is in seconds for each run, ten times as long on an emulated
    CPU.

    `budget` is the fp16 error of an output, relative to its largest value, that feature masks keep at any cost. The
    default is 2e-2; less if few more multiplications in fp32 achieve it, and more if 2e-2 needs many.

    `effort` limits the optional work of a large model: "quick", "normal", or "thorough". The first inputs of each size
    run always; `VerifyReport.notes` says if others were left out.

    Raises UsageError for an option of the wrong type.
    """

    feeds: Feeds | None = None
    shapes: GivenShapes | None = None
    values: Mapping[str, Any] | None = None
    outputs: Sequence[str] = ()
    seed: int = 0
    wanted: Wanted | None = None
    rtol: float | None = None
    atol: float | None = None
    exact: bool = False
    timeout: float = 300.0
    on: str | None = None
    modes: Sequence[str] = ()
    budget: float | None = None
    effort: Effort = "normal"

    def __post_init__(self) -> None:
        check_options(outputs=self.outputs, shapes=self.shapes, values=self.values, modes=self.modes)
        check_options(seed=self.seed, timeout=self.timeout)
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, float)) or not 0 <= value < float("inf")):
                raise UsageError(f"{name} has to be a number of 0 or more, not {value!r:.80}")
        if self.budget is not None and (not isinstance(self.budget, (int, float)) or not self.budget > 0):
            raise UsageError(f"the budget has to be a number above 0, not {self.budget!r:.80}")
        if self.effort not in EFFORTS:
            raise UsageError(f"the effort has to be one of {', '.join(EFFORTS)}, not {self.effort!r:.80}")
        if isinstance(self.feeds, str | os.PathLike | None) and self.wanted is None:
            return
        from onnx2ncnn_opt.inputs.draws import Wanted
        from onnx2ncnn_opt.inputs.given import Picture

        if not isinstance(self.feeds, str | os.PathLike | Picture):
            check_options(feeds=self.feeds)
        if not isinstance(self.wanted, Wanted | None):
            raise UsageError(f"wanted has to be a Wanted, not {self.wanted!r:.80}")

    @property
    def is_user_tolerance(self) -> bool:
        """True if the user chose `rtol` or `atol`."""
        return (self.rtol, self.atol) != (None, None)

    def allowed(self, tolerance: Tolerance) -> Tolerance:
        """Return the tolerance, with `rtol` and `atol` if the user chose them."""
        numbers = {"relative": self.rtol, "absolute": self.atol}
        chosen: dict[str, Any] = {name: float(number) for name, number in numbers.items() if number is not None}
        return replace(tolerance, **chosen)
