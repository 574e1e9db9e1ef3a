"""Loading of models from all supported sources, as one normalised graph for the importer."""

import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from onnx2ncnn_opt.errors import ModelError
from onnx2ncnn_opt.ir.dim import Dim
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.read import constants, structure
from onnx2ncnn_opt.onnx.read.binding import InputInfo, LengthInfo, TensorInfo, bind, bind_values
from onnx2ncnn_opt.onnx.read.caches import bind_lengths
from onnx2ncnn_opt.onnx.read.embedded import Bytes, Embedded
from onnx2ncnn_opt.onnx.read.exported import no_model
from onnx2ncnn_opt.onnx.read.given import GivenShapes

LARGEST_MESSAGE = 2**31 - 1  # the limit of protobuf

# Files that people pass by mistake: their first bytes, and the advice.
_NOT_ONNX = (
    (b"version https://git-lfs", "it is a Git LFS pointer; fetch the real file with: git lfs pull"),
    (b"PK\x03\x04", "it is a zip file, perhaps a PyTorch checkpoint; export the model with torch.onnx.export first"),
    (b"\x80\x02", "it is a Python pickle, perhaps a PyTorch checkpoint; export the model with torch.onnx.export first"),
    (b"7767517", "it is an ncnn .param file, not an ONNX model"),
    (b"<", "it is a text or HTML file; was it downloaded correctly?"),
)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready for the importer.

    `graph` is sorted, without function calls, Constant nodes (unless they are outputs), dead nodes or unused
    initializers. Every constant in it is a checked array.
    """

    graph: onnx_ir.Graph
    inputs: tuple[InputInfo, ...]  # without constants
    outputs: tuple[TensorInfo, ...]
    opsets: Mapping[str, int]  # the version of each domain; '' is ONNX's own
    digest: Callable[[], str | None]  # returns the SHA-256 of the main file or bytes, None for an onnx_ir.Model
    folder: Path | None  # None if the model came from memory
    name: str
    producer: str  # the exporter, with version
    metadata: Mapping[str, str] = field(default_factory=dict)  # of the file
    values: Mapping[str, Array] = field(default_factory=dict)  # inputs that the caller bound, now constants
    lost: tuple[str, ...] = ()  # outputs of the model that are not computed, because the caller chose other values
    given: GivenShapes = field(default_factory=dict)  # sizes from the caller
    cut: tuple[str, ...] = ()  # values that are outputs instead of the model's outputs
    length: LengthInfo | None = None

    def __repr__(self) -> str:
        return f"LoadedModel({self.name}: {len(self.graph)} nodes, {'; '.join(map(str, self.inputs))})"

    def bound(self, sizes: Mapping[str, Dim]) -> "LoadedModel":
        """Return the model with numbers or other names for dynamic dimensions."""

        inputs = tuple(info.bound(sizes) for info in self.inputs)
        outputs = tuple(info.bound(sizes) for info in self.outputs)
        length = self.length and self.length.bound(sizes)
        return replace(self, inputs=inputs, outputs=outputs, length=length)

    @property
    def net_inputs(self) -> tuple[InputInfo, ...]:
        """The inputs of the net."""
        return self.inputs if self.length is None else (*self.inputs, self.length)

    def initializer(self, name: str) -> Array:
        """Return the array of an initializer without a copy; raise KeyError if there is none of that name."""
        tensor = self.graph.initializers[name].const_value
        assert tensor is not None
        return tensor.numpy()


class _OpenedModel(NamedTuple):
    model: onnx_ir.Model
    digest: Callable[[], str | None] = lambda: None
    folder: Path | None = None
    stem: str = ""
    embedded: Embedded | None = None


def load_model(
    source: Any,
    *,
    shapes: GivenShapes | None = None,
    values: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
    opaque: Collection[tuple[str, str]] = (),
    stepwise: bool = True,
) -> LoadedModel:
    """Read a model from a path, bytes, onnx.ModelProto, onnx_ir.Model or torch.onnx.ONNXProgram.

    `shapes` binds the sizes of inputs by name, `values` whole inputs (see `bind_values`). `outputs` are values that
    replace the model's outputs: nodes and inputs that they do not depend on are removed. Calls of `opaque` operators
    (domain and name) are not inlined. With `stepwise` a net with caches may have an additional input (`bind_lengths`).
    Objects that are passed in are not changed, except that an unsorted onnx_ir.Model is sorted. Raises ModelError if
    the model is broken, unsafe to open, or of an unknown opset. Raises UsageError if `source` is not a model, or
    another argument does not fit the model.
    """
    opened = _open(source)
    model, given = opened.model, dict(shapes or {})
    structure.name_domains(model)
    structure.inline_functions(model, opaque)
    structure.check_opset(model)
    structure.name_runtime_operators(model)
    structure.unname_dims(model.graph, model.opset_imports[""])
    bound, sizes = bind_values(model.graph, values, given) if values else ({}, {})
    lost = structure.cut(model.graph, outputs) if outputs else ()
    structure.strip(model.graph)
    structure.lift_constants(model)
    constants.load_constants(model.graph, opened.embedded)
    open_shapes = {name: shape for name, shape in given.items() if name not in bound}
    bound_shapes = bind(model.graph.inputs, model.graph.outputs, open_shapes, sizes)
    inputs, results, length = bind_lengths(model.graph, *bound_shapes)
    return LoadedModel(
        graph=model.graph,
        inputs=inputs,
        outputs=results,
        length=length if stepwise else None,
        opsets=dict(model.opset_imports),
        digest=opened.digest,
        folder=opened.folder,
        name=opened.stem or model.graph.name or "model",
        producer=f"{model.producer_name or 'unknown'} {model.producer_version or ''}".strip(),
        metadata=dict(model.metadata_props),
        values=bound,
        lost=lost,
        given=given,
        cut=tuple(outputs),
    )


def _open(source: Any) -> _OpenedModel:
    if isinstance(source, (str, os.PathLike)):
        return _open_path(Path(source))
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
        return _OpenedModel(_from_proto(_parse(data, "the bytes"), None), _hashed(data))
    if isinstance(source, onnx.ModelProto):
        return _OpenedModel(_from_proto(source, None), _digest(source))
    model = source if isinstance(source, onnx_ir.Model) else getattr(source, "model", None)
    if isinstance(model, onnx_ir.Model):
        structure.check_structure(model)
        try:
            return _OpenedModel(model.clone())
        except RuntimeError as error:
            raise ModelError(f"the onnx_ir.Model is broken: {structure.root_cause(error)}") from None
    # Last, because ONNXProgram.model_proto serialises all weights; old ONNXPrograms have only this attribute.
    proto = getattr(source, "model_proto", None)
    if isinstance(proto, onnx.ModelProto):
        return _open(proto)
    raise no_model(source)


def _open_path(path: Path) -> _OpenedModel:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(f"{path} is a folder; give the .onnx file in it")
        # /dev/stdin may be a plain file, but in ONNX Runtime's process it is another one.
        is_own = str(path.absolute().parent) in ("/dev", "/dev/fd") or path.absolute().parts[1:2] == ("proc",)
        if not stat.S_ISREG(status.st_mode) or is_own:
            raise ModelError(f"{path} is not a plain file; save the model to one, as it is read more than once")
        if (size := status.st_size) > LARGEST_MESSAGE:
            raise ModelError(f"{path} has {size} bytes, more than protobuf can read; export it with external data")
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise ModelError(f"{path} cannot be read: {error}") from None
    digest, embedded, folder = _hashed(data), Embedded.of(data), path.absolute().parent
    return _OpenedModel(_from_proto(_parse(embedded.message, str(path)), folder), digest, folder, path.stem, embedded)


def _parse(data: Bytes, where: str) -> onnx.ModelProto:
    if not data:
        raise ModelError(f"{where}: not an ONNX model: the file is empty")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(bytes(data))
        complete = proto.HasField("graph") and proto.ir_version > 0
    except DecodeError:
        complete = False
    if not complete:
        if data[4:8] == b"ORTM":
            hint = "it is in ONNX Runtime's own format; convert the .onnx file that it was made from"
            raise ModelError(f"{where}: {hint}")
        hint = next((hint for start, hint in _NOT_ONNX if data[:64].lstrip().startswith(start)), "")
        raise ModelError(f"{where}: not an ONNX model, or truncated; {hint or 'was it written or downloaded fully?'}")
    return proto


def _hashed(data: Bytes) -> Callable[[], str]:
    """Return a function for the SHA-256 of the data, which takes as long as all other loading."""
    return cache(lambda: hashlib.sha256(data).hexdigest())


def _digest(proto: onnx.ModelProto) -> Callable[[], str | None]:
    try:
        return _hashed(proto.SerializeToString(deterministic=True))
    except (EncodeError, ValueError):  # more than 2 GB
        return lambda: None


def _from_proto(proto: onnx.ModelProto, folder: Path | None) -> onnx_ir.Model:
    structure.check_proto(proto)
    try:
        with structure.quiet("onnx_ir.serde"):
            model = onnx_ir.from_proto(proto)
            # from_proto overwrites the shape of an input that is also an output, perhaps by unknown sizes.
            for declared, value in zip(proto.graph.input, model.graph.inputs, strict=True):
                if declared.type.tensor_type.HasField("shape"):
                    onnx_ir.serde.deserialize_value_info_proto(declared, value)
    except (onnx_ir.serde.SerdeError, ValueError, TypeError) as error:
        raise ModelError(f"the model breaks ONNX's rules: {structure.root_cause(error)}") from None
    if folder is not None:
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            onnx_ir.external_data.set_base_dir(graph, folder)
    structure.check_structure(model)
    return model
