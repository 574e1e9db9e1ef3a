"""Nets that take pixels: they compute what the model computes of the normalised ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt import Net
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.manifest import Image, read_manifest
from onnx2ncnn_opt.report.example import example
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verification.model import verify_net
from testing.models import parsed
from testing.optimized import apply_passes
from testing.worker import WORKER

MODELS = Path(__file__).resolve().parent.parent / "fixtures" / "models"
UNLIKE, ALIKE, PARTS = "mean=123.7,116.3,103.5:std=58.4,57.1,57.4", "mean=127.5:std=127.5", "std=255"
MEAN_ALIKE = "mean=127.5:std=58.4,57.1,57.4"
WEIGHT = f"float[4, 3, 3, 3] w = {{{', '.join(f'{0.1 * ((7 * i) % 11 - 5):.1f}' for i in range(108))}}}"


def model(body: str, shape: str = "1, 3, 9, 8", weights: str = WEIGHT) -> bytes:
    proto = parsed(f"(float[{shape}] x) => (float y) <{weights}> {{ {body} }}", 17)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return bytes(proto.SerializeToString())


def types(data: bytes, image: str, folder: Path, **options: Any) -> list[str]:
    """The layers of a net that takes pixels, after it has been held against the model on pixels, without our maths."""
    conversion = lower(data, images={"x": image}, **options)
    conversion.verify(worker=WORKER).check()
    conversion.save(folder / "net")
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, 9, 8)).astype(np.uint8)
    numbers = dict(part.partition("=")[::2] for part in image.split(":"))
    mean, std = (
        np.array(numbers.get(key, default).split(","), float).reshape(-1, 1, 1)
        for key, default in (("mean", "0"), ("std", "1"))
    )
    rgb = pixels[:, ::-1] if "bgr" in numbers else pixels
    expected = OrtRunner(data).run({"x": ((rgb - mean) / std).astype(np.float32)})["y"]
    with Net(folder / "net") as net:
        np.testing.assert_allclose(net.run({"x": pixels})["y"], expected, atol=1e-5 * np.abs(expected).max())
    again = apply_passes(folder / "net.ncnn.param", folder / "net.ncnn.bin")
    assert not again.applied or options
    return [layer.type for layer in conversion.graph]


@pytest.mark.parametrize("order", ["", ":bgr"])
@pytest.mark.parametrize(
    ("image", "pads", "folds"),
    [
        (UNLIKE, "0, 0, 0, 0", True),
        (UNLIKE, "1, 1, 1, 1", False),  # the zeros around would be pixels of three different values
        (UNLIKE, "0, 0, 1, 0", False),
        (ALIKE, "1, 1, 1, 1", True),
        (MEAN_ALIKE, "1, 0, 2, 1", True),
        (PARTS, "1, 1, 1, 1", True),
    ],
)
def test_the_first_convolution(image: str, pads: str, folds: bool, order: str, tmp_path: Path) -> None:
    data = model(f"c = Conv<pads = [{pads}]>(x, w) y = Relu(c)")
    scale = [] if folds else ["Scale"]
    assert types(data, image + order, tmp_path) == ["Input", *scale, "Convolution"]


def test_without_passes_and_several_readers(tmp_path: Path) -> None:
    data = model("y = Conv<pads = [1, 1, 1, 1]>(x, w)")
    assert types(data, f"{ALIKE}:bgr", tmp_path, optimize=False) == ["Input", "Scale", "Convolution"]
    data = model(
        "a = Conv<pads = [1, 1, 1, 1]>(x, w) b = Conv<pads = [1, 1, 1, 1]>(x, v) y = Concat<axis = 1>(a, b)",
        weights=f"{WEIGHT}, {WEIGHT.replace(' w ', ' v ')}",
    )
    assert "Scale" not in types(data, f"{PARTS}:bgr", tmp_path)
    assert types(data, f"{UNLIKE}:bgr", tmp_path).count("Scale") == 1


@pytest.mark.parametrize("order", ["", ":bgr"])
@pytest.mark.parametrize(
    "body",
    [
        "y = Conv<group = 3>(x, d)",
        "y = Sigmoid(x)",
        "a = Sigmoid(x) c = Conv(x, w) s = ReduceMean<keepdims = 1>(c) y = Mul(a, s)",
        "y = Identity(x)",
        "s = Constant<value = int64[4] {1, 3, 8, 9}>() y = Reshape(x, s)",
    ],
)
def test_other_layers_first(body: str, order: str, tmp_path: Path) -> None:
    weights = f"{WEIGHT}, float[3, 1, 1, 2] d = {{0.5, -0.25, 1.5, 2, -1, 0.125}}"
    types(model(body, weights=weights), UNLIKE + order, tmp_path)


@pytest.mark.parametrize("image", [f"{UNLIKE}:bgr", ALIKE, f"{PARTS}:bgr"])
def test_a_real_model(image: str, tmp_path: Path) -> None:
    source = MODELS / "inverted.tsbn.onnx"
    conversion = lower(source, images={"in0": image})
    conversion.verify(worker=WORKER).check()
    files = conversion.save(tmp_path / "net")
    manifest = read_manifest(files.manifest)
    assert replace(manifest, sha256={}) == conversion.manifest()
    assert verify_net(source, files.param, files.bin, manifest=manifest).ok
    entry = replace(manifest.inputs[0], image=Image((0.0,), (255.0,)) if image != PARTS else None)
    wrong = replace(manifest, inputs=(entry,))
    assert not verify_net(source, files.param, files.bin, manifest=wrong).ok


def test_programs_feed_pixels() -> None:
    manifest = lower(MODELS / "inverted.tsbn.onnx", images={"in0": f"{UNLIKE}:bgr"}).manifest()
    cpp = example(manifest, Path("net.param"), Path("net.bin"), language="cpp")
    assert "ncnn::Mat::PIXEL_BGR, in0_w" in cpp
    assert "substract_mean_normalize" not in cpp
    python = example(manifest, Path("net.param"), Path("net.bin"), language="python")
    assert "random.integers(0, 256, [1, 3, 64, 64])" in python


def test_the_manifest_has_the_letterbox(tmp_path: Path) -> None:
    for text, value in (("std=255:letterbox", 114.0), ("letterbox=0:bgr", 0.0), ("std=255", None)):
        files = lower(model("y = Relu(x)"), images={"x": text}).save(tmp_path / "net")
        image = read_manifest(files.manifest).inputs[0].image
        assert image is not None
        assert image.letterbox == value
    old = files.manifest.read_text().replace(',\n    "letterbox": null', "")
    assert "letterbox" not in old
    files.manifest.write_text(old)
    assert read_manifest(files.manifest).inputs[0].image == Image((0.0,), (255.0,))


def test_a_batch_and_dynamic_sizes() -> None:
    data = model("y = Conv<pads = [1, 1, 1, 1]>(x, w)", shape="n, 3, h, w")
    for image in (f"{UNLIKE}:bgr", ALIKE):
        lower(data, images={"x": image}).verify(worker=WORKER).check()


def test_pixels_and_normalized_arrays_are_inverse() -> None:
    image = Image((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), bgr=True)
    pixels = np.arange(2 * 3 * 2 * 2, dtype=np.float32).reshape(2, 3, 2, 2)
    assert np.allclose(image.pixels(image.normalized(pixels)), pixels, atol=1e-5)
    assert image.normalized(pixels)[0, 0, 0, 0] == (pixels[0, 2, 0, 0] - 1) / 4


@pytest.mark.parametrize(
    ("name", "image", "shape", "message"),
    [
        ("z", ALIKE, "1, 3, 8, 8", "the net's inputs are x"),
        ("x", "mean=1,2", "1, 3, 8, 8", "mean has 2 numbers, but the input has 3 channels"),
        ("x", UNLIKE, "1, 8, 8, 3", "mean has 3 numbers, but the input has 8 channels"),
        ("x", UNLIKE, "8, 8", "images are"),
        ("x", UNLIKE, "1, c, 8, 8", "its channels have to be fixed"),
        ("x", "std=0", "1, 3, 8, 8", "must not be 0"),
        ("x", "std=nan", "1, 3, 8, 8", "finite"),
        ("x", "mean=a", "1, 3, 8, 8", "'mean=a' is not mean=NUMBER"),
        ("x", "rgb", "1, 3, 8, 8", "not 'rgb'"),
        ("x", "mean=1:mean=2", "1, 3, 8, 8", "not 'mean=2'"),
        ("x", "letterbox=300", "1, 3, 8, 8", "a pixel of 0..255"),
        ("x", "letterbox=1,2", "1, 3, 8, 8", "letterbox is one number"),
        ("x", "letterbox", "1, 4, 8, 8", "letterbox is for 1 or 3 channels, not 4"),
        ("x", 3, "1, 3, 8, 8", "has to be an Image or text"),
    ],
)
def test_inputs_and_options_that_are_no_image(name: str, image: str, shape: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lower(model("y = Relu(x)", shape=shape), images={name: image})


def test_integers_are_pixels_already() -> None:
    graph = "(uint8[1, 3, 4, 4] x) => (float[1, 3, 4, 4] y) { y = Cast<to = 1>(x) }"
    with pytest.raises(UsageError, match="takes integers already"):
        lower(parsed(graph, 17), images={"x": PARTS})
