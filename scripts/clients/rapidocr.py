"""Let RapidOcrNcnn read a picture with our nets, and compare what its nets compute and read with ONNX Runtime.

    pip download --no-deps rapidocr; unzip rapidocr-*.whl
    python -m scripts.clients.rapidocr NCNN RAPIDOCRNCNN MODELS [--write]

NCNN is an installed ncnn, RAPIDOCRNCNN a checkout of github.com/RapidAI/RapidOcrNcnn, and MODELS the folder with the
models of detection, direction and recognition that the package rapidocr has: trained PP-OCR. The program is compiled as
it is; a header gives back a function that ncnn no longer has, and writes what goes into each net and what comes out.
Blobs get the names that the program reads, in the .param. OpenCV comes from libopencv-dev.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

from scripts.measure.measured import parser_of, table

Array = NDArray[Any]
_NETS = {"det": "DbNet", "cls": "AngleNet", "rec": "CrnnNet"}
_COLUMNS = ("net", "model", "runs", "largest error", "lines of text", "equal lines")
_HEADER = """#include <unistd.h>
#include <cstring>
#include <opencv2/opencv.hpp>
#include <ncnn/net.h>
static void watch(const char* file, const ncnn::Mat& input, const ncnn::Mat& output)
{
    static FILE* log = fopen("watched", "ab");
    int sizes[] = {strstr(file, "DbNet") ? 0 : strstr(file, "AngleNet") ? 1 : 2, input.c, input.h, input.w,
                   output.c, output.h, output.w};
    fwrite(sizes, sizeof(sizes), 1, log);
    for (const ncnn::Mat& mat : {input, output})
        for (int c = 0; c < mat.c; c++) fwrite(mat.channel(c), 4, mat.w * mat.h, log);
    fflush(log);
}
#define set_num_threads(n) set_light_mode(true)
#define extract(name, mat) extract(name, mat), watch(__FILE__, input, mat)
"""


def build(arguments: argparse.Namespace, folder: Path) -> Path:
    """Compile the program."""
    source, ncnn = arguments.rapidocrncnn.absolute(), arguments.ncnn.absolute()
    (folder / "watch.h").write_text(_HEADER)
    files = [path for path in (source / "src").glob("*.cpp") if path.name not in ("OcrLiteCApi.cpp", "OcrLiteJni.cpp")]
    flags = ["-std=c++11", "-O1", "-w", "-fopenmp", "-D__EXEC__", "-include", "watch.h", f"-I{source}/include"]
    flags += [f"-I{ncnn}/include", f"-I{ncnn}/include/ncnn", "-I/usr/include/opencv4", *map(str, files)]
    libraries = [*(f"-lopencv_{name}" for name in ("imgcodecs", "imgproc", "core")), f"{ncnn}/lib/libncnn.a"]
    subprocess.run(["c++", *flags, *libraries, "-o", "main"], cwd=folder, check=True)
    return folder / "main"


def converted(model: Path, net: str, folder: Path) -> onnx.ModelProto:
    """Convert a model into files that the program loads; return the model."""
    words = ["-m", "onnx2ncnn_opt", "convert", str(model), "-o", str(folder / net), "--effort", "quick", "-q"]
    subprocess.run([sys.executable, *words], check=True)
    loaded = onnx.load(model)
    names = {loaded.graph.input[0].name: "input", loaded.graph.output[0].name: "output"}
    lines = (folder / f"{net}.ncnn.param").read_text().splitlines()
    text = "\n".join(" ".join(names.get(word, word) for word in line.split()) for line in lines) + "\n"
    (folder / f"{net}.param").write_text(text)
    (folder / f"{net}.ncnn.bin").rename(folder / f"{net}.bin")
    return loaded


def watched(path: Path) -> list[tuple[str, Array, Array]]:
    """Return the net, the input and the output of each run."""
    data, place, runs = path.read_bytes(), 0, []
    while place < len(data):
        kind, *sizes = np.frombuffer(data, np.int32, 7, place).tolist()
        place, arrays = place + 28, []
        for shape in (sizes[:3], sizes[3:]):
            arrays.append(np.frombuffer(data, np.float32, int(np.prod(shape)), place).reshape(shape))
            place += arrays[-1].nbytes
        runs.append(([*_NETS][kind], arrays[0], arrays[1]))
    return runs


def text_of(scores: Array, characters: list[str]) -> str:
    """Return the text of scores [steps, characters], as the program reads it."""
    best = scores.argmax(1)
    kept = [k for i, k in enumerate(best.tolist()) if k and not (i and k == best[i - 1])]
    return "".join(characters[k] for k in kept)


def main() -> None:
    """Print the table."""
    arguments = parser_of(__doc__, "ncnn", "rapidocrncnn", "models").parse_args()
    with TemporaryDirectory() as name, table("rapidocr", _COLUMNS, write=arguments.write) as add:
        folder = Path(name)
        paths = {net: next(arguments.models.glob(f"*_{net}_*.onnx")) for net in _NETS}
        models = {net: converted(path, net, folder) for net, path in paths.items()}
        [keys] = [entry.value for entry in models["rec"].metadata_props if entry.key == "character"]
        (folder / "keys.txt").write_text(keys.rstrip("\n") + "\n", encoding="utf-8")
        (folder / "1.jpg").write_bytes((arguments.rapidocrncnn / "images" / "1.jpg").read_bytes())
        options = {"models": ".", "det": "det", "cls": "cls", "rec": "rec", "keys": "keys.txt", "image": "./1.jpg"}
        words = [word for option, value in options.items() for word in (f"--{option}", value)]
        ended = subprocess.run([build(arguments, folder), *words], cwd=folder, check=True, capture_output=True)
        lines = [*filter(None, ended.stdout.decode().partition("FullDetectTime")[2].splitlines()[1:])]
        runs, characters = watched(folder / "watched"), ["#", *keys.rstrip("\n").split("\n"), " "]
        for net, path in paths.items():
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            pairs = [(b, session.run(None, {session.get_inputs()[0].name: a[None]})[0]) for n, a, b in runs if n == net]
            worst = max(float(abs(b - c.reshape(b.shape)).max() / abs(c).max()) for b, c in pairs)
            found = expected = None
            if net == "rec":
                read = [text_of(c[0], characters) for _, c in pairs]
                found, expected = len(lines), sum(a == b for a, b in zip(lines, read, strict=False))
            add(_NETS[net], path.stem, len(pairs), f"{worst:.1e}", found, expected)


if __name__ == "__main__":
    main()
