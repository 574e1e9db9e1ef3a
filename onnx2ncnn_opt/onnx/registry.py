"""The registry of operator importers: a Python function's signature is the operator's schema. Plug-ins can add more.

Positional parameters are the operator's inputs, keyword-only parameters its attributes with ONNX's defaults. A
parameter of either kind can be a NamedTuple with a field for each input or attribute. Each input is checked against
its annotation before the function runs:

    x: Tensor             a tensor that exists at run time (a constant becomes a MemoryData blob)
    w: Array              must be constant; arrives as numpy array
    axes: Ints            must be constant integers
    shape: Sizes          integers known up to symbolic sizes
    v: Value              a tensor, constant or not
    c: Constant           must be constant; arrives with shape and type
    s: TensorSequence     a sequence of tensors
    i: Item               any of these, or a SymbolicTensor
    *xs: Value            all further inputs
    b: Array | None = None   may be absent

An operator may have several importers, each `since` an opset; the newest one that is not newer than the model's opset
is used. A function that is registered for several opsets lists `later` parameters: attributes that the operator does
not have there, and inputs that are attributes there.
`onnx2ncnn_opt.onnx.ops` imports all importers, and finds the one for a node.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import islice
from operator import or_
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from onnx2ncnn_opt.onnx import items as rules
from onnx2ncnn_opt.onnx.items import ItemRule

Importer = Callable[..., Any]
F = TypeVar("F", bound=Importer)
Axes = Literal["each", "same"]
Errors = Literal["none", "result", "one", "input", "gates"]

MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
INT8_ACCURACY = 4  # the accuracy_level of com.microsoft's operators that lets a runtime round operands to 8 bits


class Input(NamedTuple):
    """One input as the importer declares it: its type (see the module) and whether it may be absent."""

    name: str
    type: Any
    optional: bool


class Traits(NamedTuple):
    """The facts about an operator that hold for every implementation; verification uses them to draw meaningful inputs.

    `axes` is "same" if the outputs have the axes of the inputs, aligned at the last one as in broadcasting. It is
    "each" if, in addition, each element depends only on the input elements at the same place. Rounding errors are
    relative to the quantity that `errors` names: "result"; "one" (operators such as Softplus add 1 internally); "input"
    (differences of numbers that may be almost equal); "gates" (functions of sums: the input and 1). "none": no errors.
    """

    moves: tuple[int, ...] | None = ()  # the inputs whose values the outputs have, rearranged (`ALL` of them)
    indexes: Mapping[int, int] | None = None  # the inputs that hold indices along the attribute axis of another one
    domains: Mapping[int, tuple[float, float]] | None = None  # bounds of inputs between which results are finite
    divisor: int | None = None  # an input that the operator divides by
    counts: int | None = None  # an input that, if computed from a mask, has to count all elements of the mask
    selects: bool = False  # it compares its inputs, or picks one of them
    jumps: bool = False  # the last bit of an input may decide the result, as in comparisons and rounding
    quantises: bool = False  # it rounds to few bits, so all later results show the rounding
    keeps_zeros: bool = False  # its result is 0 exactly where its input is 0
    axes: Axes | None = None
    items: ItemRule | None = None  # the rule for the items of a batch (`onnx/items.py`), unless `axes` implies it
    errors: Errors = "result"
    folds: bool = False  # folded if all inputs are constant: onnx.reference agrees with ONNX Runtime

    def moves_input(self, index: int) -> bool:
        """Return True if the outputs have the values of this input."""
        return self.moves is ALL or index in self.moves


ALL = None  # as `moves`


@dataclass(frozen=True, eq=False)
class OnnxOp:
    """One importer: the operator, the first opset that it reads, and the declared inputs and attributes."""

    name: str
    domain: str
    since: int
    function: Importer
    later: Collection[str]
    batch: int | None
    integers: bool
    traits: Traits
    summary: str

    @property
    def is_foreign(self) -> bool:
        """True if another package registered the operator."""
        return not self.function.__module__.startswith("onnx2ncnn_opt.")

    @property
    def qualified_name(self) -> str:
        """See `qualified`."""
        return qualified(self.domain, self.name)

    @cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        _, *declared = inspect.signature(self.function).parameters.values()
        attribute = inspect.Parameter.KEYWORD_ONLY
        kept = (p for p in declared if p.name not in self.later or p.kind is not attribute)
        return [p.replace(kind=attribute) if p.name in self.later else p for p in kept]

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return get_type_hints(self.function)

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """The fixed inputs, in order; those of a group `x` are named after it, as x, x_scale, unless it is `inputs`."""
        declared: dict[str, Any] = {}
        for name, hint in self._fixed.items():
            fields = get_type_hints(hint) if _is_group(hint) else {name: hint}
            if name != "inputs":
                fields = {f"{name}_{field}" if i else name: part for i, (field, part) in enumerate(fields.items())}
            declared |= fields
        return tuple(Input(name, *_optional(hint)) for name, hint in declared.items())

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        fixed = (p.name for p in self._parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return {name: self._hints[name] for name in fixed}

    def grouped(self, arguments: Iterable[Any]) -> list[Any]:
        """Return an argument for each parameter: those of a group's inputs become one NamedTuple."""
        rest = iter(arguments)
        hints = self._fixed.values()
        return [*(hint(*islice(rest, len(hint._fields))) if _is_group(hint) else next(rest) for hint in hints), *rest]

    @cached_property
    def variadic(self) -> Any | None:
        """The type of all further inputs, None if the function takes no more."""
        return next((self._hints[p.name] for p in self._parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)

    @property
    def unannotated(self) -> str | None:
        """The first input without a type annotation."""
        inputs = (p for p in self._parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY)
        return next((p.name for p in inputs if p.annotation is inspect.Parameter.empty), None)

    @cached_property
    def groups(self) -> dict[str, Any]:
        """The parameters that are NamedTuples of attributes."""
        names = (p.name for p in self._parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)
        return {name: self._hints[name] for name in names if _is_group(self._hints.get(name))}

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """Attribute names and defaults; `inspect.Parameter.empty` marks a required attribute."""
        defaults = {p.name: p.default for p in self._parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        for name, group in self.groups.items():
            del defaults[name]
            defaults |= dict.fromkeys(group._fields, inspect.Parameter.empty) | group._field_defaults
        return defaults


def qualified(domain: str, name: str) -> str:
    """Return an operator's name, with its domain unless that is ONNX's own."""
    return f"{domain}::{name}" if domain else name


# All registered importers by domain and name; each operator's importers are in the order of versions.
OPS: dict[tuple[str, str], list[OnnxOp]] = {}


def onnx_op(
    *names: str,
    domain: str = "",
    since: int = 1,
    later: Collection[str] = (),
    batch: int | None = None,
    integers: bool = False,
    **traits: Any,
) -> Callable[[F], F]:
    """Register a function as the importer of these operators from opset `since` on, without `later` parameters.

    `batch` is the axis of the first input that the operator treats as batch. `integers` allows integer and bool tensors
    at run time; without it they are refused before the function runs. The others are `Traits`.
    """
    facts = Traits(**traits)
    implied = rules.elementwise if facts.axes == "each" else None if batch is None else rules.batch(0, axis=batch)
    facts = facts._replace(items=facts.items or implied, jumps=facts.jumps or facts.quantises)

    def register(function: F) -> F:
        summary = (function.__doc__ or "").strip().partition("\n")[0]
        for name in names:
            versions = OPS.setdefault((domain, name), [])
            versions.append(OnnxOp(name, domain, since, function, later, batch, integers, facts, summary))
            versions.sort(key=lambda op: op.since)
        return function

    return register


def registered(function: object) -> tuple[OnnxOp, ...]:
    """Return the operators for which a function was registered."""
    return tuple(op for versions in OPS.values() for op in versions if op.function is function)


def _is_group(hint: Any) -> bool:
    return hasattr(hint, "_fields")


def _optional(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
        return reduce(or_, (a for a in get_args(hint) if a is not NoneType)), True
    return hint, False
