"""The lines of an example program that run the tail of a net, in Python and in C++."""

import re
from collections.abc import Iterator, Mapping

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import AXES, symbol
from onnx2ncnn_opt.manifest import Entry, Manifest, size_input
from onnx2ncnn_opt.onnx.read.given import parsed_size
from onnx2ncnn_opt.report.words import cpp_piece
from onnx2ncnn_opt.tail.header import comment
from onnx2ncnn_opt.tail.program import Port, Program

# A format for printf, and its argument; other types are integers.
_PRINTF = {"float32": ("%g", "{}"), "float64": ("%g", "{}"), "bool": ("%d", "{}")}
_PRINTF["float16"] = "%g", "ncnn::float16_to_float32({})"


def python_call(manifest: Manifest, program: Program, codes: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines that call the tail on the net's outputs in `results`; `codes` has code for dynamic sizes."""
    assert manifest.tail is not None
    sizes = _sizes(manifest, codes)
    outputs = {entry.name for entry in manifest.outputs}
    arguments = []
    for port in program.inputs:
        array = sizes.get(port.name) or f"{'results' if port.name in outputs else 'arrays'}[{port.name!a}]"
        arguments.append(f"np.asarray({f'[{array}]' if port.name in sizes else array}, np.{port.dtype})")
    names = [entry.name for entry in manifest.model_outputs]
    yield f"    results = {{**arrays, **results, **tail({', '.join(arguments)})}}"
    yield f"    results = {{name: results[name] for name in {names!a}}}"


def cpp_call(
    manifest: Manifest, program: Program, name: str, mats: Mapping[str, str], codes: Mapping[str, str]
) -> list[str]:
    """Return the lines that call `NAME_tail`, and print its outputs.

    `mats` are the variables of the net's outputs by ONNX name; `codes` has code for dynamic sizes.
    """
    count = f"{name.upper()}_TAIL_"
    lines = [f"{name}_tensor tail_in[{count}INPUTS], tail_out[{count}OUTPUTS];"]
    places = [(str(size), number, axis) for number, x in enumerate(program.inputs) for axis, size in enumerate(x.shape)]
    own = {size: f"tail_in[{number}].shape[{axis}]" for size, number, axis in places}
    sizes = _sizes(manifest, {**own, **codes})
    for number, port in enumerate(program.inputs):
        lines += _tail_input(manifest, port, number, mats.get(port.name, ""), codes, sizes)
    lines += cpp_piece("call of the tail", tail=name)
    for number, port in enumerate(program.outputs):
        form, value = _PRINTF.get(port.dtype, ("%lld", "(long long){}"))
        value = value.format(f"((const {_c_type(port)}*)tail_out[{number}].data)[i]")
        lines += cpp_piece("output of the tail", text=comment(port), i=number, form=form, value=value)
    return [f"    {line}" for line in (*lines, "free(memory);")]


def _tail_input(
    manifest: Manifest, port: Port, number: int, mat: str, codes: Mapping[str, str], sizes: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines that make an input of the tail: of a size, of a Mat of the net, or of the caller's array."""
    kind = _c_type(port)
    declaration = f"std::vector<{kind}> tail_data{number}"
    yield f"// {comment(port)}"
    if port.name in sizes:
        yield f"{declaration}(1, ({kind})({cpp_size(sizes[port.name])}));"
        shape = ["1"]
    elif mat:
        entry = next(entry for entry in manifest.outputs if entry.name == port.name)
        element = str(entry.element == "int32").lower() + (", true" if port.dtype == "float16" else "")
        shape = list(_mat_shape(entry, mat))
        yield f"{declaration};"
        if f"{mat}.n" in shape[1:]:
            raise UsageError(f"the tail reads {comment(port)}, whose batch is not its first axis; use Net in Python")
        if f"{mat}.n" in shape:
            yield f"for (int b = 0; b < {mat}.n; b++)"
            yield f"    append(tail_data{number}, {mat}.batch(b), {element});"
        else:
            yield f"append(tail_data{number}, {mat}, {element});"
    else:
        shape = [str(size) if isinstance(size, int) else codes.get(str(size), "1") for size in port.shape]
        yield f"{declaration}({' * '.join(shape) or '1'}, 1); // yours"
    yield from cpp_piece("input of the tail", i=number, rank=len(shape))
    for axis, size in enumerate(shape):
        yield f"tail_in[{number}].shape[{axis}] = {size};"


def cpp_size(text: str) -> str:
    """Translate an expression of sizes to C++."""
    return re.sub(r"\b(min|max)\(", r"std::\1<int64_t>(", text.replace("//", "/"))


def _mat_shape(entry: Entry, mat: str) -> Iterator[str]:
    dims = iter(AXES.get(len(entry.shape) - (entry.batch_axis is not None), ""))
    for axis, size in enumerate(entry.shape):
        yield f"{mat}.{next(dims)}" if axis != entry.batch_axis else "1" if size == 1 else f"{mat}.n"


def _sizes(manifest: Manifest, codes: Mapping[str, str]) -> dict[str, str]:
    """Return code for each size that the tail reads, by the name of the tail's input."""
    assert manifest.tail is not None
    result = {}
    for text in manifest.tail.sizes:
        size = parsed_size(text, {name: symbol(code) for name, code in codes.items()})
        if size is None:
            raise UsageError(f"the tail needs the size {text}, which no input has")
        result[size_input(text)] = str(size)
    return result


def _c_type(port: Port) -> str:
    # C++11 has no float16, so uint16_t holds the bits.
    plain = {"float32": "float", "float64": "double", "bool": "unsigned char", "float16": "uint16_t"}
    return plain.get(port.dtype, f"{port.dtype}_t")
