"""Run our nets in mmdeploy's SDK, and compare its results with those of the same SDK over the .onnx file.

    pip install mmdeploy-runtime
    python -m scripts.clients.mmdeploy NCNN MMDEPLOY SPDLOG [--write]

NCNN is an installed ncnn, MMDEPLOY a checkout of github.com/open-mmlab/mmdeploy at the version of the package, and
SPDLOG one of github.com/gabime/spdlog (v1.9.2). The package has a backend for ONNX Runtime; its backend for ncnn is
compiled from MMDEPLOY. Models have random weights; the second output of the pose model is computed first.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mmdeploy_runtime  # type: ignore[import-not-found]
import numpy as np
import torch
from numpy.typing import NDArray

from scripts.measure.measured import parser_of, table

Array = NDArray[Any]
_SIDE = 96
_COLUMNS = ("task", "component", "numbers", "largest error")
_POST: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Classifier": ("mmcls", "LinearClsHead", {"topk": 5}),
    "PoseDetector": ("mmpose", "SimCCLabelDecode", {"input_size": [_SIDE, _SIDE], "simcc_split_ratio": 2.0}),
    "Restorer": ("mmedit", "TensorToImg", {}),
}


class Model(torch.nn.Module):  # type: ignore[misc]
    """Convolutions, and the head of a task."""

    def __init__(self, task: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv = torch.nn.Conv2d
        layers = [conv(3, 16, 3, 2, 1), torch.nn.ReLU(), conv(16, 32, 3, 2, 1), torch.nn.SiLU(), conv(32, 48, 3, 1, 1)]
        self.task, self.trunk = task, torch.nn.Sequential(*layers)
        self.scores = torch.nn.Linear(48, 1000)
        self.points = conv(48, 17, 1)
        self.x, self.y = (torch.nn.Linear((_SIDE // 4) ** 2, 2 * _SIDE) for _ in range(2))
        self.pixels = torch.nn.Sequential(torch.nn.PixelShuffle(4), torch.nn.Sigmoid())

    def forward(self, image: Any) -> Any:
        """Return scores, or rows of probabilities for x and y, or a picture."""
        features = self.trunk(image)
        if self.task == "Classifier":
            return self.scores(features.mean((2, 3))).softmax(1)
        if self.task == "Restorer":
            return self.pixels(features)
        points = self.points(features).flatten(2)
        y = self.y(points)
        return self.x(points), y


def build(arguments: argparse.Namespace, folder: Path) -> Path:
    """Compile the SDK's backend for ncnn, for the package's library."""
    source, package = arguments.mmdeploy.absolute(), Path(mmdeploy_runtime.__file__).parent
    ncnn, sdk = arguments.ncnn.absolute(), source / "csrc" / "mmdeploy"
    layers = sdk / "backend_ops" / "ncnn" / "ops"
    files = [sdk / "net" / "ncnn" / "ncnn_net.cpp", *layers.rglob("*.cpp")]
    folders = [source / "csrc", ncnn / "include" / "ncnn", arguments.spdlog.absolute() / "include", layers]
    folders += [source / "third_party" / name for name in ("outcome", "json", "concurrentqueue")]
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden"]
    flags += ["-D_GLIBCXX_USE_CXX11_ABI=0", *(f"-I{path}" for path in folders)]  # the ABI of the package
    libraries = [str(ncnn / "lib" / "libncnn.a"), f"-L{package}", "-l:libmmdeploy.so.1"]
    path = folder / "libmmdeploy_ncnn_net.so"
    subprocess.run(["c++", *flags, *map(str, files), *libraries, "-o", path], check=True)
    return path


def export(task: str, folder: Path) -> None:
    """Export the model of a task."""
    outputs = ["simcc_x", "simcc_y"] if task == "PoseDetector" else ["output"]
    names: dict[str, Any] = {"input_names": ["input"], "output_names": outputs, "opset_version": 13, "dynamo": False}
    torch.onnx.export(Model(task).eval(), (torch.zeros(1, 3, _SIDE, _SIDE),), str(folder / "end2end.onnx"), **names)


def describe(task: str, backend: str, folder: Path) -> None:
    """Write the files that the SDK reads, as `mmdeploy` writes them for a model of the task."""
    module, component, params = _POST[task]
    files = {"net": "end2end.onnx", "weights": ""}
    if backend == "ncnn":
        files = {"net": "end2end.ncnn.param", "weights": "end2end.ncnn.bin"}
    net = {"name": "net", **files, "backend": backend, "precision": "FP32", "batch_size": 1, "dynamic_shape": False}
    text = {"version": mmdeploy_runtime.__version__, "task": task, "models": [net], "customs": []}
    (folder / "deploy.json").write_text(json.dumps(text))
    size = [_SIDE, _SIDE]
    steps: list[dict[str, Any]] = [{"type": "LoadImageFromFile"}, {"type": "Resize", "keep_ratio": False, "size": size}]
    if task == "PoseDetector":
        steps[1:] = [
            {"type": "TopDownGetBboxCenterScale", "padding": 1.25, "image_size": size},
            {"type": "TopDownAffine", "image_size": size},
        ]
    norm = {"type": "Normalize", "mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375], "to_rgb": True}
    meta = ["img_shape", "ori_shape", *(["center", "scale"] if task == "PoseDetector" else [])]
    steps += [norm, {"type": "ImageToTensor", "keys": ["img"]}, {"type": "Collect", "keys": ["img"], "meta_keys": meta}]
    before, after = ["prep_output"], ["infer_output"]
    tasks: list[dict[str, Any]] = [
        {"name": "Preprocess", "module": "Transform", "input": ["img"], "output": before, "transforms": steps},
        {"name": "net", "module": "Net", "input": before, "output": after, "input_map": {"img": "input"}},
        {"name": "postprocess", "module": module, "component": component, "params": params, "output": ["post_output"]},
    ]
    tasks[2]["input"] = before + after if task == "PoseDetector" else after
    pipeline = {"input": ["img"], "output": ["post_output"], "tasks": [{"type": "Task", **one} for one in tasks]}
    (folder / "pipeline.json").write_text(json.dumps({"pipeline": pipeline}))


def results(task: str, backend: str, folder: Path) -> Array:
    """Return what the SDK finds in a picture of noise."""
    describe(task, backend, folder)
    picture = np.random.default_rng(0).integers(0, 256, (120, 150, 3), np.uint8)
    run: Callable[[Array], Any] = getattr(mmdeploy_runtime, task)(model_path=str(folder), device_name="cpu")
    return np.asarray(run(picture), np.float64)


def main() -> None:
    """Print the table."""
    arguments = parser_of(__doc__, "ncnn", "mmdeploy", "spdlog").parse_args()
    with TemporaryDirectory() as place, table("mmdeploy", _COLUMNS, write=arguments.write) as add:
        CDLL(str(build(arguments, Path(place))), os.RTLD_GLOBAL | os.RTLD_NOW)
        for task, (_, component, _) in _POST.items():
            folder = Path(place) / task
            folder.mkdir()
            export(task, folder)
            words = ["-m", "onnx2ncnn_opt", "convert", "end2end.onnx", "--effort", "quick", "-q"]
            subprocess.run([sys.executable, *words], cwd=folder, check=True)
            expected, found = (results(task, backend, folder) for backend in ("onnxruntime", "ncnn"))
            add(task, component, found.size, f"{abs(found - expected).max():.1e}")


if __name__ == "__main__":
    main()
