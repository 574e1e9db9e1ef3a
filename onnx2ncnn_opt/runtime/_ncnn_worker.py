"""The process that ncnn runs in; started by runtime/ncnn.py as a plain script, never imported.

A broken net ends this process instead of the caller's. Messages on stdin and stdout are one line of JSON; the arrays
that it describes ("dtype", "shape") follow it as raw bytes. Each output is sent as soon as it is there, so that what
was computed before a crash is not lost.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

import numpy as np

BINARY_MAGIC = (7767517).to_bytes(4, "little")

# ncnn's own faults reach Python as these: a Mat of a kind that it cannot convert, a string that it cannot decode.
NCNN_ERRORS = (RuntimeError, TypeError, ValueError)


def read_array(stream: IO[bytes], described: dict[str, Any]) -> np.ndarray[Any, Any]:
    array = np.empty(described["shape"], described["dtype"])
    view = array.reshape(-1).view(np.uint8).data
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            sys.exit(0)
        view = view[count:]
    return array


class Worker:
    """Holds one net and runs it."""

    def __init__(self, ncnn: Any, requests: IO[bytes], answers: IO[bytes]) -> None:
        self.ncnn, self.requests, self.answers = ncnn, requests, answers
        self.net: Any = None
        self.is_binary = False

    def answer(self, message: dict[str, Any], array: np.ndarray[Any, Any] | None = None) -> None:
        if array is not None:
            message = {**message, "dtype": array.dtype.str, "shape": array.shape}
        self.answers.write(json.dumps(message).encode() + b"\n")
        if array is not None:
            self.answers.write(array.tobytes())
        self.answers.flush()

    def load(self, param: str, bin: str, options: dict[str, Any]) -> None:
        self.net = net = self.ncnn.Net()
        for name, value in options.items():
            if hasattr(net.opt, name):  # older versions of ncnn have fewer
                setattr(net.opt, name, value)
        with open(param, "rb") as file:
            self.is_binary = file.read(len(BINARY_MAGIC)) == BINARY_MAGIC
        for step, path in ((net.load_param_bin if self.is_binary else net.load_param, param), (net.load_model, bin)):
            code = step(path)
            if code != 0:
                raise RuntimeError(f"{step.__name__} returned {code} for {path}")
        if self.is_binary:
            inputs, outputs = map(str, net.input_indexes()), map(str, net.output_indexes())
        else:
            inputs, outputs = net.input_names(), net.output_names()
        self.answer({"inputs": list(inputs), "outputs": list(outputs)})

    def blob(self, name: str) -> str | int:
        return int(name) if self.is_binary else name  # a binary .param has no names

    def feed(self, feeds: list[dict[str, Any]]) -> Any:
        extractor = self.net.create_extractor()
        for feed in feeds:
            # A Mat made from an array owns nothing: an in-place first layer would free the array, so it is cloned.
            mat = self.ncnn.Mat(feed["array"], **batch_index(feed)).clone()
            code = extractor.input(self.blob(feed["blob"]), mat)
            if code != 0:
                raise RuntimeError(f"the net has no blob '{feed['blob']}' (input returned {code})")
        self.answer({"fed": len(feeds)})
        return extractor

    def extract(self, extractor: Any, output: dict[str, Any]) -> None:
        code, mat = extractor.extract(self.blob(output["blob"]))
        if code != 0 or mat.dims == 0:
            raise RuntimeError(f"extract returned {code}" if code else "extract returned an empty Mat")
        if mat.n > 1 and output["batch_axis"] is None:
            raise RuntimeError(f"the Mat holds a batch of {mat.n}, but no batch axis was expected")
        self.answer({}, np.array(mat.numpy(**batch_index(output))))

    def serve(self) -> None:
        for line in self.requests:
            request = json.loads(line)
            if "param" in request:
                self.attempt(self.load, **request)
                continue
            for feed in request["feeds"]:
                feed["array"] = read_array(self.requests, feed)
            extractor = self.attempt(self.feed, request["feeds"])
            for output in request["outputs"] if extractor else ():
                self.attempt(self.extract, extractor, output)

    def attempt(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except NCNN_ERRORS as error:
            # stderr is a file: its position is the end of what ncnn had to say about this step.
            self.answer({"error": str(error), "log": os.lseek(2, 0, os.SEEK_CUR)})
            return None


def batch_index(item: dict[str, Any]) -> dict[str, int]:
    return {} if item["batch_axis"] is None else {"batch_index": item["batch_axis"]}


def main() -> None:
    # The caller decides when to stop; and a crash must not leave a core file of the size of the model.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except ImportError:
        pass  # Windows writes no core files
    # Python put this folder first, and it has an ncnn.py of its own.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
    import ncnn  # type: ignore[import-untyped]

    # Whatever ncnn prints goes to stderr, so that stdout carries nothing but answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    Worker(ncnn, sys.stdin.buffer, answers).serve()


if __name__ == "__main__":
    main()
