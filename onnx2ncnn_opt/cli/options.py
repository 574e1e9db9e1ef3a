"""The options that several commands share.

`verification_option` passes the options for verification to the command as one `Verification`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from onnx2ncnn_opt.inputs.given import Feeds

EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _weights(ctx: click.Context, _: click.Parameter, file: Path | None) -> Path | None:
    """Return the file of a net's weights, which is next to the net by default; None without a net."""
    from onnx2ncnn_opt.param.files import bin_beside

    net = ctx.params.get("param")
    if file is None and net is not None and not (file := bin_beside(net)).is_file():
        raise click.BadParameter(f"'{file}' is not next to '{net}': give the file of its weights", param_hint="NET.bin")
    return file


bin_argument = click.argument("bin", type=EXISTING_FILE, metavar="[NET.bin]", required=False, callback=_weights)


def _by_name(pattern: str, convert: Callable[[str], Any], what: str, form: str) -> Callable[..., dict[str, Any]]:
    """Return a callback that makes a dict of an option's texts: `pattern` matches a name and a value.

    `convert` makes the value; it may raise ValueError for a text of another form.
    """

    def parsed(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for text in texts:
            try:
                [(name, value)] = re.findall(rf"(?s)\A{pattern}\Z", text)
                value = convert(value)
            except ValueError:
                raise click.BadParameter(f"'{text}' is not of the form {form}") from None
            if name in table:
                raise click.BadParameter(f"two {what} for input '{name}'")
            table[name] = value
        return table

    return parsed


def _value(text: str) -> Any:
    """Return the value of ``16000``, ``true`` or ``0.5,0.25``."""
    numbers = [_number(part.strip()) for part in text.strip("[]").split(",")]
    if None in numbers:
        raise ValueError
    return numbers[0] if len(numbers) == 1 else numbers


def _number(text: str) -> bool | int | float | None:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def choice_option(flag: str, choices: Sequence[str], default: str, help: str) -> Decorator:
    """Return an option for one of several words, whose help shows the default."""
    return click.option(flag, type=click.Choice(choices), default=default, show_default=True, help=help)


def all_of(*options: Decorator) -> Decorator:
    """Return one decorator that adds several options in this order."""
    return lambda command: functools.reduce(lambda inner, option: option(inner), reversed(options), command)


def changing(change: Callable[[dict[str, Any]], None]) -> Decorator:
    """Return a decorator that changes the values of options before the command gets them."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def changed(*args: Any, **options: Any) -> Any:
            change(options)
            return command(*args, **options)

        return changed

    return decorate


# The fields of a `Verification` by option.
_FIELDS = {
    "inputs": "feeds",
    **{name: name for name in ("shapes", "values", "seed", "on", "modes", "rtol", "atol", "budget", "effort")},
}


def _verify(options: dict[str, Any]) -> None:
    from onnx2ncnn_opt.verification.options import Verification

    checks = {field: options.pop(option) for option, field in _FIELDS.items() if option in options}
    seeds, ranges, sizes = (options.pop(name, None) for name in ("seeds", "ranges", "sizes"))
    if seeds or ranges or sizes:
        from onnx2ncnn_opt.inputs.draws import Wanted

        if checks["feeds"] is not None:
            raise click.UsageError("--seeds, --range and --sizes say how to draw inputs: give no --inputs")
        checks["wanted"] = Wanted(seeds or 1, ranges, sizes)
    options["verification"] = Verification(**checks)


# Replaces a command's options for verification by one `verification`.
verification_option = changing(_verify)


_PIXELS = "(?:mean=[^:]*|std=[^:]*|bgr|letterbox(?:=[^:]*)?)"
image_option = click.option(
    "--image",
    "images",
    multiple=True,
    callback=_by_name(
        f"(.+?):({_PIXELS}(?::{_PIXELS})*)",
        str,
        "images",
        "x:mean=123.7,116.3,103.5:std=58.4,57.1,57.4[:bgr][:letterbox=114]",
    ),
    metavar="NAME:mean=...:std=...[:bgr][:letterbox]",
    help="Let the net take pixels of 0..255, e.g. x:mean=123.7,116.3,103.5:std=58.4,57.1,57.4; with :bgr in OpenCV's "
    "order; with :letterbox=114 pictures keep their aspect, with pixels of 114 around them.",
)


def shape_option(metavar: str, help: str, *, size: str = r"\d+", form: str = "name:1,3,224,224") -> Decorator:
    """Return the option --shape, as `shapes`: sizes by input name. A size, of a pattern, stays text unless a number."""

    def sizes(text: str) -> list[int | str]:
        return [int(size) if size.isdecimal() else size for size in text.split(",") if size]

    callback = _by_name(f"(.+):((?:{size}(?:,{size})*)?)", sizes, "shapes", form)
    return click.option("--shape", "shapes", multiple=True, callback=callback, metavar=metavar, help=help)


def _inputs(value: str) -> Feeds:
    """Return the path of a file, or a picture with the arithmetic on its pixels."""
    match = re.fullmatch(f"(.+?)((?::{_PIXELS})*)", value, re.DOTALL)
    assert match is not None
    path: Path = EXISTING_FILE.convert(match[1], None, None)
    if not match[2]:
        return path
    from onnx2ncnn_opt.api.preprocessing import parse_image
    from onnx2ncnn_opt.inputs.given import Picture

    return Picture(path, parse_image(path.name, match[2][1:]))


def _range(value: str) -> tuple[float, float]:
    low, high = map(_number, value.partition(",")[::2])
    if low is None or high is None or not -math.inf < low < high < math.inf:
        raise click.BadParameter(f"'{value}' is not of the form LOW,HIGH, such as -1,1")
    return float(low), float(high)


def _sizes(value: str) -> dict[str, int]:
    if not re.fullmatch(r"[^=,]+=[1-9]\d*(,[^=,]+=[1-9]\d*)*", value):
        raise click.BadParameter(f"'{value}' is not of the form H=64,W=96")
    return {name: int(size) for name, size in (part.split("=") for part in value.split(","))}


# --shape and --value, as `shapes` and `values`; sizes may be names, sums of names, and ``?``.
binding_options = all_of(
    shape_option(
        "NAME:SIZES",
        "Shape of an input, e.g. x:1,3,224,224; in x:1,3,?,W one size stays as it is and one is called W.",
        size=r"[\w?(][\w ?+*/()-]*",
        form="name:1,3,224,224, or name:1,3,?,S",
    ),
    click.option(
        "--value",
        "values",
        multiple=True,
        callback=_by_name("(.+)=(.*)", _value, "values", "name=16000, name=true or name=0.5,0.25"),
        metavar="NAME=VALUE",
        help="Make an input a constant: a number, true, false, or numbers with commas. The net has no such input.",
    ),
)

# --shape, --value and --inputs.
given_options = all_of(
    binding_options,
    click.option(
        "--inputs",
        type=_inputs,
        metavar="FILE",
        help="Inputs for verification: an .npz with arrays by input name, an .npy for a single input, or an image and "
        "the arithmetic on its pixels: photo.png[:mean=...:std=...:bgr:letterbox].",
    ),
)


# --seeds, --range and --sizes.
draw_options = all_of(
    click.option("--seeds", type=click.IntRange(min=1), metavar="N", help="Draw inputs from N seeds, from --seed on."),
    click.option(
        "--range",
        "ranges",
        multiple=True,
        type=_range,
        metavar="LOW,HIGH",
        help="Draw floats uniformly between two numbers, e.g. -1,1; may be given several times.",
    ),
    click.option(
        "--sizes",
        multiple=True,
        type=_sizes,
        metavar="NAME=SIZE,...",
        help="Sizes of the dynamic dimensions, e.g. H=64,W=96; may be given several times.",
    ),
)


def _modes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    if value is None:
        return ()
    from onnx2ncnn_opt.runtime.targets import check_modes

    return check_modes(value.split(","))


_seed = click.option(
    "--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Seed of the inputs if none are given."
)
on_option = click.option(
    "--on",
    metavar="TARGET",
    help="Run the net on a device: vulkan, qemu-aarch64, qemu-x86_64[:CPU], ssh:user@host, or a command that starts a "
    "Python with numpy and ncnn.  [default: this machine's CPU]",
)
# --on and --modes, as `on` and `modes`.
target_options = all_of(
    on_option,
    click.option(
        "--modes",
        callback=_modes,
        metavar="MODE,...",
        help="Verify in these modes: fp32, fp16, bf16.  [default: fp32; with --on also fp16, ncnn's default there]",
    ),
)
# --seed, --on and --modes; `place_options` are for a command that chooses the modes itself.
run_options = all_of(_seed, target_options)
place_options = all_of(_seed, on_option)
effort_option = choice_option(
    "--effort",
    ["quick", "normal", "thorough"],
    "normal",
    help="The work for a large model: sets of inputs to verify, runs to find masks.",
)


def _not_negative(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 <= value < math.inf:
        raise click.BadParameter(f"{value} is not a number of 0 or more")
    return value


# --rtol and --atol.
tolerance_options = all_of(
    click.option(
        "--rtol",
        type=float,
        callback=_not_negative,
        metavar="R",
        help="The largest error that is allowed, relative to the largest value of the output.  [default: the "
        "effect of rounding, and more for weights and modes of 16 bits]",
    ),
    click.option(
        "--atol",
        type=float,
        callback=_not_negative,
        metavar="A",
        help="An absolute error that is always allowed.  [default: 1e-5]",
    ),
)


def benchmark_option(of: str) -> Decorator:
    """Return the option --benchmark, as `benchmark`."""
    return click.option("--benchmark", is_flag=True, help=f"Measure the latency of {of}: one thread each, alternating.")


def _store(options: dict[str, Any]) -> None:
    chosen = [encoding for encoding in ("fp16", "bf16") if options.pop(encoding)]
    if len(chosen) > 1:
        raise click.UsageError("--fp16 and --bf16 are two ways to store a weight; give one of them")
    options["storage"] = chosen[0] if chosen else None


# --fp16 and --bf16, as `storage`.
storage_options = all_of(
    click.option("--fp16", is_flag=True, help="Store weights as fp16, if they fit."),
    click.option("--bf16", is_flag=True, help="Store weights as bf16, if they fit."),
    changing(_store),
)


def _release(ctx: click.Context, param: click.Parameter, value: int | None) -> int:
    from onnx2ncnn_opt.ir.releases import NEWEST

    return NEWEST if value is None else value


release_option = click.option(
    "--ncnn",
    "release",
    type=int,
    callback=_release,
    metavar="YYYYMMDD",
    help="The oldest ncnn release that has to run the net.  [default: the newest]",
)
manifest_option = click.option(
    "--manifest",
    "manifest_path",
    type=EXISTING_FILE,
    metavar="FILE.json",
    help="How arrays go in and out.  [default: NET.json, if it fits both; else blobs are matched by name or order]",
)


def negative_option(name: str, keyword: str, help: str) -> Decorator:
    """Return a flag that makes `keyword` False; it is True without the flag."""
    return click.option(name, keyword, is_flag=True, callback=lambda ctx, param, value: not value, help=help)


def _masks(options: dict[str, Any]) -> None:
    device = options.pop("device")
    options["masks"] = options["masks"] and (device or True)


budget_option = click.option(
    "--budget",
    type=float,
    metavar="ERROR",
    help="The largest error of an output in fp16, in units of its largest value; masks keep it at any price.  "
    "[default: 2e-2, at a low price]",
)
masks_option = all_of(
    negative_option("--no-masks", "masks", "Do not write feature masks for layers that need more than fp16."),
    click.option(
        "--for",
        "device",
        type=click.Choice(["arm", "vulkan"]),
        help="Leave out masks that only the other kind of device needs.  [default: both]",
    ),
    changing(_masks),
)
verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="List every rewrite, and every near miss with the reason."
)
# --custom for layer types of nets.
layers_option = click.option(
    "--custom", multiple=True, metavar="TYPE:COUNTS", help="Declare the weights of a custom layer type."
)


def skip_option(help: str = "Skip a pass; may be given several times.") -> Decorator:
    """Return the option --skip, as `skip`."""
    return click.option("--skip", multiple=True, metavar="PASS", help=help)


def _conversion(options: dict[str, Any]) -> None:
    from onnx2ncnn_opt.api.options import ConvertOptions

    _verify(options)
    last_row = options.pop("last_row")
    changes = [options.pop("append"), None if last_row is None else f"last-row:{last_row}"]
    flags = ("noise-inputs", "raw-head")
    changes = [*filter(None, changes), *(flag for flag in flags if options.pop(flag.replace("-", "_")))]
    if len(changes) > 1:
        raise click.UsageError("--append, --last-row, --noise-inputs and --raw-head change the model: give one of them")
    verification = options["verification"]
    names = {field.name for field in fields(ConvertOptions)} - {"prefix"}
    given = {name: options.pop(name) for name in names.intersection(options)}
    given["outputs"] = [name for names in given["outputs"] for name in names.split(",")]
    given |= {"shapes": verification.shapes, "values": verification.values, "append": next(iter(changes), None)}
    given["verification"] = replace(verification, shapes=None, values=None)
    options["conversion"] = ConvertOptions(**given)


blob_names_option = choice_option(
    "--blob-names",
    ["onnx", "pnnx"],
    "onnx",
    help="Names of inputs and outputs in the .param: the model's, or in0, in1, ... and out0, out1, ... in its order, "
    "which many programs look for (pnnx). The manifest has the model's names.",
)

# The options of `convert` and `quantize` for a conversion, as one `ConvertOptions`.
conversion_options = all_of(
    given_options,
    effort_option,
    tolerance_options,
    click.option(
        "--outputs", multiple=True, metavar="NAME,...", help="Convert only the part of the model up to these values."
    ),
    click.option(
        "--batch-axis",
        "batch_axes",
        multiple=True,
        callback=_by_name(
            r"(.+):(-?\d+|none)",
            lambda axis: None if axis == "none" else int(axis),
            "axes",
            "name:0, or another axis, or name:none",
        ),
        metavar="NAME:K",
        help="Axis of an input that is the batch, or NAME:none.  [default: found in the model]",
    ),
    image_option,
    choice_option(
        "--tail",
        ["auto", "only-needed", "never"],
        "auto",
        help="Nodes that may follow the net as NumPy or C++: those that ncnn cannot express (only-needed), and also "
        "those that would be many layers (auto), such as TopK and NonMaxSuppression.",
    ),
    choice_option(
        "--quantized",
        ["float", "keep"],
        "float",
        help="The layers for products of a quantised model: float layers with the model's roundings (float), or int8 "
        "layers with its weights and scales, which are smaller and faster and differ a little (keep).",
    ),
    click.option(
        "--append",
        metavar="nms:OUTPUT[:conf=...:iou=...:max=...]",
        help="Decode a detector's raw output, or two (nms:BOXES,SCORES), and keep its best boxes, e.g. "
        "nms:output0:conf=0.25:iou=0.45:max=300; further options say how to read the columns: boxes=, classes=, "
        "objectness=, background=, layout=.",
    ),
    click.option(
        "--last-row",
        metavar="OUTPUT",
        help="Compute only the last row of an output: in logits [batch, tokens, vocabulary], the scores of the next "
        "token.",
    ),
    click.option("--noise-inputs", is_flag=True, help="Make inputs of nodes that draw random numbers."),
    click.option(
        "--raw-head",
        is_flag=True,
        help="Give what a YOLO computes before its decoding, with pnnx's names: ncnn's examples and Android apps for "
        "YOLOv8, YOLO11, YOLOv5 and YOLOv7 read it.",
    ),
    release_option,
    storage_options,
    masks_option,
    blob_names_option,
    click.option(
        "--client",
        type=click.Choice(["ultralytics"]),
        help="Write the folder NAME_ncnn_model, which ultralytics loads. -o is this folder, or where to make it.",
    ),
    skip_option(),
    negative_option("--no-optimize", "optimize", "Skip all passes."),
    changing(_conversion),
)
