"""Layer types: their parameters, weights and blob counts, as the table in `layers.py` states them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, IntEnum, auto
from functools import cached_property, partial
from math import prod
from operator import eq, ge, gt, itemgetter, lt, ne
from typing import Any, Literal, NamedTuple, Protocol, cast

from onnx2ncnn_opt.errors import GraphError
from onnx2ncnn_opt.ir import codes

Codes = type[IntEnum]  # an enum of `codes.py`
Kind = Literal["int", "float", "int[]", "float[]", "string"]


class Params(Protocol):
    """The parameters of a layer, with their defaults."""

    def __getitem__(self, name: str, /) -> Any: ...


Predicate = Callable[[Params], bool]
Term = Callable[[Params], Any]  # a quantity of a layer

SHAPE_HINTS_ID = 30
FEATMASK_ID = 31
MAX_PARAM_ID = 31
CUSTOM = -1


class Trait(Flag):
    """A property of a layer type that holds for all its parameters.

    ELEMENTWISE: one input and one output. Each output element is the same function of the input element at its index,
    so the shape and the order of elements do not matter. MOVES: every element of an output is an element of an input.
    VIEW: one input and one output with the same elements, in another shape or with permuted axes; implies MOVES.
    SHARES: the outputs are the memory of the inputs; implies MOVES.
    """

    NONE = 0
    ELEMENTWISE = auto()
    MOVES = auto()
    _VIEWED = auto()
    _SHARED = auto()
    VIEW = MOVES | _VIEWED
    SHARES = MOVES | _SHARED


@dataclass(frozen=True)
class Param:
    """One parameter: its id in .param files, its kind, and the default, which may follow another parameter."""

    id: int
    name: str
    kind: Kind
    default: Any
    follows: str | None = None  # the parameter whose value is the default
    codes: Codes | None = None  # the meanings of its numbers

    @cached_property
    def is_plain(self) -> bool:
        """True if the default does not depend on other parameters."""
        return self.follows is None and not callable(self.default)

    def default_in(self, params: Params) -> Any:
        """Return the default, given the other parameters of a layer."""
        if self.follows is not None:
            return params[self.follows]
        return self.default(params) if callable(self.default) else self.default


class WeightSpec(NamedTuple):
    """One weight block: the number of elements, whether a 4-byte tag precedes it, and the condition of its presence."""

    name: str
    count: Callable[[Params], int]
    tagged: bool | Predicate = False
    when: Predicate | None = None
    packed: bool = False  # raw bytes of a block-quantised weight; count is in bytes

    def present(self, params: Params) -> bool:
        """Return whether a layer with these parameters has the block in its .bin."""
        return self.when is None or bool(self.when(params))

    def is_tagged(self, params: Params) -> bool:
        """Return whether the block starts with a tag (ncnn's load type 0)."""
        return self.tagged(params) if callable(self.tagged) else self.tagged


@dataclass(frozen=True)
class LayerSpec:
    """One ncnn layer type.

    `inputs` and `outputs` are (least, most) blob counts, None for any number; `one_blob_only` says for given
    parameters whether ncnn demands exactly one blob on either side. `bounds` are the limits of all output elements,
    which are NaN only if an input has a NaN; None for no limits. `half` names the parameters and weights that are fp16
    on ARM or GPUs, in addition to the weights of products and the parameters of activations.
    """

    type: str
    index: int  # position in ncnn's registry, the type's number in .param.bin files; CUSTOM for a type outside it
    params: tuple[Param, ...] = ()
    weights: tuple[WeightSpec, ...] = ()
    inputs: tuple[int, int | None] = (1, 1)
    outputs: tuple[int, int | None] = (1, 1)
    one_blob_only: Predicate | bool = True
    inplace: bool = False
    traits: Trait = Trait.NONE
    bounds: tuple[float, float] | None = None
    half: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, Param]:
        """The parameters by name, the two that every layer has included."""
        return {p.name: p for p in (*self.params, *COMMON_PARAMS)}

    @cached_property
    def by_id(self) -> Mapping[int, Param]:
        """The parameters by id, the two that every layer has included."""
        return {p.id: p for p in (*self.params, *COMMON_PARAMS)}

    @cached_property
    def enums(self) -> Mapping[str, Codes]:
        """The meanings of parameters' numbers, by the parameters' names."""
        return {p.name: p.codes for p in self.params if p.codes is not None}

    @property
    def is_custom(self) -> bool:
        """True if ncnn's own registry lacks the type."""
        return self.index == CUSTOM

    @property
    def has_activation(self) -> bool:
        """True if an activation may be fused into the layer."""
        return "activation_type" in self.by_name

    def is_one_blob_only(self, params: Params) -> bool:
        """Return whether ncnn accepts only one input and one output."""
        return self.one_blob_only(params) if callable(self.one_blob_only) else self.one_blob_only


