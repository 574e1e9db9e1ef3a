"""The table of tail operators: NumPy functions, whose signatures are the schemas, and C++ templates.

Positional parameters are the operator's inputs, keyword-only parameters its attributes with ONNX's defaults. An input
may be an attribute in an older opset, such as Squeeze's axes: `read_tail` makes it a constant. The annotation is the
element type of an input; inputs and results with the same letter have the same type:

    x: T                  any type
    x: N, F, I, B, L      a number, a float, an int32 or int64, a bool, an int64
    axes: Ints            int32 or int64; arrives as a list
    b: T | None = None    may be absent
    *xs: T                all further inputs
    -> tuple[T, L]        two results; `-> list[T]`: one for each output of the node
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

_MOST = 2**28  # elements of a result
FLOATS = ("float32", "float64", "float16")
INTS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
ALL = (*FLOATS, *INTS, "bool")


class Kind(NamedTuple):
    """The possible element types of an input or result; types with the same letter are equal."""

    letter: str
    types: tuple[str, ...]

    @property
    def is_parameter(self) -> bool:
        """True if the C++ function has a template parameter for the type."""
        return self.letter not in ("B", "L", "F4", "Ints")


T: TypeAlias = Annotated[NDArray[Any], Kind("T", ALL)]
V: TypeAlias = Annotated[NDArray[Any], Kind("V", ALL)]
N: TypeAlias = Annotated[NDArray[Any], Kind("N", (*FLOATS, *INTS))]
M: TypeAlias = Annotated[NDArray[Any], Kind("M", (*FLOATS, *INTS))]
F: TypeAlias = Annotated[NDArray[Any], Kind("F", FLOATS)]
F4: TypeAlias = Annotated[NDArray[Any], Kind("F4", ("float32",))]
I: TypeAlias = Annotated[NDArray[Any], Kind("I", ("int64", "int32"))]  # noqa: E741
B: TypeAlias = Annotated[NDArray[Any], Kind("B", ("bool",))]
P: TypeAlias = Annotated[NDArray[Any], Kind("P", ("bool",))]
L: TypeAlias = Annotated[NDArray[Any], Kind("L", ("int64",))]
Ints: TypeAlias = Annotated[list[int], Kind("Ints", ("int64", "int32"))]
To: TypeAlias = Annotated[NDArray[Any], Kind("to", ALL)]  # the type that the attribute `to` names

Function = TypeVar("Function", bound=Callable[..., Any])


class Input(NamedTuple):
    """An input of an operator."""

    name: str
    kind: Kind
    optional: bool

    @property
    def is_list(self) -> bool:
        """True if the function takes a list of integers."""
        return self.kind.letter == "Ints"


@dataclass(frozen=True)
class TailOp:
    """One operator: the function, its C++ template, and the defaults of attributes before an opset."""

    name: str
    function: Callable[..., Any]
    symbol: str  # the C++ function
    cpp: str
    source: str = ""  # of a generated function
    broadcasts: bool = False  # the result has the inputs' common shape
    older: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return get_type_hints(self.function, include_extras=True)

    def _inputs_of(self, *kinds: Any) -> tuple[Input, ...]:
        chosen = (p for p in inspect.signature(self.function).parameters.values() if p.kind in kinds)
        return tuple(Input(p.name, _kind(self._hints[p.name]), p.default is None) for p in chosen)

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """The fixed inputs, in order."""
        return self._inputs_of(inspect.Parameter.POSITIONAL_OR_KEYWORD)

    @cached_property
    def variadic(self) -> Input | None:
        """The declaration of all further inputs."""
        return next(iter(self._inputs_of(inspect.Parameter.VAR_POSITIONAL)), None)

    @cached_property
    def attributes(self) -> Mapping[str, tuple[Any, Any]]:
        """The annotation and default of each attribute; `inspect.Parameter.empty` means no default."""
        declared = inspect.signature(self.function).parameters.values()
        return {p.name: (self._hints[p.name], p.default) for p in declared if p.kind is inspect.Parameter.KEYWORD_ONLY}

    @cached_property
    def results(self) -> tuple[Kind, ...]:
        """The kind of each result, or of all of them (see `makes_list`)."""
        hint = self._hints["return"]
        return tuple(map(_kind, get_args(hint))) if get_origin(hint) in (tuple, list) else (_kind(hint),)

    @property
    def makes_list(self) -> bool:
        """True if there is a result for each output of the node."""
        return get_origin(self._hints["return"]) is list

    def declared(self, count: int) -> Sequence[Input]:
        """Return the declarations of `count` inputs. Raises ValueError if the operator does not take this number."""
        extra = count - len(self.inputs)
        needed = sum(not item.optional for item in self.inputs) + (self.variadic is not None)
        if count < needed or (extra > 0 and self.variadic is None):
            raise ValueError(f"it has {count} inputs, and the operator takes {needed} to {len(self.inputs)}")
        return (*self.inputs[:count], *([self.variadic] * extra if self.variadic else ()))

    def run(self, inputs: Sequence[NDArray[Any] | None], attributes: Mapping[str, Any]) -> list[NDArray[Any]]:
        """Return the results; None is an absent input. Raises the errors of NumPy and of the function."""
        shapes = [x.shape for x in inputs if x is not None]
        if self.broadcasts and np.prod(np.broadcast_shapes(*shapes), dtype=float) > _MOST:
            raise ValueError("a result of more than 2**28 elements")
        arguments = [
            x.ravel().tolist() if item.is_list and x is not None else x
            for item, x in zip(self.declared(len(inputs)), inputs, strict=True)
        ]
        result = self.function(*arguments, **attributes)
        return [np.asarray(part) for part in (result if isinstance(result, (tuple, list)) else [result])]

    def types(self, inputs: Sequence[str | None], attributes: Mapping[str, Any], outputs: int) -> dict[str, str]:
        """Return the element type of each letter for the inputs' types. Raises ValueError if they are invalid."""
        if not self.makes_list and outputs > len(self.results):
            raise ValueError(f"it has {outputs} outputs, and the operator has {len(self.results)}")
        if attributes.get("num_outputs", outputs) != outputs:
            raise ValueError(f"it has {outputs} outputs, and num_outputs is {attributes['num_outputs']}")
        types = {"to": attributes["to"]} if "to" in attributes else {}
        for item, dtype in zip(self.declared(len(inputs)), inputs, strict=True):
            if dtype is None:
                if not item.optional:
                    raise ValueError(f"it has no input {item.name}")
            elif dtype not in item.kind.types or (
                not item.is_list and types.setdefault(item.kind.letter, dtype) != dtype
            ):
                raise ValueError(f"its input {item.name} is {dtype}, which the operator does not take here")
        for kind in self.results:
            types.setdefault(kind.letter, kind.types[0])
        return types

    def result_types(self, types: Mapping[str, str], outputs: int) -> list[str]:
        """Return the element type of each output."""
        kinds = self.results * outputs if self.makes_list else self.results
        return [types[kind.letter] for kind in kinds[:outputs]]


