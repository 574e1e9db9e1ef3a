"""A net as C++ headers, for apps without files; ncnn reads layers and weights from memory without a copy.

ncnn's own tool, ncnn2mem, loses the types of custom layers and the feature masks. These headers keep both.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from onnx2ncnn_opt.ir.layers import LAYERS
from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.param.files import read_graph
from onnx2ncnn_opt.param.param_bin import blob_indexes, format_param_bin
from onnx2ncnn_opt.param.splits import list_layers

_FIRST_CUSTOM = 256  # LayerType::CustomBit
_BYTES_PER_LINE = 32


@dataclass(frozen=True)
class EmbeddedNet:
    """The headers `NAME.mem.h` (the arrays NAME_param_bin and NAME_bin) and `NAME.id.h` (constants in NAME_id).

    `blobs` are the constants of all blobs, `custom` the identifiers of custom layer types.
    """

    name: str
    mem: str
    ids: str
    blobs: Mapping[str, str]
    custom: tuple[str, ...]


def embed(param: Path, bin: Path) -> EmbeddedNet:
    """Return a net as headers. Raises ParamError for a .param that cannot be read."""
    listing = list_layers(read_graph(param))
    lines = listing.lines
    custom = list(dict.fromkeys(line.type for line in lines if line.type not in LAYERS and line.type[0] != "#"))
    numbers = {type: _FIRST_CUSTOM + number for number, type in enumerate(custom)}
    numbered = (line._replace(type=f"#{numbers[line.type]}") if line.type in numbers else line for line in lines)
    net = format_param_bin(listing._replace(lines=tuple(numbered)))
    [name] = _identifiers([param.name.removesuffix(".bin").removesuffix(".param").removesuffix(".ncnn")])
    indexes = blob_indexes(listing)
    blobs = dict(zip(indexes, _identifiers(indexes, "BLOB_"), strict=True))
    layers = _identifiers((line.name for line in lines), "LAYER_")
    types = list(_identifiers(custom, "TYPE_"))
    constants = chain(
        zip(types, numbers.values(), strict=True),
        ((blobs[blob], index) for blob, index in indexes.items()),
        zip(layers, range(len(lines)), strict=True),
    )
    ids = "".join(f"const int {constant} = {value};\n" for constant, value in constants)
    qualified = {blob: f"{name}_id::{constant}" for blob, constant in blobs.items()}
    mem = _array(f"{name}_param_bin", net) + _array(f"{name}_bin", bin.read_bytes())
    return EmbeddedNet(
        name,
        f"// {_comment(param)} and {_comment(bin)}. ncnn keeps pointers into {name}_bin.\n#pragma once\n\n{mem}",
        f"// Blobs, layers and custom layer types of {_comment(param)}.\n#pragma once\n\n"
        f"namespace {name}_id {{\n{ids}}}\n",
        qualified,
        tuple(type.removeprefix("TYPE_") for type in types),
    )


def _comment(path: Path) -> str:
    return ascii(path.name)[1:-1].replace("\\", "?")


def _array(name: str, data: bytes) -> str:
    """Return the bytes as an array with the alignment that ncnn needs; C++ has no array of 0 bytes."""
    rows = (data[start : start + _BYTES_PER_LINE] for start in range(0, len(data), _BYTES_PER_LINE))
    text = ",\n".join(",".join(map(str, row)) for row in rows) or "0"
    size = f"static const int {name}_size = {len(data)};"
    return f"{size}\nalignas(4) static const unsigned char {name}[] = {{\n{text}\n}};\n"


def _identifiers(names: Iterable[str], prefix: str = "") -> Iterator[str]:
    """Yield a unique C++ identifier for each name."""
    pool = NamePool()
    for name in names:
        base = prefix + re.sub(r"\W", "_", name, flags=re.ASCII)
        yield pool.take(base if re.match(r"[A-Za-z]", base) else f"net{base}")
