"""The time limit of requests to a process."""

import math
from subprocess import Popen
from threading import TIMEOUT_MAX, Condition, Thread
from time import monotonic

from onnx2ncnn_opt.runtime.ending import stop


class Deadline:
    """A thread that stops a process once a request takes too long.

    One thread serves all requests: to start one for each takes as long as to run a small net. It sleeps until the
    deadline of the first request, and then until that of the current one.
    """

    def __init__(self, process: Popen[bytes]) -> None:
        self._changed = Condition()
        self._time = self._wakes = math.inf  # when the request has to be done, when the thread looks
        self._is_over = False
        self.expired = False
        Thread(target=self._watch, args=(process,), daemon=True).start()  # an interrupt does not wait for it

    def set(self, seconds: float) -> None:
        """Allow so many seconds from now, or any time: math.inf."""
        with self._changed:
            self._time = monotonic() + seconds
            if self._time < self._wakes:
                self._changed.notify()

    def end(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _watch(self, process: Popen[bytes]) -> None:
        with self._changed:
            while not self._is_over and (rest := self._time - monotonic()) > 0:
                self._wakes = self._time
                self._changed.wait(min(rest, TIMEOUT_MAX))
            if not self._is_over:
                self.expired = True
                stop(process)
