"""Run nets in ultralytics' own package, and compare them with their .onnx files in the same package.

    pip install ultralytics
    python -m scripts.clients.ultralytics [-k pose] [--write]

Models of each task have random weights, and names that YAML has to quote. They are exported with fixed and dynamic
sizes and in fp16, and converted with and without `--client ultralytics`. YOLO(...) predicts the package's own picture,
whose sides differ. Exports with NMS and end-to-end heads are nets, too; those of rotated boxes have to be refused.
"""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import cv2
import torch
from ultralytics import YOLO
from ultralytics.utils import ASSETS, LOGGER

from scripts.measure.measured import parser_of, table

_TASKS = {"yolo11n": "detect", "yolo11n-seg": "segment", "yolo11n-pose": "pose", "yolo11n-obb": "obb"}
_MODELS = {**_TASKS, "yolo11n-cls": "classify", "yolov8n": "detect", "yolo26n": "detect", "yolo26n-pose": "pose"}
_EXPORTS: dict[str, dict[str, Any]] = {"fixed": {}, "dynamic": {"dynamic": True}, "half": {"half": True}}
_ENDS: dict[str, dict[str, Any]] = {"nms": {"nms": True}, "end2end": {"end2end": True}}
_SIDE, _SCORE = 320, 0.1
_COLUMNS = (
    "model", "export", "ultralytics loads", "picture", "largest error of raw outputs", "results", "largest error",
    "names", "without --client",
)  # fmt: skip


class Prediction(NamedTuple):
    """What ultralytics makes of the picture: the size that the net got, its outputs, the results, names of classes."""

    picture: str
    raw: list[torch.Tensor]
    results: list[torch.Tensor]
    names: dict[int, str]


def model_of(name: str, classes: int | None = None) -> YOLO:
    """Return a model with random weights that finds something: its normalisations suit the picture."""
    torch.manual_seed(0)
    model = YOLO(f"{name}.yaml")
    if classes is not None:
        inner = model.model
        model.model = type(inner)({**inner.yaml, "nc": classes}, verbose=False)
        model.model.args, model.model.task = inner.args, inner.task
    norms = [module for module in model.model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    pixels = cv2.resize(cv2.imread(str(ASSETS / "bus.jpg")), (_SIDE, _SIDE))
    picture = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    model.model.train()
    with torch.no_grad():
        model.model(torch.cat([picture, picture.flip(3), picture.flip(2), torch.rand_like(picture)]))
    model.model.eval()
    head = model.model.model[-1]
    for layers in [*getattr(head, "cv3", []), *getattr(head, "one2one_cv3", [])]:
        layers[-1].bias.data.fill_(-4)
        layers[-1].weight.data.mul_(4)
    model.model.names = {i: f"'{i}': \"Zoë\" #{i}" for i in model.model.names}
    return model


def exported(name: str, options: dict[str, Any], folder: Path) -> Path:
    """Export a model with ultralytics; return the .onnx file."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return folder / str(model_of(name).export(format="onnx", imgsz=_SIDE, **options))
    finally:
        os.chdir(before)


def converted(model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `convert`."""
    words = ["-m", "onnx2ncnn_opt", "convert", str(model), "--effort", "quick", "-q", *options]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True)


def predicted(path: Path, task: str | None = None) -> Prediction:
    """Let ultralytics load a model, and predict."""
    model, seen = YOLO(path, task=task), list[tuple[torch.Tensor, Any]]()
    picture = ASSETS / "bus.jpg"
    model.predict(picture, imgsz=_SIDE, conf=_SCORE, verbose=False)  # makes the predictor
    backend = model.predictor.model
    forward = backend.forward

    def watched(image: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append((image, forward(image, *args, **options)))
        return seen[-1][1]

    backend.forward = watched
    [result] = model.predict(picture, imgsz=_SIDE, conf=_SCORE, verbose=False)
    image, outputs = seen[-1]
    kinds = (result.boxes, result.masks, result.keypoints, result.obb, result.probs)
    found = [torch.as_tensor(kind.data).float() for kind in kinds if kind is not None]
    size = "x".join(map(str, image.shape[2:]))
    raw = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    return Prediction(size, raw, found, result.names)


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference in units of the largest value of a tensor; infinity for other shapes.

    Of masks, which are 0 and 1, it is the share of pixels that differ.
    """
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return float("inf")
    errors = [0.0]
    for a, b in zip(found, expected, strict=True):
        apart = (a.double() - b.double()).abs()
        is_mask = bool(((b == 0) | (b == 1)).all())
        errors += [float(apart.mean() if is_mask else apart.max() / b.abs().max())] if b.numel() else []
    return max(errors)


def without_client(model: Path, task: str, expected: Prediction, folder: Path) -> str:
    """Return what ultralytics does with a folder of a net alone."""
    folder.mkdir()
    converted(model, "--no-verify", "-o", f"{folder}/")
    try:
        plain = predicted(folder, task)
    except (IndexError, RuntimeError) as failure:  # poses and rotated boxes need metadata.yaml
        return f"{type(failure).__name__}"
    lost = [*([] if plain.names == expected.names else ["names lost"])]
    lost += [] if plain.picture == expected.picture else [f"picture {plain.picture}"]
    lost += [] if error(plain.results, expected.results) < 1e-3 else ["other results"]
    return ", ".join(lost) or "equal"


def rows(pattern: str, folder: Path) -> Iterator[tuple[object, ...]]:
    """Yield the lines of the table."""
    for name, task in _MODELS.items():
        for export, options in {**_EXPORTS, **(_ENDS if "cls" not in name else {})}.items():
            if pattern not in f"{name} {export}":
                continue
            if export == "end2end" and not name.startswith("yolo26"):
                continue
            place = folder / f"{name}_{export}"
            place.mkdir()
            model = exported(name, options, place)
            own = place / f"{name}_ncnn_model"
            ended = converted(model, "--client", "ultralytics")
            if ended.returncode:
                yield name, export, f"refused, exit code {ended.returncode}", *[None] * 6
                continue
            expected, found = predicted(model), predicted(own)
            is_named = found.names == expected.names and len(set(found.names.values())) > 1
            yield (
                name,
                export,
                "yes",
                found.picture if found.picture == expected.picture else f"{found.picture}, not {expected.picture}",
                f"{error(found.raw, expected.raw):.1e}",
                len(expected.results[0]),
                f"{error(found.results, expected.results):.1e}",
                "equal" if is_named else "lost",
                without_client(model, task, expected, place / "plain_ncnn_model"),
            )
            shutil.rmtree(place)


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("-k", default="", metavar="TEXT", help="only models and exports whose names contain it")
    options = parser.parse_args()
    LOGGER.setLevel(logging.ERROR)
    with TemporaryDirectory() as folder, table("ultralytics", _COLUMNS, write=options.write) as add:
        for row in rows(options.k, Path(folder)):
            add(*row)


if __name__ == "__main__":
    main()
