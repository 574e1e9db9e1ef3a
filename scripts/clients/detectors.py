"""Find the same objects with detectors in plain ncnn as in ONNX Runtime, decoded by the same lines of NumPy.

    pip install ultralytics transformers torchvision
    python -m scripts.clients.detectors [--examples NCNN SOURCE] [-k yolox] [--write]

The nets of `convert` run in pyncnn, which loads the .param and the .bin, and knows nothing else. No net has a tail.
With `--examples`, ncnn's own programs yolox and retinaface are compiled as they are and run too: NCNN is an installed
ncnn, built with NCNN_SIMPLEOCV=ON, and SOURCE its source. Models have random weights; the picture is that of
ultralytics. The score that an object needs lies halfway between those of the 100th and the 101st best candidates. Nets
of `--append nms:` give the best class of each box.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray

from scripts.clients.detector_models import COUNT, DETECTORS, Detector, decode_decoded, decode_yolo, fed, picture
from scripts.clients.tools import loaded, outputs_of
from scripts.measure.measured import parser_of, table

Array = NDArray[Any]
_FILES = {"yolox": "yolox", "retinaface": "mnet.25-opt"}  # that the programs load
_COLUMNS = ("detector", "program", "outputs", "candidates", "found", "expected", "in both", "pixels", "of scores")
_MAIN = """#define main example
#include "{source}"
#undef main
int main(int, char** argv)
{{
    cv::Mat picture = cv::imread(argv[1], 1);
    std::vector<{type}> objects;
    detect_{name}(picture, objects);
    for (const {type}& o : objects)
        printf("{label} %.9g %.9g %.9g %.9g %.9g\\n", {value} o.prob, o.rect.x, o.rect.y, o.rect.width, o.rect.height);
}}
"""


def kept(table: Array, score: float, overlap: float) -> Array:
    """Return the rows that a greedy NMS keeps, for each class alone."""
    chosen: list[Array] = []
    for row in table[np.argsort(-table[:, 1], kind="stable")]:
        if row[1] <= score:
            break
        same = np.array([other for other in chosen if other[0] == row[0]]).reshape(-1, 6)
        shared = (np.minimum(same[:, 4:], row[4:]) - np.maximum(same[:, 2:4], row[2:4])).clip(0).prod(1)
        areas = (same[:, 4:] - same[:, 2:4]).prod(1) + (row[4:] - row[2:4]).prod()
        if (shared <= overlap * (areas - shared)).all():
            chosen.append(row)
    return np.array(chosen).reshape(-1, 6)


def input_of(detector: Detector) -> str:
    """Return the name of the input, which ncnn's examples know."""
    return "images" if detector.program == "yolox" else "data"


def convert(detector: Detector, folder: Path) -> Path:
    """Export and convert the model; return the .onnx file."""
    path, image = folder / "model.onnx", torch.from_numpy(fed(detector))
    names: dict[str, Any] = {"input_names": [input_of(detector)], "dynamo": False}
    torch.onnx.export(detector.model, (image,), str(path), output_names=[*detector.outputs], opset_version=17, **names)
    words = ["-m", "onnx2ncnn_opt", "convert", str(path), "--effort", "quick", "-q", "--tail", "never"]
    subprocess.run([sys.executable, *words], check=True)
    return path


def found(detector: Detector, arguments: argparse.Namespace, folder: Path) -> Array:
    """Return the rows: label, score and corners that an example of ncnn finds."""
    name, source = detector.program, arguments.examples[1].absolute() / "examples" / f"{detector.program}.cpp"
    face = {"type": "FaceObject", "label": "0", "value": ""}
    words = {"type": "Object", "label": "%d", "value": "o.label,"} if name == "yolox" else face
    (folder / "main.cpp").write_text(_MAIN.format(source=source, name=name, **words))
    ncnn = arguments.examples[0].absolute()
    flags = ["-O1", "-w", f"-I{ncnn}/include/ncnn", "-DUSE_NCNN_SIMPLEOCV", "main.cpp", f"{ncnn}/lib/libncnn.a"]
    subprocess.run(["c++", *flags, "-fopenmp", "-o", "main"], cwd=folder, check=True)
    for end in ("param", "bin"):
        (folder / f"model.ncnn.{end}").rename(folder / f"{_FILES[name]}.{end}")
    cv2.imwrite(str(folder / "x.png"), picture(detector.side))
    ended = subprocess.run([folder / "main", "x.png"], cwd=folder, check=True, capture_output=True, text=True)
    table = np.array([line.split() for line in ended.stdout.splitlines()], float).reshape(-1, 6)
    table[:, 4:] += table[:, 2:4]
    return table


