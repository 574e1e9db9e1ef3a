"""Attention under two masks, with rows that both of them hide: models for scripts/measure/devices.py.

    python -m scripts.fuzz.mask_pairs FOLDER
    python -m scripts.measure.devices run RESULTS.jsonl FOLDER --suites "" --on vulkan --on qemu-aarch64

Writes FOLDER/NAME.onnx, and NAME.npz with its inputs. One mask hides padding and is an input. The other is constant:
a window, the future, or a bias for each distance. They are fills that are added to the scores, or one is chosen over
the other, or both are booleans; in both orders.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

from onnx2ncnn_opt.ir.weight import Array

HEADS, LENGTH, SIZE = 2, 8, 16
SHORT, NONE = [1, 1, 1, 1, 1, 0, 0, 0], [0] * LENGTH  # a window hides all that is left of the last row
PADDED = {
    "inf": (-np.inf, [1] * (LENGTH - 1) + [0]),  # of a row that is hidden whole ONNX Runtime makes NaN
    **{
        f"{name}, {kind}": (fill, kept)
        for name, fill in {"lowest": float(np.finfo(np.float32).min), "1e9": -1e9, "1e4": -1e4}.items()
        for kind, kept in {"short": SHORT, "none": NONE}.items()
    },
}
AT = np.arange(LENGTH)
KEPT = {"window": abs(AT[:, None] - AT) <= 1, "future": AT[:, None] >= AT}
FORMS = {
    "added": "a = Add(s, {first}) m = Add(a, {second})",
    "summed": "both = Add({first}, {second}) m = Add(s, both)",
    "over the fill": "both = Where(keep_{second}, {first}, fill) m = Add(s, both)",
    "over scores": "a = Where(keep_{first}, s, fill) m = Where(keep_{second}, a, fill)",
    "of booleans": "keep = And(keep_{first}, keep_{second}) m = Where(keep, s, fill)",
}
MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[{heads}, {length}, {size}] x, int64[1, {length}] mask) => (float[{heads}, {length}, {size}] y) {{
    keep_padding = Cast<to = 9>(mask) padding = Where(keep_padding, zero, fill)
    q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) k_t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, k_t)
    {masks} p = Softmax<axis = -1>(m) y = MatMul(p, v) }}"""


def models() -> Iterator[tuple[str, onnx.ModelProto, dict[str, Array]]]:
    """Yield the name, the model and its inputs of each combination."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((SIZE, SIZE)).astype(np.float32) / 4 for name in ("wq", "wk", "wv")}
    x = rng.standard_normal((HEADS, LENGTH, SIZE)).astype(np.float32)
    for other, is_second, form, padded in product((*KEPT, "bias"), (False, True), FORMS, PADDED):
        if other == "bias" and "keep_" in FORMS[form]:
            continue  # it hides nothing
        first, second = ("padding", other)[:: 1 if is_second else -1]
        fill, kept = PADDED[padded]
        masks = FORMS[form].format(first=first, second=second)
        constants: dict[str, Any] = weights | {"zero": 0.0, "fill": fill}
        if other == "bias":
            constants[other] = -abs(AT[:, None] - AT)
        elif f"keep_{other}" in masks:
            constants[f"keep_{other}"] = KEPT[other]
        if other in masks.replace(f"keep_{other}", ""):
            constants.setdefault(other, np.where(KEPT.get(other, False), 0.0, fill))
        model = parser.parse_model(MODEL.format(heads=HEADS, length=LENGTH, size=SIZE, masks=masks))
        for name, constant in constants.items():
            array = np.asarray(constant, bool if name.startswith("keep_") else np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        yield f"{first} and {second} {form}, {padded}", model, {"x": x, "mask": np.array([kept])}


def main() -> None:
    """Write the models."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("folder", type=Path)
    folder: Path = command.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, model, feeds in models():
        onnx.save(model, folder / f"{name}.onnx")
        named: dict[str, Any] = {f"in_{i}": array for i, array in enumerate(feeds.values())}
        np.savez(folder / f"{name}.npz", **named)


if __name__ == "__main__":
    main()