COMMON_PARAMS = (Param(SHAPE_HINTS_ID, "shape_hints", "int[]", ()), Param(FEATMASK_ID, "featmask", "int", 0))
COMMON_BY_NAME: Mapping[str, Param] = {param.name: param for param in COMMON_PARAMS}


def choose(sizes: Sequence[int], code: int, name: str) -> int:
    """Return the size for a parameter's code; GraphError for an unknown code."""
    if not 0 <= code < len(sizes):
        raise GraphError(f"{name} has the code {code}, which is none of 0 to {len(sizes) - 1}")
    return sizes[code]


_PARAM = re.compile(r"(\d+) (\w+)(?::(int\[\]|float\[\]|string|[A-Z]\w+))?(?:=(\S+))?")
_WEIGHT = re.compile(r"(\w+)([*!]?)=([\w*]+)(?: if (.+))?")
_CONDITION = re.compile(r"(\w+)(?:(<|>=|>|==|!=)([-\w|]+))?")
_COMPARISONS = {"<": lt, ">": gt, ">=": ge, "==": eq, "!=": ne}


def parse_params(text: str, computed: Mapping[str, Callable[[Params], Any]] | None = None) -> tuple[Param, ...]:
    """Parse parameters in the table's notation: ``id name[:kind][=default]``, separated by commas.

    A kind is int[], float[], string, or an enum of `codes.py` (an int). A default with a point or an exponent makes a
    float parameter. A word is another parameter, whose value is the default. Without a default it is 0, or an empty
    array or string. `computed` holds the defaults that are formulas.
    """
    params = []
    for entry in filter(None, map(str.strip, text.split(","))):
        match = _PARAM.fullmatch(entry)
        assert match, f"bad parameter notation {entry!r}"
        number, name, written_kind, default = match.groups()
        enum = getattr(codes, written_kind) if written_kind and written_kind[0].isupper() else None
        kind = cast(Kind, "int" if enum else written_kind or "int")
        follows = None
        value: Any = 0
        if computed and name in computed:
            kind, value = ("float" if default == "0.0" else "int"), computed[name]
        elif kind != "int":
            value = "" if kind == "string" else ()
        elif default is None:
            pass
        elif default[0].isalpha():
            follows, value = default, None
        elif re.search(r"[.e]", default):
            kind, value = "float", float(default)
        else:
            value = int(default)
        params.append(Param(int(number), name, kind, value, follows, enum))
    return tuple(params)


def parse_weights(text: str, terms: Mapping[str, Term] | None = None) -> tuple[WeightSpec, ...]:
    """Parse weights in the table's notation: ``name=count[ if condition]``, separated by commas.

    A * after the name means a tag, a ! raw bytes. `count` is a product of numbers, parameters and `terms`, which are
    functions of the parameters: ``p0*9``. `condition` lists parameters and terms that are not 0, and comparisons with
    numbers or other parameters: ``bias_term and dynamic_weight==0``. ``1|101`` is one of several numbers.
    """
    named = terms or {}
    specs = []
    for entry in filter(None, map(str.strip, text.split(","))):
        match = _WEIGHT.fullmatch(entry)
        assert match, f"bad weight notation {entry!r}"
        name, mark, count, condition = match.groups()
        factors = [_value(word, named) for word in count.split("*")]
        tests = [_test(text, named) for text in condition.split(" and ")] if condition else []
        when = partial(_all_hold, tests) if tests else None
        specs.append(WeightSpec(name, partial(_product, factors), mark == "*", when, packed=mark == "!"))
    return tuple(specs)


def _value(word: str, terms: Mapping[str, Term]) -> Term:
    """Return the function from parameters to the value of a number, a term or a parameter."""
    if word.lstrip("-").isdecimal():
        number = int(word)
        return lambda params: number
    return terms.get(word, itemgetter(word))


def _product(factors: Sequence[Term], params: Params) -> int:
    return prod(factor(params) for factor in factors)


def _test(condition: str, terms: Mapping[str, Term]) -> Predicate:
    match = _CONDITION.fullmatch(condition)
    assert match, f"bad condition notation {condition!r}"
    value, compare = _value(match[1], terms), _COMPARISONS[match[2] or "!="]
    others = [_value(word, terms) for word in (match[3] or "0").split("|")]
    return lambda params: any(compare(value(params), other(params)) for other in others)


def _all_hold(tests: Sequence[Predicate], params: Params) -> bool:
    return all(test(params) for test in tests)