def appended(detector: Detector, path: Path, score: float) -> Array:
    """Return the rows that pyncnn finds in the only output of a net with `--append nms:`."""
    end = f"nms:{detector.outputs[0]}:conf={score}:iou={detector.overlap}:max=300"
    # Of numbers that are no pictures, random weights make boxes whose areas float32 does not hold.
    np.savez(path.with_name("inputs.npz"), **{input_of(detector): fed(detector)})  # type: ignore[arg-type]  # no key is an option
    words = ["-m", "onnx2ncnn_opt", "convert", str(path), "--effort", "quick", "-q", "--append", end]
    words += ["--inputs", str(path.with_name("inputs.npz")), "-o", str(path.with_name("nms"))]
    subprocess.run([sys.executable, *words], check=True)
    net = loaded(*(path.with_name(f"nms.ncnn.{end}") for end in ("param", "bin")))
    [boxes] = outputs_of(net, [fed(detector)])
    return boxes[:, [5, 4, 0, 1, 2, 3]]


def compared(a: Array, b: Array) -> tuple[object, ...]:
    """Return how many rows are in both tables, and how far apart they are."""
    pairs = []
    for row in a:
        same = b[(b[:, 0] == row[0]) & (abs(b[:, 1:] - row[1:]).max(1) < 1)]
        pairs += [(row, same[0])] if len(same) else []
    apart = abs(np.array([x - y for x, y in pairs]).reshape(-1, 6)).max(0, initial=0)
    return len(a), len(b), len(pairs), f"{apart[2:].max():.1e}", f"{apart[1]:.1e}"


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--examples", nargs=2, type=Path, metavar=("NCNN", "SOURCE"), help="also run ncnn's examples")
    parser.add_argument("-k", default="", metavar="TEXT", help="only detectors whose names contain it")
    arguments = parser.parse_args()
    with table("detectors", _COLUMNS, write=arguments.write) as add:
        for name in (name for name in DETECTORS if arguments.k in name):
            with TemporaryDirectory() as place:
                detector = DETECTORS[name]()
                path, feed = convert(detector, Path(place)), fed(detector)
                session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
                raw = [x[0] for x in session.run(None, {session.get_inputs()[0].name: feed})]
                whole = detector.decode(raw)
                scores = -np.sort(-whole[:, 1])
                score = round(float(scores[COUNT - 1 : COUNT + 1].mean()), 6)
                net = loaded(*(path.with_suffix(f".ncnn.{end}") for end in ("param", "bin")))
                own = detector.decode([x.reshape(y.shape) for x, y in zip(outputs_of(net, [feed]), raw, strict=True)])
                tables = [kept(candidates, score, detector.overlap) for candidates in (own, whole)]
                add(name, "pyncnn", len(raw), len(whole), *compared(*tables))
                if detector.decode in (decode_yolo, decode_decoded):
                    rows = whole.reshape(-1, int(whole[:, 0].max()) + 1, 6)
                    best = rows[np.arange(len(rows)), rows[:, :, 1].argmax(1)]
                    tables = [appended(detector, path, score), kept(best, score, detector.overlap)]
                    add(name, "pyncnn, --append nms", 1, len(best), *compared(*tables))
                if arguments.examples and detector.program:
                    expected = kept(whole, detector.score, detector.overlap)
                    expected[:, 2:] = expected[:, 2:].clip(0, detector.side - 1)
                    boxes = found(detector, arguments, Path(place))
                    add(name, f"ncnn's example {detector.program}", len(raw), len(whole), *compared(boxes, expected))


if __name__ == "__main__":
    main()
