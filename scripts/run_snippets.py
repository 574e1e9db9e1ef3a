"""Convert PyTorch constructs as both exporters write them, and hold ncnn against ONNX Runtime and torch.

    python scripts/run_snippets.py               judge those of fixtures/snippets, and rewrite their table of outcomes
    python scripts/snippets.py FOLDER            export them anew (this one needs torch)
    python scripts/run_snippets.py FOLDER        judge those of a folder, and print what is not right
    python scripts/run_snippets.py FOLDER -k X   only those whose name contains X, with everything that is said of them
    python scripts/run_snippets.py FOLDER --write   judge them, and keep models and outcomes in fixtures/snippets

Every net runs on the inputs of two seeds, and on torch's own where these are at hand. Outcomes are those of
scripts/conformance.py.
"""

from __future__ import annotations

import argparse
import collections
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from conformance import BAD, RELATIVE, Harness, Outcome, attempt, short

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verification.inputs import draw_inputs

FIXTURES = Path(__file__).parents[1] / "fixtures" / "snippets"
TABLE = FIXTURES / "outcomes.tsv"
VARIANTS = ("dyn", "ts", "new")  # torch's default exporter, TorchScript, and the default one at a newer opset
SEEDS = (0, 1)
WITHOUT_RUNTIME = "as torch says; ONNX Runtime does not run it"


def judge(harness: Harness, model: onnx.ModelProto, torch: Mapping[str, Any] | None = None) -> Outcome:
    """Convert a snippet once, and run it on inputs of each seed and on torch's, if these and its outputs are given."""
    conversion = attempt(model)
    if isinstance(conversion, Outcome):
        return conversion
    names = [entry.name for entry in conversion.manifest().inputs]
    feeds = [draw_inputs(conversion.model, seed=seed) for seed in SEEDS]
    feeds += [{name: torch[name] for name in names}] if torch else []
    expected = [torch[name] for name in torch if name.startswith("out")] if torch else []
    try:
        runtime = OrtRunner(model.SerializeToString())
        references = [list(runtime.run(given).values()) for given in feeds]
    except RunError as error:
        if not torch:
            return Outcome("WRONG", f"it is converted, but {error}")
        outcome = harness.compare(conversion, feeds[-1], [(expected, RELATIVE + _rounding(model))])
        return replace(outcome, reason=f"{WITHOUT_RUNTIME}: {error}") if outcome.kind == "right" else outcome
    tolerance = RELATIVE + _rounding(model)
    for given, reference in zip(feeds, references, strict=True):
        outcome = harness.compare(conversion, given, [(reference, tolerance)])
        if outcome.kind != "right":
            return outcome
    if torch and harness.compare(conversion, feeds[-1], [(expected, tolerance)]).kind != "right":
        return Outcome("right", "as ONNX Runtime says, not as torch")
    return outcome


def _rounding(model: onnx.ModelProto) -> float:
    """What 16 bits inside a model may cost its results, as a share of them: ncnn computes with 32."""
    types = {value.type.tensor_type.elem_type for value in model.graph.input}
    types |= {a.i for node in model.graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
    bits = [2.0**-10] * (onnx.TensorProto.FLOAT16 in types) + [2.0**-7] * (onnx.TensorProto.BFLOAT16 in types)
    return 4 * max(bits, default=0.0)


def exported(folder: Path) -> Iterator[tuple[str, str, Path | str]]:
    """Name, variant, and file of each model that was exported; the exporter's complaint where it was not."""
    for line in (folder / "NAMES.tsv").read_text().splitlines():
        name, stem, failures = line.split("\t")
        for variant in VARIANTS:
            path = folder / f"{stem}.{variant}.onnx"
            if path.exists() or variant in failures:
                yield name, variant, path if path.exists() else failures


def kept(variant: str) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Name and model of each fixture."""
    with zipfile.ZipFile(FIXTURES / f"{variant}.zip") as archive:
        for name in archive.namelist():
            yield name, onnx.ModelProto.FromString(archive.read(name))


def keep(variant: str, models: Mapping[str, Path]) -> None:
    """Write the fixtures of one variant; files of equal content are equal to the byte."""
    FIXTURES.mkdir(exist_ok=True)
    with zipfile.ZipFile(FIXTURES / f"{variant}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, path in models.items():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)


def operators(path: Path | str | None) -> list[str]:
    """The types of a model's nodes; none without a model."""
    return [node.op_type for node in onnx.load(path).graph.node] if isinstance(path, Path) else []


def table() -> list[str]:
    """The lines of the table."""
    return TABLE.read_text(encoding="utf-8").splitlines()


def write_table(rows: Sequence[str]) -> None:
    """Write the table."""
    TABLE.write_text("\n".join(rows) + "\n", encoding="utf-8")


def rows_of(variant: str) -> list[str]:
    """The lines of the table for the fixtures of one variant, as they come out now."""
    with Harness() as harness:
        return [row(name, variant, judge(harness, model)) for name, model in kept(variant)]


def row(name: str, variant: str, outcome: Outcome) -> str:
    """A line of the table."""
    return f"{name}\t{variant}\t{outcome.kind}\t{short(outcome.reason) if outcome.kind != 'right' else ''}"


def campaign(folder: Path, part: str = "", *, write: bool = False) -> collections.Counter[tuple[str, str]]:
    """Judge the snippets of a folder whose names contain `part`; how many of each variant came out how."""
    rows, models = [], {variant: dict[str, Path]() for variant in VARIANTS}
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    with Harness() as harness:
        for name, variant, path in exported(folder):
            if part not in name:
                continue
            if isinstance(path, str):
                outcome = Outcome("not exported", path)
            else:
                with np.load(path.with_name(f"{path.name[:3]}.npz")) as arrays:
                    outcome = judge(harness, onnx.load(path), dict(arrays))
            counts[variant, outcome.kind] += 1
            if part or (outcome.reason and not isinstance(path, str)):
                print("\t".join((name, variant, outcome.kind, short(outcome.reason))), flush=True)
            known = variant == "new" and operators(path) == operators(models["dyn"].get(name))
            if isinstance(path, Path) and not known and not outcome.reason.startswith(WITHOUT_RUNTIME):
                models[variant][name] = path
                rows.append(row(name, variant, outcome))
    if write:
        for variant in VARIANTS:
            keep(variant, models[variant])
        write_table(sorted(rows, key=lambda line: VARIANTS.index(line.split("\t")[1])))
    return counts


def main() -> int:
    """Judge the fixtures, or the snippets of a folder."""
    parser = argparse.ArgumentParser(description="PyTorch constructs through convert and ncnn")
    parser.add_argument("folder", type=Path, nargs="?", help="what scripts/snippets.py wrote; the fixtures without it")
    parser.add_argument("-k", dest="part", default="", help="only snippets whose name contains this; prints outcomes")
    parser.add_argument("--write", action="store_true", help="write fixtures/snippets")
    options = parser.parse_args()
    if options.folder is None:
        before = set(table())
        rows = [line for variant in VARIANTS for line in rows_of(variant)]
        write_table(rows)
        print("\n".join(line for line in rows if line not in before))
        counts = collections.Counter((line.split("\t")[1], line.split("\t")[2]) for line in rows)
    else:
        counts = campaign(options.folder, options.part, write=options.write)
    for variant in VARIANTS:
        print(f"{variant}: {', '.join(f'{n} {kind}' for (v, kind), n in counts.most_common() if v == variant)}")
    return any(kind in BAD for _, kind in counts)


if __name__ == "__main__":
    sys.exit(main())
