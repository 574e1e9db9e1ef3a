"""How often each pass finds something to do in real nets; writes fixtures/firings.tsv.

    python -m scripts.measure.count_passes [--models FOLDER] [--nets FOLDER]

Of ONNX models: those of fixtures/models, and those of --models. Of nets of pnnx: the *.ncnn.param below --nets. A
column whose folder is not given keeps its numbers. Each is nets / rewrites; the last column is the net with the most
rewrites for its size, of the first source that has one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx

from onnx2ncnn_opt.api.apply_passes import apply_passes
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.passes import PASSES
from onnx2ncnn_opt.rewrite.events import Applied
from scripts.measure.measured import FIRINGS, ROOT, SOURCES, Rows, read_table, write_table
from testing.skeletons import refill


def rewrites(source: str, folder: Path) -> Iterator[tuple[str, int, Sequence[Applied]]]:
    """Name, number of layers and rewrites of every net of a source."""
    for path in sorted(folder.rglob("*.ncnn.param") if source == "pnnx" else folder.glob("*.onnx")):
        name = path.parent.name if source == "pnnx" else path.stem
        print(f"{source}: {name}", file=sys.stderr)
        try:
            if source == "pnnx":
                net = apply_passes(path, path.with_suffix(".bin"))
                yield name, net.layers[0], net.applied
            else:
                model = lower(refill(onnx.load(path)) if source == "models" else path)
                yield name, model.layers_before, model.applied
        except Error as error:
            print(f"  {type(error).__name__}", file=sys.stderr)


def count(source: str, folder: Path, rows: Rows) -> None:
    """Fill in the column of a source."""
    found: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    for name, layers, applied in rewrites(source, folder):
        for pass_name, times in Counter(event.pass_name for event in applied).items():
            found[pass_name].append((times / layers, f"{source}:{name}", times))
    for p in PASSES:
        row = rows.setdefault(p.name, {})
        if row.get("net", "-").startswith(f"{source}:"):
            row["net"] = "-"
        nets = found[p.name]
        row[source] = f"{len(nets)}/{sum(number for *_, number in nets)}" if nets else "-"
        if nets and row.get("net", "-") == "-":
            row["net"] = max(nets)[1]


def main() -> None:
    """Count, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="a folder of more ONNX models")
    parser.add_argument("--nets", type=Path, help="a folder of nets that pnnx has made")
    options = parser.parse_args()
    folders = {"models": ROOT / "fixtures" / "models", "zoo": options.models, "pnnx": options.nets}
    rows = read_table(FIRINGS)
    for source in SOURCES:
        if folders[source] is not None:
            count(source, folders[source], rows)
    write_table(FIRINGS, (*SOURCES, "net"), rows)


if __name__ == "__main__":
    main()
