"""Detectors with random weights, and the decoding of their outputs in NumPy, for detectors.py."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchvision.models.detection import ssdlite320_mobilenet_v3_large
from torchvision.models.detection.image_list import ImageList
from ultralytics.utils import ASSETS

from scripts.clients.ultralytics import model_of
from scripts.measure.architecture_export import build
from scripts.measure.architectures import read_architectures

Array = NDArray[Any]
COUNT = 100  # candidates that are good enough
_STRIDES = (8, 16, 32)


class Detector(NamedTuple):
    """A model, the side of its picture, its outputs' names, and their decoding to rows: label, score, corners."""

    model: Any
    side: int
    outputs: tuple[str, ...]
    decode: Callable[[list[Array]], Array]
    program: str = ""  # of ncnn's examples
    score: float = 0  # that the program wants
    overlap: float = 0.45


class Best(nn.Module):  # type: ignore[misc]
    """The end of RT-DETR's and D-FINE's exports: the best of all queries and classes."""

    def __init__(self, model: nn.Module, side: int) -> None:
        super().__init__()
        self.model, self.side = model, side

    def forward(self, image: Any) -> Any:
        """Return labels, boxes in pixels, and scores."""
        logits, boxes = self.model(image)
        scores, index = logits.sigmoid().flatten(1).topk(300, -1)
        centre, size = boxes.split(2, -1)
        corners = torch.cat((centre - size / 2, centre + size / 2), -1) * self.side
        classes = logits.shape[-1]
        return index % classes, corners.gather(1, (index // classes).unsqueeze(-1).repeat(1, 1, 4)), scores


class Pyramid(nn.Module):  # type: ignore[misc]
    """A small trunk with features of three strides, the coarse added to the finer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def block(a: int, b: int) -> nn.Module:
            depthwise = [nn.Conv2d(a, a, 3, 2, 1, groups=a), nn.BatchNorm2d(a), nn.ReLU()]
            return nn.Sequential(*depthwise, nn.Conv2d(a, b, 1), nn.BatchNorm2d(b), nn.ReLU())

        self.stem = nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), block(16, 32))
        self.blocks = nn.ModuleList(block(a, b) for a, b in ((32, 64), (64, 96), (96, 128)))
        self.sides = nn.ModuleList(nn.Conv2d(a, 64, 1) for a in (64, 96, 128))

    def forward(self, image: Any) -> list[Any]:
        """Return features of 8, 16 and 32 pixels."""
        x, maps = self.stem(image), []
        for stage, side in zip(self.blocks, self.sides, strict=True):
            x = stage(x)
            maps.append(side(x))
        for i in (1, 0):
            maps[i] = maps[i] + nn.functional.interpolate(maps[i + 1], scale_factor=2.0, mode="nearest")
        return maps


class YOLOX(nn.Module):  # type: ignore[misc]
    """The head of YOLOX: [N, candidates, 85], with or without `decode_in_inference`."""

    def __init__(self, *, is_decoded: bool) -> None:
        super().__init__()
        self.trunk, self.is_decoded = Pyramid(), is_decoded
        self.boxes = nn.ModuleList(nn.Conv2d(64, 4, 1) for _ in _STRIDES)
        self.scores = nn.ModuleList(nn.Conv2d(64, 81, 1) for _ in _STRIDES)

    def forward(self, image: Any) -> Any:
        """Return boxes on the grid, objectness and scores."""
        maps = zip(self.trunk(image), self.boxes, self.scores, strict=True)
        rows = [torch.cat((box(x), score(x).sigmoid()), 1).flatten(2) for x, box, score in maps]
        table = torch.cat(rows, 2).permute(0, 2, 1)
        if not self.is_decoded:
            return table
        grid, stride = (torch.from_numpy(x).float() for x in cells(int(image.shape[2])))
        centre, size = (table[..., :2] + grid) * stride[:, None], table[..., 2:4].exp() * stride[:, None]
        return torch.cat((centre, size, table[..., 4:]), 2)


class RetinaFace(nn.Module):  # type: ignore[misc]
    """Scores, boxes and landmarks of two anchors in each cell, for each stride, the coarsest first."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Pyramid()
        self.heads = nn.ModuleList(nn.ModuleList(nn.Conv2d(64, n, 1) for n in (4, 8, 20)) for _ in _STRIDES)

    def forward(self, image: Any) -> Any:
        """Return nine maps."""
        outputs: list[Any] = []
        for x, (score, box, landmark) in reversed([*zip(self.trunk(image), self.heads, strict=True)]):
            logits = score(x)
            n, _, high, wide = logits.shape
            scores = logits.reshape(n, 2, 2 * high, wide).softmax(1).reshape(n, 4, high, wide)
            outputs += [scores, box(x), landmark(x)]
        return tuple(outputs)


class SSD(nn.Module):  # type: ignore[misc]
    """torchvision's SSDlite up to its head."""

    def __init__(self) -> None:
        super().__init__()
        model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=21)
        self.backbone, self.head, self.anchors = model.backbone, model.head, model.anchor_generator

    def forward(self, image: Any) -> Any:
        """Return probabilities and deltas."""
        result = self.head([*self.backbone(image).values()])
        return result["cls_logits"].softmax(-1), result["bbox_regression"]


def rows(boxes: Array, scores: Array) -> Array:
    """Return a row for each box and class."""
    labels = np.tile(np.arange(scores.shape[1]), len(boxes))
    return np.concatenate((np.stack((labels, scores.ravel()), 1), boxes.repeat(scores.shape[1], 0)), 1)


def corners(centre: Array, size: Array) -> Array:
    """Return x0, y0, x1, y1."""
    return np.concatenate((centre - size / 2, centre + size / 2), 1)


def cells(side: int) -> tuple[Array, Array]:
    """Return the corner of each cell of three strides, and its stride."""
    grids = [np.mgrid[: side // s, : side // s][::-1].reshape(2, -1).T for s in _STRIDES]
    return np.concatenate(grids), np.concatenate([np.full(len(g), s) for g, s in zip(grids, _STRIDES, strict=True)])


def decode_yolo(outputs: list[Array]) -> Array:
    """Decode [4 + classes, candidates], centre and size."""
    table = outputs[0].T
    return rows(corners(table[:, :2], table[:, 2:4]), table[:, 4:])


def decode_yolox(outputs: list[Array]) -> Array:
    """Decode [candidates, 5 + classes] without grids."""
    [table], side = outputs, round((len(outputs[0]) / 21) ** 0.5) * 32
    grid, stride = cells(side)
    boxes = corners((table[:, :2] + grid) * stride[:, None], np.exp(table[:, 2:4]) * stride[:, None])
    return rows(boxes, table[:, 4:5] * table[:, 5:])


def decode_decoded(outputs: list[Array]) -> Array:
    """Decode [candidates, 5 + classes], centre and size."""
    [table] = outputs
    return rows(corners(table[:, :2], table[:, 2:4]), table[:, 4:5] * table[:, 5:])


def decode_retinaface(outputs: list[Array]) -> Array:
    """Decode nine maps with the anchors of ncnn's example."""
    found = []
    for i, (stride, sizes) in enumerate(((32, (512, 256)), (16, (128, 64)), (8, (32, 16)))):
        scores, deltas = outputs[3 * i], outputs[3 * i + 1].reshape(2, 4, -1)
        y, x = np.mgrid[: scores.shape[1], : scores.shape[2]].reshape(2, -1) * stride + 8
        for anchor, size in enumerate(sizes):
            d = deltas[anchor]
            centre = np.stack((x + size * d[0], y + size * d[1]), 1)
            boxes = corners(centre, np.exp(d[2:].T) * size)
            boxes[:, 2:] += 1
            found.append(rows(boxes, scores[2 + anchor].reshape(-1, 1)))
    return np.concatenate(found)


def decode_best(outputs: list[Array]) -> Array:
    """Decode labels, boxes and scores."""
    labels, boxes, scores = outputs
    return np.concatenate((labels.reshape(-1, 1), scores.reshape(-1, 1), boxes), 1)


def ssd() -> Detector:
    """Return torchvision's SSDlite."""
    torch.manual_seed(0)
    model, image = SSD().eval(), torch.zeros(1, 3, 320, 320)
    [priors] = model.anchors(ImageList(image, [(320, 320)]), [*model.backbone(image).values()])
    boxes = priors.numpy()
    sizes, centres = boxes[:, 2:] - boxes[:, :2], (boxes[:, :2] + boxes[:, 2:]) / 2

    def decode(outputs: list[Array]) -> Array:
        scores, deltas = outputs
        moved = corners(centres + deltas[:, :2] / 10 * sizes, np.exp(deltas[:, 2:] / 5) * sizes)
        return rows(moved, scores[:, 1:])

    detector = Detector(model, 320, ("scores", "deltas"), decode)
    calibrate(detector, [])
    return detector


def yolo(name: str) -> Detector:
    """Return a model of ultralytics; YOLO26 gives its best boxes."""
    model = model_of(name).model
    model.model[-1].export = True
    if name == "yolo26n":
        model.model[-1].end2end = True
        return Detector(model, 320, ("output0",), lambda outputs: outputs[0][:, [5, 4, 0, 1, 2, 3]], overlap=1)
    return Detector(model, 320, ("output0",), decode_yolo)


def transformer(name: str) -> Detector:
    """Return a small model of transformers, with the end of its exports."""
    best = Best(build(read_architectures()[name]), 640)
    return Detector(best, 640, ("labels", "boxes", "scores"), decode_best, overlap=1)


def yolox() -> Detector:
    """Return a small YOLOX."""
    detector = Detector(YOLOX(is_decoded=False), 640, ("output",), decode_yolox, "yolox", 0.25)
    calibrate(detector, [score.bias for score in detector.model.scores])
    return detector


def decoded_yolox() -> Detector:
    """Return the same model with `decode_in_inference`."""
    detector = Detector(YOLOX(is_decoded=True), 640, ("output",), decode_decoded, score=0.25)
    calibrate(detector, [score.bias for score in detector.model.scores])
    return detector


def retinaface() -> Detector:
    """Return a small RetinaFace."""
    names = [f"face_rpn_{x}_stride{s}" for s in (32, 16, 8) for x in ("cls_prob_reshape", "bbox_pred", "landmark_pred")]
    detector = Detector(RetinaFace(), 640, tuple(names), decode_retinaface, "retinaface", 0.8, 0.4)
    calibrate(detector, [score.bias[2:] for score, *_ in detector.model.heads])
    return detector


DETECTORS: dict[str, Callable[[], Detector]] = {
    **{name: partial(yolo, name) for name in ("yolov8n", "yolo11n", "yolo26n")},
    **{name: partial(transformer, name) for name in ("rt_detr", "d_fine")},
    "yolox": yolox,
    "yolox, decoded": decoded_yolox,
    "ssdlite320": ssd,
    "retinaface": retinaface,
}


def picture(side: int) -> Array:
    """Return a photograph [side, side, 3], BGR."""
    return np.asarray(cv2.resize(cv2.imread(str(ASSETS / "bus.jpg")), (side, side), interpolation=cv2.INTER_AREA))


def fed(detector: Detector) -> Array:
    """Return the photograph as an input [1, 3, side, side]; ncnn's examples feed pixels, and yolox BGR."""
    pixels = picture(detector.side)[:, :, :: 1 if detector.program == "yolox" else -1]
    array = np.ascontiguousarray(pixels[None].transpose(0, 3, 1, 2)).astype(np.float32)
    return array if detector.program else array * np.float32(1 / 255)


def calibrate(detector: Detector, biases: list[Any]) -> None:
    """Let normalisations suit the photograph; change biases until about a hundred candidates have the score."""
    for norm in detector.model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.reset_running_stats()
            norm.momentum = None
    image = torch.from_numpy(fed(detector))
    low, high, moved = -30.0, 30.0, 0.0
    with torch.no_grad():
        detector.model.train()(torch.cat([image, image.flip(3), image.flip(2)]))
        detector.model.eval()
        for _ in range(25 if biases else 0):
            middle = (low + high) / 2
            for bias in biases:
                bias += middle - moved
            moved, outputs = middle, detector.model(image)
            arrays = [x[0].numpy() for x in (outputs if isinstance(outputs, tuple) else [outputs])]
            is_much = (detector.decode(arrays)[:, 1] > detector.score).sum() > COUNT
            low, high = (low, middle) if is_much else (middle, high)
