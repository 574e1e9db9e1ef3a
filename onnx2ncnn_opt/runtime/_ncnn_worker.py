"""The program of ncnn's process. runtime/child.py sends it over stdin, after _worker.py and _ncnn_net.py.

A broken net ends this process instead of the caller's. Each output is sent at once, so a crash does not lose earlier
outputs.
"""

from __future__ import annotations

import base64
import ctypes
import os
import platform
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from onnx2ncnn_opt.runtime._ncnn_net import NCNN_ERRORS, NcnnNet
    from onnx2ncnn_opt.runtime._worker import Missing, Server, main


# Numbers of N(0, 1) to draw from, PART at a time, because so many stay in the cache of a core. SIZES, the number of
# sizes of errors, is prime, so that they do not repeat in step with the rows of a blob.
NORMALS, PART, SIZES = 2**17, 2**15 + 3, 4099
# For larger blobs (in bytes), glibc asks the system for memory each time, which takes longer than the layer.
LARGE_BLOB, TRIM_THRESHOLD, MMAP_MAX = 2**25, -1, -4  # the latter two are options of mallopt
THP_DISABLE = 41  # of prctl
LARGEST = 6e4  # numbers up to this stay finite in fp16, errors included


class NcnnServer(Server):
    """Holds one net and runs it."""

    errors = NCNN_ERRORS

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Import ncnn, and find a GPU if the config says so; return their names."""
        global np  # imported here, so that the greeting can report a missing numpy
        import ncnn  # type: ignore[import-untyped]
        import numpy as np  # ncnn's package needs numpy, but does not declare that

        self.ncnn = ncnn
        self.net: Any = None
        self.normals: Any = None
        self.libc: Any = None  # glibc, once it keeps freed memory
        greeting = {"ncnn": getattr(ncnn, "__version__", "0"), "machine": platform.machine()}
        self.vulkan = bool(config["vulkan"])
        if not self.vulkan and not getattr(ncnn, "cpu_support_arm_asimdhp", int)():  # the caller refuses older versions
            greeting["fp16"] = "fp16 storage"
        if self.vulkan:
            greeting["gpu"] = self.gpu()
        return greeting

    def gpu(self) -> str:
        """Return the name of ncnn's default GPU; raises Missing if there is none."""
        if not hasattr(self.ncnn, "get_gpu_count"):
            raise Missing("its ncnn was built without Vulkan")
        if not self.ncnn.get_gpu_count():
            raise Missing(
                "ncnn finds no Vulkan driver there; a GPU's own has to be installed, or Mesa's software one (on Debian "
                "and Ubuntu: apt-get install mesa-vulkan-drivers)"
            )
        return str(self.ncnn.get_gpu_info(self.ncnn.get_default_gpu_index()).device_name())

    def do_put(self, name: str, data: bytes) -> None:
        """Store a file until this process ends."""
        assert self.folder is not None
        with open(os.path.join(self.folder, name), "wb") as file:
            file.write(data)
        self.answer({})

    def do_load(self, param: str, bin: str, options: dict[str, Any]) -> None:
        """Load a net instead of the present one, from paths, or from names of files that `do_put` stored."""
        self.net = None
        if self.folder is not None:
            param, bin = (os.path.join(self.folder, name) for name in (param, bin))
        self.net = NcnnNet(param, bin, {**options, "use_vulkan_compute": self.vulkan})
        self.answer({"inputs": self.net.inputs, "outputs": self.net.outputs})

    def do_run(
        self,
        feeds: list[dict[str, Any]],
        outputs: list[dict[str, Any]],
        caches: Sequence[list[str]] = (),
        past: int = 0,
    ) -> None:
        """Compute outputs; send an answer after the feeds, one for each output, and one after keeping caches."""
        extractor = self.fed(feeds, caches, past)
        for output in outputs:
            self.attempt(self.extract, extractor, output)
        if caches:
            self.attempt(self.keep, extractor, caches)

    def fed(self, feeds: list[dict[str, Any]], caches: Sequence[list[str]] = (), past: int = 0) -> Any:
        """Return an extractor with the feeds, and send an answer."""
        extractor = self.net.feed(feeds, caches, past)
        self.answer({"fed": len(feeds)})
        return extractor

    def extract(self, extractor: Any, output: dict[str, Any]) -> None:
        self.answer({}, self.net.extract(extractor, output))

    def keep(self, extractor: Any, caches: Sequence[list[str]]) -> None:
        self.net.keep(extractor, caches)
        self.answer({})

    def do_time(
        self, feeds: list[dict[str, Any]], outputs: list[dict[str, Any]], seconds: float, **caches: Any
    ) -> None:
        """Run for `seconds`, at least once; send the time of each run."""
        clock = self.clock()
        times: list[float] = []
        # Without boxes, ncnn cannot compute what follows a net's selection.
        allowed = (0, -100) if any(layer.type == "DetectionOutput" for layer in self.net.net.layers()) else (0,)
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            extractor = self.net.feed(feeds, **caches)
            start = clock()
            for output in outputs:
                code, _ = extractor.extract(self.net.blob(output["blob"]))
                if code not in allowed:
                    raise RuntimeError(f"extract returned {code}")
            times.append(clock() - start)
        self.answer({"times": times})

    def clock(self) -> Callable[[], float]:
        """Return the clock for runs: CPU time of this thread, or elapsed time for a GPU."""
        return time.perf_counter if self.vulkan else time.thread_time

    def do_memory(self, restart: bool) -> None:
        """Send the peak memory of this process in bytes, null if unknown; `restart` first resets the peak.

        From then on, Linux gives this process no huge pages of 2 MB: it depends on addresses which memory gets them.
        """
        try:
            if restart:
                with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                    file.write("5")
                ctypes.CDLL(None).prctl(THP_DISABLE, 1, 0, 0, 0)  # there is a /proc, so this is Linux
            with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
                kilobytes = [int(line.split()[1]) for line in file if line.startswith("VmHWM:")]
        except OSError:
            kilobytes = []
        self.answer({"bytes": kilobytes[0] * 1024 if kilobytes else None})

    def do_walk(self, feeds: list[dict[str, Any]], steps: list[dict[str, Any]], seed: int, **caches: Any) -> None:
        """Compute the blobs in order, and change each before its readers are computed; send an answer for each."""
        extractor = self.fed(feeds, **caches)
        for step in steps:
            self.attempt(self.step, extractor, step, seed)
        if self.libc is not None:
            self.libc.malloc_trim(0)

    def step(self, extractor: Any, step: dict[str, Any], seed: int) -> None:
        """Compute one blob, add errors, and round it; `step` has the fields of `WalkStep`.

        The answer has the blob (with `send`) or a sample before errors and rounding, and the mean squares of the errors
        and of the rounding of that sample.
        """
        blob, sample = step["blob"], step["sample"]
        code, mat = extractor.extract(self.net.blob(blob))
        if code != 0 or mat.dims == 0:
            raise RuntimeError(f"blob '{blob}': extract returned {code or 'an empty Mat'}")
        batch = {"batch_index": 0} if mat.n > 1 else {}
        array = mat.numpy(**batch)
        is_changed = array.dtype == np.float32 and bool(step["rounded"] or step["noise"] or step["relative"])
        if is_changed:
            array = np.array(array)
            del mat
        if array.nbytes > LARGE_BLOB and self.libc is None:
            self.keep_memory()
        least, largest, limits, fits = extremes(array)
        sampled = slice(None, None, array.size // sample | 1) if sample else slice(0)
        samples = [array.reshape(-1)[sampled].copy()]
        if is_changed:
            self.add_errors(array, step, least, [seed, *blob.encode()])
            samples.append(array.reshape(-1)[sampled].copy())
            if step["rounded"]:
                for start in range(0, array.size, PART):
                    round_part(array.reshape(-1)[start : start + PART], fits=fits)
            samples.append(array.reshape(-1)[sampled])
            extractor.input(self.net.blob(blob), self.ncnn.Mat(array, **batch).clone())
        special = 0
        if not fits:  # numbers below LARGEST stay finite when they are rounded
            special = max(int(array.size - np.count_nonzero(np.isfinite(array)) - limits), 0)
        errors = [mean_square(after - before, fits=fits) for before, after in zip(samples, samples[1:])]  # noqa: B905, RUF007 (3.8)
        answer = {"largest": largest, "special": special, "batch": bool(batch), "errors": errors}
        self.answer(answer, array if step["send"] else samples[0] if sample else None)

    def keep_memory(self) -> None:
        """Let glibc keep freed memory until `malloc_trim`."""
        libc = ctypes.CDLL(None) if os.name == "posix" else None
        if libc is not None and hasattr(libc, "malloc_trim"):
            libc.mallopt(MMAP_MAX, 0)
            libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
            self.libc = libc

    def add_errors(self, array: Any, step: dict[str, Any], least: float, seed: list[int]) -> None:
        """Add errors to the numbers of a blob, whose smallest one is `least`. Each blob has its own seed."""
        if not step["noise"] and not step["relative"]:
            return
        random, numbers = np.random.default_rng(seed), array.reshape(-1)
        if step["relative"]:
            for start in range(0, numbers.size, PART):
                part = numbers[start : start + PART]
                part *= self.normal(random, part.size) * np.float32(step["relative"]) + 1
        sizes = self.sizes(step, numbers.size, random)
        places = np.ones(1, np.float32)
        if sizes.size and array.ndim > 2:  # sums are as inexact as they are large: silent places have less noise
            places = np.sqrt(np.einsum("i...,i...->...", array, array).reshape(-1))
            places /= mean_square(places, fits=False) ** 0.5 or 1.0
            places = np.fmin(3 * places, np.float32(1))  # others have more terms, or a texture that cancels
        repeated = np.resize(places, places.size + sizes.size)
        for start in range(0, numbers.size if sizes.size else 0, sizes.size or 1):
            part = numbers[start : start + sizes.size]
            errors = self.normal(random, part.size) * sizes[: part.size]
            errors *= repeated[start % places.size :][: part.size]
            part += errors * (part != 0)  # after an activation, zeros stay 0, and no number becomes negative
            if least >= 0:
                np.maximum(part, 0, out=part)

    def sizes(self, step: dict[str, Any], count: int, random: Any) -> Any:
        """Return the sizes of errors of a blob with so many numbers; they repeat."""
        sizes = np.frombuffer(base64.b64decode(step["noise"]), np.float32)
        if sizes.size in (0, count):
            return sizes
        return np.resize(random.choice(sizes, SIZES), min(PART, count))

    def normal(self, random: Any, count: int) -> Any:
        """Return numbers of N(0, 1); more than PART repeat."""
        if self.normals is None:
            self.normals = np.random.default_rng(1).standard_normal(NORMALS, np.float32)
        numbers = self.normals[random.integers(NORMALS - PART) :][: min(count, PART)]
        return numbers if count <= PART else np.resize(numbers, count)

    def do_time_blobs(
        self, feeds: list[dict[str, Any]], blobs: list[str], runs: int, seconds: float, **caches: Any
    ) -> None:
        """Measure the time of a net and of each blob; send one answer."""
        clock = self.clock()
        blob_times: list[list[tuple[float, float]]] = []
        whole: list[float] = []
        end = time.perf_counter() + seconds
        while len(whole) <= runs and (len(whole) < 2 or time.perf_counter() < end):  # the first run warms up
            extractor = self.net.feed(feeds, **caches)
            blob_times.append([self.times_of(extractor, blob, clock) for blob in blobs])
            extractor = self.net.feed(feeds, **caches)
            start = clock()
            for blob in self.net.outputs:
                extractor.extract(self.net.blob(blob))
            whole.append(clock() - start)
        first, copy = np.array(blob_times[1:]).reshape(len(blob_times) - 1, len(blobs), 2).min(axis=0).T
        fastest = np.maximum(first - copy, 0.0).tolist()
        self.answer({"blobs": fastest, "whole": min(whole[1:]), "runs": len(whole) - 1})

    def times_of(self, extractor: Any, blob: str, clock: Callable[[], float]) -> tuple[float, float]:
        """Return the seconds to extract a blob, and to extract it again: then ncnn only copies it."""
        name, times = self.net.blob(blob), [clock()]
        for _ in range(2):
            code, mat = extractor.extract(name, 1)
            times.append(clock())
            if code != 0 or mat.dims == 0:
                raise RuntimeError(f"blob '{blob}': extract returned {code or 'an empty Mat'}")
            del mat
        return times[1] - times[0], times[2] - times[1]


def extremes(array: Any) -> tuple[float, float, int, bool]:
    """Return the least number, the largest finite size, the count of 3.4e38, and whether all stay finite in fp16."""
    least, most = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    largest = max(-least, most)
    if largest < 3.4e38:  # False for NaN
        return least, largest, 0, largest < LARGEST
    sizes, is_finite = np.abs(array), np.isfinite(array)
    limits = int(np.count_nonzero(is_finite & (sizes >= 3.4e38)))  # they stand for infinity
    return least, float(sizes.max(initial=0.0, where=is_finite)), limits, False


def round_part(array: Any, *, fits: bool) -> None:
    """Round float32 numbers to fp16; `fits` says that all are finite in fp16, else large ones become infinite."""
    if not fits:
        with np.errstate(over="ignore"):
            array[:] = array.astype(np.float16)
    else:  # a quarter of the time: adding 2**13 times the number rounds it to fp16's last place
        bits = array.view(np.uint32) & np.uint32(0xFF << 23)
        np.maximum(bits, np.uint32((127 - 14) << 23), out=bits)  # smaller numbers are subnormal in fp16
        bits += np.uint32(13 << 23 | 1 << 22)
        large = bits.view(np.float32)
        array += large
        array -= large


def mean_square(numbers: Any, *, fits: bool) -> float:
    """Return the mean square of the finite numbers; `fits` says that all are."""
    finite = numbers if fits else numbers[np.isfinite(numbers)]
    return float(np.square(finite, dtype=np.float64).sum() / max(finite.size, 1))


if __name__ == "__main__":
    main(NcnnServer)
