"""The results of `optimize` on .param files without weights: they are filled with random numbers first.

    python -m scripts.measure.params FILE_OR_FOLDER... [--most 30] [--only TEXT]

For nets as they lie in repositories: those of ncnn's benchmark/models, and of the apps that use ncnn. Inputs without a
stated shape get one from the first layer that states their channels. Their height and width are the first of some sizes
at which every layer takes its inputs. Nets of more than `--most` million weights are left out. A line is `ok` or the
error, a net, its layers before and after, and the largest difference. Nets that ncnn itself does not run (so filled)
are counted apart.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onnx2ncnn_opt.errors import Error, RunError, UsageError
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.param.binary import weight_blocks, write_weights
from onnx2ncnn_opt.param.text import parse_param
from testing.optimized import apply_passes

Sizes = tuple[int, ...]

ROWS = 9  # of a sequence
SIZES = (64, 112, 128, 160, 192, 224, 256, 320, 384, 416, 512, 640)  # of images
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def nets(paths: Iterable[Path], only: str) -> Iterator[Path]:
    """Yield the text files among these and in these folders, each content once."""
    seen: set[bytes] = set()
    for path in paths:
        for file in sorted(path.rglob("*.param")) if path.is_dir() else [path]:
            content = file.read_bytes()
            if only in str(file) and content.startswith(b"7767517") and content not in seen:
                seen.add(content)
                yield file


def fill(graph: Graph) -> int:
    """Set random weights of the layer table's sizes, so that numbers neither vanish nor explode; return their count."""
    rng = np.random.default_rng(0)
    count = 0
    for layer in graph:
        for block in weight_blocks(layer):
            count += block.count
            layer.weights[block.name] = _values(rng, layer, block.name, block.count).astype(np.float32)
    return count


def _values(rng: np.random.Generator, layer: Layer, name: str, count: int) -> NDArray[np.floating]:
    if "int8_scale" in name:
        return np.full(count, 60.0 if "weight" in name else 20.0)
    if layer.type == "PReLU":
        return rng.uniform(0.1, 0.4, count)
    if name in ("var_data", "slope_data", "gamma_data", "scale_data"):
        return rng.uniform(0.5, 1.5, count)
    if "bias" in name or name in ("mean_data", "beta_data"):
        return rng.normal(0, 0.1, count)
    outputs = layer.get("num_output", 0)
    each = count / outputs if isinstance(outputs, int) and 0 < outputs <= count else np.sqrt(count)
    return rng.normal(0, np.sqrt(1.6 / each), count)


def shapes(graph: Graph, size: int) -> dict[str, Sizes]:
    """Return a shape for each input that states none, if a layer after it implies one."""
    found = {blob.name: _shape(blob, size) for blob in graph.inputs if blob.shape is None}
    return {name: shape for name, shape in found.items() if shape is not None}


def _shape(blob: Blob, size: int) -> Sizes | None:
    blobs, seen = [blob], {blob}
    for each in blobs:
        for layer in each.users:
            if (shape := _wanted(layer, size)) is not None:
                return shape
            blobs += [output for output in layer.outputs if output not in seen]
            seen.update(layer.outputs)
    return None


def _wanted(layer: Layer, size: int) -> Sizes | None:
    """Return the shape that a layer takes: an image of its channels, or rows of its width."""
    if layer.type in ("Convolution", "ConvolutionDepthWise"):
        kernel = layer["kernel_w"] * layer["kernel_h"]
        return layer["weight_data_size"] // layer["num_output"] // kernel * layer.get("group", 1), size, size
    if layer.type == "Gemm" and layer["constantB"]:
        return ROWS, layer["constantK"]
    if layer.type == "InnerProduct":
        return ROWS, layer["weight_data_size"] // layer["num_output"]
    if layer.type == "Embed":
        return (ROWS,)
    if layer.type in _GATES:
        directions = 2 if layer["direction"] == 2 else 1
        return ROWS, layer["weight_data_size"] // layer["num_output"] // _GATES[layer.type] // directions
    return None


def measure(file: Path, folder: Path, most: float) -> tuple[str, str]:
    """Return a net's outcome in a word, and its line."""
    try:
        graph = parse_param(file.read_bytes(), file=str(file)).graph
        unknown = sorted({layer.type for layer in graph if layer.spec is None})
        if unknown:
            return "custom", f"has {', '.join(unknown)}"
        if sum(block.count for layer in graph for block in weight_blocks(layer)) > most * 1e6:
            return "large", "has more weights"
        fill(graph)
        with (folder / "in.bin").open("wb") as stream:
            write_weights(graph, stream)
        for size in SIZES:
            given = shapes(graph, size)
            result = apply_passes(file, folder / "in.bin", shapes=given)
            if not result.misfit:
                break
        before, after = result.layers
        files = result.save(folder / "out")
        report = result.verify()
        again = apply_passes(files.param, files.bin, shapes=given).applied
    except (RunError, UsageError) as error:
        return "not run", " ".join(str(error).split())[:200]
    except Error as error:
        return "refused", " ".join(str(error).split())[:200]
    wrong = [f"{output.name}: {output.status}" for output in report.outputs if output.status != "ok"]
    worst = max((output.max_rel or 0.0 for output in report.outputs), default=0.0)
    changed = f", a second run changes {len(again)}" if again else ""
    outcome = "wrong" if wrong else "changes again" if again else "ok"
    return outcome, f"{before} -> {after} layers, {worst:.1e}{changed} {'; '.join(wrong)}".rstrip()


def main() -> None:
    """Measure every net, and count the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--most", type=float, default=30.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for file in nets(options.paths, options.only):
            outcome, line = measure(file, Path(folder), options.most)
            counts[outcome] += 1
            print(f"{outcome}\t{file}\t{line}", flush=True)
    print(*(f"{count} {outcome}" for outcome, count in counts.most_common()), sep=", ")
    sys.exit(1 if counts["wrong"] or counts["changes again"] else 0)


if __name__ == "__main__":
    main()
