"""Random Resize and Upsample nodes of every version, mode and way to say the sizes, on small tensors."""

from typing import Any

import numpy as np
import onnx
from onnx import helper

from testing.compared import model_of

OPSETS = (7, 8, 9, 10, 11, 12, 13, 17, 18, 19, 22, 23)
MODES = ("nearest", "linear", "cubic")
COORDINATES = (
    *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"),
    *("tf_half_pixel_for_nn", "tf_crop_and_resize"),
)
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
SCALES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0, 1.1, 1.2, 1.25, 1.3, 1.5, 1.7, 2.0, 2.3, 2.5, 3.0, 4.0)

Array = Any


def random_resize(seed: int) -> tuple[onnx.ModelProto, dict[str, Array]]:  # noqa: C901, PLR0912
    """Return a model of one node, and its input."""
    rng = np.random.default_rng(seed)
    opset = int(rng.choice(OPSETS))
    rank = int(rng.choice((2, 3, 4, 4, 4, 5)))
    shape = tuple(
        int(n) for n in (rng.integers(1, 4, rank - min(rank, 2)).tolist() + rng.integers(1, 9, min(rank, 2)).tolist())
    )
    changed = [axis for axis in range(rank) if rng.random() < (0.9 if axis >= rank - 2 else 0.1)]
    scales = np.ones(rank, np.float32)
    for axis in changed:
        scales[axis] = rng.choice(SCALES) if rng.random() < 0.7 else rng.uniform(0.3, 3)
    if rng.random() < 0.3:
        scales[changed] = scales[changed[0]] if changed else 1
    # An axis has to keep an element.
    scales = np.maximum(scales, np.float32(1.001) / np.array(shape, np.float32) * (scales < 1))
    x = {"x": rng.standard_normal(shape).astype(np.float32)}
    mode = str(rng.choice(MODES))
    if opset < 11:
        mode = str(rng.choice(MODES[:2]))
        kind = "Upsample" if opset < 10 else "Resize"
        if opset < 10:
            scales = np.maximum(scales, 1)
        attributes: dict[str, Any] = {"mode": mode}
        if opset < 9:
            return model_of([helper.make_node(kind, ["x"], ["y"], scales=scales, **attributes)], x, opset=opset), x
        return model_of([helper.make_node(kind, ["x", "s"], ["y"], **attributes)], x, {"s": scales}, opset=opset), x
    attributes = {"mode": mode, "coordinate_transformation_mode": str(rng.choice(COORDINATES))}
    attributes["nearest_mode"] = str(rng.choice(NEAREST))
    if rng.random() < 0.2:
        attributes["cubic_coeff_a"] = -0.5
    if rng.random() < 0.2:
        attributes["exclude_outside"] = 1
    if opset >= 18 and mode != "nearest" and rng.random() < 0.2:
        attributes["antialias"] = 1
    sizes = np.maximum(1, np.floor(np.array(shape) * scales)).astype(np.int64)
    if rng.random() < 0.5 and changed:
        sizes[changed] = rng.integers(1, 13, len(changed))
    constants: dict[str, Array] = {}
    axes = list(range(rank))
    if opset >= 18 and changed and rng.random() < 0.3:
        axes = changed
        attributes["axes"] = axes
    inputs = ["x", "", ""]
    if attributes["coordinate_transformation_mode"] == "tf_crop_and_resize":
        begin = np.where(np.isin(np.arange(rank), changed), rng.uniform(0, 0.4, rank), 0)[axes]
        end = np.where(np.isin(np.arange(rank), changed), rng.uniform(0.5, 1.2, rank), 1)[axes]
        constants["roi"] = np.concatenate([begin, end]).astype(np.float32)
        inputs[1] = "roi"
        attributes["extrapolation_value"] = float(rng.choice((0.0, 0.5)))
    elif opset < 13:
        constants["roi"] = np.zeros(0, np.float32)
        inputs[1] = "roi"
    if rng.random() < 0.5:
        constants["s"] = sizes[axes]
        if opset < 13:
            constants["none"] = np.zeros(0, np.float32)
            inputs[2] = "none"
        inputs.append("s")
        if opset >= 18 and rng.random() < 0.2:
            attributes["keep_aspect_ratio_policy"] = str(rng.choice(("stretch", "not_larger", "not_smaller")))
    else:
        constants["s"] = scales[axes]
        inputs[2] = "s"
    return model_of([helper.make_node("Resize", inputs, ["y"], **attributes)], x, constants, opset=opset), x
