"""The lines of an example program that run the tail of a net, in Python and in C++."""

import re
from collections.abc import Iterator, Mapping

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import symbol
from onnx2ncnn_opt.manifest import Entry, Manifest, size_input
from onnx2ncnn_opt.onnx.read.given import parsed_size
from onnx2ncnn_opt.onnx.tail.header import comment
from onnx2ncnn_opt.onnx.tail.program import Port, Program

_PRINTF = {"float32": ("float", "%g", ""), "float64": ("double", "%g", ""), "bool": ("unsigned char", "%d", "")}


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
) -> Iterator[str]:
    """Yield the lines that call `NAME_tail`, and print its outputs.

    `mats` are the variables of the net's outputs by ONNX name; `codes` has code for dynamic sizes.
    """
    sizes, entries = _sizes(manifest, codes), {entry.name: entry for entry in manifest.outputs}
    count = f"{name.upper()}_TAIL_"
    yield f"    {name}_tensor tail_in[{count}INPUTS], tail_out[{count}OUTPUTS];"
    for number, port in enumerate(program.inputs):
        kind, data, mat = _c_type(port), f"tail_data{number}", mats.get(port.name, "")
        yield f"    // {comment(port)}"
        if port.name in sizes:
            yield f"    std::vector<{kind}> {data}(1, ({kind})({cpp_size(sizes[port.name])}));"
            shape = ["1"]
        elif mat:
            is_int = str(entries[port.name].element == "int32").lower()
            shape = list(_mat_shape(entries[port.name], mat))
            yield f"    std::vector<{kind}> {data};"
            if f"{mat}.n" in shape[1:]:
                raise UsageError(
                    f"the tail reads {comment(port)}, whose batch is not its first axis; use Net in Python"
                )
            if f"{mat}.n" in shape:
                yield f"    for (int b = 0; b < {mat}.n; b++)"
                yield f"        append({data}, {mat}.batch(b), {is_int});"
            else:
                yield f"    append({data}, {mat}, {is_int});"
        else:
            shape = [str(size) if isinstance(size, int) else codes.get(str(size), "1") for size in port.shape]
            yield f"    std::vector<{kind}> {data}({' * '.join(shape) or '1'}, 1); // yours"
        yield f"    tail_in[{number}].data = {data}.data();"
        yield f"    tail_in[{number}].rank = {len(shape)};"
        for axis, size in enumerate(shape):
            yield f"    tail_in[{number}].shape[{axis}] = {size};"
    yield "    void* memory = NULL;"
    yield f"    const int failed = {name}_tail(tail_in, tail_out, &memory);"
    yield "    if (failed)"
    yield '        return fprintf(stderr, "the tail: error %d\\n", failed), 1;'
    for number, port in enumerate(program.outputs):
        kind, form, cast = _PRINTF.get(port.dtype, (_c_type(port), "%lld", "(long long)"))
        yield f"    // {comment(port)}"
        yield f"    int64_t count{number} = 1;"
        yield f"    for (int64_t axis = 0; axis < tail_out[{number}].rank; axis++)"
        yield f"        count{number} *= tail_out[{number}].shape[axis];"
        yield f"    for (int64_t i = 0; i < count{number}; i++)"
        yield f'        printf("{form} ", {cast}((const {kind}*)tail_out[{number}].data)[i]);'
        yield '    printf("\\n");'
    yield "    free(memory);"


def cpp_size(text: str) -> str:
    """Translate an expression of sizes to C++."""
    return re.sub(r"\b(?=(min|max)\()", "std::", text.replace("//", "/"))


def _mat_shape(entry: Entry, mat: str) -> Iterator[str]:
    dims = iter({1: "w", 2: "hw", 3: "chw", 4: "cdhw"}.get(len(entry.shape) - (entry.batch_axis is not None), ""))
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
