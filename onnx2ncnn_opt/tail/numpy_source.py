"""A tail as plain NumPy, generated from the table of tail operators."""

import ast
import base64
import builtins
import inspect
import keyword
import re
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.ir.names import NamePool
from onnx2ncnn_opt.tail.program import Program

# Other names in the module of `numpy_program`.
_RESERVED = (
    *("np", "base64", "tail", "_", "ncnn", "load", "feed", "fetch", "run", "PARAM", "BIN"),
    *("place", "letterbox", "to_picture", *dir(builtins)),
)
_MAX_LITERAL = 64  # elements; larger constants are stored in base64


def numpy_program(program: Program) -> str:
    """Return the source of a function `tail` that takes the inputs and returns the outputs by name.

    It needs the module numpy as np, and base64 for large constants.
    """
    sources: dict[str, str] = {}
    for node in program.nodes:
        _add_source(sources, node.op.function, node.op.source)
    pool = NamePool({*sources, *_RESERVED})
    names = {value: pool.take(_identifier(value)) for value in program.types}
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
        is_single = len(results) == 1 and not node.op.makes_list
        target = results[0] if is_single else f"[{', '.join(results)}]"
        guards = " and ".join(f"{'' if is_true else 'not '}{names[name]}.all()" for name, is_true in node.guards)
        otherwise = f" if {guards} else {'None' if is_single else f'[None] * {len(results)}'}" if guards else ""
        lines.append(f"{target} = {node.op.function.__name__}({', '.join(arguments)}){otherwise}")
    used = {word for line in lines for word in re.findall(r"\w+", line)} | {names[x.name] for x in program.outputs}
    constants = [f"{names[x]} = {_array(array)}" for x, array in program.constants.items() if names[x] in used]
    body = textwrap.indent("\n".join(lines or ["pass"]), " " * 8)
    outputs = ", ".join(f"{port.name!a}: np.asarray({names[port.name]})" for port in program.outputs)
    inputs = ", ".join(names[port.name] for port in program.inputs)
    tail = f"def tail({inputs}):\n    with np.errstate(all='ignore'):\n{body}\n    return {{{outputs}}}"
    return "\n\n\n".join(["\n".join(constants), *sources.values(), tail]).lstrip() + "\n"


class _Undecorated(ast.NodeTransformer):
    """A transformer that removes annotations and decorators."""

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
    """Add the source of a function, after the sources of the functions that it calls."""
    if function.__name__ in sources:
        return
    tree = _Undecorated().visit(ast.parse(source or inspect.getsource(function)))
    for item in ast.walk(tree):
        called = function.__globals__.get(item.id) if isinstance(item, ast.Name) else None
        if isinstance(called, FunctionType) and called is not function:
            _add_source(sources, called)
    sources[function.__name__] = ast.unparse(tree)


def _identifier(value: str) -> str:
    name = re.sub(r"\W", "_", value, flags=re.ASCII) or "_"
    return f"v{name}" if name[0].isdigit() or name.startswith("__") or keyword.iskeyword(name) else name


def _array(array: NDArray[Any]) -> str:
    if array.size <= _MAX_LITERAL and (array.dtype.kind != "f" or np.isfinite(array).all()):
        return f"np.array({array.tolist()}, np.{array.dtype.name}).reshape({list(array.shape)})"
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return f'np.frombuffer(base64.b64decode("{data}"), np.{array.dtype.name}).reshape({list(array.shape)})'
