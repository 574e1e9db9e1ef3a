"""ncnn's expressions for dynamic sizes in terms of the sizes of a layer's inputs, such as ``*(0w,2)``."""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce

from onnx2ncnn_opt.ir.dim import AXES, Call, Dim, Sym, exact_div
from onnx2ncnn_opt.ir.graph import Blob

LONGEST_TEXT = 255  # characters of a string parameter


class SizeWriter:
    """Writes sizes in terms of the sizes of a layer's first input, and of further inputs `others` from `sources`."""

    def __init__(self, blob: Blob | None, sources: Callable[[], Iterator[Blob]], *, whole_batch: bool) -> None:
        self._own = {} if blob is None else _tokens(blob, 0)
        if blob is not None and whole_batch:
            self._own.setdefault(blob.batch, "0n")
        self._sources = sources
        self.others: list[Blob] = []

    def text(self, size: Dim) -> str:
        """Return the expression of a size."""
        if isinstance(size, int):
            return str(size)
        direct = _ratio(size, self._own)
        if direct is not None:
            return direct
        first, *rest = sorted(size.terms.items(), key=lambda term: term[1] < 0)  # positive terms first
        text = self._term(*first)
        for factors, k in rest:
            text = f"{'+' if k > 0 else '-'}({text},{self._term(factors, abs(k))})"
        return text

    def _term(self, factors: tuple[str | Call, ...], k: int) -> str:
        texts = [self._factor(factor) for factor in factors]
        if k != 1 or not texts:
            texts.append(str(k))
        return reduce(lambda a, b: f"*({a},{b})", texts)

    def _factor(self, factor: str | Call) -> str:
        size = Sym({(factor,): 1})
        direct = _ratio(size, self._own)
        if direct is not None:
            return direct
        if isinstance(factor, Call):
            return f"{factor.operator}({self.text(factor.a)},{self.text(factor.b)})"
        for blob in self._sources():
            others = self.others if blob in self.others else [*self.others, blob]
            direct = _ratio(size, _tokens(blob, others.index(blob) + 1))
            if direct is not None:
                self.others = others
                return direct
        raise UnknownSize(factor)


class UnknownSize(Exception):
    """Raised for a size that does not follow from the sizes of any blob."""


def _tokens(blob: Blob, index: int) -> dict[Dim, str]:
    """Return the token of each size of a blob in ncnn's expressions."""
    shape = blob.known_shape
    return dict(zip(shape, (f"{index}{name}" for name in AXES[len(shape)]), strict=True))


def _ratio(size: Sym, tokens: Mapping[Dim, str]) -> str | None:
    """Return a size as a token, a quotient of a token, or a multiple of a token; None if no token fits."""
    if size in tokens:
        return tokens[size]
    for other, token in tokens.items():
        if isinstance(other, int):
            continue
        divisor = exact_div(other, size)
        if isinstance(divisor, int):
            return f"//({token},{divisor})"
        factor = exact_div(size, other)
        rest = None if factor is None else str(factor) if isinstance(factor, int) else _ratio(factor, tokens)
        if rest is not None:
            return f"*({token},{rest})"
    return None
