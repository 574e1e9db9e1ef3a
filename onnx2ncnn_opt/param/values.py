"""Reading and writing ``id=value`` tokens of .param text by ncnn's rules."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import ParamError
from onnx2ncnn_opt.ir.spec import MAX_PARAM_ID, Kind

_ARRAY_ID = -23300  # old style: the key of an array is -23300 - id
_MAX_VALUE_CHARS = 127
MAX_STRING_BYTES = 255
_INT32 = range(-(2**31), 2**31)
_INFINITY = float(np.float32(3.402823e38))
_TOO_LARGE = 2.0**128 - 2.0**103  # rounds to infinity in float32

BLANKS = " \t\v\f"
_INT = re.compile(r"[+-]?[0-9]+", re.ASCII)
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_TOKEN = re.compile(rf'([+-]?[0-9]+)=("[^"]*"|[^{BLANKS}]+)(?:[{BLANKS}]+|$)', re.ASCII)

Value = int | float | str | tuple[int, ...] | tuple[float, ...]


def read_values(text: str, where: str) -> dict[int, Value]:
    """Return the parameters of a layer by id; the last value of a repeated id counts."""
    values: dict[int, Value] = {}
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ParamError(f"{where}: '{excerpt(text[position:])}' is not a parameter like 0=1 or 6=\"0w,1\"")
        position = token.end()
        key, value = token.groups()
        id = int(key) if len(key) <= 16 else MAX_PARAM_ID + 1
        parse = _old_array if id <= _ARRAY_ID else _value
        parsed = parse(value, f"{where}, {key}")
        if id <= _ARRAY_ID:
            id = _ARRAY_ID - id
        if not 0 <= id <= MAX_PARAM_ID:
            raise ParamError(f"{where}: there is no parameter id {excerpt(key)}, ids go from 0 to {MAX_PARAM_ID}")
        values[id] = parsed
    return values


def _value(text: str, where: str) -> Value:
    if text[0] == '"' or (text[0].isascii() and text[0].isalpha()):
        string = text[1:-1] if text[0] == '"' else text
        closed = string == text or (len(text) > 1 and text[-1] == '"' and '"' not in string)
        if not closed or len(string.encode()) > MAX_STRING_BYTES:
            raise ParamError(f"{where}: the string {excerpt(text)} is not closed or has over {MAX_STRING_BYTES} bytes")
        return string
    if "," not in text:
        return _number(text, where)
    elements = text.removesuffix(",").split(",")
    numbers = tuple(_number(element, where) for element in elements)
    if _is_float(elements[0]):
        return tuple(map(float, numbers))
    if any(isinstance(number, float) for number in numbers):
        raise ParamError(f"{where}: the array starts with an integer but goes on with floats; write them all as floats")
    return numbers


def _old_array(text: str, where: str) -> Value:
    count, *elements = text.split(",")
    if not _INT.fullmatch(count) or len(count) > 16 or int(count) != len(elements):
        raise ParamError(f"{where}: the array says '{excerpt(count)}' elements and has {len(elements)}")
    numbers = tuple(_number(element, where) for element in elements)
    if len(set(map(type, numbers))) > 1:
        raise ParamError(f"{where}: ncnn cannot read an array that mixes integers and floats; write them all as floats")
    return numbers


def _is_float(text: str) -> bool:
    return "." in text or "e" in text or "E" in text


def _number(text: str, where: str) -> int | float:
    """Return an integer, or a float that is rounded to float32 through a double, as in ncnn."""
    if len(text) <= _MAX_VALUE_CHARS:
        if not _is_float(text) and _INT.fullmatch(text) and int(text) in _INT32:
            return int(text)
        if _is_float(text) and _FLOAT.fullmatch(text) and abs(float(text)) < _TOO_LARGE:
            return _float32(float(text))
    raise ParamError(f"{where}: '{excerpt(text)}' is not a 32-bit number")


def excerpt(text: str) -> str:
    """Return the beginning of a text, for an error message."""
    return text if len(text) <= 60 else f"{text[:60]}..."


def as_kind(kind: Kind, value: Value) -> Value | None:
    """Return the value that ncnn reads for a parameter of this kind; None if ncnn takes the default."""
    if kind == "string":
        return value if isinstance(value, str) else None
    if kind in ("int", "float"):
        if isinstance(value, (str, tuple)):
            return None
        return _float32(value) if kind == "float" else value if isinstance(value, int) else None
    if not isinstance(value, tuple):
        return None
    if kind == "float[]":
        return tuple(_float32(element) for element in value)
    return value if all(isinstance(element, int) for element in value) else None


def _float32(value: float) -> float:
    return float(np.float32(value))


def format_value(id: int, kind: Kind | None, value: Any) -> str:
    """Return an ``id=value`` token; ValueError if the format cannot express it."""
    kind = kind or kind_of(value)
    writers: dict[str, Callable[[Any], str]] = {"string": _string_text, "int": _int_text, "float": float_text}
    if kind in writers:
        return f"{id}={writers[kind](value)}"
    if isinstance(value, str) or not isinstance(value, (Sequence, np.ndarray)):
        raise ValueError("not an array")
    elements = map(writers[kind.removesuffix("[]")], value)
    return f"{_ARRAY_ID - id}=" + ",".join((str(len(value)), *elements))


def kind_of(value: Any) -> Kind:
    """Return the kind of a parameter that the table does not know."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, (Sequence, np.ndarray)):
        return "float[]" if "float" in map(kind_of, value) else "int[]"
    return "float" if isinstance(value, (float, np.floating)) else "int"


def _int_text(value: Any) -> str:
    if not isinstance(value, (int, np.integer)) or int(value) not in _INT32:
        raise ValueError("not a 32-bit integer")
    return str(int(value))


def _string_text(value: Any) -> str:
    if not isinstance(value, str) or len(value.encode()) > MAX_STRING_BYTES or re.search(r"[\0\n\r]", value):
        raise ValueError(f"not a string of at most {MAX_STRING_BYTES} bytes on one line")
    if '"' not in value:
        return f'"{value}"'
    # The format has no escape for a quote, but a word may contain one.
    if value[0].isascii() and value[0].isalpha() and not re.search(rf"[{BLANKS}]", value):
        return value
    raise ValueError("ncnn cannot read a string with both quotes and blanks")


def stored_float(value: Any) -> float:
    """Return the float32 to write for a value: for an infinity, the largest number that every ncnn can read.

    Raises ValueError for values that are not numbers, and for NaN, which ncnn reads as a string.
    """
    if not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError("not a number")
    with np.errstate(over="ignore"):
        number = np.float32(value)
    if np.isnan(number):
        raise ValueError("NaN cannot be written")
    return math.copysign(_INFINITY, number) if np.isinf(number) else float(number)


def float_text(value: float) -> str:
    """Return the shortest text that ncnn reads as `stored_float(value)`."""
    number = np.float32(stored_float(value))
    text = np.format_float_scientific(number, unique=True, trim="-", exp_digits=1).replace("e+", "e")
    plain = np.format_float_positional(number, unique=True, trim="0")
    # Older parsers hold the digits on each side of the point in a 32-bit integer.
    whole, _, fraction = plain.lstrip("-").partition(".")
    return plain if len(plain) <= len(text) + 2 and len(whole) <= 9 and len(fraction) <= 9 else text
