"""The order of rows that a net sorts: the model runs in the net's order, which has to be right within rounding."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verdict.ordered_model import BEST, FOUND, GIVEN, OWN, with_order
from onnx2ncnn_opt.verification.model_accuracy import Rounding


@dataclass(frozen=True)
class NetOrder:
    """The model with a net's indices in place of those of its TopK nodes, and the rounding errors of this model."""

    runner: OrtRunner
    rounding: Rounding

    @classmethod
    def of(cls, source: Path | bytes, manifest: Manifest | None, model: LoadedModel) -> "NetOrder | None":
        """Return the model of a manifest's net; None for a net that does not sort."""
        if manifest is None or not manifest.sorts:
            return None
        sorts = [sort.indices for sort in manifest.sorts]
        data = with_order(source, manifest.compared or model.cut, sorts)
        compared = [entry.name for entry in manifest.read] + [x + sort for sort in sorts for x in (FOUND, BEST)]
        return cls(OrtRunner(data, values=model.values, threads=None), Rounding(data, compared, model.values))

    def run(self, feeds: Mapping[str, Array], rows: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return inputs with the net's indices, and the model's outputs; `rows` are those of each sort in the net."""
        given = {GIVEN + sort: np.rint(array[..., 2]).astype(np.int64).reshape(-1) for sort, array in rows.items()}
        return {**feeds, **given}, self.runner.run_any({**feeds, **given})


def explained(report: OutputReport, sort: str, rows: Array, reference: Mapping[str, Array]) -> OutputReport:
    """Return the report on the scores of a net's rows, in which each index has to be there once; NaN is no score."""
    own = reference[OWN + sort]
    name, items = f"the order of '{sort}'", rows[..., 2].reshape(-1, own.shape[-1])
    is_finite = np.isfinite(reference[BEST + sort].astype(np.float64)).all()
    if is_finite and any(np.unique(item).size < item.size for item in items):
        return replace(report, status="mismatch", message=f"{name} has an index twice")
    if report.message:
        return replace(report, message=f"{name} is wrong: its scores are {report.message}")
    moved = int((items.reshape(-1) != own.reshape(-1)).sum())
    text = f"{moved} of {items.size} rows have other places in {name}: scores are equal within rounding"
    return replace(report, message=text if moved else "")
