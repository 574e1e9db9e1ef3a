"""Run ncnn's own tools and its Python package over our nets, and compare what the nets compute before and after.

    pip install netron
    python -m scripts.clients.tools BUILD [-k resnet] [--write]

BUILD is a folder where ncnn was built with NCNN_BUILD_TOOLS and NCNN_BUILD_BENCHMARK. Each model of the list becomes a
net by `convert` with no other options. The package ncnn (pyncnn) loads the net and knows nothing else; ONNX Runtime is
its reference. The reference of the tools is the net itself. Netron's server and chromium, without a window, draw each
net: its nodes have to be the layers. It draws the .param alone if it does not read the .bin beside it.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import ncnn  # type: ignore[import-untyped]
import netron
import numpy as np
import onnx
from netron.server import _HTTPRequestHandler as Handler
from numpy.typing import NDArray

from onnx2ncnn_opt import convert
from onnx2ncnn_opt.runtime.ort import OrtRunner
from scripts.measure.measured import parser_of, table
from testing.exports import ROOT, refilled

Array = NDArray[Any]
_MODELS = (
    "models/resnet18.ts", "models/mobilenet_v3_small.dyn", "models/shufflenet_v2_x1_0.ts", "models/unet.dyn",
    "models/attention.ts", "heads/yolov8.ts", "heads/rtdetr.dyn",
)  # fmt: skip
_HEADS = (
    "yolov5",
    "yolov8",
    "yolo11",
    "yolov10",
    "yolo26",
    "yolox",
    "rtdetr",
    "dfine",
    "centernet",
    "ssd",
    "retinanet",
    "fcos",
)
_NODE = re.compile(r'class="node graph-node".*?<text[^>]*>([^<]*)</text><title>([^<]*)</title>')
_COLUMNS = ("program", "net", "ran", "largest error")


def loaded(param: Path, bin: Path) -> Any:
    """Return a net in fp32."""
    net = ncnn.Net()
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    is_binary = param.suffix == ".bin"
    assert (net.load_param_bin if is_binary else net.load_param)(str(param)) == 0, param
    assert net.load_model(str(bin)) == 0, bin
    return net


def outputs_of(net: Any, feeds: list[Array], *, by_number: bool = False) -> list[Array]:
    """Return the outputs of a net, by the lists that ncnn has of its inputs and outputs."""
    extractor = net.create_extractor()
    inputs, outputs = (
        (net.input_indexes(), net.output_indexes()) if by_number else (net.input_names(), net.output_names())
    )
    for name, feed in zip(inputs, feeds, strict=True):
        array = feed[0] if feed.dtype == np.float32 else feed[0].astype(np.int32)
        extractor.input(name, ncnn.Mat(array).clone())
    return [np.array(extractor.extract(name)[1]) for name in outputs]


def error(found: list[Array], expected: list[Array]) -> float:
    """Return the largest difference in units of an output's largest value."""
    pairs = list(zip(found, expected, strict=True))
    return max(float(abs(a - b.reshape(a.shape)).max() / abs(b).max()) for a, b in pairs)


class Consenting(Handler):  # type: ignore[misc]
    """Netron's pages with the cookie of a user who has consented: else they wait for a click."""

    def end_headers(self) -> None:
        """Add the cookie."""
        self.send_header("Set-Cookie", "consent=1; path=/")
        super().end_headers()


def drawn(param: Path) -> str:
    """Return "yes" if the layers, except the inputs, are the nodes of Netron's page, with their types and names."""
    layers = [tuple(line.split()[:2]) for line in param.read_text().splitlines()[2:]]
    layers = [layer for layer in layers if layer[0] != "Input"]
    with patch("netron.server._HTTPRequestHandler", Consenting):
        host, port = netron.start(str(param), address=("localhost", 0), browse=False)
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom"]
    page = subprocess.run([*words, f"http://{host}:{port}/"], check=True, capture_output=True, text=True).stdout
    netron.stop((host, port))
    nodes = _NODE.findall(unescape(page))
    if not nodes and param.with_suffix(".bin").exists():
        return f"without the .bin: {drawn(Path(shutil.copy(param, param.parent / 'alone.param')))}"
    return "yes" if sorted(nodes) == sorted(layers) else f"{len(nodes)} of {len(layers)} layers"


