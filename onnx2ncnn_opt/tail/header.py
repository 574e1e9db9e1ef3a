"""Generation of a C++ header with one function for a tail, from the table of tail operators."""

import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from importlib.resources import files
from string import Template
from typing import Any, get_args

import numpy as np

from onnx2ncnn_opt.tail.program import Node, Program
from onnx2ncnn_opt.tail.registry import TailOp

_WIDTH = 116
_C_TYPES = {"float32": "float", "float64": "double", "float16": "Half", "bool": "Bool"}


def header(program: Program, name: str) -> str:
    """Return the text of NAME.tail.h."""
    ids = {"": -1}
    for value in program.types:
        ids[value] = len(ids) - 1
    lines = list(_setup(program, ids))
    for number, node in enumerate(program.nodes, 1):
        first, count = len(ids) - 1, len(node.outputs) if node.op.makes_list else len(node.op.results)
        ids |= {f"{number}.{i}": first + i for i in range(count)}
        guards = "".join(f"{'' if is_true else '!'}holds(t, v[{ids[name]}]) && " for name, is_true in node.guards)
        lines.append(f"if ({guards}!{_call(program, node, ids, first)}) return {number};")
        lines += [f"v[{ids[value]}] = v[{first + i}];" for i, value in enumerate(node.outputs) if value]
    results = [port.name for port in program.outputs]
    lines += [f"if (!output<{_c_type(program.types[x])}>(t, v[{ids[x]}])) return -1;" for x in dict.fromkeys(results)]
    used = dict.fromkeys(node.op.cpp for node in program.nodes)
    plain, longest = c_name(name), max([64, *(len(node.outputs) for node in program.nodes)])  # of Split's sizes
    return Template(files(__package__).joinpath("tail.h.in").read_text(encoding="utf-8")).substitute(
        title=comment(f"{name}: what follows the net, as one function"),
        name=plain,
        NAME=plain.upper(),
        longest=longest,
        longer=longest + 1,
        n_inputs=len(program.inputs),
        n_outputs=len(program.outputs),
        inputs="".join(f"//   {comment(port)}\n" for port in program.inputs),
        outputs="".join(f"//   {comment(port)}\n" for port in program.outputs),
        table="\n".join(f"//   {i}: {comment(node)}" for i, node in enumerate(program.nodes, 1)),
        operators="\n".join(used),
        run="\n".join(f"    {line}" for line in lines),
        results=", ".join(str(ids[name]) for name in results),
        values=len(ids),
    )


def c_name(name: str) -> str:
    """Return the prefix of the names in a header."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{plain}" if plain[:1].isdigit() else plain


def _setup(program: Program, ids: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines that create views of constants and inputs."""
    for number, port in enumerate(program.inputs):
        sizes = [size if isinstance(size, int) else -1 for size in port.shape]
        yield f"static const i64 in{number}[] = {{{', '.join(map(str, sizes or [0]))}}};"
        yield f"if (!input(v[{ids[port.name]}], inputs[{number}], {len(sizes)}, in{number})) return -2;"
    for name, array in program.constants.items():
        number, kind = ids[name], _c_type(array.dtype.name)
        values = ", ".join(_literal(value, array.dtype) for value in array.ravel().tolist()) or f"{kind}(0)"
        yield from textwrap.wrap(
            f"static const {kind} c{number}[] = {{{values}}};", _WIDTH, break_long_words=False, break_on_hyphens=False
        )
        yield f"static const i64 s{number}[] = {{{', '.join(map(str, array.shape or [0]))}}};"
        yield f"v[{number}] = constant(c{number}, {array.ndim}, s{number});"


def _call(program: Program, node: Node, ids: Mapping[str, int], first: int) -> str:
    op, letters = node.op, program.letters(node, program.types)
    views = [f"v[{ids[name]}]" if name else "absent()" for name in node.inputs]
    fixed = [*views, *["absent()"] * (len(op.inputs) - len(views))]
    arguments = [f"v[{first + i}]" for i in range(len(op.results))] if not op.makes_list else [f"v + {first}"]
    if op.variadic:
        arguments += [str(len(views)), f"std::initializer_list<View>{{{', '.join(views)}}}.begin()"]
    else:
        for view, item, name in zip(fixed, op.inputs, [*node.inputs, *[""] * len(op.inputs)], strict=False):
            kind = _c_type(program.types[name]) if name else "i64"
            arguments.append(f"ints<{kind}>(t, {view})" if item.is_list else view)
    for key, (hint, default) in op.attributes.items():
        if key not in ("to", "saturate", "round_mode", "mode") or len(get_args(hint)) > 1:
            arguments.append(_attribute(op, key, node.attributes.get(key, default)))
    kinds = dict.fromkeys(
        kind.letter
        for kind in (*(item.kind for item in op.inputs), *([op.variadic.kind] if op.variadic else ()), *op.results)
        if kind.is_parameter
    )
    types = ", ".join(_c_type(letters[letter]) for letter in kinds)
    return f"{op.symbol}{f'<{types}>' if types else ''}(t, {', '.join(arguments)})"


def _attribute(op: TailOp, key: str, value: Any) -> str:
    if "list" in str(op.attributes[key][0]):
        return "Ints()" if value is None else f"Ints{{true, {len(value)}, {{{', '.join(map(str, value[:64]))}}}}}"
    if isinstance(value, str):
        return f'"{value}"'
    return "none" if value is None else f"{value}LL" if isinstance(value, int) else repr(value)


def _literal(value: float, dtype: np.dtype[Any]) -> str:
    suffix = {"float32": "f", "int64": "LL", "uint64": "ULL"}.get(dtype.name, "")
    text = f"{dtype.type(value)}{suffix}" if dtype.kind == "f" else f"{int(value)}{suffix}"
    if dtype.kind == "f" and not math.isfinite(value):
        text = "NAN" if value != value else "INFINITY" if value > 0 else "-INFINITY"
    return f"{_c_type(dtype.name)}({text})" if dtype.name in ("float16", "bool") else text


def _c_type(dtype: str) -> str:
    return _C_TYPES.get(dtype, f"{dtype}_t")


def comment(text: object) -> str:
    """Return a text from a model in a form that cannot end a comment."""
    return ascii(str(text))[1:-1].replace("\\", "/")
