"""A small program that runs one net in ncnn: in C++, or in Python with only numpy and ncnn."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from string import Template

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import AXES, symbol
from onnx2ncnn_opt.manifest import Entry, Image, Manifest, fits, limit_of, multiple_of
from onnx2ncnn_opt.onnx.read.given import parsed_size
from onnx2ncnn_opt.report.embed import EmbeddedNet
from onnx2ncnn_opt.report.tail_call import cpp_call, cpp_size, python_call
from onnx2ncnn_opt.report.words import cpp_piece, data_file
from onnx2ncnn_opt.runtime.slots import np_dtype, too_small
from onnx2ncnn_opt.runtime.steps import StepInputs
from onnx2ncnn_opt.tail.header import c_name
from onnx2ncnn_opt.tail.numpy_source import numpy_program
from onnx2ncnn_opt.tail.program import Program

# Default sizes of dynamic dimensions: of images, and of all others.
_IMAGE, _LENGTH = 224, 16

# Options to turn off, because nets are verified in fp32, and ARM and Vulkan compute in fp16 by default.
_FP32 = ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_packed", "use_bf16_storage")


@dataclass(frozen=True)
class _Mat:
    """An input or output with numbers for all sizes; `dims` are the Mat's sizes, outermost first, without `batch`."""

    entry: Entry
    shape: tuple[int, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(size for axis, size in enumerate(self.shape) if axis != self.entry.batch_axis) or (1,)

    @property
    def batch(self) -> int:
        return 1 if self.entry.batch_axis is None else self.shape[self.entry.batch_axis]

    @property
    def is_integer(self) -> bool:
        return self.entry.dtype.startswith(("int", "uint", "bool"))

    @property
    def is_image(self) -> bool:
        return not self.is_integer and self.batch == 1 and len(self.dims) == 3 and self.dims[0] in (1, 3)

    @property
    def text(self) -> str:
        image = self.entry.image
        pixels = "" if image is None else f", {'BGR ' if image.bgr else ''}pixels of 0..255 as they are"
        return _plain(self.entry) + pixels


@dataclass(frozen=True)
class _Job:
    """The net of a program: its manifest and files, its inputs, and a decoder's loop or a tail if it has one."""

    manifest: Manifest
    param: str
    bin: str
    inputs: Sequence[_Mat]
    loop: StepInputs | None
    tail: Program | None


def example(
    manifest: Manifest,
    param: Path,
    bin: Path,
    *,
    language: str,
    shapes: Mapping[str, Sequence[int]] | None = None,
    embedded: EmbeddedNet | None = None,
    tail: Program | None = None,
    name: str = "",
) -> str:
    """Return the program in "cpp" or "python" for a net and its manifest.

    `shapes` has shapes of inputs with dynamic dimensions; other sizes are made up. A C++ program loads the `embedded`
    net instead of the files, and calls the `tail` in NAME.tail.h. Raises UsageError if the shapes do not fit.
    """
    for entry in (*manifest.inputs, *manifest.outputs):
        if np_dtype(entry).name != entry.dtype or len(entry.shape) - (entry.batch_axis is not None) > max(AXES):
            raise UsageError(f"no Mat can hold {_Mat(entry, ()).text} of the manifest")
    loop = StepInputs.of(manifest) if manifest.caches else None
    if loop is not None and loop.mask is None:  # the program fills an input of all tokens with ones, like a mask
        loop = loop._replace(mask=next((entry for entry in manifest.inputs if entry.length), None))
    inputs = _inputs(manifest, shapes or {})
    # These arrays take no memory; only their shapes matter.
    if small := too_small(manifest, {mat.entry.name: np.broadcast_to(0, mat.shape) for mat in inputs}):
        raise UsageError(small)
    if loop is not None and (tail is not None or loop.scores is None or loop.ids.element != "int32"):
        raise UsageError("a loop needs a net that takes tokens and gives their scores: write yours with Net.step")
    if loop is not None and loop.fixed not in (None, 1):
        raise UsageError(f"a loop needs a net that takes one token, not {loop.fixed} in each step: see Net.step")
    job = _Job(manifest, param.as_posix(), bin.as_posix(), inputs, loop, tail)
    if language == "cpp":
        return _cpp(job, embedded, c_name(name))
    return _python_loop(job, loop) if loop else _python(job)


def _inputs(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> list[_Mat]:
    counted = (entry for entry in manifest.inputs if entry.length)
    entries = [*(entry for entry in manifest.model_inputs if entry.cache is None), *counted]
    names = [entry.name for entry in entries]
    for name in shapes:
        if name not in names:
            raise UsageError(f"the net has no input '{name}'; its inputs are {', '.join(names)}")
    sizes: dict[str, int] = {}
    for entry in (entry for entry in entries if entry.name in shapes):
        requested = shapes[entry.name]
        if not fits(requested, entry.shape, sizes):
            wrong = f"{entry.name}:{','.join(map(str, requested))}"
            raise UsageError(f"--shape {wrong} is not a shape of {_Mat(entry, ()).text}")
    # Plain names come first, because other sizes may be sums of them.
    mats: dict[str, _Mat] = {}
    sums = {dim for entry in entries for dim in entry.shape if isinstance(dim, str) and not dim.isidentifier()}
    for entry in sorted(entries, key=lambda entry: not sums.isdisjoint(entry.shape)):
        is_image = len(entry.shape) == 4 and entry.shape[1] in (1, 3)
        shape = []
        for axis, dim in enumerate(entry.shape):
            size = 1 if axis == (entry.batch_axis or 0) else _IMAGE if is_image else _LENGTH
            if isinstance(dim, int):
                size = dim
            elif entry.name in shapes:
                size = shapes[entry.name][axis]
            elif dim is not None:
                computed = parsed_size(dim, sizes)
                default = max(size, manifest.minimum.get(dim, 1))
                size = sizes.setdefault(dim, computed if isinstance(computed, int) else default)
            shape.append(size)
        mats[entry.name] = _Mat(entry, tuple(shape))
    return [mats[name] for name in names]


def _plain(text: object) -> str:
    """Escape characters with which a name in a model could end a comment."""
    return "".join(char if char.isprintable() and char != "\\" else ascii(char)[1:-1] for char in str(text))


def _filled(template: str, blocks: Mapping[str, Iterable[str]], **words: str) -> str:
    """Fill blocks of lines, and words, into a template."""
    lines = {name: "".join(f"{line}\n" for line in block) for name, block in blocks.items()}
    return Template(template).substitute(lines, **words)


def _unfit(manifest: Manifest, codes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a condition and a message for each size with a minimum or a factor; `codes` are expressions of sizes."""
    for text, code in codes.items():
        if multiple_of(text) > 1:
            yield f"{code} % {multiple_of(text)}", f"the net is for multiples of {multiple_of(text)} as {_plain(text)}"
    for text, least in manifest.minimum.items():
        size = parsed_size(text, {name: symbol(code) for name, code in codes.items()})
        if size is not None:
            yield f"{size} < {least}", f"the net is for {_plain(' of '.join(limit_of(text, least)))}"


# Python ----------------------------------------------------------------------------------------------------------


def _python(job: _Job) -> str:
    inputs, manifest, tail = job.inputs, job.manifest, job.tail
    codes = {
        dim: f"np.shape(arrays[{mat.entry.name!a}])[{axis}]"
        for mat in inputs
        for axis, dim in enumerate(mat.entry.shape)
        if isinstance(dim, str)
    }
    blocks = {
        "options": (f"    net.opt.{option} = False" for option in _FP32),
        "checks": (f"    if {bad}:\n        raise SystemExit({text!a})" for bad, text in _unfit(manifest, codes)),
        "feeds": (_python_feed(mat) for mat in inputs if mat.entry.blob),
        "call": python_call(manifest, tail, codes) if tail else (),
        "fetches": chain.from_iterable(map(_python_fetch, manifest.outputs)),
        "functions": [data_file("letterbox.py.in").rstrip("\n"), "", ""] if any(map(_letterbox, inputs)) else (),
        "pictures": (
            f"    picture{i} = random.integers(0, 256, (480, 640, {mat.dims[0]}), np.uint8)  # your image, for "
            f"to_picture(boxes, picture{i}, {mat.dims[1]}, {mat.dims[2]})"
            for i, mat in enumerate(inputs)
            if _letterbox(mat)
        ),
        "arrays": (
            f"        {mat.entry.name!a}: {_python_array(mat, i)},  # {mat.text}" for i, mat in enumerate(inputs)
        ),
    }
    source = f"{numpy_program(tail)}\n\n" if tail else ""
    imports = "import base64\n\n" if "base64." in source else ""
    program = data_file("load.py.in") + data_file("program.py.in")
    return _filled(program, blocks, tail=source, imports=imports, param=ascii(job.param), bin=ascii(job.bin))


def _python_loop(job: _Job, loop: StepInputs) -> str:
    assert loop.scores is not None
    codes = {loop.ids.name: "np.reshape(ids, {})", "": "np.arange(length, length + len(ids)).reshape({})"}
    if loop.mask is not None:
        codes[loop.mask.name] = "np.ones(length + len(ids), {kind}).reshape({})"
    if loop.positions is not None:
        codes[loop.positions.name] = codes[""]
    arrays = {
        mat.entry.name: codes[mat.entry.name].format([*[1] * (len(mat.shape) - 1), -1], kind=f"np.{mat.entry.dtype}")
        if mat.entry.name in codes
        else f"others[{mat.entry.name!a}]"
        for mat in job.inputs
    }
    mats = [mat for mat in job.inputs if mat.entry in loop.others]
    others = [f"        {mat.entry.name!a}: {_python_array(mat, 0)},  # {mat.text}" for mat in mats]
    draws = ["    random = np.random.default_rng(0)"] if any("random." in line for line in others) else []
    checks = [f"        if length + len(ids) > {loop.most}:  # the model has no more positions", "            break"]
    blocks = {
        "options": (f"    net.opt.{option} = False" for option in _FP32),
        "feeds": map(_python_feed, job.inputs),
        "others": [*draws, "    others = {  # put yours here", *others, "    }"] if others else (),
        "checks": checks if loop.most else (),
        "arrays": (f"            {name!a}: {code}," for name, code in arrays.items()),
    }
    words = {
        "past": ascii([a for a, _ in job.manifest.caches]),
        "present": ascii([b for _, b in job.manifest.caches]),
        "prompt": _prompt(loop),
        "scores": f"{loop.scores.blob!a}{_axis(loop.scores)}",
        "param": ascii(job.param),
        "bin": ascii(job.bin),
    }
    return _filled(data_file("load.py.in") + data_file("loop.py.in"), blocks, imports="", **words)


def _letterbox(mat: _Mat) -> Image | None:
    """Return the image options of an input with a letterbox, else None."""
    image = mat.entry.image
    return image if image is not None and image.letterbox is not None and mat.is_image else None


def _python_array(mat: _Mat, number: int) -> str:
    if image := _letterbox(mat):
        call = f"letterbox(picture{number}, {mat.dims[1]}, {mat.dims[2]}, {image.letterbox})"
        return f"{call}.reshape({list(mat.shape)})"
    if mat.entry.dtype == "bool":
        return f"np.ones({list(mat.shape)}, bool)"
    if mat.is_integer:
        return f"np.zeros({list(mat.shape)}, np.{mat.entry.dtype})"
    if mat.entry.image is not None:
        return f"random.integers(0, 256, {list(mat.shape)}).astype(np.float32)"
    return f"random.standard_normal({list(mat.shape)}, np.float32)"


def _axis(entry: Entry) -> str:
    return "" if entry.batch_axis is None else f", batch_axis={entry.batch_axis}"


def _python_feed(mat: _Mat) -> str:
    name, kind = ascii(mat.entry.name), "int32" if mat.is_integer else "float32"
    comment = f"  # {mat.entry.dtype} goes in as int32" if mat.is_integer else ""
    number = ".reshape(-1, 1)" * (len(mat.shape) == 1 and mat.entry.batch_axis == 0)  # a Mat for each item
    array = f"np.asarray(arrays[{name}]).astype(np.{kind}){number}"
    call = f"feed(extractor, {mat.entry.blob!a}, {array}{_axis(mat.entry)})"
    return f"    {call}{comment}"


def _python_fetch(entry: Entry) -> Iterator[str]:
    value = f"fetch(extractor, {entry.blob!a}{_axis(entry)})"
    if entry.boxes:
        yield f"    code, boxes = extractor.extract({entry.boxes!a})  # without boxes, ncnn cannot compute the output"
        value = f"{value} if code != 0 or boxes.dims else np.zeros((0, 6), np.float32)"
    rank = len(entry.shape)
    if rank - (entry.batch_axis is not None) == 0:  # no Mat has the rank of a scalar
        value += ".reshape(-1)" if rank else ".reshape(())"
    comment = ""
    if entry.element == "int32":
        value, comment = f"{value}.view(np.int32).astype({entry.dtype!a})", "  # its Mat holds int32"
    elif entry.dtype == "bool":
        value, comment = f"{value} != 0", "  # its Mat holds 0.0 and 1.0"
    elif entry.dtype.startswith(("int", "uint")):
        value, comment = f"np.rint({value}).astype({entry.dtype!a})", f"  # {entry.dtype}, its Mat holds floats"
    yield f"    results[{entry.name!a}] = {value}{comment}"


# C++ -------------------------------------------------------------------------------------------------------------


def _cpp(job: _Job, net: EmbeddedNet | None, name: str) -> str:
    inputs = {f"in{i}": mat for i, mat in enumerate(mat for mat in job.inputs if mat.entry.blob)}
    entries = (*job.manifest.inputs, *job.manifest.outputs)
    names = (name for entry in entries for name in (entry.blob, entry.boxes) if name is not None)
    blobs = net.blobs if net else {name: _c(name) for name in names}
    feeds = {mat.entry: _cpp_feed(variable, mat, blobs[mat.entry.blob]) for variable, mat in inputs.items()}
    options, includes = [f"net.opt.{option} = false;" for option in _FP32], list[str]()
    declarations = [data_file("letterbox.cpp.in").rstrip("\n"), ""] if any(map(_letterbox, inputs.values())) else []
    fails = f"net.load_param({_c(job.param)}) != 0 || net.load_model({_c(job.bin)}) != 0"
    if job.tail:
        includes += [f"#define {name.upper()}_TAIL_IMPLEMENTATION", f'#include "{name}.tail.h"', ""]
        includes += ["#include <cstdlib>", "#include <type_traits>"]
    if net:
        includes += [f'#include "{net.name}.id.h"', f'#include "{net.name}.mem.h"']
        for type in net.custom:
            creator = f"{type}_layer_creator"
            declarations.append(f"ncnn::Layer* {creator}(void*); // yours: DEFINE_LAYER_CREATOR({type})")
            options.append(f"net.register_custom_layer({net.name}_id::TYPE_{type}, {creator});")
        # ncnn returns the number of bytes that it has read.
        loads = ((load, f"{net.name}_{array}") for load, array in (("load_param", "param_bin"), ("load_model", "bin")))
        fails = " || ".join(f"net.{load}({array}) != {array}_size" for load, array in loads)
    if job.loop:
        body = _cpp_loop(job.loop, feeds, blobs, [(blobs[a], blobs[b]) for a, b in job.manifest.caches])
    else:
        codes = {dim: member for variable, mat in inputs.items() for dim, member in _cpp_sizes(mat, variable)}
        body = [*_cpp_run(job, feeds.values(), blobs, codes, name)]
    blocks = {"options": [f"    {line}" for line in options], "includes": includes, "declarations": declarations}
    # A tail takes arrays without gaps; channels and images of a Mat are aligned to 16 bytes or more.
    append = data_file("append.cpp.in") + "\n" if job.tail else ""
    return _filled(data_file("program.cpp.in"), {**blocks, "body": body}, fails=fails, tail=append)


def _cpp_run(
    job: _Job, feeds: Iterable[list[str]], blobs: Mapping[str, str], codes: Mapping[str, str], name: str
) -> Iterator[str]:
    """Yield the lines of one run: make and feed the inputs, check their sizes, read the outputs, and call the tail."""
    yield "    ncnn::Extractor ex = net.create_extractor();"
    for lines in feeds:
        yield from ("", *lines)
    for condition, problem in _unfit(job.manifest, codes):
        yield from ("", f"    if ({cpp_size(condition)})", f"        return fputs({_c(problem)}, stderr), 1;")
    for number, entry in enumerate(job.manifest.outputs):
        is_read = job.manifest.tail is not None and entry.name in job.manifest.tail.inputs
        boxes = blobs[entry.boxes] if entry.boxes else ""
        yield from ("", *_cpp_fetch(f"out{number}", entry, blobs[entry.blob], boxes, is_read=is_read))
    if job.tail:
        variables = {entry.name: f"out{number}" for number, entry in enumerate(job.manifest.outputs)}
        yield from ("", *cpp_call(job.manifest, job.tail, name, variables, codes))


def _prompt(loop: StepInputs) -> str:
    return "1, 2, 3" if loop.fixed is None else "1"


def _cpp_loop(
    loop: StepInputs, feeds: Mapping[Entry, list[str]], blobs: Mapping[str, str], caches: Sequence[tuple[str, str]]
) -> list[str]:
    """Return the lines of a greedy loop; `feeds` has the lines that make each input, and two lines that feed it."""
    assert loop.scores is not None
    checks = [f"        if (length + count > {loop.most}) // the model has no more positions", "            break;"]
    blocks = {
        "others": [line for entry in loop.others for line in ("", *feeds[entry][:-2])],
        "checks": checks if loop.most else [],
        "feeds": [line for i, (entry, lines) in enumerate(feeds.items()) for line in _cpp_step(loop, i, entry, lines)],
    }
    past, present = (", ".join(names) for names in zip(*caches, strict=True))
    words = {
        "kind": "const char*" if blobs[loop.scores.blob].startswith('"') else "const int",
        "past": past,
        "present": present,
        "count": str(len(caches)),
        "prompt": _prompt(loop),
        "scores": blobs[loop.scores.blob],
    }
    return _filled(data_file("loop.cpp.in"), blocks, **words).splitlines()


def _cpp_step(loop: StepInputs, number: int, entry: Entry, lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines that make an input in each step of a loop, and feed it."""
    if entry not in loop.others:
        size = "length + count" if entry == loop.mask else "count"
        rows = ", 1" * (len(entry.shape) - (entry.batch_axis is not None) - 1)
        yield f"        ncnn::Mat in{number}({size}{rows}); // {_plain(entry)}"
    if entry == loop.mask:
        yield f"        in{number}.fill({'1' if entry.element == 'int32' else '1.f'});"
    elif entry not in loop.others:
        yield "        for (int i = 0; i < count; i++)"
        yield f"            ((int*)in{number})[i] = {'ids[i]' if entry == loop.ids else 'length + i'};"
    yield from (f"    {line}" for line in lines[-2:])


def _cpp_sizes(mat: _Mat, name: str) -> Iterator[tuple[str, str]]:
    """Yield each dynamic size of an input, and the Mat's member that has it."""
    axes = iter(AXES[len(mat.dims)])
    for axis, dim in enumerate(mat.entry.shape):
        member = "n" if axis == mat.entry.batch_axis else next(axes)
        if isinstance(dim, str):
            yield dim, f"{name}.{member}" if member != "n" or mat.batch > 1 else "1"  # older ncnn has no n


def _cpp_feed(name: str, mat: _Mat, blob: str) -> list[str]:
    sizes = ", ".join(f"{dim} = {size}" for dim, size in zip(AXES[len(mat.dims)], mat.dims, strict=True))
    if mat.entry.batch_axis is not None:
        sizes += f", n = {mat.batch} (axis {mat.entry.batch_axis})"
    lines = [f"// {mat.text}", f"// Mat: {sizes}"]
    dims = zip(mat.entry.shape, mat.shape, strict=True)
    if dynamic := [f"{'?' if dim is None else _plain(dim)} = {size}" for dim, size in dims if not isinstance(dim, int)]:
        lines.append(f"// dynamic, other sizes will do: {', '.join(dynamic)}")
    lines += _cpp_image(name, mat) if mat.is_image else _cpp_fill(name, mat)
    return [f"    {line}" for line in (*lines, *cpp_piece("input", blob=blob, mat=name))]


def _cpp_image(name: str, mat: _Mat) -> list[str]:
    channels, height, width = mat.dims
    kind = "PIXEL_RGB" if channels == 3 else "PIXEL_GRAY"
    other = "PIXEL_BGR2RGB for OpenCV's" if channels == 3 else "PIXEL_BGR2GRAY for OpenCV's"
    if mat.entry.image is not None and mat.entry.image.bgr and channels == 3:
        kind, other = "PIXEL_BGR", "as OpenCV has them"
    words = {"mat": name, "channels": channels, "height": height, "width": width, "kind": kind}
    lines = cpp_piece("image", other=other, **words)
    if image := _letterbox(mat):
        lines += cpp_piece("letterboxed image", border=image.letterbox, **words)
    else:
        lines += cpp_piece("resized image", **words)
    if mat.entry.image is not None:
        return [*lines, "// the net itself subtracts the mean and divides"]
    mean, norm = ", ".join(["0.f"] * channels), ", ".join(["1 / 255.f"] * channels)
    return lines + cpp_piece("normalized pixels", mean=mean, norm=norm, **words)


def _cpp_fill(name: str, mat: _Mat) -> list[str]:
    kind = "int" if mat.is_integer else "float"
    batch = f", (size_t)4u, 1, {mat.batch}" if mat.batch > 1 else ""
    order = "the model's order" if mat.entry.batch_axis in (None, 0) else f"axis {mat.entry.batch_axis} outermost"
    dtype = f", {_plain(mat.entry.dtype)} as int" if mat.is_integer else ""
    lines = cpp_piece(
        "array",
        mat=name,
        kind=kind,
        count=math.prod(mat.shape),
        value="1" if mat.entry.dtype == "bool" else "0" if mat.is_integer else "0.5f",
        order=order + dtype,
        sizes=", ".join(map(str, reversed(mat.dims))) + batch,
    )
    # Channels and images of a Mat are aligned to 16 bytes or more, so there may be gaps: copy them one by one.
    planes = mat.dims[0] if len(mat.dims) > 2 else 1
    loops = [(index, count) for index, count in (("b", mat.batch), ("q", planes)) if count > 1]
    for depth, (index, count) in enumerate(loops):
        lines.append("    " * depth + f"for (int {index} = 0; {index} < {count}; {index}++)")
    plane = name + ".batch(b)" * (mat.batch > 1) + ".channel(q)" * (planes > 1)
    copy = cpp_piece("copy to a plane", mat=name, kind=kind, plane=plane, size=math.prod(mat.dims) // planes)
    return lines + ["    " * (len(loops) - 1) + line for line in copy]


def _cpp_fetch(name: str, entry: Entry, blob: str, boxes: str, *, is_read: bool = False) -> list[str]:
    """Return the lines that extract an output and print it, unless the tail reads it; first its `boxes`, if it has."""
    mat = _Mat(entry, ())
    kind, content, form, element = "float", "floats", "%g", "p[i]"
    if entry.element == "int32":
        kind, content, form = "int", "int32", "%d"
    elif mat.is_integer:
        content, form, element = f"floats of the values of {_plain(entry.dtype)}", "%ld", "std::lround(p[i])"
    dims = ", ".join(AXES[len(entry.shape) - (entry.batch_axis is not None) or 1])
    dims += "" if entry.batch_axis is None else f", n is axis {entry.batch_axis}"
    lines = cpp_piece("output", text=mat.text, dims=dims, content=content, mat=name)
    lines += cpp_piece("extract boxes" if boxes else "extract", mat=name, blob=blob, boxes=boxes)
    # ncnn has batches since 2026; programs with one image work in older releases too.
    is_batched = entry.batch_axis is not None and entry.shape[entry.batch_axis] != 1
    batch = ".batch(b)" if is_batched else ""
    loops = cpp_piece("print an output", mat=name, batch=batch, kind=kind, form=form, element=element)
    if is_batched:
        loops = [f"for (int b = 0; b < {name}.n; b++)", *(f"    {line}" for line in loops)]
    return [f"    {line}" for line in (*lines, *([] if is_read else [*loops, 'printf("\\n");']))]


def _c(text: str) -> str:
    """Return a string literal of C."""
    escaped = "".join(
        chr(byte) if (chr(byte).isalnum() and byte < 128) or chr(byte) in " _./:-+" else f"\\{byte:03o}"
        for byte in text.encode(errors="surrogateescape")  # a path may have any bytes
    )
    return f'"{escaped}"'
