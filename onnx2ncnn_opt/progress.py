"""Progress reports of long operations to a listener, which a command or caller may set."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_INTERVAL = 0.25  # seconds between two reports
_OPERATION_SHARE = 1 / 6  # estimate: an operation takes this share of the remaining part
_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


class _Part:
    """A part of the work: the shares of the whole work that are done now and at the end of the part."""

    def __init__(self, end: float, done: float) -> None:
        self.end, self.done = end, done


_part: ContextVar[_Part] = ContextVar("part")


@contextmanager
def listening(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` within the block, with lines such as "writing weights: 120 of 353 MB, 410 a second"."""
    token, whole = _listener.set(tell), _part.set(_Part(1.0, 0.0))
    try:
        yield
    finally:
        _listener.reset(token)
        _part.reset(whole)


@contextmanager
def up_to(end: float) -> Iterator[None]:
    """Count the block as the work between the share that is done and the share `end` of the whole."""
    part = _part.get(None)
    if part is None:
        yield
        return
    before, part.end = part.end, end
    yield
    part.end, part.done = before, end


def share_done() -> float:
    """Return an estimate of the share of the whole work that is done."""
    part = _part.get(None)
    return part.done if part else 0.0


def announce(what: str) -> None:
    """Tell the listener which operation begins, such as "ncnn runs the net in fp16"."""
    if (tell := _listener.get()) is not None:
        part = _part.get()
        part.done += (part.end - part.done) * _OPERATION_SHARE
        tell(what)


class Count:
    """A count of finished items, with the total if it is known; `unit` names the items."""

    def __init__(self, what: str, unit: str, total: float | None = None) -> None:
        self._what, self._done = what, 0.0
        self._of = f" {unit}" if total is None else f" of {total:,.0f} {unit}"
        self._tell = _listener.get()
        self._start = self._reported = time.monotonic()

    def add(self, amount: float = 1) -> None:
        """Count finished items, and tell the listener a few times a second."""
        self._done += amount
        if self._tell is None or (now := time.monotonic()) < self._reported + _INTERVAL:
            return
        self._reported = now
        rate = self._done / (now - self._start)
        rate_text = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        self._tell(f"{self._what}: {self._done:,.0f}{self._of}, {rate_text} a second")


def counted(items: Collection[T], what: str, unit: str) -> Iterator[T]:
    """Yield the items, and count each as finished when the caller requests the next."""
    count = Count(what, unit, len(items))
    for item in items:
        yield item
        count.add()
