"""Run ncnn's own YOLO examples over our nets, and compare what they find with the .onnx file in ONNX Runtime.

    pip install ultralytics
    python -m scripts.clients.examples NCNN SOURCE [--apps ncnn-android-yolov8 ncnn-android-yolo11] [-k pose] [--write]

NCNN is an installed ncnn, built with NCNN_SIMPLEOCV=ON; SOURCE is its source, which has examples/. The programs are
compiled as they are; behind each is a main that prints what its function returns, instead of drawing it. Of Android
apps, whose sources are in the folders after --apps, the C++ of each task is compiled for this machine. Apps and
examples of rotated boxes need OpenCV (libopencv-highgui-dev). Models have random weights and the classes that the
examples know; YOLOv5 and YOLOv7 are their heads only. They are exported by ultralytics with dynamic and fixed sizes,
and by torch's newer exporter, and converted with `--raw-head`. The picture has the size that the examples want, but
for a border.
"""

import argparse
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import cv2
import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from ultralytics.utils import ASSETS, LOGGER

from scripts.clients.ultralytics import model_of
from scripts.measure.measured import parser_of, table

Array = NDArray[Any]
_TASKS = {"": ("detect", 80, 640), "seg": ("segment", 80, 640), "pose": ("pose", 1, 640), "obb": ("obb", 15, 1024)}
_TASKS |= {"cls": ("classify", 1000, 224)}
_EXPORTS = ("dynamic", "fixed", "dynamo")
_SCORE, _OVERLAP = 0.25, 0.45  # of the examples
_BOXES = 100  # before NMS
_ANCHORS = {  # of yolov5_pnnx.cpp and yolov7_pnnx.cpp, by the stride
    "yolov5s": {8: [10, 13, 16, 30, 33, 23], 16: [30, 61, 62, 45, 59, 119], 32: [116, 90, 156, 198, 373, 326]},
    "yolov7": {8: [12, 16, 19, 36, 40, 28], 16: [36, 75, 76, 55, 72, 146], 32: [142, 110, 192, 243, 459, 401]},
}
_COLUMNS = ("example", "export", "found", "expected", "in both", "largest error, pixels", "of scores", "further")
_FIRST = 'printf("%d %.9g %.9g %.9g %.9g %.9g", o.label, o.prob, o.rect.x, o.rect.y, o.rect.width, o.rect.height);'
_PRINTED = {
    "detect": _FIRST,
    "segment": _FIRST + ' for (int i = 0; i < o.mask.rows * o.mask.cols; i++) printf(" %d", o.mask.data[i]);',
    "pose": _FIRST + ' for (const KeyPoint& k : o.keypoints) printf(" %.9g %.9g %.9g", k.p.x, k.p.y, k.prob);',
    "obb": 'printf("%d %.9g %.9g %.9g %.9g %.9g %.9g", o.label, o.prob, o.rrect.center.x, o.rrect.center.y, '
    "o.rrect.size.width, o.rrect.size.height, o.rrect.angle);",
    "classify": 'printf("%d %.9g", o.label, o.prob);',
}
_MAIN = """#define main example
#include "{source}"
#undef main
int main(int, char** argv)
{{
    cv::Mat picture = cv::imread(argv[1], 1);
    std::vector<Object> objects;
    detect_{function}(picture, objects);
    for (const Object& o : objects) {{ {printed} printf("\\n"); }}
    return 0;
}}
"""


_APP = """#include <float.h>
#include <algorithm>
#include <opencv2/highgui.hpp>
#include <opencv2/imgproc.hpp>
#define AAssetManager void
#include "{folder}/{family}.h"
#include "{folder}/{program}.cpp"
{base}::~{base}() {{}}
struct App : {base}_{task}
{{
    App()
    {{
        {family}.load_param("{net}.ncnn.param");
        {family}.load_model("{net}.ncnn.bin");
        det_target_size = {side};
    }}
    int draw(cv::Mat&, const std::vector<Object>&) {{ return 0; }}
}};
int main(int, char** argv)
{{
    cv::Mat picture = cv::imread(argv[1], 1);
    cv::cvtColor(picture, picture, cv::COLOR_BGR2RGB);
    std::vector<Object> objects;
    App().detect(picture, objects);
    for (const Object& o : objects) {{ {printed} printf("\\n"); }}
    return 0;
}}
"""


