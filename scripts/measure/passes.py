"""What each pass is worth in ncnn, on one thread; writes fixtures/benefit.tsv, which docs/passes.md shows.

    python -m scripts.measure.passes [--models FOLDER] [--nets FOLDER] [--only TEXT] [--seconds S] [--again]

Twice for each pass: on a whole net that it finds something in (fixtures/firings.tsv names it; for nets that are not in
fixtures/models, --models and --nets say where they are, as for count_passes.py), made with all passes and with all but
this one; and alone, on its net of fixtures/pass_nets.md, before and after. Passes that have their numbers are left out,
so that an interrupted run goes on where it was; --again measures them all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import onnx

from onnx2ncnn_opt.api.apply_passes import apply_passes
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.param.files import write_net
from onnx2ncnn_opt.passes import PASSES
from onnx2ncnn_opt.passes.eliminate_orphaned_memorydata import eliminate_orphaned_memorydata
from onnx2ncnn_opt.rewrite.pipeline import run
from onnx2ncnn_opt.rewrite.rule import Pass
from scripts.measure.latency import Latency, NetPaths, compare
from scripts.measure.measured import BENEFIT, FIRINGS, ROOT, read_table, write_table
from testing.pass_cases import Case, load
from testing.skeletons import refill

COLUMNS = ("net", "net ms", "net ratio", "net median", "alone ms", "alone ratio", "alone median")


def measure_alone(p: Pass, case: Case, folder: Path, seconds: float) -> Latency | None:
    """The net that is made for the pass, as it is and after it."""
    before, after = ((folder / f"{stem}.param", folder / f"{stem}.bin") for stem in ("before", "after"))
    graph = case.net()
    write_net(graph, *before)
    run(graph, [p, eliminate_orphaned_memorydata])
    write_net(graph, *after)
    return compare(before, after, _shapes(graph), seconds)


def measure_whole(p: Pass, path: Path, folder: Path, seconds: float) -> Latency | None:
    """A real net without the pass and with it."""
    files: list[NetPaths] = []
    for skip in ([p.name], []):
        if path.suffix == ".onnx":
            model = lower(refill(onnx.load(path)) if path.parent.name == "models" else path, skip=skip)
            graph = model.graph
        else:
            graph = apply_passes(path, path.with_suffix(".bin"), skip=skip).graph
        files.append((folder / f"net{len(files)}.param", folder / f"net{len(files)}.bin"))
        write_net(graph, *files[-1])
    shapes = _shapes(graph)
    return compare(files[0], files[1], shapes, seconds) if shapes else None


def locate(net: str, models: Path | None, nets: Path | None) -> Path | None:
    """The file of a net that fixtures/firings.tsv names; None where its folder is not given."""
    source, _, name = net.partition(":")
    folder = {"models": ROOT / "fixtures" / "models", "zoo": models, "pnnx": nets}.get(source)
    if folder is None:
        return None
    pattern = f"{name}/*.ncnn.param" if source == "pnnx" else f"{name}.onnx"
    return next(folder.glob(pattern), None)


def _shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """The sizes of the inputs, open ones chosen; none where a rank is unknown, or a batch is fed."""
    if any(blob.shape is None or blob.batch != 1 for blob in graph.inputs):
        return {}
    return {blob.name: tuple(s if isinstance(s, int) else 64 for s in blob.shape or ()) for blob in graph.inputs}


def _numbers(prefix: str, found: Latency | None) -> dict[str, str]:
    texts = (f"{found.first:.4g}", f"{found.ratio:.3f}", f"{found.median:.3f}") if found else ("-", "-", "-")
    return dict(zip((f"{prefix} ms", f"{prefix} ratio", f"{prefix} median"), texts, strict=True))


def main() -> None:
    """Measure, and write the table after every pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="a folder of more ONNX models")
    parser.add_argument("--nets", type=Path, help="a folder of nets that pnnx has made")
    parser.add_argument("--only", default="", help="passes with this in their name")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of each measurement")
    parser.add_argument("--again", action="store_true", help="measure those that have numbers, too")
    options = parser.parse_args()
    rows, firings, start = read_table(BENEFIT), read_table(FIRINGS), time.perf_counter()
    nets = {case.title: case for case in load(ROOT / "fixtures" / "pass_nets.md")}
    todo = [p for p in PASSES if options.only in p.name and (options.again or p.name not in rows)]
    for number, p in enumerate(todo, 1):
        net = firings.get(p.name, {}).get("net", "-")
        path = locate(net, options.models, options.nets)
        whole = None
        with tempfile.TemporaryDirectory() as folder:
            alone = measure_alone(p, nets[p.name], Path(folder), options.seconds)
            if path is not None:
                try:
                    whole = measure_whole(p, path, Path(folder), options.seconds)
                except Error as error:
                    print(f"{p.name}: {error}", file=sys.stderr)
        rows[p.name] = {"net": net if whole else "-"}
        rows[p.name] |= _numbers("net", whole) | _numbers("alone", alone)
        write_table(BENEFIT, COLUMNS, rows)
        at = f"{number}/{len(todo)}, {time.perf_counter() - start:.0f} s"
        print(f"{at}: {p.name}: {net}: {whole or '-'}; alone: {alone or '-'}", flush=True)


if __name__ == "__main__":
    main()
