"""Run the C++ programs that `example` prints, linked with ncnn's own library, and compare them with `Net`.

    python -m scripts.run_cpp NCNN [-k yolo] [--keep FOLDER]

NCNN is an installed ncnn (`cmake --install`), with include/ncnn and lib/libncnn.a. Detectors with fixed and dynamic
sizes, raw ones with `--append nms:`, and nets in headers (`--embed`) get pictures of drawn pixels. Decoders continue
the prompt of the program. A line for each says how many numbers differ.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from onnx2ncnn_opt import Net, convert
from onnx2ncnn_opt.tail.reader import read_tail
from testing.exports import refilled

FIXTURES = Path(__file__).parents[1] / "fixtures"
_TOKENS = 32  # of the printed loop
_SIDES = (64, 96)  # of pictures, where they are dynamic: height, width


class Case(NamedTuple):
    """A model, options of `convert`, and options of `example`."""

    path: Path
    options: dict[str, Any]
    printed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.path.stem, *map(str, self.options.values()), *self.printed])


def cases() -> Iterator[Case]:
    """Yield the heads of both exporters and some decoders."""
    nms = {"append": "nms:output0:conf=0.01:classes=5"}
    for path in sorted((FIXTURES / "heads").glob("*.onnx")):
        is_raw = path.name.startswith(("yolov5", "yolov8", "yolo11", "yolox"))
        options = nms if is_raw and "raw" not in path.name else {}
        yield Case(path, options)
        if path.name.endswith(".ts.onnx"):
            yield Case(path, options, ("--embed",))
    for name in ("qwen2.optimum", "gpt2.dynamo", "phi3.genai", "mistral.optimum-sdpa"):
        yield Case(FIXTURES / "llm" / f"{name}.onnx", {})


def filled(text: str, sizes: tuple[int, int]) -> str:
    """Return a program with drawn pixels in a picture of its own size, and numbers that differ in other inputs."""
    text = re.sub(r"(in\d+_w = )640(, in\d+_h = )480", rf"\g<1>{sizes[1]}\g<2>{sizes[0]}", text)
    pixels = r"\g<0>\n    for (size_t i = 0; i < \g<1>.size(); i++) \g<1>[i] = (unsigned char)(i * i % 251);"
    text = re.sub(r".*std::vector<unsigned char> (in\d+_pixels).*", pixels, text)
    numbers = r"\g<0>\n    for (size_t i = 0; i < \g<1>.size(); i++) \g<1>[i] = 100 + 50 * i;"
    text = re.sub(r".*std::vector<[a-z0-9_]+> (in\d+_data|tail_data\d+)\(.*\); // yours.*", numbers, text)
    return text.replace("%g", "%.9g")


def feeds_of(net: Net, sizes: tuple[int, int]) -> dict[str, Any]:
    """Return the same inputs for `Net`."""
    feeds: dict[str, Any] = {}
    for entry in net.inputs:
        if len(entry.shape) == 4:
            pixels = np.arange(sizes[0] * sizes[1] * 3, dtype=np.uint64) ** 2 % 251
            feeds[entry.name] = pixels.reshape(1, *sizes, 3).transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
        else:
            shape = [size if isinstance(size, int) else 1 for size in entry.shape]
            feeds[entry.name] = (100 + 50 * np.arange(np.prod(shape))).reshape(shape).astype(entry.dtype)
    return feeds


def expected(net: Net, feeds: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return what `Net` gives: the outputs of these names, or the tokens of a decoder."""
    if net.manifest is None or not net.manifest.caches:
        results = net.run(feeds)
        return {name: results[name] for name in names}
    tokens = [1, 2, 3]
    for count in range(_TOKENS):
        logits = net.step(tokens if count == 0 else tokens[-1:])["logits"]
        tokens.append(int(logits.reshape(-1, logits.shape[-1])[-1].argmax()))
    return {"tokens": np.array(tokens[3:])}


def run(case: Case, ncnn: Path, folder: Path) -> str:
    """Return in words how the program differs from `Net`."""
    model = refilled(case.path).SerializeToString()
    conversion = convert(model, folder / "net", verification=None, **case.options)
    manifest = conversion.manifest()
    shape = next(
        (entry.shape for entry in manifest.inputs if len(entry.shape) == 4 and not entry.cache), (1, 3, *_SIDES)
    )
    height, width = (size if isinstance(size, int) else side for size, side in zip(shape[2:], _SIDES, strict=True))
    options = [] if (height, width) == shape[2:] else ["--shape", f"images:1,3,{height},{width}"]
    printer = [sys.executable, "-m", "onnx2ncnn_opt", "example", "net", "-o", "main.cpp", *case.printed, *options]
    subprocess.run(printer, cwd=folder, check=True, capture_output=True)
    program = folder / "main.cpp"
    program.write_text(filled(program.read_text(), (height, width)))
    flags = ["-std=c++11", "-O1", "-Wall", "-Wextra", "-Werror", "-isystem", f"{ncnn}/include/ncnn", "main.cpp"]
    subprocess.run(["c++", *flags, f"-L{ncnn}/lib", "-lncnn", "-fopenmp", "-o", "main"], cwd=folder, check=True)
    printed = subprocess.run(["./main"], cwd=folder, check=True, capture_output=True, text=True).stdout.splitlines()
    names = [entry.name for entry in manifest.outputs]
    if conversion.tail is not None and manifest.tail is not None:
        names = [name for name in names if name not in manifest.tail.inputs]
        names += [port.name for port in read_tail(conversion.tail.data).outputs]
    with Net(folder / "net") as net:
        results = expected(net, feeds_of(net, (height, width)), names)
    said = []
    for line, (name, array) in zip(printed, results.items(), strict=True):
        numbers = np.array(line.split(), np.float64).astype(np.int64 if array.dtype == bool else array.dtype)
        fits = numbers.reshape(array.shape) if numbers.size == array.size else numbers
        differ = array.size
        if fits.shape == array.shape:
            differ = int((~np.isclose(fits, array.astype(fits.dtype), rtol=1e-3, atol=1e-5, equal_nan=True)).sum())
        said.append(f"{name} {[*array.shape]}: {differ} of {array.size} numbers differ")
    return ", ".join(said)


def main() -> None:
    """Print a line for each program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ncnn", type=Path)
    parser.add_argument("-k", default="")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    for case in cases():
        if options.k not in str(case):
            continue
        with TemporaryDirectory() as folder:
            target = Path(folder) if options.keep is None else options.keep / str(case).replace(" ", "_")
            target.mkdir(parents=True, exist_ok=True)
            try:
                print(case, run(case, options.ncnn.absolute(), target), sep="\t", flush=True)
            except subprocess.CalledProcessError as error:
                print(case, f"failed: {error} {error.stderr or ''}", sep="\t", flush=True)


if __name__ == "__main__":
    main()