class Example(NamedTuple):
    """A program of ncnn's examples or an app, the net that it loads, and how its model is exported."""

    program: str
    net: str
    task: str
    classes: int
    side: int
    export: str
    app: Path | None = None  # its folder

    @property
    def border(self) -> int:
        """The number of pixels at the left and the right of the picture: the net gets a multiple of its stride."""
        return -self.picture[1] % (64 if self.net in _ANCHORS else 32)

    @property
    def picture(self) -> tuple[int, int]:
        """The height and width of the picture, which gets a border at its left and right, except for a classifier."""
        return (self.side, self.side if self.task == "classify" else self.side * 3 // 4 - 10)


def examples(apps: Iterable[Path]) -> Iterator[Example]:
    """Yield the programs for YOLOv8 and YOLO11, two of them with each export, those for YOLOv5 and v7, and the apps."""
    for family in ("yolov8", "yolo11"):
        for suffix, how in _TASKS.items():
            for export in _EXPORTS:
                if export == "dynamic" or (family == "yolo11" and suffix in ("", "pose")):
                    name = "_".join(filter(None, [family, suffix]))
                    yield Example(name, name.replace(family, f"{family}n"), *how, export)
    for net in _ANCHORS:
        yield Example(f"{net.rstrip('s')}_pnnx", net, *_TASKS[""], "dynamic")
    for app in apps:
        family = app.name.removeprefix("ncnn-android-")
        for suffix, how in _TASKS.items():
            net = "_".join(filter(None, [f"{family}n", suffix]))
            yield Example(f"{family}_{suffix or 'det'}", net, *how, "dynamic", app.absolute())


def exported(example: Example, folder: Path) -> Path:
    """Export the example's model with random weights; return the .onnx file."""
    path = folder / "model.onnx"
    if example.net in _ANCHORS:
        export_levels(example, path)
        return path
    model, export = model_of(example.net.replace("_", "-"), example.classes), torch.onnx.export
    if example.task != "classify":
        find_some(model.model, [layers[-1] for layers in model.model.model[-1].cv3], example)

    def newer(model: Any, image: Any, *args: Any, **options: Any) -> Any:
        sizes = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
        changed = {"dynamo": True, "dynamic_axes": None, "dynamic_shapes": (sizes,), "external_data": False}
        return export(model, (image,), *args, **{**options, **changed, "opset_version": None})

    height, width = example.picture
    options: dict[str, Any] = {"dynamic": True, "imgsz": example.side}
    if example.export == "fixed" or example.task == "classify":
        options = {"imgsz": (height, (width + 31) // 32 * 32)}
    before = Path.cwd()
    os.chdir(folder)
    try:
        with patch("torch.onnx.export", newer if example.export == "dynamo" else export):
            written = folder / str(model.export(format="onnx", simplify=False, **options))
    finally:
        os.chdir(before)
    return written.rename(path)


def find_some(model: Any, convolutions: Iterable[Any], example: Example) -> None:
    """Change biases until a model with random weights finds about a hundred boxes in the picture, before NMS."""
    image = torch.from_numpy(fed(example))

    def count() -> int:
        output = model(image)
        while isinstance(output, tuple):
            output = output[0]
        return int((scores_of(example, output[0].numpy()).max(1) >= _SCORE).sum())

    step = 1.0
    with torch.no_grad():
        while not _BOXES <= (found := count()) <= 2 * _BOXES:
            if (found < _BOXES) != (step > 0):
                step /= -2
            for convolution in convolutions:
                convolution.bias += step


def scores_of(example: Example, output: Array) -> Array:
    """Return the scores [boxes, classes] in an output [boxes, 5 + classes] or [4 + classes + others, boxes]."""
    if example.net in _ANCHORS:
        return np.asarray(output[:, 5:] * output[:, 4:5])
    return np.asarray(output[4 : 4 + example.classes].T)


class AnchorBased(torch.nn.Module):  # type: ignore[misc]
    """The head of YOLOv5 or v7 over one convolution for each level, decoded as its source does."""

    def __init__(self, net: str) -> None:
        super().__init__()
        self.anchors = _ANCHORS[net]
        self.levels = torch.nn.ModuleList(torch.nn.Conv2d(3, 255, s, s) for s in self.anchors)

    def forward(self, image: Any) -> Any:
        """Return [N, boxes, 85]."""
        rows = []
        for level, (stride, anchors) in zip(self.levels, self.anchors.items(), strict=True):
            values = level(image)
            batch, _, high, wide = values.shape
            numbers = values.view(batch, 3, 85, high, wide).permute(0, 1, 3, 4, 2).sigmoid()
            y, x = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
            centre = (numbers[..., :2] * 2 - 0.5 + torch.stack((x, y), 2)) * stride
            size = (numbers[..., 2:4] * 2) ** 2 * torch.tensor(anchors, dtype=torch.float32).view(1, 3, 1, 1, 2)
            rows.append(torch.cat((centre, size, numbers[..., 4:]), 4).view(batch, -1, 85))
        return torch.cat(rows, 1)


def export_levels(example: Example, path: Path) -> None:
    """Export a head like that of YOLOv5 or v7 with dynamic sizes."""
    torch.manual_seed(0)
    model = AnchorBased(example.net).eval()
    find_some(model, model.levels, example)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["output0"], "dynamo": False}
    sizes = {"images": {2: "height", 3: "width"}}
    torch.onnx.export(model, (torch.zeros(1, 3, 640, 640),), str(path), dynamic_axes=sizes, opset_version=17, **names)


def picture_of(example: Example) -> Array:
    """Return a photograph [height, width, 3], BGR."""
    height, width = example.picture
    whole = cv2.imread(str(ASSETS / "bus.jpg"))
    return np.asarray(cv2.resize(whole, (width, height), interpolation=cv2.INTER_AREA))


def compiled(example: Example, ncnn: Path, source: Path, folder: Path) -> Path:
    """Compile the example; return the program."""
    printed, (family, _, task) = _PRINTED[example.task], example.program.partition("_")
    if example.app:
        names = {"folder": example.app / "app/src/main/jni", "base": family.upper().replace("V", "v"), "task": task}
        names |= {"family": family, "program": example.program, "net": example.net, "side": example.side}
        text = _APP.format(printed=printed, **names)
    else:
        file, function = source / "examples" / f"{example.program}.cpp", example.program.removesuffix("_pnnx")
        text = _MAIN.format(source=file, function=function, printed=printed)
    (folder / "main.cpp").write_text(text)
    flags = ["-DUSE_NCNN_SIMPLEOCV"]
    if example.app or example.task == "obb":
        flags = [
            "-I/usr/include/opencv4",
            "-lopencv_highgui",
            "-lopencv_imgcodecs",
            "-lopencv_imgproc",
            "-lopencv_core",
        ]
    words = ["c++", "-O1", "-w", f"-I{ncnn}/include/ncnn", "main.cpp", *flags]  # OpenCV before ncnn's own small one
    subprocess.run([*words, f"{ncnn}/lib/libncnn.a", "-fopenmp", "-o", "main"], cwd=folder, check=True)
    return folder / "main"


def fed(example: Example) -> Array:
    """Return the picture with its border as the examples feed it."""
    sides, value = (0, 0, example.border // 2, example.border - example.border // 2), (114,) * 3
    whole = cv2.copyMakeBorder(picture_of(example), *sides, cv2.BORDER_CONSTANT, value=value)
    return np.ascontiguousarray(whole[None, :, :, ::-1].transpose(0, 3, 1, 2)).astype(np.float32) * np.float32(1 / 255)


def decoded(example: Example, model: Path) -> list[Array]:
    """Return the objects that the .onnx file gives: label, score, box and further numbers of each, the best first."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    [rows, *others] = session.run(None, {session.get_inputs()[0].name: fed(example)})
    if example.task == "classify":
        best = np.argsort(-rows[0], kind="stable")[:5]
        return [np.array([label, rows[0, label]]) for label in best]
    scores, is_old = scores_of(example, rows[0]), example.net in _ANCHORS
    rows = rows[0] if is_old else rows[0].T
    further = rows[:, rows.shape[1] if is_old else 4 + example.classes :]
    table = np.concatenate((scores.argmax(1)[:, None], scores.max(1)[:, None], rows[:, :4], further), 1)
    kept: list[Array] = []
    for row in table[np.argsort(-table[:, 1], kind="stable")]:
        if row[1] >= _SCORE and all(other[0] != row[0] or overlap(other, row) <= _OVERLAP for other in kept):
            kept.append(row)
    return [placed(example, row, others, example.border // 2, example.picture) for row in kept]


def overlap(a: Array, b: Array) -> float:
    """Return the intersection over the union of two boxes, which may be rotated: label, score, centre, size, angle."""
    shared = 0.0
    if len(a) == 7:
        corners = [((x[2], x[3]), (x[4], x[5]), np.degrees(x[6])) for x in (a, b)]
        found = cv2.rotatedRectangleIntersection(*corners)[1]
        shared = 0.0 if found is None else cv2.contourArea(found)
    else:
        sides = np.minimum(a[2:4] + a[4:6] / 2, b[2:4] + b[4:6] / 2) - np.maximum(
            a[2:4] - a[4:6] / 2, b[2:4] - b[4:6] / 2
        )
        shared = float(sides.clip(0).prod())
    return shared / float(a[4] * a[5] + b[4] * b[5] - shared)


def placed(example: Example, row: Array, others: list[Array], left: int, sizes: tuple[int, int]) -> Array:
    """Return the numbers that the program prints: the box in the picture, keypoints there, and pixels of a mask."""
    label, score, x, y, w, h, *further = row.tolist()
    if example.task == "obb":
        return np.array([label, score, x - left, y, w, h, np.degrees(further[0])])
    low = np.clip([x - w / 2 - left, y - h / 2], 0, (sizes[1] - 1, sizes[0] - 1))
    high = np.clip([x + w / 2 - left, y + h / 2], 0, (sizes[1] - 1, sizes[0] - 1))
    box, points = [*low, *(high - low)], np.array(further)
    if example.task == "pose":
        points[::3] -= left
    if example.task == "segment":
        whole = 1 / (1 + np.exp(-np.tensordot(points.astype(np.float32), others[0][0], 1)))
        whole = cv2.resize(whole, (whole.shape[1] * 4, whole.shape[0] * 4))
        x0, y0 = int(left + np.float32(low[0])), int(low[1])
        points = (whole[y0 : y0 + int(box[3]), x0 : x0 + int(box[2])] > 0.5).astype(float).ravel()
    return np.array([label, score, *box, *points])


def row_of(example: Example, arguments: argparse.Namespace, folder: Path) -> tuple[object, ...]:
    """Return the example's line of the table."""
    model = exported(example, folder)
    head = ["--blob-names", "pnnx"] if example.task == "classify" else ["--raw-head"]
    words = ["-m", "onnx2ncnn_opt", "convert", str(model), "-o", str(folder / example.net), "--effort", "quick", "-q"]
    subprocess.run([sys.executable, *words, *head], check=True)
    for end in ("param", "bin"):  # yolov7_pnnx.cpp loads these names
        shutil.copy(folder / f"{example.net}.ncnn.{end}", folder / f"{example.net}.{end}")
    program, picture = (
        compiled(example, arguments.ncnn.absolute(), arguments.source.absolute(), folder),
        folder / "x.png",
    )
    cv2.imwrite(str(picture), picture_of(example))
    lines = subprocess.run(
        [program, picture], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    found, expected = [np.array(line.split(), float) for line in lines], decoded(example, model)
    pairs = list[tuple[Array, Array]]()
    for a in found:
        same = [b for b in expected if a[0] == b[0] and abs(a[1:6] - b[1:6]).max() < 1 and len(a) == len(b)]
        pairs += [(a, same[0])] if same else []
    first, last = (6, None) if example.task in ("pose", "segment") else (2, 2)
    further = max((abs(a[first:last] - b[first:last]).max(initial=0) for a, b in pairs), default=0)
    if example.task == "segment":
        further = np.mean([abs(a[6:] - b[6:]).mean() for a, b in pairs if len(a) > 6])
    boxes = max((abs(a[2:] - b[2:])[: 5 if example.task == "obb" else 4].max(initial=0) for a, b in pairs), default=0)
    scores = max((abs(a[1] - b[1]) for a, b in pairs), default=0)
    has_more = example.task in ("pose", "segment")
    name = f"{example.app.name}, {example.task}" if example.app else example.program
    return (
        name, example.export, len(found), len(expected), len(pairs), f"{boxes:.1e}", f"{scores:.1e}",
        f"{further:.1e}" if has_more else None,
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__, "ncnn", "source")
    parser.add_argument("--apps", nargs="*", type=Path, default=[], metavar="APP", help="folders of Android apps")
    parser.add_argument("-k", default="", metavar="TEXT", help="only examples and exports whose names contain it")
    arguments = parser.parse_args()
    LOGGER.setLevel(logging.ERROR)
    with table("examples", _COLUMNS, write=arguments.write) as add:
        for example in examples(arguments.apps):
            if arguments.k in f"{example.program} {example.export}{example.app or ''}":
                with TemporaryDirectory() as folder:
                    add(*row_of(example, arguments, Path(folder)))


if __name__ == "__main__":
    main()
