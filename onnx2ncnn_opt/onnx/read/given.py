"""Input sizes given by the caller: equations with the declared sizes. Equal names are equal sizes."""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.dim import Dim, Sym, larger, smaller, symbol

LARGEST_SIZE = 2**31 - 1  # ncnn counts in int
_LONGEST = 1000  # characters of a size; longer ones are not written by people or exporters

# A number, a name or a sum such as ``P+S``, or None (``"?"``) for the model's own size.
GivenSize: TypeAlias = int | str | Sym | None
GivenShapes: TypeAlias = Mapping[str, Sequence[GivenSize]]
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Dim]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def listed_sizes(sizes: Iterable[GivenSize]) -> str:
    """Return sizes in the format of the option --shape."""
    return ",".join("?" if size is None else str(size).replace(" + ", "+") for size in sizes)


def parsed_size(text: str, sizes: Mapping[str, Dim]) -> Dim | None:
    """Return a size written in torch's notation: ``((h + 1)//2)``; None if it uses a name that is not in `sizes`."""
    if text in sizes:
        return sizes[text]
    values = dict(sizes)
    for name in sorted((name for name in sizes if not name.isidentifier()), key=len, reverse=True):
        # dynamo calls a size ``32*H``
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", plain := f"size_{len(values)}_", text)
        values[plain] = sizes[name]
    return _parsed(_tree(text), values)


def given_size(size: GivenSize, symbols: Mapping[str, Dim], where: str) -> Dim | None:
    """Return the caller's size in terms of `symbols` or new names; raise UsageError (begins with `where`) if wrong."""
    if size is None or size == "?":
        return None
    if isinstance(size, str):
        tree = _tree(size)
        names = {} if tree is None else {n.id: symbol(n.id) for n in ast.walk(tree) if isinstance(n, ast.Name)}
        parsed = parsed_size(size if size in symbols else size.strip(), {**names, **symbols})
        if parsed is None:
            raise UsageError(f"{where}: '{size}' is not a size; give a number, a name, a sum such as P+S, or ?")
        size = parsed
    if isinstance(size, Sym):
        return size
    try:
        number = operator.index(size)
    except TypeError:
        raise UsageError(f"{where}: {size!r:.80} is not a size; give a number, a name or None") from None
    if isinstance(size, bool) or not 0 < number <= LARGEST_SIZE:
        raise UsageError(f"{where}: {size} is not a possible size")
    return number


class Equations:
    """The values of symbols, in terms of symbols that have no value yet."""

    def __init__(self, values: Mapping[str, Dim]) -> None:
        self.values: dict[str, Dim] = dict(values)

    def resolved(self, size: Dim) -> Dim:
        """Return the size with all known symbols replaced by their values."""
        while isinstance(size, Sym) and not size.names().isdisjoint(self.values):
            size = size.subs(self.values)
        return size

    def equate(self, declared: Dim, given: Dim) -> bool:
        """Make two sizes equal by solving for one symbol; return False if that is impossible."""
        a, b = self.resolved(declared), self.resolved(given)
        if a == b:
            return True
        for name in [name for size in (a, b) if isinstance(size, Sym) for name in sorted(size.names())]:
            value = _solved(a - b, name)
            if value is not None:
                self.values[name] = value
                return True
        return False


def solved(pairs: Iterable[tuple[Dim, Dim]]) -> dict[str, Dim]:
    """Return the values of symbols that make the sizes of each pair equal; empty if there are none."""
    equations = Equations({})
    are_equal = all(equations.equate(a, b) for a, b in pairs)
    return {name: equations.resolved(symbol(name)) for name in equations.values if are_equal}


def _solved(difference: Dim, name: str) -> Dim | None:
    """Solve ``difference == 0`` for a name: ``a - n - 2`` gives n + 2 for a. Return None if that is not a size."""
    if not isinstance(difference, Sym):
        return None
    k = difference.terms.get((name,), 0)
    rest = difference - symbol(name) * k
    if isinstance(rest, int) and k and rest % k == 0 and -rest // k > 0:  # 2 * n - 16
        return -rest // k
    value = rest * -k
    if abs(k) != 1 or (isinstance(value, Sym) and name in value.names()):
        return None
    return value if all(n > 0 for n in (value.terms.values() if isinstance(value, Sym) else (value,))) else None


@lru_cache(maxsize=256)
def _tree(text: str) -> ast.expr | None:
    if len(text) > _LONGEST:
        return None
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: a zero byte
        return None


def _parsed(tree: ast.expr | None, sizes: Mapping[str, Dim]) -> Dim | None:
    if isinstance(tree, ast.Name):
        return sizes.get(tree.id)
    if isinstance(tree, ast.Constant):
        return tree.value if type(tree.value) is int else None
    function: Callable[[Any, Any], Dim] | None
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):  # -1 + a
        function, operands = operator.sub, [ast.Constant(0), tree.operand]
    elif isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and len(tree.args) == 2:
        function, operands = {"min": smaller, "max": larger}.get(tree.func.id), tree.args
    elif isinstance(tree, ast.BinOp):
        function, operands = _OPERATORS.get(type(tree.op)), [tree.left, tree.right]
    else:
        return None
    a, b = (_parsed(operand, sizes) for operand in operands)
    if function is None or a is None or b is None:
        return None
    if function is operator.floordiv and (b == 0 or (isinstance(a, int) and isinstance(b, Sym))):
        return None
    return function(a, b)
