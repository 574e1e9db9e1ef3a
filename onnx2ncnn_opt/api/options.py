"""The options of a conversion: one object for `convert`, `lower`, the commands and `check`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

from onnx2ncnn_opt.errors import UsageError, check_option, check_options
from onnx2ncnn_opt.ir.features import MasksFor
from onnx2ncnn_opt.ir.releases import NEWEST
from onnx2ncnn_opt.manifest import Image
from onnx2ncnn_opt.onnx.read.given import GivenShapes
from onnx2ncnn_opt.param.files import PathLike
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.verification.options import Verification

if TYPE_CHECKING:  # needs onnx
    from onnx2ncnn_opt.onnx.read.load import LoadedModel

TAILS = ("auto", "only-needed", "never")
QUANTIZED = ("float", "keep")
BLOB_NAMES = ("onnx", "pnnx")
CLIENTS = ("ultralytics",)
# The options that a client, or the change `append`, needs.
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "ultralytics": {"tail": "never", "blob_names": "pnnx"},
    "raw-head": {"blob_names": "pnnx"},
}


@dataclass(frozen=True)
class ConvertOptions:
    """The options of a conversion.

    The model: `inputs` and `dynamic_shapes` are those of torch.export.export, for a torch.nn.Module. `shapes` binds the
    sizes of inputs by name: a number, a name (equal names are equal sizes), a sum of names such as "P+S", or None for
    the model's own. `values` binds whole inputs to constants: {"sr": 16000}. `outputs` are values at which to cut the
    model. `batch_axes` is the axis of each input that becomes the Mat's batch count, or None. `images` are inputs that
    take pixels of 0..255: each has an `Image`, or text such as "mean=123.7,116.3,103.5:std=58.4,57.1,57.4:bgr".
    `append` appends the decoding of a detector's raw output: "nms:output0:conf=0.25:iou=0.45:max=300" (docs/deploy.md);
    "raw-head" takes the decoding of a YOLO away, for programs that do it, and names the blobs like pnnx.
    `loaded` is the model, if the caller has loaded it with the same bindings; its graph changes.

    The net: `optimize` runs the passes; `skip` names passes to skip, `limit` is the largest number of rewrites.
    `release` (YYYYMMDD) is the oldest ncnn that has to run the net. `storage` "fp16" or "bf16" stores weights in 16
    bits if they lose little. `custom` operators become layers, such as "my.domain::MyOp=MyLayer:alpha,beta"
    (docs/plugins.md). `masks` gives feature masks to layers that fp16 breaks, on all devices, or only on "arm" or
    "vulkan". `tail` is one of TAILS: "only-needed" moves nodes at the model's end that ncnn cannot express to a tail
    after the net, "auto" also nodes that would be many layers. `quantized` is one of QUANTIZED: "keep" makes the
    products of a quantised model int8 layers, "float" float layers with its roundings, if it has no quantised LSTM.
    `blob_names` is one of BLOB_NAMES: "pnnx" names inputs in0, in1, ..., outputs out0, out1, ... in the model's order,
    and other blobs by numbers; the manifest has the model's names. `client` is a program that runs the net, one of
    CLIENTS: "ultralytics" names the blobs, takes no tail, and writes metadata.yaml into the folder of the net.

    The work of `convert`, which `lower` leaves out: `prefix` is the path of the files without suffixes; without one,
    nothing is written. `verification` has the options of the verification, and of the estimate of fp16; with None,
    nothing runs. `benchmark` measures the latency, `keep_failed` keeps the files of a net that fails verification.
    `worker` is an ncnn process to reuse.

    Raises UsageError for an option of the wrong type.
    """

    prefix: PathLike | None = None
    _: KW_ONLY
    inputs: Sequence[Any] | Mapping[str, Any] | None = None
    dynamic_shapes: Any = None
    shapes: GivenShapes | None = None
    values: Mapping[str, Any] | None = None
    outputs: Sequence[str] = ()
    batch_axes: Mapping[str, int | None] | None = None
    images: Mapping[str, Image | str] | None = None
    append: str | None = None
    loaded: LoadedModel | None = field(default=None, repr=False)
    optimize: bool = True
    skip: Collection[str] = ()
    limit: int | None = None
    release: int = NEWEST
    storage: str | None = None
    custom: Collection[str] = ()
    masks: MasksFor = True
    tail: str = "auto"
    quantized: str = "float"
    blob_names: str = "onnx"
    client: str | None = None
    verification: Verification | None = Verification()
    benchmark: bool = False
    keep_failed: bool = False
    worker: NcnnWorker | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        names = ("shapes", "values", "outputs", "batch_axes", "skip", "limit", "images")
        check_options(**{name: getattr(self, name) for name in names})
        check_option("names", "custom", self.custom)
        choices = {"tail": TAILS, "quantized": QUANTIZED, "blob_names": BLOB_NAMES, "client": (None, *CLIENTS)}
        for name, values in choices.items():
            if (value := getattr(self, name)) not in values:
                raise UsageError(f"{name} has to be one of {', '.join(map(str, values))}, not {value!r:.80}")
        if self.client and (self.append or self.outputs or self.images or self.custom):
            raise UsageError("client: ultralytics knows the model's own inputs, outputs and layers; change none")
        for name, sizes in (self.shapes or {}).items():
            check_option("list", f"shapes['{name}']", sizes)
        for name, axis in (self.batch_axes or {}).items():
            if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
                raise UsageError(f"batch_axes['{name}'] has to be an axis or None, not {axis!r:.80}")

    @property
    def arguments(self) -> list[str]:
        """The values, shapes, outputs, blob names, noise inputs and custom operators as arguments of `convert`."""
        from onnx2ncnn_opt.onnx.edit.append import NOISE_INPUTS  # only where a command line is made

        words = [("--value", f"{name}={_text(value)}") for name, value in (self.values or {}).items()]
        words += [("--shape", f"{name}:{_text(sizes)}") for name, sizes in (self.shapes or {}).items()]
        words += [("--outputs", ",".join(self.outputs))] if self.outputs else []
        words += [("--blob-names", self.blob_names)] if self.blob_names != BLOB_NAMES[0] else []
        words += [("--custom", name) for name in self.custom]
        flags = [("--noise-inputs", self.append == NOISE_INPUTS), ("--no-verify", self.custom)]
        return [*(word for pair in words for word in pair), *(flag for flag, is_set in flags if is_set)]


def _text(value: Any) -> str:
    """Return a value or sizes in the syntax of --value and --shape."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    return "?" if value is None else str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


P = ParamSpec("P")
Result = TypeVar("Result", covariant=True)


class _TakesOptions(Protocol[P, Result]):
    @overload
    def __call__(self, model: Any, options: ConvertOptions, /) -> Result: ...

    @overload
    def __call__(self, model: Any, *args: P.args, **fields: P.kwargs) -> Result: ...


def _taking(
    options: Callable[P, ConvertOptions],
) -> Callable[[Callable[[Any, ConvertOptions], Result]], _TakesOptions[P, Result]]:
    def decorate(function: Callable[[Any, ConvertOptions], Result]) -> _TakesOptions[P, Result]:
        @functools.wraps(function)
        def call(model: Any, *args: Any, **fields: Any) -> Result:
            is_object = args and isinstance(args[0], ConvertOptions)
            return function(model, *args, **fields) if is_object else function(model, options(*args, **fields))

        return cast(_TakesOptions[P, Result], call)

    return decorate


# A decorator for a function of a model and options: its callers may also give the fields of the options.
takes_options = _taking(ConvertOptions)
