"""One net in ncnn's Python package. The worker process gets this file as source; `Net(isolated=False)` imports it.

It runs in any Python from 3.8 on, and imports nothing of this package.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

BINARY_MAGIC = (7767517).to_bytes(4, "little")

# Exceptions of ncnn's binding: a Mat that it cannot convert, a string that it cannot decode.
NCNN_ERRORS = (RuntimeError, TypeError, ValueError, MemoryError, OSError)
EMPTY = "extract returned an empty Mat"
# A net of one attention layer without a past: its caches are the keys and values, in ncnn's layout for caches.
CACHE_PARAM = """7767517
3 8
Input new 0 3 q k v
Input unset 0 2 a b
SDPA sdpa 5 3 q k v a b o keys values 7=1
"""


class NcnnNet:
    """A loaded net. `options` are fields of ncnn.Option. Raises one of NCNN_ERRORS if ncnn cannot load the net."""

    def __init__(self, param: str, bin: str, options: dict[str, Any]) -> None:
        import ncnn  # type: ignore[import-untyped]

        self.ncnn = ncnn
        self.net = net = ncnn.Net()
        for name, value in {"num_threads": os.cpu_count() or 1, **options}.items():
            if hasattr(net.opt, name):  # older versions of ncnn lack some
                setattr(net.opt, name, value)
        with open(param, "rb") as file:
            self.is_binary = file.read(len(BINARY_MAGIC)) == BINARY_MAGIC
        for step, path in ((net.load_param_bin if self.is_binary else net.load_param, param), (net.load_model, bin)):
            code = step(os.fsencode(path))  # pybind11 takes no str with bytes that are not UTF-8
            if code != 0:
                raise RuntimeError(f"{step.__name__} returned {code}")
        if self.is_binary:
            inputs, outputs = map(str, net.input_indexes()), map(str, net.output_indexes())
        else:
            inputs, outputs = net.input_names(), net.output_names()
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.pasts = [] if self.is_binary else list(cache_inputs(param))
        self.cache_net: Any = None
        self.cache_extractors: list[Any] = []
        self.caches: dict[str, Any] = {}  # the Mats after the last step, by the blobs of their inputs

    def blob(self, name: str) -> str | int:
        """Return ncnn's name for a blob."""
        return int(name) if self.is_binary else name  # a binary .param has no names

    def feed(self, feeds: list[dict[str, Any]], caches: Sequence[Sequence[str]] = (), past: int = 0) -> Any:
        """Return an extractor with these inputs: each has a "blob", an "array" and a "batch_axis".

        `caches` are pairs of blobs: a cache before and after a step. Each cache gets its first `past` rows from the
        last step, or stays unset if `past` is 0.
        """
        extractor = self.net.create_extractor()
        arrays, self.cache_extractors = {feed["blob"]: feed for feed in feeds}, []
        pairs = [pair for pair in self.pasts if pair[0] in arrays and pair[1] in arrays]
        for pair in pairs:
            for blob, mat in zip(pair, self.as_caches(*map(arrays.pop, pair))):  # noqa: B905 (3.8)
                extractor.input(self.blob(blob), mat)
        for feed in arrays.values():
            # A Mat of an array does not own its memory: an in-place first layer would free the array, so it is cloned.
            mat = self.ncnn.Mat(feed["array"], **batch_index(feed)).clone()
            code = extractor.input(self.blob(feed["blob"]), mat)
            if code != 0:
                raise RuntimeError(f"the net has no blob '{feed['blob']}' (input returned {code})")
        for blob, _ in caches if past else ():
            extractor.input(self.blob(blob), self.shortened(blob, past))
        return extractor

    def as_caches(self, *pasts: dict[str, Any]) -> list[Any]:
        """Return the keys and values of a past in ncnn's layout for caches."""
        import numpy as np

        if self.cache_net is None:
            self.cache_net = self.ncnn.Net()
            self.cache_net.opt = self.net.opt
            self.cache_net.load_param_mem(CACHE_PARAM)
            self.cache_net.load_model(os.devnull)
        extractor = self.cache_net.create_extractor()
        self.cache_extractors.append(extractor)  # the caches are in its memory
        keys, values = (np.squeeze(past["array"], past["batch_axis"]) for past in pasts)
        for name, array in (("q", np.zeros_like(keys[:, :1])), ("k", keys), ("v", values)):
            extractor.input(name, self.ncnn.Mat(np.ascontiguousarray(array)).clone())
        return [extractor.extract(name, 1)[1] for name in ("keys", "values")]

    def shortened(self, blob: str, rows: int) -> Any:
        """Return the first rows of a cache; ncnn appends rows in place, and overwrites the later ones."""
        held = self.caches[blob].h if blob in self.caches else 0
        if held < rows:
            raise RuntimeError(f"the caches have {held} rows, not {rows}: the net was loaded anew; start with reset()")
        mat = self.ncnn.Mat(self.caches[blob])
        mat.h = rows
        # A GPU takes no Mat with gaps; on a CPU, rows are held in blocks, and a clone would cut the last block.
        return mat.clone() if self.net.opt.use_vulkan_compute and held > rows else mat

    def keep(self, extractor: Any, caches: Sequence[Sequence[str]]) -> None:
        """Keep an extractor's caches for the next step; type 1 of `extract` keeps them in ncnn's own layout."""
        results = {blob: extractor.extract(self.blob(after), 1) for blob, after in caches}
        if wrong := [after for blob, after in caches if results[blob][0] != 0 or results[blob][1].dims == 0]:
            raise RuntimeError(f"ncnn could not compute the cache '{wrong[0]}'")
        self.caches = {blob: mat for blob, (_, mat) in results.items()}

    def extract(self, extractor: Any, output: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Return one output, which has a "blob", a "batch_axis", and perhaps the blob of its "boxes"."""
        import numpy as np

        if output["boxes"]:  # after no boxes, ncnn fails, and extracting once more may kill the process
            code, mat = extractor.extract(self.blob(output["boxes"]))
            if code == 0 and mat.dims == 0:
                return np.zeros((0, 6), np.float32)
        code, mat = extractor.extract(self.blob(output["blob"]))
        if code != 0 or mat.dims == 0:
            raise RuntimeError(f"extract returned {code}" if code else EMPTY)
        if mat.n > 1 and output["batch_axis"] is None:
            raise RuntimeError(f"the Mat holds a batch of {mat.n}, but no batch axis was expected")
        return np.array(mat.numpy(**batch_index(output)))


def cache_inputs(param: str) -> Iterator[tuple[str, str]]:
    """Yield the input blobs of keys and values of each SDPA with a cache in a .param file."""
    with open(param, encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if words[:1] == ["SDPA"] and "7=1" in words[4:]:
                first, count = 4, int(words[2])
                yield words[first + count - 2], words[first + count - 1]


def batch_index(item: dict[str, Any]) -> dict[str, int]:
    """Return the argument of ncnn's binding for a batch axis."""
    return {} if item["batch_axis"] is None else {"batch_index": item["batch_axis"]}
