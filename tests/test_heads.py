"""The ends of detectors: fixtures/heads, each a net with a tail, in Python, as printed programs and as C++.

Of each head, one of four forms is verified, and two are cut by hand; all with --thorough.
"""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import files as files_of
from pathlib import Path

import numpy as np
import pytest

from onnx2ncnn_opt import Net, convert
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.tail.numpy_source import numpy_program
from onnx2ncnn_opt.tail.program import Program
from onnx2ncnn_opt.tail.reader import read_tail
from testing import present
from testing.command import run_well
from testing.compared import types
from testing.exports import sampled
from testing.tails import Library, same_bits
from testing.worker import listed

HEADS = sorted((Path(__file__).parents[1] / "fixtures" / "heads").glob("*.onnx"))
# Of each head one exporter with fixed sizes, the other with dynamic ones.
SOME = [path for path in HEADS if path.stem.endswith(".ts") == ("-" not in path.stem)]


@pytest.mark.parametrize("verified", sampled(SOME, [path for i, path in enumerate(SOME) if i % 4 in (0, 3)]))
def test_a_head_is_right(verified: Path) -> None:
    conversion = convert(verified)
    assert conversion.report is not None
    assert conversion.report.ok, conversion.report


@pytest.mark.parametrize("path", sampled(HEADS, SOME))
def test_the_net_is_that_of_the_model_cut_by_hand(path: Path, tmp_path: Path) -> None:
    found = lower(path)
    net, manifest = found.save(tmp_path / "net"), found.manifest()
    assert listed(net.param) == ([e.blob for e in manifest.inputs], [e.blob for e in manifest.outputs])
    if found.tail is None:
        return
    cut = lower(path, outputs=found.cut, tail="never").save(tmp_path / "cut")
    assert net.param.read_bytes() == cut.param.read_bytes()
    assert net.bin.read_bytes() == cut.bin.read_bytes()


@pytest.mark.parametrize("name", ["yolov10.dyn", "yolo26.ts", "rtdetr.ts", "rtdetr-nhw.dyn", "yolov10-nhw.ts"])
def test_rows_in_the_order_of_scores_need_no_tail(name: str) -> None:
    conversion = lower(next(path for path in HEADS if path.stem == name))
    assert conversion.tail is None
    assert types(conversion).count("DetectionOutput") == len(conversion.manifest().sorts)


def test_a_tail_is_the_same_every_time() -> None:
    """The order of its constants, and of the values at the cut, is the model's."""
    path = next(path for path in HEADS if path.stem == "fcos.dyn")
    conversions = [lower(path) for _ in range(4)]
    assert len({(c.cut, present(c.tail).data) for c in conversions}) == 1


def tails() -> dict[str, tuple[Path, Program]]:
    """Return the tails of heads with fixed sizes, and of one with branches."""
    found = {}
    for path in HEADS:
        if ("-" not in path.stem and path.stem.endswith(".dyn")) or path.stem == "obb_nms-hw.ts":
            tail = lower(path).tail
            if tail is not None:
                found[path.stem.replace(".", "_").replace("-", "_")] = path, read_tail(tail.data)
    return found


@pytest.mark.needs("C++")
def test_headers_give_the_same_bits(tmp_path: Path) -> None:
    """NumPy, the compiled header and the printed NumPy agree on the model's own numbers, and on random ones."""
    programs = tails()
    assert len(programs) >= 6
    library = Library(tmp_path, {name: program for name, (_, program) in programs.items()}, "-O0")
    for name, (path, program) in programs.items():
        space: dict[str, object] = {"np": np}
        exec("import base64\n" + numpy_program(program), space)
        random = np.random.default_rng(0)
        runner = OrtRunner(path, outputs=[port.name for port in program.inputs])
        for draw in range(3):
            # Anchors of a picture of 64 x 64 at the strides 8 and 16, where their number is dynamic.
            shapes = {port.name: [n if isinstance(n, int) else 80 for n in port.shape] for port in program.inputs}
            feeds = {
                port.name: np.round(random.uniform(0, 8, shapes[port.name]), draw).astype(port.dtype)
                for port in program.inputs
            }
            if draw == 0 and runner.input_names() == ["images"]:
                feeds = runner.run({"images": random.standard_normal((1, 3, 64, 64), np.float32)})
            expected = program.run(feeds)
            found = library.run(name, feeds)
            assert not isinstance(found, int), str(program.nodes[found - 1])
            printed = space["tail"](*feeds.values())  # type: ignore[operator]
            for output, array in expected.items():
                assert same_bits(found[output], array), (name, output)
                assert same_bits(printed[output], array), (name, output)


def test_a_detector_with_numpy_and_ncnn_alone(tmp_path: Path) -> None:
    """Run the printed program where only numpy and ncnn are installed."""
    path = next(path for path in HEADS if path.stem == "yolov10.ts")
    convert(path, tmp_path / "net")
    site = tmp_path / "site"
    site.mkdir()
    for package in ("numpy", "ncnn"):
        listed = files_of(package) or []
        for top in {file.parts[0] for file in listed if file.parts[0] != ".."}:
            (site / top).symlink_to(Path(str(listed[0].locate())).parents[len(listed[0].parts) - 1] / top)
    run_well(tmp_path, "example", "net", "--python", "-o", "example.py")
    # -I -S: no other packages of this Python.
    program = f"import sys; sys.path[:0] = [{str(site)!r}, {str(tmp_path)!r}]\n"
    program += "import example, numpy as np\nx = np.random.default_rng(0).standard_normal((1, 3, 64, 64), np.float32)\n"
    program += "np.save('example.npy', example.run(example.load(), {'images': x})['output0'])"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], cwd=tmp_path, check=True, timeout=120)
    images = np.random.default_rng(0).standard_normal((1, 3, 64, 64), np.float32)
    expected = OrtRunner(path).run({"images": images})["output0"]
    with Net(tmp_path / "net") as net:
        for found in (np.load(tmp_path / "example.npy"), net.run({"images": images})["output0"]):
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module", params=["centernet-nhw.ts", "ssd-hw.dyn", "yolo26-nhw.ts", "obb_nms-hw.dyn"])
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the C++ program of a head: in one file, and beside the header of its tail."""
    folder = tmp_path_factory.mktemp("printed")
    lower(next(path for path in HEADS if path.stem == request.param)).save(folder / "my net")
    (folder / "one.cpp").write_text(run_well(folder, "example", "my net").out)
    run_well(folder, "example", "my net", "-o", "main.cpp")
    return folder


def test_the_printed_cpp_program_compiles(printed: Path, compiles: Callable[[Path], None]) -> None:
    assert "int my_net_tail(" in (printed / "one.cpp").read_text()
    assert (printed / "my_net.tail.h").is_file()
    for name in ("one.cpp", "main.cpp"):
        compiles(printed / name)
