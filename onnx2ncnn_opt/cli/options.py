"""The options that several commands have, each spelled once.

Options that go on together come to the command as one object, whose fields have the names of the Python interface.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

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


@dataclass(frozen=True)
class Given:
    """What is given to the model: sizes and values of its inputs, and a file of arrays."""

    shapes: dict[str, list[int | str]]
    values: dict[str, Any]
    feeds: Path | None


@dataclass(frozen=True)
class Runs:
    """How nets are run to verify them."""

    seed: int
    on: str | None
    modes: tuple[str, ...] = ()


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _together(name: str, kind: type, **fields: str) -> Decorator:
    """The command gets one object in place of options; `fields` are its fields, with the options' names."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def gathered(*args: Any, **options: Any) -> Any:
            together = kind(**{field: options.pop(option) for field, option in fields.items()})
            return command(*args, **{name: together}, **options)

        return gathered

    return decorate


def shape_option(metavar: str, help: str, *, are_open: bool = False) -> Decorator:
    """The option --shape, as `shapes`: sizes by input name, which may be names where they are open."""
    callback = _open_shapes if are_open else _shapes
    return click.option("--shape", "shapes", multiple=True, callback=callback, metavar=metavar, help=help)


def seed_option() -> Decorator:
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


def given_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options --shape, --value and --inputs, together as `given`."""
    inputs = click.option(
        "--inputs", type=EXISTING_FILE, metavar="FILE.npz", help="Arrays for verification, by the inputs' names."
    )
    together = _together("given", Given, shapes="shapes", values="values", feeds="inputs")
    return binding_options(inputs(together(command)))


def run_options(*, modes: bool = True) -> Decorator:
    """The options --seed, --on and --modes, together as `runs`."""
    seed = click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Seed of the inputs if none are given.",
    )
    names = ("seed", "on", "modes") if modes else ("seed", "on")
    together = _together("runs", Runs, **{name: name for name in names})

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = together(command)
        return seed(_on(_mode(command) if modes else command))

    return decorate


@dataclass(frozen=True)
class Allowed:
    """What an output may be off by, None for the usual."""

    rtol: float | None = None
    atol: float | None = None


def _not_negative(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 <= value < math.inf:
        raise click.BadParameter(f"{value} is not a number of 0 or more", ctx, param)
    return value


def tolerance_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options --rtol and --atol, together as `allowed`."""
    relative = click.option(
        "--rtol",
        type=float,
        callback=_not_negative,
        metavar="R",
        help="What an output may be off by, in units of its largest value, in every mode.  [default: 1e-3, and more "
        "for weights and modes of 16 bits]",
    )
    absolute = click.option(
        "--atol",
        type=float,
        callback=_not_negative,
        metavar="A",
        help="What an output may be off by in any case.  [default: 1e-5]",
    )
    return relative(absolute(_together("allowed", Allowed, rtol="rtol", atol="atol")(command)))


def benchmark_option(beside: str) -> Decorator:
    """The option --benchmark, as `benchmark`."""
    return click.option("--benchmark", is_flag=True, help=f"Time the net beside {beside}: one thread each, in turns.")


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options --on and --modes, as `on` and `modes`."""
    return _on(_mode(command))


def _on(command: Callable[..., Any]) -> Callable[..., Any]:
    help = (
        "Run the net on a device: vulkan, qemu-aarch64, ssh:user@host, or a command that starts a Python with numpy "
        "and ncnn.  [default: this machine's CPU]"
    )
    return click.option("--on", metavar="TARGET", help=help)(command)


def _mode(command: Callable[..., Any]) -> Callable[..., Any]:
    help = "Verify in each of fp32, fp16, bf16.  [default: fp32; with --on also fp16, ncnn's default there]"
    return click.option("--modes", callback=_modes, metavar="MODE,...", help=help)(command)


def _modes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    from onnx2ncnn_opt.runtime.targets import check_modes

    return check_modes(value.split(",")) if value is not None else ()


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


def release_option() -> Decorator:
    """The option --ncnn, as `release`."""
    help = "The oldest ncnn release that has to run the net.  [default: the newest]"
    return click.option("--ncnn", "release", type=int, metavar="YYYYMMDD", help=help)


def manifest_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option --manifest, as `manifest_path`."""
    help = "How arrays go in and out.  [default: NET.json, if it fits both; else blobs are matched by name or order]"
    option = click.option("--manifest", "manifest_path", type=EXISTING_FILE, metavar="FILE.json", help=help)
    return option(command)


def masks_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option --no-masks, as `no_masks`."""
    help = "Do not write feature masks for layers that need more than fp16."
    return click.option("--no-masks", is_flag=True, help=help)(command)


def skip_option(help: str = "Skip a pass; may be given several times.") -> Decorator:
    """The option --skip, as `skip`."""
    return click.option("--skip", multiple=True, metavar="PASS", help=help)


def layers_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option --custom for layers of nets, as `custom`."""
    help = "Declare the weights of a custom layer type."
    return click.option("--custom", multiple=True, metavar="TYPE:COUNTS", help=help)(command)