def rows(name: str, build: Path, folder: Path) -> Iterator[tuple[object, ...]]:
    """Yield the lines of a model; the tools run over those of the list only."""
    model = refilled(ROOT / "fixtures" / f"{name}.onnx")
    onnx.save(model, folder / "model.onnx")
    conversion, rng = convert(folder / "model.onnx", folder / "net", verification=None), np.random.default_rng(0)
    manifest = conversion.manifest()
    if conversion.tail is not None:
        yield "pyncnn", name, "needs its tail", None
        return
    shapes = {x: [int(size or 1) for size in x.shape] for x in manifest.inputs}
    feeds = {
        x.name: (rng.random(shape, np.float32) + (x.dtype != "float32") * 64).astype(x.dtype)
        for x, shape in shapes.items()
    }
    before = outputs_of(loaded(folder / "net.ncnn.param", folder / "net.ncnn.bin"), [*feeds.values()])
    expected = OrtRunner(model.SerializeToString()).run(feeds)
    yield "pyncnn", name, "yes", f"{error(before, [expected[x.name] for x in manifest.outputs]):.1e}"
    if name not in _MODELS:
        return

    def run(tool: str, *arguments: str) -> str:
        ended = subprocess.run([build / tool, *arguments], cwd=folder, capture_output=True, text=True)
        return "yes" if ended.returncode == 0 else f"exit code {ended.returncode}"

    files = ("net.ncnn.param", "net.ncnn.bin")
    sizes = ",".join(f"[{','.join(map(str, reversed(feed.shape[1:])))}]" for feed in feeds.values())
    ran = run("benchmark/benchncnn", "2", "1", "0", "-1", "0", f"param={files[0]}", f"shape={sizes}")
    yield "benchncnn", name, ran, None
    yield "Netron", name, drawn(folder / files[0]), None
    ran = run("tools/ncnn2mem", *files, "id.h", "mem.h")
    after = outputs_of(loaded(folder / "net.ncnn.param.bin", folder / files[1]), [*feeds.values()], by_number=True)
    yield "ncnn2mem", name, ran, f"{error(after, before):.1e}"
    ran = run("tools/ncnnoptimize", *files, "other.param", "other.bin", "0")
    after = outputs_of(loaded(folder / "other.param", folder / "other.bin"), [*feeds.values()])
    yield "ncnnoptimize", name, ran, f"{error(after, before):.1e}"
    if len(feeds) == 1:
        np.save(folder / "x.npy", next(iter(feeds.values()))[0])
        (folder / "list.txt").write_text("x.npy\n")
        ran = run("tools/quantize/ncnn2table", *files, "list.txt", "net.table", f"shape={sizes}", "method=kl", "type=1")
        ran = run("tools/quantize/ncnn2int8", *files, "int8.param", "int8.bin", "net.table") if ran == "yes" else ran
        after = outputs_of(loaded(folder / "int8.param", folder / "int8.bin"), [*feeds.values()])
        yield "ncnn2table, ncnn2int8", name, ran, f"{error(after, before):.1e}"


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__, "build")
    parser.add_argument("-k", default="", metavar="TEXT", help="only models whose names contain it")
    arguments = parser.parse_args()
    with table("tools", _COLUMNS, write=arguments.write) as add:
        heads = [f"heads/{name}.{exporter}" for name in _HEADS for exporter in ("ts", "dyn")]
        for name in dict.fromkeys((*_MODELS, *heads)):
            if arguments.k in name:
                with TemporaryDirectory() as folder:
                    for row in rows(name, arguments.build.absolute(), Path(folder)):
                        add(*row)


if __name__ == "__main__":
    main()
