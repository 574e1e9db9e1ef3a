"""What the commands that verify have in common: their options, and how a result is shown and ends."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnx2ncnn_opt.errors import VerificationError

if TYPE_CHECKING:
    from onnx2ncnn_opt.report.verification import OutputRow
    from onnx2ncnn_opt.verification.verify import OutputReport, VerifyReport

EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _shapes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, list[int]]:
    """Sizes by input name, from ``name:1,3,224,224``; the name may have colons in it."""
    return _parsed_shapes(ctx, param, values, r"\d+", "name:1,3,224,224")


def _open_shapes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, list[int | str]]:
    """As `_shapes`, with names, sums of them, and ``?`` among the sizes."""
    return _parsed_shapes(ctx, param, values, r"[\w?(][\w ?+*/()-]*", "name:1,3,224,224, or name:1,3,?,S")


def _parsed_shapes(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...], size: str, form: str
) -> dict[str, list[Any]]:
    shapes: dict[str, list[Any]] = {}
    for value in values:
        name, _, sizes = value.rpartition(":")
        if not name or not re.fullmatch(f"({size}(,{size})*)?", sizes):
            raise click.BadParameter(f"'{value}' is not of the form {form}", ctx, param)
        if name in shapes:
            raise click.BadParameter(f"two shapes for input '{name}'", ctx, param)
        shapes[name] = [int(size) if size.isdecimal() else size for size in sizes.split(",") if size]
    return shapes


def _values(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """Values by input name, from ``name=16000``, ``name=true`` or ``name=0.5,0.25``; the name may have "=" in it."""
    bound: dict[str, Any] = {}
    for text in values:
        name, _, value = text.rpartition("=")
        numbers = [_number(part.strip()) for part in value.strip("[]").split(",")]
        if not name or None in numbers:
            raise click.BadParameter(f"'{text}' is not of the form name=16000, name=true or name=0.5,0.25", ctx, param)
        if name in bound:
            raise click.BadParameter(f"two values for input '{name}'", ctx, param)
        bound[name] = numbers[0] if len(numbers) == 1 else numbers
    return bound


def _number(text: str) -> bool | int | float | None:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def shape_option(
    metavar: str, help: str, *, are_open: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option --shape, as `shapes`: sizes by input name, which may be names where they are open."""
    callback = _open_shapes if are_open else _shapes
    return click.option("--shape", "shapes", multiple=True, callback=callback, metavar=metavar, help=help)


def seed_option() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option --seed, as `seed`."""
    help = "Seed of the inputs if none are given."
    return click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help=help)


def binding_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options --shape and --value, as `shapes` and `values`."""
    help = "Shape of an input, e.g. x:1,3,224,224, or x:1,3,?,W (? stays dynamic, W names a size); for each input."
    shape = shape_option("NAME:SIZES", help, are_open=True)
    value = click.option(
        "--value",
        "values",
        multiple=True,
        callback=_values,
        metavar="NAME=VALUE",
        help="Bind an input to a number, true, false, or numbers with commas. The net does not have it.",
    )
    return shape(value(command))


def verification_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `binding_options`, and --inputs and --seed, as `inputs` and `seed`."""
    inputs = click.option(
        "--inputs", type=EXISTING_FILE, metavar="FILE.npz", help="Arrays for verification, by the inputs' names."
    )
    return binding_options(inputs(seed_option()(command)))


def _modes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    from onnx2ncnn_opt.runtime.targets import check_modes

    return check_modes(value.split(",")) if value is not None else ()


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options --on and --modes, as `on` and `modes`."""
    on = click.option(
        "--on",
        metavar="TARGET",
        help="Run the net on a device: vulkan, qemu-aarch64, ssh:user@host, or a command that starts a Python with "
        "numpy and ncnn.  [default: this machine's CPU]",
    )
    modes = click.option(
        "--modes",
        callback=_modes,
        metavar="MODE,...",
        help="Verify in each of fp32, fp16, bf16.  [default: fp32; with --on also fp16, ncnn's default there]",
    )
    return on(modes(command))


def require_runtimes(on: str | None, *packages: str) -> None:
    """Raise UsageError before the work where it is clear that a verification could not run."""
    from onnx2ncnn_opt.runtime.base import require
    from onnx2ncnn_opt.runtime.targets import find_target

    for package in packages:
        require(package)
    find_target(on).require()


def output_rows(outputs: Sequence[OutputReport]) -> list[OutputRow]:
    """The outputs as the report shows them."""
    from onnx2ncnn_opt.report.verification import OutputRow

    return [OutputRow(o.name, o.status, o.max_abs, o.max_rel, o.cosine, o.message, o.mode) for o in outputs]


def output_sizes(report: VerifyReport) -> list[str]:
    """The open sizes of the runs, as the report shows them."""
    from onnx2ncnn_opt.verification.verify import sizes_text

    return [sizes_text(sizes) for sizes in report.sizes]


def failure(report: VerifyReport, consequence: str = "") -> VerificationError:
    """The error that a command ends with when outputs differ; the outputs themselves have been shown."""
    wrong = sum(output.status != "ok" for output in report.outputs)
    message = f"{wrong} of {len(report.outputs)} outputs differ from ONNX Runtime's"
    return VerificationError(f"{message}; {consequence}" if consequence else message)


def storage_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options --fp16 and --bf16, as `storage`."""

    @functools.wraps(command)
    def with_storage(*args: Any, fp16: bool, bf16: bool, **options: Any) -> Any:
        if fp16 and bf16:
            raise click.UsageError("--fp16 and --bf16 are two ways to store a weight; give one of them")
        return command(*args, storage="fp16" if fp16 else "bf16" if bf16 else None, **options)

    fp16 = click.option("--fp16", is_flag=True, help="Store weights as fp16, if they fit.")
    bf16 = click.option("--bf16", is_flag=True, help="Store weights as bf16, if they fit.")
    return fp16(bf16(with_storage))


def release_option() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option --ncnn, as `release`."""
    help = "The oldest ncnn release that has to run the net.  [default: the newest]"
    return click.option("--ncnn", "release", type=int, metavar="YYYYMMDD", help=help)