# Every tail operator by name.
TAIL_OPS: dict[str, TailOp] = {}


def tail_op(
    cpp: str,
    *names: str,
    source: str = "",
    broadcasts: bool = False,
    older: Mapping[int, Mapping[str, Any]] | None = None,
) -> Callable[[Function], Function]:
    """Register a NumPy function and a C++ template as the operator that is named like the C++ function.

    `names` are several operators; the first one is the name of the C++ function. `older` are defaults of attributes
    before an opset: `{16: {"mode": "old"}}`.
    """
    names = names or (re.findall(r"^.*?\bbool (\w+)\(Tail", cpp, re.M)[-1],)

    def register(function: Function) -> Function:
        for name in names:
            TAIL_OPS[name] = TailOp(name, function, names[0], cpp, source, broadcasts, older or {})
        return function

    return register


def of_source(source: str, cpp: str, space: Mapping[str, Any], **facts: Any) -> None:
    """Register the only function of a source; it may use the names in `space` and the annotations above."""
    space = {**globals(), **space}
    exec(source, space)
    [name] = re.findall(r"^def (\w+)", source)
    tail_op(cpp, source=source, **facts)(space[name])


def _kind(hint: Any) -> Kind:
    """Return the kind of an annotation, or of its union with None."""
    if get_origin(hint) is Annotated:
        kind = get_args(hint)[1]
        assert isinstance(kind, Kind)
        return kind
    return _kind(get_args(hint)[0])
