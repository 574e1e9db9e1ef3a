"""Work in a thread before its result is needed: the runtimes are other processes, so this one can go on."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


def begin(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in a daemon thread, which an interrupt does not wait for, and return its future result."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            result = function(*args)
        except Exception as error:  # raised again for the caller
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=call, daemon=True).start()
    return future
