"""Constant tensors of a model: their dims are checked against their data, external files are mapped into memory.

onnx_ir maps an external file for each tensor, with a new file descriptor. So a model of a thousand tensors runs out of
descriptors. It never compares dims, offset and length with the file. Here each file is mapped once.
"""

import math
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import onnx_ir
from onnx_ir import serde

from onnx2ncnn_opt.errors import ModelError
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.onnx.read.embedded import Bytes, Embedded
from onnx2ncnn_opt.progress import counted

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # for a pipe
_TYPED_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
LARGEST_TENSOR = 2**40  # bytes; larger dims are an error on any machine for ncnn


def single_number(value: onnx_ir.Value | None) -> float | None:
    """Return the number of a constant with one element; None for other values."""
    tensor = value.const_value if value is not None else None
    return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


def load_constants(graph: onnx_ir.Graph, embedded: Embedded | None = None) -> None:
    """Replace every constant of the graph, attributes and subgraphs included, by a checked array.

    `embedded` are the weights in the model's own file, if they are not in the message. Raises ModelError if a tensor's
    dims, data and external file do not match, or the file lies outside the model's folder.
    """
    maps: dict[str, mmap.mmap] = {}  # of external data files
    done: dict[int, tuple[onnx_ir.TensorProtocol, onnx_ir.TensorProtocol]] = {}

    def loaded(tensor: onnx_ir.TensorProtocol, where: str) -> onnx_ir.TensorProtocol:
        # Once for each object, which `done` keeps alive: copies of an inlined function share their tensors.
        if id(tensor) not in done:
            done[id(tensor)] = tensor, _loaded(tensor, where, embedded, maps)
        return done[id(tensor)][1]

    for inner in (graph, *graph.subgraphs()):
        for value in counted(inner.initializers.values(), "checking the weights", "tensors"):
            if value.const_value is not None:
                value.const_value = loaded(value.const_value, f"tensor '{value.name}'")
    for node in graph.all_nodes():
        for name, attribute in node.attributes.items():
            where = f"attribute '{name}' of {node.op_type} '{node.name}'"
            if attribute.is_ref():
                raise ModelError(f"{where} refers to an attribute of a function, but is outside of one")
            if attribute.type is onnx_ir.AttributeType.TENSOR:
                node.attributes[name] = onnx_ir.AttrTensor(name, loaded(attribute.value, where))
            elif attribute.type is onnx_ir.AttributeType.TENSORS:
                tensors = [loaded(tensor, where) for tensor in attribute.value]
                node.attributes[name] = onnx_ir.AttrTensors(name, tensors)


def _mapped(path: str, where: str, maps: dict[str, mmap.mmap]) -> mmap.mmap:
    """Return the file's bytes; raise ModelError (with `where`) unless it is a plain, non-empty file with one link."""
    if path not in maps:
        try:
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NONBLOCK)) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ModelError(f"{where} is not a plain file")
                if status.st_nlink > 1:
                    problem = "has several hard links, so it may be a file from elsewhere"
                    raise ModelError(f"{where} {problem}; replace it by a copy of its own")
                if status.st_size == 0:
                    raise ModelError(f"{where} is empty; was it downloaded fully?")
                maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{where} is missing; put it at {path}, beside the model") from None
        except OSError as error:
            raise ModelError(f"{where} cannot be read: {error.strerror}") from None
    return maps[path]


def _loaded(
    tensor: onnx_ir.TensorProtocol, where: str, embedded: Embedded | None, maps: dict[str, mmap.mmap]
) -> onnx_ir.TensorProtocol:
    if isinstance(tensor, onnx_ir.ExternalTensor):
        nbytes = _check_dims(tensor, where)
        if embedded is not None and tensor.location == embedded.location:
            _check_bytes(tensor.length or 0, nbytes, tensor.shape.numpy(), where)
            return _tensor(embedded.data, tensor.offset or 0, nbytes, tensor)
        return _external(tensor, where, maps)
    if isinstance(tensor, serde.TensorProtoTensor):
        return _embedded(tensor, where)
    if isinstance(tensor, onnx_ir.StringTensor) and math.prod(tensor.shape.numpy()) != len(tensor.raw):
        raise ModelError(f"{where} holds {len(tensor.raw)} strings, but its dims are {list(tensor.shape.numpy())}")
    return tensor


