"""A tail as a C++ header of one function, or as plain NumPy; both are made from the table of tail operators."""

import ast
import base64
import inspect
import keyword
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from string import Template
from types import FunctionType
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.onnx.tail.program import Node, Port, Program
from onnx2ncnn_opt.onnx.tail.registry import TailOp
from onnx2ncnn_opt.report.words import data_file

_WIDTH = 116
_C_TYPES = {"float32": "float", "float64": "double", "float16": "Half", "bool": "Bool"}
# Names that the module of `numpy_program` may have itself.
_TAKEN = ("np", "base64", "tail", "_", "ncnn", "load", "feed", "fetch", "run", "PARAM", "BIN")
_SMALL = 64  # elements of a constant that NumPy programs spell out


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
    plain = c_name(name)
    return Template(data_file("tail.h.in")).substitute(
        title=_comment(f"{name}: what follows the net, as one function"),
        name=plain,
        NAME=plain.upper(),
        n_inputs=len(program.inputs),
        n_outputs=len(program.outputs),
        inputs="".join(f"//   {_comment(port)}\n" for port in map(_port, program.inputs)),
        outputs="".join(f"//   {_comment(port)}\n" for port in map(_port, program.outputs)),
        table="\n".join(f"//   {i}: {_comment(node)}" for i, node in enumerate(program.nodes, 1)),
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
    """Yield the lines that make views of constants and inputs."""
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


def _port(port: Port) -> str:
    return f"{port.name}: {port.dtype} [{', '.join('?' if size is None else str(size) for size in port.shape)}]"


def _comment(text: object) -> str:
    """Return a name from a model in a form that cannot end a comment."""
    return ascii(str(text))[1:-1].replace("\\", "/")


def numpy_program(program: Program) -> str:
    """Return the source of a function `tail` that takes the inputs and returns the outputs by name.

    It needs the module numpy as np, and base64 for large constants.
    """
    sources: dict[str, str] = {}
    for node in program.nodes:
        _add_source(sources, node.op.function, node.op.source)
    names: dict[str, str] = {}
    for value in program.types:
        names[value] = _identifier(value, {*sources, *names.values(), *_TAKEN})
    lines = []
    for node in program.nodes:
        arguments = []
        for item, value in zip(node.op.declared(len(node.inputs)), node.inputs, strict=True):
            listed = str(program.constants[value].ravel().tolist()) if value in program.constants else None
            text = names[value] if value else "None"
            arguments.append((listed or f"np.ravel({text}).tolist()") if item.is_list and value else text)
        arguments += [f"{key}={value!r}" for key, value in node.attributes.items()]
        results = [names.get(value, "_") for value in node.outputs]
        results += ["_"] * (0 if node.op.makes_list else len(node.op.results) - len(results))
        is_one = len(results) == 1 and not node.op.makes_list
        target = results[0] if is_one else f"[{', '.join(results)}]"
        guards = " and ".join(f"{'' if is_true else 'not '}{names[name]}.all()" for name, is_true in node.guards)
        otherwise = f" if {guards} else {'None' if is_one else f'[None] * {len(results)}'}" if guards else ""
        lines.append(f"{target} = {node.op.function.__name__}({', '.join(arguments)}){otherwise}")
    used = {word for line in lines for word in re.findall(r"\w+", line)} | {names[x.name] for x in program.outputs}
    constants = [f"{names[x]} = {_array(array)}" for x, array in program.constants.items() if names[x] in used]
    body = textwrap.indent("\n".join(lines or ["pass"]), " " * 8)
    outputs = ", ".join(f"{port.name!a}: np.asarray({names[port.name]})" for port in program.outputs)
    inputs = ", ".join(names[port.name] for port in program.inputs)
    tail = f"def tail({inputs}):\n    with np.errstate(all='ignore'):\n{body}\n    return {{{outputs}}}"
    return "\n\n\n".join(["\n".join(constants), *sources.values(), tail]).lstrip() + "\n"


class _Plain(ast.NodeTransformer):
    """The removal of annotations and decorators."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list, node.returns = [], None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _add_source(sources: dict[str, str], function: Callable[..., Any], source: str = "") -> None:
    """Add the source of a function, and before it those of the functions that it calls."""
    if function.__name__ in sources:
        return
    tree = _Plain().visit(ast.parse(source or inspect.getsource(function)))
    for item in ast.walk(tree):
        called = function.__globals__.get(item.id) if isinstance(item, ast.Name) else None
        if isinstance(called, FunctionType) and called is not function:
            _add_source(sources, called)
    sources[function.__name__] = ast.unparse(tree)


def _identifier(value: str, taken: Collection[str]) -> str:
    name = re.sub(r"\W", "_", value, flags=re.ASCII) or "_"
    name = f"v{name}" if name[0].isdigit() or keyword.iskeyword(name) else name
    while name in taken:
        name += "_"
    return name


def _array(array: NDArray[Any]) -> str:
    if array.size <= _SMALL and (array.dtype.kind != "f" or np.isfinite(array).all()):
        return f"np.array({array.tolist()}, np.{array.dtype.name}).reshape({list(array.shape)})"
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return f'np.frombuffer(base64.b64decode("{data}"), np.{array.dtype.name}).reshape({list(array.shape)})'
