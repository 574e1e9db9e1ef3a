"""Progress reports of long operations to a listener, which a command or caller may set."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_INTERVAL = 0.25  # seconds between two reports
_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` within the block, with lines such as "writing weights: 120 of 353 MB, 410 a second"."""
    token = _listener.set(tell)
    try:
        yield
    finally:
        _listener.reset(token)


def announce(what: str) -> None:
    """Tell the listener which operation begins, such as "ncnn runs the net in fp16"."""
    if (tell := _listener.get()) is not None:
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