def _embedded(tensor: serde.TensorProtoTensor, where: str) -> onnx_ir.TensorProtocol:
    """Return a tensor inside the model file. Check sub-byte types first: onnx_ir fills missing data with zeros."""
    nbytes, proto = _check_dims(tensor, where), tensor.raw
    if proto.HasField("raw_data"):
        raw = proto.raw_data
        _check_bytes(len(raw), nbytes, proto.dims, where)
        return _tensor(raw, 0, nbytes, tensor)
    if nbytes and not any(len(getattr(proto, field)) for field in _TYPED_FIELDS):
        reason = "the weights were stripped, or are in a file that the model does not name"
        raise ModelError(f"{where} holds no data, but has dims {list(proto.dims)}; {reason}")
    if tensor.dtype.bitwidth < 8:
        _check_bytes(len(proto.int32_data), nbytes, proto.dims, where)
    try:
        array = tensor.numpy()
    except (ValueError, AssertionError, OverflowError) as error:  # wrong count, field of another type, too large number
        raise ModelError(f"{where} holds other data than its dims {list(proto.dims)} and type say: {error}") from None
    return onnx_ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)


def _check_bytes(length: int, nbytes: int, dims: Iterable[int], where: str) -> None:
    if length != nbytes:
        raise ModelError(f"{where} holds {length} bytes, but its dims {list(dims)} need {nbytes}")


def _check_dims(tensor: onnx_ir.TensorProtocol, where: str) -> int:
    """Return the number of bytes that the tensor needs."""
    try:
        dtype = tensor.dtype
    except ValueError as error:
        raise ModelError(f"{where} has an unknown element type: {error}") from None
    dims = tensor.shape.numpy()
    if dtype in (onnx_ir.DataType.UNDEFINED, onnx_ir.DataType.STRING):
        raise ModelError(f"{where} has no numeric element type ({dtype.name})")
    nbytes = -(-math.prod(dims) * dtype.bitwidth // 8)
    if any(dim < 0 for dim in dims) or len(dims) > 32 or nbytes > LARGEST_TENSOR:
        raise ModelError(f"{where} has impossible dims {list(dims)}")
    return nbytes


def _external(tensor: onnx_ir.ExternalTensor, where: str, maps: dict[str, mmap.mmap]) -> onnx_ir.TensorProtocol:
    location = os.fspath(tensor.location)
    path = _inside(location, os.fspath(tensor.base_dir), where)
    where = f"{where}: external data '{location}'"
    offset, nbytes = tensor.offset or 0, tensor.nbytes
    length = nbytes if tensor.length is None else tensor.length
    if length != nbytes or offset < 0:
        needed = f"dims {list(tensor.shape.numpy())} of {tensor.dtype.name} need {nbytes}"
        raise ModelError(f"{where} is {length} bytes at offset {offset}, but {needed}")
    if nbytes == 0:
        return _tensor(b"", 0, 0, tensor)
    data = _mapped(path, where, maps)
    if offset + nbytes > len(data):
        problem = f"ends at byte {len(data)}, but {nbytes} bytes at offset {offset} are wanted"
        raise ModelError(f"{where} {problem}; was it downloaded fully, and is it of the same export?")
    return _tensor(data, offset, nbytes, tensor)


def _tensor(data: Bytes, offset: int, nbytes: int, tensor: onnx_ir.TensorProtocol) -> onnx_ir.TensorProtocol:
    """Return the tensor as a view of raw little-endian data."""
    raw: Array = np.frombuffer(data, np.uint8, nbytes, offset)
    dims = tensor.shape.numpy()
    if tensor.dtype.bitwidth < 8:
        return onnx_ir.PackedTensor(raw, tensor.dtype, shape=dims, name=tensor.name)
    try:
        array = raw.view(np.dtype(tensor.dtype.numpy()).newbyteorder("<")).reshape(dims)
    except ValueError as error:  # an empty tensor of impossible dims
        raise ModelError(f"tensor '{tensor.name}' has impossible dims {list(dims)}: {error}") from None
    return onnx_ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)


def _inside(location: str, folder: str, where: str) -> str:
    """Return the real path of a data file; raise ModelError unless it lies in the folder."""
    fix = "save the model again with its data file beside it (onnx.save, save_as_external_data=True)"
    if not location:
        raise ModelError(f"{where} is external data without a location; {fix}")
    pure = PurePosixPath(location), PureWindowsPath(location)
    if any(path.is_absolute() or path.drive or ".." in path.parts for path in pure) or "\0" in location:
        raise ModelError(f"{where}: external data '{location}' must be a path inside the model's folder; {fix}")
    if not folder:
        problem = f"is in the file '{location}', but the model came from memory, so its folder is unknown"
        raise ModelError(f"{where} {problem}; give the path of the model (or load it by an absolute path)")
    base = Path(folder).resolve()
    try:
        path = (base / location).resolve()
    except (OSError, RuntimeError):  # a loop of links
        raise ModelError(f"{where}: external data '{location}' cannot be followed; {fix}") from None
    if base not in path.parents:
        problem = f"is a link to {path}, outside the model's folder {base}"
        raise ModelError(f"{where}: external data '{location}' {problem}; put a copy of the file in its place")
    return str(path)
